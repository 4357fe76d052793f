"""Course: your problems, one test a recorded call: python -m pytest tests -k grpo.kl_k3

cases.json holds inputs, and the outputs and gradients that the solution gave to them.
"""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from worker import describe, named, unpack  # noqa: E402

CASES = json.loads((HERE / "cases.json").read_text())


def tensor(x):
    return torch.tensor(x["data"], dtype=getattr(torch, x["dtype"])).view(x["shape"])


def compare(what, actual, case_value, mistakes):
    """Where the two differ, and which classic mistake gives exactly this."""
    expected = tensor(case_value)
    for kind in ("shape", "dtype"):
        got, wanted = getattr(actual, kind), getattr(expected, kind)
        if got != wanted:
            fail(f"{what}: {kind} {got}, expected {wanted}")
    loose = expected.dtype in (torch.float32, torch.bfloat16)
    actual, expected = actual.detach().double().flatten(), expected.double().flatten()

    def same(x):
        return torch.allclose(actual, x, rtol=1e-4 if loose else 1e-7, atol=1e-5 if loose else 1e-9)

    if same(expected):
        return
    error = (actual - expected).abs().nan_to_num(math.inf, math.inf)
    worst = int(error.argmax())
    names = [n for n, x in mistakes.items() if same(torch.tensor(x, dtype=torch.float64))]
    fail(f"{what}: got {actual[worst]:.6g}, expected {expected[worst]:.6g} at place {worst}"
         + (";\nlooks like " + ",\nor ".join(names[:3]) if names else ""))


def fail(words):
    pytest.fail(words, pytrace=False)  # the words alone: a traceback would be of this file


@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case['problem']}-{i}-{case['test']}") for i, case in enumerate(CASES)])
def test_case(case):
    try:
        run(case)
    except Exception as error:  # whatever the student's code may raise
        told = describe(error)
        fail("not written yet" if told["error"] == "NotImplementedError"
             else f"{told['error']}: {told['message']}")


def run(case):
    function = getattr(importlib.import_module(case["problem"].split(".")[0]), case["function"])
    inputs = [tensor(x) for x in case["inputs"]]
    for x, wanted in zip(inputs, case["wanted"]):
        x.requires_grad_(wanted)
    args, kwargs = unpack(case["form"], inputs)
    if "raises" in case:
        try:
            function(*args, **kwargs)
        except ValueError:
            return
        fail(f"{case['why']}: a ValueError is wanted")
    result = named(function(*args, **kwargs))
    for name, right in case["values"].items():
        if result.get(name) != right:
            fail(f"{case['why']} {name}: got {result.get(name)!r}, expected {right!r}"[:400])
    for name, right in case["outputs"].items():
        if not torch.is_tensor(result.get(name)):
            fail(f"{name} is missing, or no tensor")
        compare(f"{case['why']} {name}", result[name], right, case["mistakes"].get(name, {}))
    total = sum(result[n].sum() for n in case["outputs"] if result[n].requires_grad)
    for x, right in zip([x for x in inputs if x.requires_grad], case["gradients"]):
        if right and any(right["data"]):
            if not torch.is_tensor(total):
                fail("the result carries no gradient")
            (gradient,) = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)
            gradient = torch.zeros_like(x) if gradient is None else gradient
            compare("the gradient", gradient, right, {})
