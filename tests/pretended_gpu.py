"""Tests: a pretended GPU. Real CPU tensors that say they are on cuda:0 and refuse to meet others.

    with PretendedGpu() as gpu:
        grpo.train(cfg)                 # as on a machine with one GPU without bfloat16
    gpu.waits                           # how often the host waited for it: {(what, where): times}

`PretendedGpu("mps")` is an Apple one, which knows no float64.

A tensor is on the GPU if its storage is known to be; no class of its own, so that parameters,
views, saved tensors and gradients are what they always are. One mode answers what Python asks of a
tensor (`.device`, `.to`, `.numpy`, pickle), the other sees each operator, those of a backward pass
too: what it makes is where its inputs are, and inputs in two places are an error as on CUDA (0-d
tensors and indices may be on the CPU).
"""

import sys
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, T, aten = torch.device("cpu"), torch.Tensor, torch.ops.aten
OURS = ("common", "experiment", "rewards", "grpo", "ppo", "dapo", "gspo")
# What a machine with one such GPU answers.
ANY = dict(
    device_count=1, set_device_index=None, synchronize=None, max_memory_allocated=0,
    current_stream=mock.Mock(is_capturing=lambda: False),
)
APPLE = dict(is_available=True, recommended_max_memory=16 << 30)
CUDA = dict(
    is_available=True, device_count=1, current_device=0, set_device=None, synchronize=None,
    is_bf16_supported=False, max_memory_allocated=0, memory_allocated=0, empty_cache=None,
    is_initialized=True, _lazy_init=None, manual_seed=None, manual_seed_all=None,
    get_device_capability=(7, 5), get_device_name="pretended", mem_get_info=(16 << 30, 16 << 30),
    get_device_properties=mock.Mock(total_memory=16 << 30), is_current_stream_capturing=False,
    get_rng_state=torch.zeros(1), set_rng_state=None,
)
WAITS = {  # their result's value or shape is needed on the host
    aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.masked_select.default,
    aten.equal.default, aten.is_nonzero.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
           aten._index_put_impl_.default, aten._unsafe_index.Tensor}
MOVED = {aten.copy_.default, aten._to_copy.default}


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    """A tensor's memory; of a sharded one, this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def asked_by_fsdp():
    """FSDP's mesh is of CPUs, since this build knows no other: what it calls CPU is the GPU."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in (__name__, "torch.overrides", "torch._tensor"):
        frame = frame.f_back
    name = frame.f_globals["__name__"]
    return name.startswith(("torch.distributed.fsdp", "torch.distributed.tensor"))


class PretendedGpu:
    """Both modes and the answers of `torch.cuda`, as one context."""

    def __init__(self, kind="cuda"):
        self.device = torch.device(kind, 0)
        self.known = weakref.WeakSet()  # storages on the GPU
        self.waits = Counter()
        self.made_where = [False]  # whether what the call under way makes is on the GPU

    def __enter__(self):
        self.stack = ExitStack()
        gpus = [(torch.accelerator, ANY | dict(current_accelerator=torch.device(self.device.type))),
                (torch.cuda, CUDA) if self.device.type == "cuda" else (torch.mps, APPLE)]
        for module, answers in gpus:
            for name, value in answers.items():
                # a default argument: each answer has its own
                answer = (lambda *_, value=value, **__: value)
                self.stack.enter_context(mock.patch.object(module, name, answer, create=True))
        self.stack.enter_context(mock.patch.object(torch, "Event"))  # generate() on mps has some
        mesh, group = device_mesh.init_device_mesh, dist.init_process_group
        self.stack.enter_context(mock.patch.object(
            device_mesh, "init_device_mesh", lambda kind, *shape: mesh("cpu", *shape)))
        self.stack.enter_context(mock.patch.object(
            dist, "init_process_group", lambda backend, **options: group("gloo", **options)))
        torch_groups = torch._C._group_tensors_by_device_and_dtype
        reduce = T.__reduce_ex__

        def grouped(lists, *more):  # the key of a group names a device
            return {(self.device if self.has(value[0][0][0]) else CPU, kind): value
                    for (_, kind), value in torch_groups(lists, *more).items()}

        def reduced(tensor, protocol):
            if self.has(tensor):
                raise TypeError(f"a tensor on {self.device} is pickled: move it to the CPU first")
            return reduce(tensor, protocol)

        self.stack.enter_context(
            mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped))
        self.stack.enter_context(mock.patch.object(T, "__reduce_ex__", reduced))
        self.stack.enter_context(_Operators(self))
        self.stack.enter_context(_Questions(self))
        return self

    def __exit__(self, *error):
        return self.stack.__exit__(*error)

    def has(self, tensor):
        return storage(tensor) in self.known

    def put(self, out):
        for tensor in tensors(out):
            self.known.add(storage(tensor))
        return out

    def means(self, device):
        """Whether the device that is named is the GPU."""
        if torch.device(device).type == "cpu" and asked_by_fsdp():
            return True
        return torch.device(device).type == self.device.type

    def wait(self, what):
        """The host waits: by whose code, ours or a library's."""
        frame = sys._getframe(2)
        while frame:
            name = frame.f_globals.get("__name__", "")
            if name in OURS or name.startswith(("transformers.", "torch.optim")):
                break
            frame = frame.f_back
        self.waits[what, f"{name}.{frame.f_code.co_name}" if frame else "?"] += 1

    def own_waits(self, *functions):
        """How often our own code waited, in these functions of it ("common.cut")."""
        return sum(times for (_, where), times in self.waits.items() if where in functions)


class _Questions(TorchFunctionMode):
    """What Python asks of a tensor."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        if function in (T.device.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.get_device):
            if not gpu.has(args[0]) or asked_by_fsdp():
                return function(*args)
            return {T.device.__get__: gpu.device, T.is_cuda.__get__: gpu.device.type == "cuda",
                    T.is_cpu.__get__: False, T.get_device: 0}[function]
        if function in (T.to, T.cuda, T.cpu):
            return self.move(function, args, kwargs)
        if function is T.backward:  # Python code may run inside: this mode stays on
            with self, self.making(True):
                torch.autograd.backward(
                    args[0], kwargs["gradient"], kwargs["retain_graph"], kwargs["create_graph"])
                return None
        if function in (T.numpy, T.__array__) and gpu.has(args[0]):
            raise TypeError(
                f"{function.__name__} of a tensor on {gpu.device}: move it to the CPU first")
        if function is T.tolist and gpu.has(args[0]):
            gpu.wait("tolist")
        device = kwargs.get("device")
        there = any(map(gpu.has, tensors([args, kwargs])))
        if device is None or torch.device(device).type == "meta":
            with self.making(there):
                out = function(*args, **kwargs)
            return gpu.put(out) if function is T.new_tensor and gpu.has(args[0]) else out
        there = gpu.means(device)
        with self.making(there):
            out = function(*args, **kwargs | {"device": CPU})  # this build knows no other
        if not there:
            return out
        return gpu.put(out.clone() if any(out is x for x in tensors(args)) else out)

    def making(self, there):
        stack = ExitStack()
        self.gpu.made_where.append(there)
        stack.callback(self.gpu.made_where.pop)
        return stack

    def move(self, function, args, kwargs):
        """`to`, `cuda`, `cpu`: a copy where the place changes."""
        tensor, *rest = args
        named = [x for x in [*rest, kwargs.get("device")] if isinstance(x, (str, torch.device))]
        if any(torch.device(place).type == "meta" for place in named):
            return function(*args, **kwargs)
        there = was = self.gpu.has(tensor)
        if function is not T.to:
            there, rest, kwargs = function is T.cuda, [], {}
        elif named:
            there = self.gpu.means(named[0])
        elif rest and isinstance(rest[0], torch.Tensor):
            there = self.gpu.has(rest[0])
        rest = ["cpu" if isinstance(x, (str, torch.device)) else x for x in rest]
        kwargs = kwargs | ({"device": "cpu"} if kwargs.get("device") is not None else {})
        if was and not there:
            self.gpu.wait("to the CPU")
        if was == there:
            with self.making(there):
                out = tensor.to(*rest, **kwargs)
            return out
        out = tensor.clone().to(*rest, **kwargs)
        (self.gpu.known.add if there else self.gpu.known.discard)(storage(out))
        return out


class _Operators(TorchDispatchMode):
    """Each operator: where its inputs are, and where what it makes is."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        given = tensors([args, kwargs])
        places = [gpu.has(tensor) for tensor in given]
        there = any(places)
        if kwargs.get("device") == torch.device("meta"):
            there = False
        elif kwargs.get("device") is not None:
            there = gpu.made_where[-1]
        elif not given:
            there = gpu.made_where[-1]
        elif there and function not in MOVED:
            self.check(function, args, given, places)
        if any(places) and (function in WAITS or function in INDEXED and self.by_bool(args)):
            gpu.wait(function.name().removeprefix("aten::"))
        if function is aten.histc.default and there:  # of integers: on GPUs only
            args = (args[0].float(), *args[1:])
        out = function(*args, **kwargs)
        if there and gpu.device.type == "mps":
            if any(x.dtype == torch.float64 for x in [*given, *tensors(out)]):
                raise TypeError(f"{function.name()}: no float64 on {gpu.device}")
        mutates = function._schema.is_mutable
        return gpu.put(out) if there and not mutates else out

    def by_bool(self, args):
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors(args[1]))

    def check(self, function, args, given, places):
        if function in INDEXED and self.gpu.has(args[0]):
            given = [args[0], *tensors(args[2:3])]  # indices on the CPU are taken there
            places = [self.gpu.has(tensor) for tensor in given]
        strangers = [x for x, there in zip(given, places) if not there and x.dim() > 0]
        if strangers:
            raise RuntimeError(
                f"{function.name()}: expected all tensors on {self.gpu.device}, but one of shape "
                f"{tuple(strangers[0].shape)} is on the CPU")
