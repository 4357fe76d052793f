"""Course: where a student's code runs: a process that gets inputs and gives back outputs only.

It lives in a sandbox (sandbox.py) that imports the heavy libraries once, then forks for each
problem: the fork imports one file of the student's and answers calls on a socket. Tensors travel as
safetensors, all else as JSON; nothing is ever unpickled.
"""

import importlib
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections import OrderedDict

import torch
from safetensors.torch import load, save

MAX_LINES = 10_000  # that a student's functions may print per problem
MAX_BYTES = 2**26  # of one message
KEPT = 1024  # calls whose graph waits for a backward pass

# --- messages ------------------------------------------------------------------------------------


def pack(value, tensors):
    """A JSON form of `value`; its tensors are appended to `tensors` and named by their place."""
    if torch.is_tensor(value):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.nn.Linear):
        return {"linear": [pack(value.weight, tensors), pack(value.bias, tensors)]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [pack(x, tensors) for x in value]}
    if isinstance(value, dict):
        return {"dict": [[str(key), pack(x, tensors)] for key, x in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype) or not hasattr(value, "item"):
        return {"other": f"{type(value).__name__} {value!r}"[:200]}
    return value.item()  # a number of numpy's


def unpack(form, tensors):
    """The value behind `pack`'s form."""
    if not isinstance(form, dict):
        return form
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "linear":
        return _linear(*inner, tensors)
    if kind == "dict":
        return {key: unpack(x, tensors) for key, x in inner}
    if kind == "other":
        return inner
    return {"tuple": tuple, "list": list}[kind](unpack(x, tensors) for x in inner)


def _linear(weight, bias, tensors):
    layer = torch.nn.Linear(1, 1, bias=bias is not None)
    for name, form in (("weight", weight), ("bias", bias)):
        if form:
            tensor = tensors[form["tensor"]]
            tensors[form["tensor"]] = torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)
            setattr(layer, name, tensors[form["tensor"]])
    return layer


def named(value, name="result"):
    """Every tensor and number in a nested result: {"result[1]['clip_frac']": ..., ...}."""
    if isinstance(value, (tuple, list)):
        parts = [named(x, f"{name}[{i}]") for i, x in enumerate(value)]
    elif isinstance(value, dict):
        parts = [named(x, f"{name}[{key!r}]") for key, x in value.items()]
    else:
        return {name: value}
    return {key: x for part in parts for key, x in part.items()}


def send(link, message, tensors=()):
    """One message: JSON, and tensors."""
    text = json.dumps(message).encode()
    data = save({str(i): t.detach().clone().contiguous() for i, t in enumerate(tensors)})
    link.sendall(struct.pack("!II", len(text), len(data)) + text + data)


def receive(link):
    """(JSON, list of tensors), or EOFError if the other side has gone."""
    sizes = struct.unpack("!II", _read(link, 8))
    if sum(sizes) > MAX_BYTES:
        raise EOFError("too large an answer")
    message, tensors = json.loads(_read(link, sizes[0])), load(_read(link, sizes[1]))
    return message, [tensors[str(i)] for i in range(len(tensors))]


def _read(link, size):
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError("gone")
        data += part
    return bytes(data)


# --- the student's side --------------------------------------------------------------------------


class Printed(io.TextIOBase):
    """Swallows what is printed; too much of it is an error at the print that overflows."""

    lines = 0

    def write(self, text):
        self.lines += text.count("\n")
        if self.lines > MAX_LINES:
            raise RuntimeError(f"printed more than {MAX_LINES:,} lines")
        return len(text)


def describe(error):
    """Kind, message and the student's own line of an exception."""
    message = f"{error}"[:500]
    if isinstance(error, SyntaxError):
        message = f"{error.msg}, {os.path.basename(error.filename or '')} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if os.path.dirname(f.filename) == os.getcwd()]
    if own:
        message += f" ({os.path.basename(own[-1].filename)} line {own[-1].lineno})"
    kinds = [c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"]
    return {"error": kinds[0], "message": message}


def limit_time(link, seconds):
    """Say so and end after that many seconds of CPU time."""
    def over(*_):
        words = f"over the time limit of {seconds} s: an endless loop?"
        send(link, {"error": "over", "message": words})
        os._exit(1)
    signal.signal(signal.SIGXCPU, over)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))  # then the system ends it


def import_heavy():
    """What a student's file may import, once for all forks; one thread, as everywhere here."""
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, GenerationConfig, HfArgumentParser  # noqa: F401

    torch.set_num_threads(1)


def serve(link, module_name, seconds):
    """Import the student's file, then answer calls until the grader hangs up."""
    limit_time(link, seconds)
    sys.path[0] = os.getcwd()
    sys.stdout = sys.stderr = Printed()
    graphs = OrderedDict()
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # whatever a student's file may do
        return send(link, describe(error) | {"import": True})
    send(link, {})
    while True:
        message, tensors = receive(link)
        try:
            reply = backward(graphs, message, tensors) if "backward" in message else call(
                module, graphs, message, tensors)
        except BaseException as error:
            reply = describe(error), []
        send(link, *reply)


def call(module, graphs, message, tensors):
    """Run a function; its graph is kept for a later `backward`."""
    for tensor, wanted in zip(tensors, message["grad"]):
        tensor.requires_grad_(wanted)
    args, kwargs = unpack(message["form"], tensors)
    before = [t.detach().clone() for t in tensors]
    outs = []
    form = pack(getattr(module, message["function"])(*args, **kwargs), outs)
    graphs[message["call"]] = tensors, outs
    while len(graphs) > KEPT:
        graphs.popitem(last=False)
    changed = [i for i, (t, b) in enumerate(zip(tensors, before)) if not torch.equal(t, b)]
    reply = {"form": form, "grad": [t.requires_grad for t in outs], "changed": changed}
    return reply, [*outs, *(tensors[i] for i in changed)]


def backward(graphs, message, gradients):
    """The gradients of a call's inputs, given those of its outputs."""
    tensors, outs = graphs[message["backward"]]
    leaves = [t for t in tensors if t.requires_grad]
    pairs = [(out, g) for out, g in zip(outs, gradients) if out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in pairs], leaves, [g for _, g in pairs], retain_graph=True,
        allow_unused=True)
    return {}, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)]
