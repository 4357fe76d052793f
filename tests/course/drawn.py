"""Course: every problem on inputs that are drawn from the hidden seed, beside the solution.

The grader runs this file with the house's tests; a problem has points only if one of these checks
is passed. What is compared: all values, and the gradients of a weighted sum of them.
"""

import importlib
import inspect
import random
import sys

import pytest
import torch

from oracles import normal
from problems import SCRIPTS

# --- inputs --------------------------------------------------------------------------------------


def masks(rng, rows=6, width=7):
    """(rows, width): answers of different lengths, one as long as can be."""
    lengths = torch.tensor([width, *rng.integers(1, width, size=rows - 1)])
    return (torch.arange(width) < lengths[:, None]).double()


def weights(rng, mask):
    """Positive and not those of any method: a loss must use what it is given."""
    return mask * normal(rng, *mask.shape).abs() / mask.sum()


def rewards(rng):
    return normal(rng, 12), int(rng.choice([2, 3, 4, 6]))


def clipped(rng, limits, per_token=False):
    """Arguments of a policy loss whose ratios fall on both sides of the limits."""
    mask = masks(rng)
    old = -normal(rng, *mask.shape).abs()
    logp = (old + normal(rng, *mask.shape, scale=0.4)).requires_grad_()
    advantages = normal(rng, *(mask.shape if per_token else mask.shape[:1]))
    return logp, old, advantages, mask, weights(rng, mask), *limits


def with_reference(rng):
    given = clipped(rng, [0.2])
    return *given, given[1] + normal(rng, *given[1].shape, scale=0.3), float(rng.uniform(0.1, 1))


def value_loss(rng):
    mask = masks(rng)
    old = normal(rng, *mask.shape)
    new = (old + normal(rng, *mask.shape, scale=0.4)).requires_grad_()
    return new, old, normal(rng, *mask.shape), mask, weights(rng, mask), 0.3


def head(rng, entropy):
    layer = torch.nn.Linear(5, 11, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(normal(rng, 11, 5))
    hidden = normal(rng, 7, 5).requires_grad_()
    return layer, hidden, torch.tensor(rng.integers(0, 11, size=7)), float(rng.uniform(0.5, 2)), \
        entropy


def left_padded(rng):
    return (masks(rng).flip(1).long(),)


def text(rng):
    """A completion with several numbers, markers or boxes of which one counts."""
    draw = random.Random(int(rng.integers(2**31)))
    a, b, c = (str(draw.randint(10, 10**6)) for _ in range(3))
    return draw.choice([
        f"so {a}\n#### {b} #### {c} \nmore", f"#### {a}\n#### {b}\nQuestion: {c}\n#### {c}",
        f"\\boxed{{{a}}} then \\boxed{{\\frac{{{b}}}{{{c}}}}}", f"#### {a}<|im_end|>#### {b}",
        f"\\boxed{{{a}}} and \\boxed{{{b}", f"{a} and {b}, no marker at all"])


def tokens(rng):
    return torch.tensor(rng.integers(2, 9, size=(8, 10))), [int(x) for x in rng.integers(2, 9, 2)]


def token_rewards(rng):
    mask = masks(rng)
    return (normal(rng, len(mask)), -normal(rng, *mask.shape).abs(),
            -normal(rng, *mask.shape).abs(), mask, float(rng.uniform(0.1, 1)))


def gae(rng):
    mask = masks(rng)
    return (normal(rng, *mask.shape), normal(rng, *mask.shape), mask,
            float(rng.uniform(0.5, 1)), float(rng.uniform(0.5, 1)))


def lengths(rng):
    most = int(rng.integers(20, 60))
    return torch.tensor(rng.integers(0, most + 1, size=20)), most, int(rng.integers(5, most))


DRAWN_BY_NAME = {  # what a variant's functions take besides a batch of answers
    "clip_eps": lambda rng: 0.2, "clip_low": lambda rng: 0.3, "clip_high": lambda rng: 0.4,
    "beta": lambda rng: float(rng.uniform(0.1, 1)), "scale": lambda rng: float(rng.uniform(0.5, 2)),
    "off_policy": lambda rng: 0.1, "dual_clip": lambda rng: 1.2, "kl_coef": lambda rng: 0.7,
    "cap": lambda rng: 1.1, "tau_pos": lambda rng: 1.1, "tau_neg": lambda rng: 1.3,
    "share": lambda rng: 0.3, "group_size": lambda rng: 3, "k": lambda rng: 2,
    "eps": lambda rng: 1e-6, "total": lambda rng: 40}


def by_name(function):
    """What a variant's function is called with, drawn by the names of its arguments."""
    def draw(rng):
        logp, old, advantages, mask, weight = clipped(rng, [])
        given = {"logp": logp, "old_logp": old, "mask": mask, "weights": weight,
                 "advantages": advantages, "rewards": normal(rng, len(mask)),
                 "lengths": mask.sum(1), "ref_logp": old + normal(rng, *old.shape, scale=0.3),
                 "gen_logp": old + normal(rng, *old.shape, scale=0.3),
                 "marked": (normal(rng, *old.shape) > 0).double() * mask}
        if function.__name__ == "decoupled_advantages":
            given |= {"rewards": normal(rng, 2, len(mask)), "weights": normal(rng, 2).abs()}
        if function.__module__ == "gspo_token":
            given["advantages"] = normal(rng, *mask.shape)
        return [given[name] if name in given else DRAWN_BY_NAME[name](rng)
                for name in inspect.signature(function).parameters]
    return draw


def variant_rows():
    """Rows of DRAWS for the variants that the grader has put among the modules."""
    import variants

    for name in variants.names():
        for function in variants.changed_functions(name) if name in sys.modules else ():
            problem = f"{name}.{variants.changed_functions(name)[0]}"
            yield problem, function, function, by_name(getattr(sys.modules[name], function))


def wide(rng):
    return float(rng.uniform(0.1, 0.2)), float(rng.uniform(0.25, 0.4))


DRAWS = [  # problem, function, what is drawn, arguments
    *((f"{s}.group_advantages", "group_advantages", "groups", rewards)
      for s in ("grpo", "dapo", "gspo")),
    *((f"{s}.token_weights", "token_weights", "rows", lambda rng: (masks(rng),)) for s in SCRIPTS),
    *((f"{s}.token_weights", "token_weights", "total",
       lambda rng: (masks(rng), int(rng.integers(50, 99)))) for s in SCRIPTS),
    ("dapo.token_weights", "answer_weights", "answers",
     lambda rng: (masks(rng), int(rng.integers(7, 20)))),
    ("grpo.policy_loss", "policy_loss", "plain", lambda rng: clipped(rng, [rng.uniform(0.1, 0.4)])),
    ("grpo.policy_loss", "policy_loss", "reference", with_reference),
    ("dapo.policy_loss", "policy_loss", "limits", lambda rng: clipped(rng, wide(rng))),
    ("gspo.policy_loss", "policy_loss", "limits", lambda rng: clipped(rng, wide(rng))),
    ("ppo.policy_loss", "policy_loss", "plain", lambda rng: clipped(rng, [0.2], per_token=True)),
    ("grpo.kl_k3", "kl_k3", "policies",
     lambda rng: (normal(rng, 4, 5).requires_grad_(), normal(rng, 4, 5))),
    ("dapo.soft_overlong_penalty", "soft_overlong_penalty", "lengths", lengths),
    ("dapo.keep_group", "keep_group", "groups",
     lambda rng: (torch.tensor(rng.integers(0, 2, size=(12, 2))).double(),)),
    ("ppo.token_rewards", "token_rewards", "answers", token_rewards),
    ("ppo.gae", "gae", "answers", gae),
    ("ppo.whiten", "whiten", "answers", lambda rng: (normal(rng, 6, 7), masks(rng))),
    ("ppo.value_loss", "value_loss", "answers", value_loss),
    ("common.response_mask", "response_mask", "tokens", tokens),
    *(("common.head_logps", "head_logps", entropy, lambda rng, entropy=entropy: head(rng, entropy))
      for entropy in ("off", "value", "grad")),
    ("common.head_logps", "positions", "padding", left_padded),
    ("rewards.extract_answer", "extract_answer", "strict", lambda rng: (text(rng),)),
    ("rewards.extract_answer", "extract_answer", "lenient", lambda rng: (text(rng), True)),
]

# --- the comparison ------------------------------------------------------------------------------


def parts(value):
    """The tensors and other values of a result, by name."""
    if isinstance(value, (tuple, list)):
        return {f"[{i}]{k}": x for i, v in enumerate(value) for k, x in parts(v).items()}
    if isinstance(value, dict):
        return {f"[{key!r}]{k}": x for key, v in value.items() for k, x in parts(v).items()}
    return {"": value}


def gradients(found, args):
    """Those of the inputs, given a sum of the results in which each has a weight of its own."""
    leaves = [x for x in args if torch.is_tensor(x) and x.requires_grad]
    outs = [x for _, x in sorted(found.items()) if torch.is_tensor(x) and x.requires_grad]
    if not leaves or not outs:
        return [None] * len(leaves)
    total = sum((x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in outs)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def same(name, got, right):
    if right is None or not torch.is_tensor(right):
        assert got == right, f"{name}: got {got!r}, expected {right!r}"[:300]
        return
    assert torch.is_tensor(got), f"{name}: got {type(got).__name__}, expected a tensor"
    assert got.shape == right.shape, \
        f"{name}: shape {tuple(got.shape)}, expected {tuple(right.shape)}"
    error = (got.detach().double() - right.detach().double()).abs().flatten().nan_to_num(torch.inf)
    worst = int(error.argmax())
    assert error[worst] <= 1e-6, (
        f"{name}: got {got.flatten()[worst]:.6g}, expected {right.flatten()[worst]:.6g} "
        f"at place {worst}")


def pytest_generate_tests(metafunc):
    metafunc.parametrize("problem, name, kind, draw", [
        pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in (*DRAWS, *variant_rows())])


def test_drawn(rng, problem, name, kind, draw):
    function = getattr(importlib.import_module(problem.split(".")[0]), name)
    solution = getattr(function, "__wrapped__", function)
    for _ in range(8 if kind in ("strict", "lenient") else 3):
        args = draw(rng)
        right, got = parts(solution(*args)), parts(function(*args))
        assert got.keys() == right.keys(), f"got {sorted(got)}, expected {sorted(right)}"
        for part in right:
            same(f"result{part}", got[part], right[part])
        for wanted, grad in zip(gradients(right, args), gradients(got, args)):
            same("the gradient", grad, wanted)
