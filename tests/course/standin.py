"""Course: pytest plugins that let a marked function be run elsewhere, test by test.

The house's tests call `grpo.kl_k3(...)`. While a test of the problem `grpo.kl_k3` runs, that name
leads to `Grader`, which asks a process with the student's file (worker.py) and compares nothing
itself; in all other tests, and for all other functions, it leads to the solution. So the tests, the
right values and the verdict stay out of the student's reach, and no problem depends on another.
`Recorder` uses the same names to write down what the solution answers, for the handout.
"""

import contextlib
import functools
import importlib
import json
import re
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch

import worker

# --- the other process ---------------------------------------------------------------------------


class Remote:
    """One student's file: calls its functions within `limit` seconds of CPU time, all together.

    files: {name: bytes}, what lies around it in the sandbox `box`."""

    def __init__(self, box, files, module, limit):
        self.box, self.files, self.module, self.limit = box, files, module, limit
        self.link, self.dead, self.calls = None, None, 0
        self.patience = 10 * limit  # seconds of a busy machine, or of a student who sleeps

    def call(self, function, args, kwargs):
        """As if the function were here: its value, its gradient, its ValueError."""
        if self.link is None and not self.dead:
            self.link = self.box.worker(self.files, self.module, self.limit)
            self.exchange(None, ())
        tensors, request = [], {"function": function, "call": self.calls}
        request["form"] = worker.pack((args, kwargs), tensors)
        self.calls += 1
        outs = _Call.apply(self, request, *tensors)
        return worker.unpack(request["reply"]["form"], outs)

    def exchange(self, message, tensors):
        """Send (unless None) and receive; every way to fail becomes one clear line."""
        if self.dead:
            raise RuntimeError(self.dead)
        start = time.monotonic()
        self.link.settimeout(max(self.patience, 0.01))
        try:
            if message is not None:
                worker.send(self.link, message, tensors)
            reply, found = worker.receive(self.link)
            if not isinstance(reply, dict):
                raise EOFError("a forged answer")
        except TimeoutError:
            self.die(f"no answer within {10 * self.limit} s")
        except Exception:  # whatever a broken process may send
            self.die("the process ended without an answer: os._exit, or a crash?")
        self.patience -= time.monotonic() - start
        if "error" in reply:
            text = f"{reply['error']}: {reply.get('message')}"
            if reply["error"] == "over":
                self.die(str(reply.get("message")))
            if reply.get("import"):
                self.die(f"{self.module}.py can't be imported: {text}")
            raise (ValueError if reply["error"] == "ValueError" else RuntimeError)(text)
        return reply, found

    def die(self, why):
        self.dead = why
        self.close()
        raise RuntimeError(why)

    def close(self):
        if self.link is not None:
            self.link.close()  # its process ends with it, and what that left with the next order


class _Call(torch.autograd.Function):
    """A remote call that autograd can walk back through."""

    @staticmethod
    def forward(ctx, remote, request, *tensors):
        request["grad"] = list(ctx.needs_input_grad[2:])
        reply, found = remote.exchange(request, tensors)
        try:  # a reply that the student's own code has written may be anything
            outs = found[: len(reply["grad"])]
            for i, value in zip(reply["changed"], found[len(outs) :]):
                tensors[i].detach().copy_(value)  # what the student's function did to its inputs
            worker.unpack(reply["form"], outs)
        except Exception:
            remote.die("no answer that can be read")
        request["reply"] = reply
        ctx.remote, ctx.request = remote, request
        ctx.mark_non_differentiable(*[o for o, g in zip(outs, reply["grad"]) if not g])
        return tuple(outs)

    @staticmethod
    def backward(ctx, *gradients):
        _, found = ctx.remote.exchange({"backward": ctx.request["call"]}, gradients)
        found = iter(found)
        return None, None, *[next(found) if g else None for g in ctx.request["grad"]]


# --- the plugins ---------------------------------------------------------------------------------


def scripted(name):
    """The script of a variant, as a module."""
    import variants

    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    exec(compile(variants.patched(name), module.__file__, "exec"), vars(module))
    return module


class StandIns:
    """Keeps the tests of `problems` and leads each one's functions to `self.handle`."""

    def __init__(self, problems):
        self.problems, self.active, self.item, self.of = problems, None, None, {}
        self.replaced = []  # (module, name, what was there)

    def pytest_configure(self, config):
        for problem in self.problems:
            if problem.file == "variants":  # a script that lies nowhere
                sys.modules[problem.module] = scripted(problem.module)
            module = importlib.import_module(problem.module)
            for name in problem.functions:
                self.replace(module, name, self._standin(problem, name, getattr(module, name)))

    def replace(self, module, name, value):
        self.replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def pytest_unconfigure(self, config):
        for module, name, value in reversed(self.replaced):
            setattr(module, name, value)
        for problem in self.problems:
            if problem.file == "variants":
                sys.modules.pop(problem.module, None)

    def _standin(self, problem, name, original):
        @functools.wraps(original)
        def standin(*args, **kwargs):
            if self.active is not problem:
                return original(*args, **kwargs)
            return self.handle(problem, name, original, args, kwargs)
        return standin

    def pytest_collection_modifyitems(self, items):
        for item in items:
            module, name = item.path.stem.removeprefix("test_"), item.nodeid.split("::", 1)[1]
            found = [p for p in self.problems
                     if (p.file or p.module) == module and re.search(p.tests, name)]
            if module == "drawn":
                found = [p for p in self.problems if f"[{p.name}-" in name]
            if found:
                self.of[item.nodeid] = found[0]
        place = {problem: i for i, problem in enumerate(self.problems)}  # one process at a time
        items[:] = sorted((item for item in items if item.nodeid in self.of),
                          key=lambda item: place[self.of[item.nodeid]])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self.active, self.item = self.of[item.nodeid], item

    def pytest_runtest_teardown(self, item):
        self.active = None


def wrong_versions(problem):
    """{what is wrong: a module with that fault}, by the faults that mutants.py plants."""
    import mutants

    found = {}
    if problem.file:
        return found
    source = (mutants.ROOT / f"{problem.module}.py").read_text()
    for what, file, old, new, *_ in mutants.MUTANTS:
        if file == problem.module and source.count(old) == 1:
            found[what] = module = types.ModuleType(file)
            module.__file__ = f"{file}.py"
            exec(compile(source.replace(old, new), f"{file}.py", "exec"), vars(module))
    return found


def same(a, b):
    """Whether two results are the same, within what float32 keeps."""
    a, b = worker.named(a), worker.named(b)
    return a.keys() == b.keys() and all(
        torch.allclose(x, b[n], rtol=1e-5, atol=1e-7, equal_nan=True) if torch.is_tensor(x)
        and torch.is_tensor(b[n]) and (x.shape, x.dtype) == (b[n].shape, b[n].dtype)
        else not torch.is_tensor(x) and not torch.is_tensor(b[n]) and x == b[n]
        for n, x in a.items())


class Grader(StandIns):
    """`remotes`: problem -> Remote. Afterwards `results`: problem -> [(check, passed, message)]."""

    def __init__(self, remotes):
        super().__init__(list(remotes))
        self.remotes, self.results = remotes, {problem: [] for problem in remotes}
        self.calls, self.wrong = [], {}  # of the test that runs: (name, args, kwargs, result)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        super().pytest_runtest_call(item)
        self.calls = []
        if dead := self.remotes[self.active].dead:
            pytest.fail(dead, pytrace=False)

    def handle(self, problem, name, original, args, kwargs):
        remote = self.remotes[problem]
        try:
            result = remote.call(name, args, kwargs)
            if len(self.calls) < 4:
                self.calls.append((name, args, kwargs, result))
            return result
        except RuntimeError as error:
            if str(error).startswith("NotImplementedError") and len(problem.functions) == 1:
                remote.dead = "not written yet"
            raise

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            check = report.nodeid.split("::", 1)[1]
            message = ""
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = crash.message if crash else str(report.longrepr)
                message = re.sub(r"^(Failed|RuntimeError|AssertionError): ", "", message)[:600]
                if "looks like" not in message and self.calls:
                    message += self.named_mistake(self.of[report.nodeid])
            self.results[self.of[report.nodeid]].append((check, report.passed, message))


    def named_mistake(self, problem):
        """"; looks like ..." if one known fault gives just what the student's function gave."""
        if problem not in self.wrong:
            self.wrong[problem] = wrong_versions(problem)
        original = {name: value for module, name, value in self.replaced
                    if module.__name__ == problem.module}
        for what, module in self.wrong[problem].items():
            try:
                with torch.no_grad():
                    as_wrong = all(same(getattr(module, n)(*a, **k), r)
                                   for n, a, k, r in self.calls)
                    right = all(same(original[n](*a, **k), r) for n, a, k, r in self.calls)
            except Exception:  # a fault may raise what it likes
                continue
            if as_wrong and not right:
                return f";\nlooks like this fault: {what}"
        return ""


class Recorder(StandIns):
    """`cases`: what the solution answers in a few calls of each test, for the student to run."""

    def __init__(self, problems):
        super().__init__(problems)
        self.cases, self.counts = [], {}

    def pytest_collection_modifyitems(self, items):
        super().pytest_collection_modifyitems(items)
        import oracles
        self.check = oracles.check
        for module in {oracles, *(item.module for item in items)}:
            if vars(module).get("check") is self.check:
                self.replace(module, "check", self.spy)

    def handle(self, problem, name, original, args, kwargs):
        test = self.item.nodeid.split("::", 1)[1]
        tensors = []
        form = worker.pack((args, kwargs), tensors)
        drawn = self.item.originalname == "test_drawn"
        kind = test if drawn else (problem.name, self.item.originalname)
        room = 1 if drawn else 3 if tensors else 20
        small = sum(t.numel() for t in tensors) <= 400
        if not small or self.counts.get(kind, 0) >= room or "any_cut" in test:
            return original(*args, **kwargs)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        doc = (self.item.function.__doc__ or "").strip().split("\n\n")[0]
        case = {"problem": problem.name, "function": name, "test": test, "form": form,
                "why": " ".join(doc.split()), "inputs": [plain(t) for t in tensors],
                "wanted": [t.requires_grad for t in tensors], "mistakes": {}}
        self.cases.append(case)
        try:
            case |= answer(case, original)
        except ValueError:
            case["raises"] = "ValueError"
        return original(*args, **kwargs)

    def spy(self, actual, expected, mistakes={}, atol=1e-9):
        """The house's comparison; the mistakes it knows are noted with the output they are of."""
        self.check(actual, expected, mistakes, atol)
        test = self.item.nodeid.split("::", 1)[1]
        value = np.asarray(actual.detach() if torch.is_tensor(actual) else actual, dtype=float)
        for case in [c for c in self.cases if c["test"] == test and "outputs" in c]:
            for name, out in case["outputs"].items():
                if out["shape"] == list(value.shape) and np.allclose(out["data"], value.flatten()):
                    case["mistakes"].setdefault(name, {}).update({
                        what: np.broadcast_to(np.asarray(wrong, float), value.shape).flatten()
                        .tolist() for what, wrong in mistakes.items()})

    def name_mistakes(self):
        """To each small case: what the known faults give to its inputs."""
        wrong = {problem.name: wrong_versions(problem) for problem in self.problems}
        for case in self.cases:
            few = sum(len(x["data"]) for x in case.get("outputs", {}).values()) <= 24
            if not few:
                continue
            for what, module in wrong[case["problem"]].items():
                # A fault may raise what it likes, and torch warn of it.
                with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                    got = answer(case, getattr(module, case["function"]))["outputs"]
                    for name, right in case["outputs"].items():
                        if got[name] != right and got[name]["shape"] == right["shape"]:
                            case["mistakes"].setdefault(name, {})[what] = got[name]["data"]


def plain(tensor):
    """A tensor as JSON."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "data": tensor.detach().flatten().tolist()}


def answer(case, function):
    """What `function` says to a recorded case: values, tensors, gradients of their sum."""
    tensors = [torch.tensor(x["data"], dtype=getattr(torch, x["dtype"])).view(x["shape"])
               for x in case["inputs"]]
    for tensor, wanted in zip(tensors, case["wanted"]):
        tensor.requires_grad_(wanted)
    args, kwargs = worker.unpack(case["form"], tensors)
    result = worker.named(function(*args, **kwargs))
    outputs = {name: x for name, x in result.items() if torch.is_tensor(x)}
    leaves = [t for t in tensors if t.requires_grad]
    total = sum(x.sum() for x in outputs.values() if x.requires_grad)
    gradients = [None] * len(leaves)
    if torch.is_tensor(total):
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return {"values": {name: x for name, x in result.items() if name not in outputs},
            "outputs": {name: plain(x) for name, x in outputs.items()},
            "gradients": [g if g is None else plain(g) for g in gradients]}
