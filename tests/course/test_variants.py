"""The later algorithms. One of them: pytest tests/course/test_variants.py -k cispo

`--impl DIR` takes NAME.py from DIR where it is there: so a student's script is checked.
"""

import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import types
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import common
import experiment
import variants
from oracles import (LossProperties, cells, check, clip, clipped_loss, is_clipped, k3, mask_of,
                     mean_ratio, normal, peer, sequence_weights, token_mean_weights, token_ratio,
                     toy_answers, toy_gradient, weighted)
from test_steps import LIMIT, G, generate

NAMES = variants.names()


@lru_cache
def module_of(text, name):
    """A script's text as a module."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    exec(compile(text, module.__file__, "exec"), vars(module))  # noqa: S102  our own text
    return module


@pytest.fixture
def load(impl):
    """Name -> module: the patched script, or the one in --impl DIR."""
    def load(name):
        if name in sys.modules:  # the grader's, in which a student's functions stand
            return sys.modules[name]
        file = impl / f"{name}.py"
        return module_of(file.read_text() if file.is_file() else variants.patched(name), name)
    return load


# --- the diffs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_diff_fits_and_is_small(name):
    """It applies to today's script, and is what its header says: a patch of a few lines."""
    variant = variants.read(name)
    old, new = variants.script(variant.parent), variants.patched(name)
    code, total = variants.changed_lines(old, new)
    assert code <= 15 and total <= 30, f"{code} lines of code, {total} with docstrings"
    assert max(map(len, new.splitlines())) <= 100
    assert all(variant.header[key] for key in variants.HEADER)
    assert "arXiv" in variant.header["Paper"]
    assert f"python {name}.py " in new and f" {name}.py --model Qwen2.5-7B" in new
    assert not re.search(rf"\b{variant.parent}\.py", new), "the script still speaks of its parent"
    assert variants.make_diff(old, new) == variant.diff, "not what difflib makes of the two"


@pytest.mark.parametrize("name", NAMES)
def test_config_and_help_are_whole(load, name):
    """Every flag has help, and TINY overrides only what there is."""
    module = load(name)
    cfg = experiment.parse_args(module.Config, module.TINY, ["--steps", "1"])
    assert set(module.TINY) <= set(vars(cfg))


def test_apply_is_strict():
    """A diff is for one text: no offset, no fuzz, nothing lost."""
    old = "".join(f"line {i}\n" for i in range(12))
    new = old.replace("line 5\n", "five\nand a half\n").replace("line 11\n", "")
    diff = variants.make_diff(old, new)
    assert variants.apply(old, diff) == new
    for drifted in ("\n" + old, old.replace("line 4", "line four"), old[:-8]):
        with pytest.raises(ValueError, match="line"):
            variants.apply(drifted, diff)


@pytest.mark.skipif(not shutil.which("patch"), reason="no patch program here")
@pytest.mark.parametrize("name", NAMES[:3])
def test_patch_reads_the_diffs(name, tmp_path):
    """`patch -o cispo.py dapo.py cispo.diff` gives the same script."""
    parent = variants.ROOT / f"{variants.read(name).parent}.py"
    diff = variants.FOLDER / f"{name}.diff"
    subprocess.run(["patch", "-s", "-o", "out.py", str(parent), str(diff)], cwd=tmp_path,
                   check=True)
    assert (tmp_path / "out.py").read_text() == variants.patched(name)


def test_changed_lines_counts_edits_and_additions():
    old = 'def f():\n    """Doc."""\n    a = 1\n    return a\n'
    new = 'def f():\n    """Other."""\n    # why\n    a = 2\n    b = 3\n    return a\n'
    assert variants.changed_lines(old, new) == (2, 4)


def repository(path, text):
    """A git repository with one script in it and one variant of it."""
    subprocess.run(["git", "init", "-q", str(path)], check=True)
    (path / "grpo.py").write_text(text)
    (path / "variants").mkdir()


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A small house of its own: twenty lines, a variant that edits line 10."""
    text = "".join(f"x{i} = {i}\n" for i in range(20))
    repository(tmp_path, text)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path / "variants")
    header = {key: "text that is long enough to be wrapped " * 4 for key in variants.HEADER}
    variants.write(variants.Variant("mine", "grpo", header, ""))
    variants.save("mine", text.replace("x10 = 10\n", "x10 = 'ten'\n"))
    return tmp_path


def test_header_survives_its_file(house):
    before = variants.read("mine")
    variants.write(before)
    assert variants.read("mine") == before


def test_refresh_follows_an_edit_of_the_script(house):
    """Lines added above: the strict apply refuses, the merge rebases."""
    assert variants.refresh("mine") == "up to date"
    edited = "import os\n" + (house / "grpo.py").read_text()
    (house / "grpo.py").write_text(edited)
    with pytest.raises(ValueError, match="--refresh"):
        variants.patched("mine")
    assert variants.refresh("mine") == "rebased"
    assert variants.patched("mine") == edited.replace("x10 = 10\n", "x10 = 'ten'\n")


def test_refresh_leaves_a_conflict_to_be_mended(house):
    """The same line was edited on both sides."""
    text = (house / "grpo.py").read_text()
    (house / "grpo.py").write_text(text.replace("x10 = 10\n", "x10 = 100\n"))
    before = (house / "variants" / "mine.diff").read_text()
    with pytest.raises(ValueError, match="1 conflict"):
        variants.refresh("mine")
    assert "<<<<<<<" in (house / "mine.py").read_text()
    assert (house / "variants" / "mine.diff").read_text() == before


def test_a_script_is_never_overwritten(tmp_path):
    variants.main(["cispo", "--to", str(tmp_path)])
    assert (tmp_path / "cispo.py").read_text() == variants.patched("cispo")
    with pytest.raises(ValueError, match="exists"):
        variants.main(["cispo", "--to", str(tmp_path)])
    with pytest.raises(ValueError, match="no variant 'sispo'"):
        variants.main(["sispo", "--to", str(tmp_path)])


@pytest.mark.parametrize("name", NAMES)
def test_exercise_has_a_blank(name):
    """What makes the variant is gone, the rest is there."""
    text = variants.blanked(name)
    blanks = variants.changed_functions(name)
    assert blanks and text.count("raise NotImplementedError") == len(blanks)
    solution, left = variants.functions(variants.patched(name)), variants.functions(text)
    for function, body in solution.items():
        assert (left[function] == body) == (function not in blanks)


# --- the peer's numbers --------------------------------------------------------------------------

VALUES = json.loads((variants.FOLDER / "values.json").read_text())


def tensors(number):
    return SimpleNamespace(**{name: torch.tensor(x, dtype=torch.float64)
                              for name, x in VALUES["batches"][number].items()})


def case_of(kind, name, number):
    return next((c for c in VALUES["cases"]
                 if (c["kind"], c["name"], c["batch"]) == (kind, name, number)), None)


def grpo_advantages(number):
    """What the peer's losses were given, one number an answer."""
    return torch.tensor([row[0] for row in case_of("advantage", "grpo", number)["value"]],
                        dtype=torch.float64)


def cases(kind, *names):
    return [pytest.param(name, number, id=f"{name}-{number}") for name in names for number in "12"
            if case_of(kind, name, number)]


ADVANTAGES = {
    "dr_grpo": lambda m, b: m.group_advantages(b.rewards, 4),
    "rloo": lambda m, b: m.group_advantages(b.rewards, 4),
    "opo": lambda m, b: m.group_advantages(b.rewards, 4, b.mask.sum(1)),
    "gpg": lambda m, b: m.group_advantages(b.rewards, 4),
    "reinforce_pp": lambda m, b: m.batch_advantages(b.rewards, b.mask),
    "reinforce_pp_baseline": lambda m, b: m.group_advantages(b.rewards, 4, b.mask),
}


@pytest.mark.parametrize("name, number", cases("advantage", "dr_grpo", "rloo", "opo",
                                               "reinforce_pp", "reinforce_pp_baseline"))
def test_advantages_are_the_peers(load, name, number):
    b = tensors(number)
    ours = ADVANTAGES[name](load(name), b)[:, None] * b.mask
    check(ours, case_of("advantage", name, number)["value"])


def test_maxk_is_the_peers_pass_at_k(load):
    """The peer's name for it is grpo_passk."""
    b = tensors("2")
    check(load("maxk").group_advantages(b.rewards, 4)[:, None] * b.mask,
          case_of("advantage", "grpo_passk", "2")["value"])


@pytest.mark.parametrize("number", "12")
def test_gpg_counts_groups_where_the_peer_counts_rewards(load, number):
    """alpha is groups over groups that are not tied, as in the paper (and its authors' code, which
    looks for a std of 0); the peer divides answers by rewards that are not 0, in float32."""
    b = tensors(number)
    ours = load("gpg").group_advantages(b.rewards, 4)
    tied = sum(len(set(group.tolist())) == 1 for group in b.rewards.view(-1, 4))
    alpha, peers = 2 / (2 - tied), 8 / int((b.rewards != 0).sum())
    check(ours / alpha * peers * b.mask.T, torch.tensor(
        case_of("advantage", "gpg", number)["value"]).T, atol=1e-7)


LOSSES = {  # name: (weights, the settings as arguments)
    "dr_grpo": (token_mean_weights, {}),
    "sapo": (sequence_weights, {}),
    "cispo": (token_mean_weights, dict(clip_low=0.2, clip_high=0.2)),
    "gmpo": (sequence_weights, dict(clip_low=0.4, clip_high=0.4)),
    "gpg": (token_mean_weights, {}),
    "dual_clip": (token_mean_weights, dict(dual_clip=3.0)),
    "kl_cov": (token_mean_weights, dict(kl_coef=1.0)),
}


@pytest.mark.parametrize("name, number", cases("loss", *LOSSES))
def test_losses_are_the_peers(load, name, number):
    """Value and gradient. dr_grpo: the scale makes 1/C, here 1/7, of the mean over tokens. kl_cov:
    the peer marks under the new policy, so this does here; `train` marks under the old one, once,
    that a cut into micro-batches may change nothing. gmpo: the peer adds 1e-8 to |o|."""
    b, case, module = tensors(number), case_of("loss", name, number), load(name)
    weigh, settings = LOSSES[name]
    advantages = grpo_advantages(number)
    if name == "dr_grpo":
        settings = dict(scale=float(b.mask.sum() / 8 / 7))
    if name == "kl_cov":
        marked = module.high_covariance(b.logp, advantages, b.mask, 0.2)
        settings = settings | dict(marked=marked)
    logp = b.logp.clone().requires_grad_()
    loss, _ = module.policy_loss(logp, b.old_logp, advantages, b.mask, weigh(b.mask), **settings)
    tolerance = 1e-8 if name == "gmpo" else 1e-9
    check(loss, case["value"], atol=tolerance)
    check(torch.autograd.grad(loss, logp)[0], case["gradient"], atol=tolerance)


def test_gspo_token_is_the_peers(load):
    """verl's gspo is GSPO-token: with one advantage an answer that is GSPO, gradient and all."""
    case = peer("gspo_seqadv_3e-4_4e-4_verl")
    logp = case.logp_new.clone().requires_grad_()
    loss, _ = load("gspo_token").policy_loss(logp, case.logp_old, case.adv, case.mask,
                                             sequence_weights(case.mask), 3e-4, 4e-4)
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)


# --- what every loss owes ------------------------------------------------------------------------


class VariantLoss(LossProperties):
    """The properties of the four's losses, and: at ratio 1 every token pulls with its advantage."""

    name, factor, spread, per_token = None, 1.0, 0.3, False

    @pytest.fixture(autouse=True)
    def _module(self, load):
        self.module = load(self.name)

    def settings(self, b):
        return {}

    def call(self, b):
        return self.module.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights,
                                       **self.settings(b))

    def test_first_update_is_the_policy_gradient(self, rng):
        b = self.draw(rng)
        b.old_logp, b.ref_logp = b.logp, b.logp
        advantages = b.advantages if self.per_token else b.advantages[:, None]
        check(self.run(b)[1], -self.factor * b.weights * advantages, {
            "the wrong sign": self.factor * b.weights * advantages})


class Test_dr_grpo(VariantLoss):
    name, factor, weigh = "dr_grpo", 0.25, staticmethod(token_mean_weights)

    def settings(self, b):
        return dict(scale=0.25)


class Test_rloo(VariantLoss):
    name, factor, weigh = "rloo", 3.0, staticmethod(token_mean_weights)

    def settings(self, b):
        return dict(scale=3.0)


class Test_gpg(VariantLoss):
    name, weigh = "gpg", staticmethod(token_mean_weights)


class Test_cispo(VariantLoss):
    name, weigh = "cispo", staticmethod(token_mean_weights)

    def test_no_token_loses_its_gradient(self, rng):
        """Beyond the limit a weight stops growing, and is not 0 as PPO's."""
        b = self.draw(rng)
        b.old_logp = b.logp - 3 * torch.sign(normal(rng, *b.logp.shape))
        right = -b.weights * b.advantages[:, None] * (b.logp - b.old_logp).exp().clamp(max=5)
        check(self.run(b)[1], right)


class Test_gmpo(VariantLoss):
    name = "gmpo"

    def test_clip_by_hand(self):
        """Log-ratios 1 and -1 with A = 1: the first is held at 0.4, the second not at all; with
        A = -1 the other way round. exp(-0.3) and -(-exp(0.3))."""
        logp = torch.tensor([[1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
        A, mask = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones(2, 2).double()
        loss, stats = self.module.policy_loss(logp, 0 * logp, A, mask, mask / 4)
        check(loss, (-math.exp(-0.3) + math.exp(0.3)) / 2)
        check(stats["clip_frac"], 0.5)


class Test_sapo(VariantLoss):
    name = "sapo"


class Test_dual_clip(VariantLoss):
    name, weigh = "dual_clip", staticmethod(token_mean_weights)

    def test_bound_by_hand(self):
        """A = -1 at ratio 5: loss 3 and no gradient; at ratio 2: loss 2 with its slope."""
        logp = torch.tensor([[5.0, 2.0]], dtype=torch.float64).log().requires_grad_()
        mask = torch.ones(1, 2).double()
        loss, stats = self.module.policy_loss(logp, 0 * logp.detach(), -mask[0, :1], mask, mask)
        check(loss, 5)
        check(torch.autograd.grad(loss, logp)[0], [[0, 2]])
        check(stats["clip_frac"], 1)


class Test_kl_cov(VariantLoss):
    name, weigh = "kl_cov", staticmethod(token_mean_weights)

    def draw(self, rng):
        b = super().draw(rng)
        return b.but(marked=(normal(rng, *b.mask.shape) > 0).to(b.logp))

    def settings(self, b):
        return dict(marked=b.marked)

    def test_marks_the_largest_covariance(self, rng):
        b = self.draw(rng)
        A, p = b.advantages.tolist(), b.logp.tolist()
        all_cells, count = cells(b.mask), int(b.mask.sum())
        mean_A = sum(A[i] for i, _ in all_cells) / count
        mean_p = sum(p[i][t] for i, t in all_cells) / count
        order = sorted(all_cells, key=lambda c: -(A[c[0]] - mean_A) * (p[c[0]][c[1]] - mean_p))
        for share in (1e-9, 0.2, 1.0):
            right = torch.zeros_like(b.mask)
            for i, t in order[: max(1, int(share * count))]:
                right[i, t] = 1
            dirty = b.with_garbage(math.nan)
            marked = self.module.high_covariance(dirty.logp, b.advantages, b.mask, share)
            check(marked.double(), right)


class Test_gspo_token(VariantLoss):
    name, per_token, spread = "gspo_token", True, 1e-3

    def test_each_token_has_its_own_gradient(self, rng):
        """-weight x A_it x s_i, or 0 where that token's branch is clipped. The sequence form would
        give every token of an answer the mean of these."""
        b = self.draw(rng)
        right = torch.zeros_like(b.logp)
        for i, t in cells(b.mask):
            A, s = float(b.advantages[i, t]), mean_ratio(b, i, t)
            if not is_clipped(3e-4, 4e-4)(A, s):
                right[i, t] = -b.weights[i, t] * A * s
        loss, gradient, _ = self.run(b)
        check(loss, weighted(b, clipped_loss(3e-4, 4e-4), mean_ratio))
        check(gradient, right)
        assert (right == 0).any() and len(set(right[b.mask.bool()].tolist())) > 8


class Test_olmo3(VariantLoss):
    name, weigh = "olmo3", staticmethod(token_mean_weights)

    def draw(self, rng):
        b = super().draw(rng)
        return b.but(gen_logp=b.old_logp - normal(rng, *b.mask.shape))

    def settings(self, b):
        return dict(gen_logp=b.gen_logp)

    def test_first_update_is_the_policy_gradient(self, rng):
        """Times the truncated weight of the trainer over the sampler."""
        b = self.draw(rng)
        b.old_logp = b.logp
        trust = (b.old_logp - b.gen_logp).exp().clamp(max=2.0)
        check(self.run(b)[1], -b.weights * trust * b.advantages[:, None])

    def test_unknown_samplers_count_as_they_are(self, rng):
        b = self.draw(rng)
        plain, _ = self.module.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)
        check(plain, weighted(b, clipped_loss(0.2, 0.272), token_ratio))
        check(self.call(b.but(gen_logp=b.gen_logp * math.nan))[0], plain)


class Test_deepseek_v32(VariantLoss):
    name, spread = "deepseek_v32", 1.0

    def settings(self, b):
        return dict(ref_logp=b.ref_logp, beta=0.5, off_policy=0.2)

    def test_value_against_a_loop(self, rng):
        """Masked answers keep their KL, and the KL has the ratio before it."""
        b = self.draw(rng)
        total, masked = 0.0, 0
        for i in range(len(b.mask)):
            row = [c for c in cells(b.mask) if c[0] == i]
            A = float(b.advantages[i])
            gap = -sum(math.log(token_ratio(b, *c)) for c in row) / len(row)
            keep = not (A < 0 and gap > 0.2)
            masked += not keep
            for c in row:
                r, d = token_ratio(b, *c), float(b.ref_logp[c] - b.logp[c])
                policy = keep * max(-A * r, -A * clip(r, 0.8, 1.2))
                total += float(b.weights[c]) * (policy + 0.5 * r * k3(d))
        assert masked, "no answer is masked here"
        check(self.run(b)[0], total)

    def test_kl_is_unbiased_in_its_gradient(self, rng):
        """Over all answers of a toy model, sampled from the *old* policy, the KL term's gradient
        is the gradient of KL(pi || ref): k3 alone has that of the forward KL."""
        logits, old, ref = (normal(rng, 1, 4) for _ in range(3))
        logits.requires_grad_()
        logp = logits.log_softmax(-1).T  # four answers of one token
        old_logp, ref_logp = old.log_softmax(-1).T, ref.log_softmax(-1).T
        chance, mask = old_logp.exp(), torch.ones(4, 1).double()
        loss, _ = self.module.policy_loss(logp, old_logp, torch.zeros(4).double(), mask, chance,
                                          ref_logp=ref_logp, beta=1.0)
        true = (logp.exp() * (logp - ref_logp)).sum()
        check(loss, true)
        check(torch.autograd.grad(loss, logits, retain_graph=True)[0],
              torch.autograd.grad(true, logits)[0])


# --- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("right", range(7))
def test_passk_by_drawing_every_k(load, k, right):
    """Every k of 6 answers is a draw, its reward that of the best; an answer's advantage is the
    mean over its draws of (reward - mean) / std."""
    rewards = torch.tensor([1.0] * right + [0.0] * (6 - right), dtype=torch.float64)
    draws = list(itertools.combinations(range(6), k))
    best = [max(rewards[list(draw)].tolist()) for draw in draws]
    mean = sum(best) / len(best)
    std = math.sqrt(sum((x - mean) ** 2 for x in best) / len(best))
    expected = [0.0] * 6
    if std > 0:
        for i in range(6):
            mine = [x for x, draw in zip(best, draws) if i in draw]
            expected[i] = (sum(mine) / len(mine) - mean) / std
    check(load("passk").group_advantages(rewards, 6, k), expected)


def test_passk_refuses_more_than_the_group(load):
    config = load("passk").Config
    with pytest.raises(ValueError, match="--k 9"):
        config(k=9, group_size=8).check()


def test_gdpo_normalises_each_reward_alone(load, rng):
    rewards, weights = normal(rng, 2, 12), torch.tensor([1.0, 0.5], dtype=torch.float64)
    rewards[1] *= 100  # its spread does not matter
    total = [0.0] * 12
    for k in range(2):
        for g in range(0, 12, 4):
            group = rewards[k, g : g + 4].tolist()
            mean = sum(group) / 4
            std = math.sqrt(sum((x - mean) ** 2 for x in group) / 3)
            for j, x in enumerate(group):
                total[g + j] += float(weights[k]) * (x - mean) / (std + 1e-6)
    mean = sum(total) / 12
    std = math.sqrt(sum((x - mean) ** 2 for x in total) / 11)
    check(load("gdpo").decoupled_advantages(rewards, weights, 4),
          [(x - mean) / (std + 1e-6) for x in total])


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "gpg", "maxk", "passk", "olmo3",
                                  "deepseek_v32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_groups_teach_exactly_nothing(load, name, dtype):
    """Eight times 0.1 in float32, where the mean is not 0.1."""
    rewards = torch.full((16,), 0.1, dtype=dtype)
    more = {"opo": [torch.arange(1, 17)], "passk": [4]}.get(name, [])
    advantages = load(name).group_advantages(rewards, 8, *more)
    assert not advantages.any() and advantages.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_are_refused(load, name):
    """One answer has no other to be compared with. REINFORCE++ compares with the step's."""
    if name == "reinforce_pp":
        return
    more = {"opo": [torch.ones(4)], "passk": [1],
            "reinforce_pp_baseline": [torch.ones(4, 3)]}.get(name, [])
    for size in (1, 3):
        with pytest.raises(ValueError):
            load(name).group_advantages(torch.zeros(4), size, *more)


def test_rloo_has_the_exact_policy_gradient(load, rng):
    """Averaged over every pair of answers the model could give, RLOO's gradient is that of the
    expected reward, to the last digit: no factor (G - 1) / G, no 1/|o|."""
    module = load("rloo")
    logits = normal(rng, 2, 3).requires_grad_()
    logp, mask = toy_answers(logits)
    rewards = normal(rng, len(mask))
    chance = (logp * mask).sum(1).exp().detach()
    total = 0.0
    for pair in itertools.product(range(len(mask)), repeat=2):
        rows = list(pair)
        weights = module.token_weights(mask[rows])
        loss, _ = module.policy_loss(
            logp[rows], logp[rows].detach(), module.group_advantages(rewards[rows], 2),
            mask[rows], weights, scale=float(mask[rows].sum() / 2))
        total = total + chance[rows].prod() * loss
    check(torch.autograd.grad(total, logits)[0], -toy_gradient(logits, rewards))


def test_k2_has_the_gradient_of_the_kl(load, rng):
    """Averaged over the policy's own samples: the gradient of KL(pi || ref) with respect to the
    logits is sum_a pi_a d_a grad log pi_a, and that of k2 is the same. Its value is not the KL."""
    logits, logq = normal(rng, 5).requires_grad_(), normal(rng, 5).log_softmax(0)
    logp = logits.log_softmax(0)
    true = (logp.exp() * (logp - logq)).sum()
    k2 = (logp.detach().exp() * load("reinforce_pp_baseline").kl_k2(logp, logq)).sum()
    check(torch.autograd.grad(k2, logits, retain_graph=True)[0],
          torch.autograd.grad(true, logits)[0])


@pytest.mark.parametrize("name", NAMES)
def test_weights_sum_to_one(load, name):
    """Whatever the rule, a step's statistics are means."""
    mask = mask_of([1, 4, 2, 6], 6)
    check(load(name).token_weights(mask).sum(), 1)


# --- training them all ---------------------------------------------------------------------------


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """`train_one` on a stand-in for a script, whose run leaves what a real one does."""
    calls = []

    def run(command, **_):
        calls.append(command[4:])
        folder, steps = Path(command[3]), int(command[5])
        for name in ("final", f"checkpoints/step-{steps}"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        rows = "".join(f"{i},0.{i},0.5,0.1,0.01,2\n" for i in range(1, steps + 1))
        columns = "step,eval_sampled,eval_accuracy,entropy,clip_frac,t_total\n"
        (folder / "metrics.csv").write_text(columns + "0,0.0,0.5,,,\n" + rows)
        return SimpleNamespace(returncode=0)
    monkeypatch.setattr(variants.subprocess, "run", run)
    return SimpleNamespace(calls=calls, out=tmp_path)


def test_training_goes_on_where_it_stopped(runner):
    """Complete runs are not repeated, cut ones resume, those without a checkpoint begin again."""
    def train(steps):
        runner.calls.clear()
        variants.train_one(Path("cispo.py"), runner.out / "cispo-7", 7, steps)
        return runner.calls
    (runner.out / "cispo-7").mkdir()  # killed before its first checkpoint
    (runner.out / "cispo-7" / "stale").write_text("")
    assert train(2) == [["--steps", "2", "--seed", "7"]]
    assert not (runner.out / "cispo-7" / "stale").exists()
    assert train(2) == []
    assert train(3) == [["--steps", "3", "--resume"]]


def test_table_and_picture(runner, capsys):
    """Means over seeds of the last evaluation, of entropy, clip and seconds; a panel a variant."""
    variants.main(["all", "--train", "--only", "gpg", "opo", "--seeds", "0", "1", "--steps", "3",
                   "--out", str(runner.out)])
    text = (runner.out / "variants.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| grpo", "| gspo", "| gpg", "| opo"]
    assert rows[2][1:] == ["0.300 (0.300 to 0.300)", "0.500", "0.100", "0.0100", "6 |"]
    assert "one small task" in text and "not which is better" in text
    assert (runner.out / "variants.png").stat().st_size > 1000


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the tiny model is made, once."""
    return tmp_path_factory.mktemp("cache")


def one_right(self, batch):
    """Every third group all wrong, in the others one answer is right."""
    n = torch.arange(len(batch.texts))
    right = ((n % G == 0) & (n // G % 3 != 0)).float()
    return right.clone(), right


@pytest.fixture
def sandbox(tmp_path, cache, monkeypatch):
    """Made-up answers and verdicts, so that a random model will do; a folder of the test's own."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(common.Sampler, "generate", generate)
    monkeypatch.setattr(experiment.Scorer, "__call__", one_right)
    monkeypatch.setattr(experiment, "evaluate", lambda *_: {})
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def train(module, folder, steps, resume=False, more=""):
    """The patched script's own loop, in `folder`. Returns its settings."""
    argv = [*more.split(), "--steps", str(steps), "--out_dir", str(folder)]
    if resume:
        argv += ["--resume"]
    else:
        argv += (f"--cold_start 0 --prompts_per_step 6 --group_size {G} --minibatches 2 --lr 1e-3 "
                 f"--max_new_tokens {LIMIT} --micro_tokens 300 --eval_size 4 --keep 9").split()
        argv += ["--overlong_buffer", "4"] * hasattr(module, "soft_overlong_penalty")
        argv += ["--k", "2"] * ("k" in vars(module.Config))  # of 4 wherever 1 is right: no contrast
    cfg = experiment.parse_args(module.Config, module.TINY, argv)
    module.train(cfg)
    return cfg


def record(monkeypatch, module, name):
    """The positional arguments of every call of a function, from now on."""
    calls, function = [], getattr(module, name)

    def noted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)
    monkeypatch.setattr(module, name, noted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name, scale", [("dr_grpo", 1 / 12 / LIMIT), ("rloo", 1 / 12)])
def test_loop_scales_the_mean_over_tokens(load, sandbox, monkeypatch, name, scale):
    """Minibatches of 12 answers: a token counts 1/N 1/C in Dr. GRPO, 1/N in RLOO."""
    calls = record(monkeypatch, load(name), "policy_loss")
    train(load(name), sandbox / "run", 1, more="--minibatches 2")
    assert len(calls) >= 2
    for _, _, _, mask, weights, *_, factor in calls:
        check(weights * factor, mask * scale, atol=1e-7)


@pytest.mark.slow
def test_loop_gives_opo_the_lengths(load, sandbox, monkeypatch):
    (batches, calls) = (record(monkeypatch, common, "cut"),
                        record(monkeypatch, load("opo"), "group_advantages"))
    train(load("opo"), sandbox / "run", 1)
    check(calls[0][2], batches[0][0].mask.sum(1))


@pytest.mark.slow
def test_loop_marks_tokens_of_the_whole_rollout(load, sandbox, monkeypatch):
    """The share is of all tokens, not of each micro-batch's, and marks reach the loss."""
    calls = record(monkeypatch, load("kl_cov"), "policy_loss")
    train(load("kl_cov"), sandbox / "run", 1, more="--kl_cov 0.1")
    tokens = sum(int(mask.sum()) for _, _, _, mask, *_ in calls)
    marked = sum(int(marks.sum()) for _, _, _, _, _, marks, _ in calls)
    assert marked == int(0.1 * tokens) and len(calls) > 2


@pytest.mark.slow
def test_loop_scores_each_reward_by_itself(load, sandbox, monkeypatch):
    (batches, calls) = (record(monkeypatch, common, "cut"),
                        record(monkeypatch, load("gdpo"), "decoupled_advantages"))

    def by_name(self, batch):
        rewards, right = one_right(self, batch)
        return rewards + 10 * ("marker_format" in self.weights), right
    monkeypatch.setattr(experiment.Scorer, "__call__", by_name)
    train(load("gdpo"), sandbox / "run", 1, more="--reward correct+0.5*marker_format")
    rewards, weights, _ = calls[0]
    check(weights, [1, 0.5])
    check(rewards[1], rewards[0] + 10)
    check(batches[0][0].rewards, rewards[0] + 0.5 * rewards[1])


@pytest.mark.slow
def test_loop_hands_over_the_samplers_log_probs(load, sandbox, monkeypatch):
    """All rows are asked for, and a micro-batch gets those of its own rows."""
    asked = []

    def known(self, *args, **kwargs):
        asked.append(kwargs.get("record", 0))
        tokens, _ = generate(self, *args, **kwargs)
        return tokens, -tokens.float() / 50
    monkeypatch.setattr(common.Sampler, "generate", known)
    monkeypatch.setattr(experiment, "check_law", lambda sampler: None)  # it would notice
    batches, calls = (record(monkeypatch, common, "cut"),
                      record(monkeypatch, load("olmo3"), "policy_loss"))
    train(load("olmo3"), sandbox / "run", 1)
    assert 6 * G in asked
    known_rows = {tuple(row[:n].tolist()) for row, n in
                  zip(batches[0][0].sampler_logp, batches[0][0].mask.sum(1).tolist())}
    for _, _, _, mask, _, _, _, gen_logp, cap in calls:
        assert cap == 2.0
        for row, n in zip(gen_logp, mask.sum(1).tolist()):
            assert tuple(row[:n].tolist()) in known_rows


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_and_a_resume(load, sandbox, name):
    """It trains as it is, its losses are finite, and one step and another are two, bit for bit."""
    module = load(name)
    train(module, sandbox / "whole", 2)
    train(module, sandbox / "halves", 1)
    train(module, sandbox / "halves", 2, resume=True)
    whole, halves = (load_file(sandbox / f / "final" / "model.safetensors")
                     for f in ("whole", "halves"))
    assert all(torch.equal(x, halves[key]) for key, x in whole.items())
    rows = variants.metrics(sandbox / "whole")
    trained = [row for row in rows if row["pg_loss"]]
    assert len(trained) == 2 and all(math.isfinite(float(row["grad_norm"])) for row in trained)
    assert all(float(row["grad_norm"]) > 0 for row in trained), "nothing was learned"
