"""Tests: what the files share: a comparison that names mistakes, small ragged batches, slow and
obvious versions of the formulas, and the properties that several scripts owe alike.

The oracles are plain Python loops over floats. They share no code with the scripts on purpose.
"""

import itertools
import json
import math
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30]


# --- comparing -----------------------------------------------------------------------------------

def as_array(x):
    return x.detach().double().numpy() if torch.is_tensor(x) else np.asarray(x, dtype=float)


def check(actual, expected, mistakes={}, atol=1e-9):
    """Assert that `actual` is `expected`. If it is not, say where, and whether it is exactly
    what a well-known mistake would give: `mistakes` maps the mistake's name to its value."""
    __tracebackhide__ = True
    actual, expected = as_array(actual), as_array(expected)
    if actual.shape != expected.shape:
        pytest.fail(f"shape {actual.shape}, expected {expected.shape}")

    def same(value, rtol=1e-9):
        value = np.broadcast_to(as_array(value), actual.shape)
        return np.allclose(actual, value, rtol=rtol, atol=atol)

    if same(expected):
        return
    error = np.abs(actual - expected)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    message = f"got {actual[worst]:.6g}, expected {expected[worst]:.6g}"
    if actual.ndim:
        message += f" at index {tuple(map(int, worst))}"
    names = [name for name, value in mistakes.items() if same(value, rtol=1e-6)]
    pytest.fail(message + (";\nlooks like " + ",\nor ".join(names) if names else ""))


@lru_cache
def peer_file():
    return json.loads(Path(__file__).with_name("peer_values.json").read_text())


def peer(case_id):
    """A case of peer_values.json: inputs as float64 tensors, expected values, tolerances."""
    case = next(case for case in peer_file()["cases"] if case["id"] == case_id)
    inputs = {name: peer_file()["arrays"][x[1:]] if isinstance(x, str) else x
              for name, x in case["inputs"].items()}
    tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in inputs.items()
               if not isinstance(x[0], str)}
    return SimpleNamespace(**tensors, expected=SimpleNamespace(**case["expected"]),
                           atol=case["atol"], atol_metrics=case["atol_metrics"])


# --- ragged batches ------------------------------------------------------------------------------

class Batch(SimpleNamespace):
    """Tensors of N answers by name; `mask`, `weights` and most others are (N, T)."""

    def but(self, **changed):
        return Batch(**{**vars(self), **changed})

    def each(self, change):
        return Batch(**{name: change(name, x) for name, x in vars(self).items()})

    def rows(self, index):
        return self.each(lambda name, x: x[index])

    def to(self, dtype):
        return self.each(lambda name, x: x.to(dtype))

    def padded(self, columns):
        return self.each(lambda name, x: F.pad(x, (0, columns)) if x.dim() == 2 else x)

    def trimmed(self):
        width = int(self.mask.sum(1).max())
        return self.each(lambda name, x: x[:, :width] if x.dim() == 2 else x)

    def with_garbage(self, value):
        """`value` in every cell that is not a response token."""
        def fill(name, x):
            if x.dim() == 1 or name in ("mask", "weights"):
                return x
            return x.masked_fill(self.mask == 0, value)
        return self.each(fill)


def normal(rng, *shape, scale=1.0):
    """Gaussian numbers on a grid of 2**-14: exact in float32 too, and, as the clip limits are
    off the grid, never so near to one that rounding decides on which side they fall."""
    return torch.tensor(np.round(rng.normal(size=shape) * scale * 2**14) / 2**14)


def mask_of(lengths, width):
    return torch.tensor([[float(t < n) for t in range(width)] for n in lengths]).double()


def cells(mask):
    """(row, column) of every response token."""
    return [(i, t) for i, row in enumerate(mask.tolist()) for t, m in enumerate(row) if m]


def sequence_weights(mask, total=None):
    """GRPO and GSPO: every answer counts the same, 1/N, shared by its tokens."""
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in cells(mask):
        weights[i, t] = 1 / (total or len(mask)) / float(mask[i].sum())
    return weights


def token_mean_weights(mask, total=None):
    """DAPO and PPO: every token counts the same."""
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in cells(mask):
        weights[i, t] = 1 / (total or len(cells(mask)))
    return weights


def ragged_batch(rng, weigh, spread=0.3, per_token=False, rows=8, width=6):
    """Answers of random lengths, one of a single token and one that fills the width. `spread`
    is the size of log pi - log pi_old; `per_token`: an advantage for each token, as in PPO."""
    lengths = rng.permutation([1, width, *rng.integers(1, width + 1, size=rows - 2)])
    mask = mask_of(lengths, width)
    logp = -normal(rng, rows, width).abs()
    return Batch(mask=mask, weights=weigh(mask), logp=logp,
                 old_logp=logp - normal(rng, rows, width, scale=spread),
                 ref_logp=logp - normal(rng, rows, width, scale=0.3),
                 advantages=normal(rng, *((rows, width) if per_token else (rows,))))


# --- the clipped objective, term by term ---------------------------------------------------------

def clip(x, low, high):
    return min(max(x, low), high)


def clipped_loss(low, high):
    return lambda A, r: max(-A * r, -A * clip(r, 1 - low, 1 + high))


def is_clipped(low, high):
    return lambda A, r: float((A > 0 and r > 1 + high) or (A < 0 and r < 1 - low))


def token_ratio(b, i, t):
    return math.exp(b.logp[i, t] - b.old_logp[i, t])


def product_ratio(b, i, t):
    return math.exp(sum(b.logp[j, u] - b.old_logp[j, u] for j, u in cells(b.mask) if j == i))


def mean_ratio(b, i, t):
    return product_ratio(b, i, t) ** (1 / float(b.mask[i].sum()))


def advantage(b, i, t):
    return float(b.advantages[i] if b.advantages.dim() == 1 else b.advantages[i, t])


def weighted(b, term, ratio, weights=None):
    """Sum over the response tokens of weight x term(advantage, ratio)."""
    weights = b.weights if weights is None else weights
    return sum(float(weights[i, t]) * term(advantage(b, i, t), ratio(b, i, t))
               for i, t in cells(b.mask))


def k3(log_ratio):
    """k3 of KL(p||q) for one sample of p, with log_ratio = log q - log p."""
    return math.exp(log_ratio) - 1 - log_ratio


def surrogate_mistakes(b, low, high, ratio):
    """Values of the clipped objective with a classic fault each."""
    padded = torch.full(b.mask.shape, 1 / b.mask.numel())
    right = clipped_loss(low, high)
    return {
        "the wrong sign (it makes good answers rarer)": -weighted(b, right, ratio),
        "min where a loss needs max (the optimistic bound)": weighted(
            b, lambda A, r: min(-A * r, -A * clip(r, 1 - low, 1 + high)), ratio),
        "the two clip limits swapped": weighted(b, clipped_loss(high, low), ratio),
        "clip limits of 0.2 on both sides": weighted(b, clipped_loss(0.2, 0.2), ratio),
        "no clipping at all": weighted(b, lambda A, r: -A * r, ratio),
        "the clipped term alone, without the max": weighted(
            b, lambda A, r: -A * clip(r, 1 - low, 1 + high), ratio),
        "the ratio upside down (old over new)": weighted(
            b, right, lambda *cell: 1 / ratio(*cell)),
        "the quotient of log-probs instead of the exponential of their difference": weighted(
            b, right, lambda b, i, t: float(b.logp[i, t] / b.old_logp[i, t])),
        "a mean over tokens where every answer should count the same": weighted(
            b, right, ratio, token_mean_weights(b.mask)),
        "a mean over answers where every token should count the same": weighted(
            b, right, ratio, sequence_weights(b.mask)),
        "a plain mean over the padded width": weighted(b, right, ratio, padded),
        "the weights forgotten (a plain sum)": weighted(b, right, ratio, b.mask),
    }


# --- an answer space small enough to write down --------------------------------------------------

def toy_answers(logits):
    """Every answer of a model that is a table of logits (T, V); token 0 stops.

    Returns log-probs (K, T), which carry gradients to `logits`, and the mask (K, T)."""
    width, vocabulary = logits.shape
    answers = [(*body, 0) for n in range(width)
               for body in itertools.product(range(1, vocabulary), repeat=n)]
    answers += list(itertools.product(range(1, vocabulary), repeat=width))     # truncated
    mask = mask_of(map(len, answers), width)
    tokens = torch.tensor([answer + (0,) * (width - len(answer)) for answer in answers])
    return logits.log_softmax(-1)[torch.arange(width), tokens], mask


def toy_gradient(logits, rewards):
    """The expected reward's true gradient with respect to the logits."""
    logp, mask = toy_answers(logits)
    expected_reward = ((logp * mask).sum(1).exp() * rewards).sum()
    return torch.autograd.grad(expected_reward, logits)[0]


# --- properties of every loss --------------------------------------------------------------------

class LossProperties:
    """A loss is a weighted sum over response tokens, so how the batch is laid out is nothing to
    it. Subclasses say which loss (`call`) and which tensor it trains (`trained`)."""

    trained = "logp"
    weigh = staticmethod(sequence_weights)
    spread, per_token = 0.3, False

    def call(self, b):
        raise NotImplementedError

    def draw(self, rng):
        return ragged_batch(rng, self.weigh, self.spread, self.per_token)

    def run(self, b):
        """Loss, gradient and stats in float64."""
        x = getattr(b, self.trained).clone().requires_grad_()
        loss, stats = self.call(b.but(**{self.trained: x}))
        gradient, = torch.autograd.grad(loss, x)
        return as_array(loss), as_array(gradient), {k: float(v) for k, v in stats.items()}

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_garbage_under_the_mask_changes_nothing(self, rng, garbage):
        """0 x NaN is NaN, and so is its gradient: mask before exp, not after."""
        b = self.draw(rng)
        loss, gradient, stats = self.run(b)
        dirty_loss, dirty_gradient, dirty_stats = self.run(b.with_garbage(garbage))
        check(dirty_loss, loss)
        check(dirty_gradient, gradient)
        assert dirty_stats == pytest.approx(stats, abs=1e-9)
        assert (dirty_gradient[b.mask.numpy() == 0] == 0).all(), "padding gets a gradient"

    def test_padding_width_changes_nothing(self, rng):
        b = self.draw(rng)
        loss, gradient, stats = self.run(b)
        wide_loss, wide_gradient, wide_stats = self.run(b.padded(3))
        check(wide_loss, loss)
        check(wide_gradient[:, :-3], gradient)
        assert wide_stats == pytest.approx(stats, abs=1e-9)

    def test_order_of_rows_changes_nothing(self, rng):
        b = self.draw(rng)
        order = rng.permutation(len(b.mask))
        loss, gradient, _ = self.run(b)
        shuffled_loss, shuffled_gradient, _ = self.run(b.rows(order))
        check(shuffled_loss, loss)
        check(shuffled_gradient, gradient[order])

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
    def test_any_cut_into_micro_batches_gives_the_same(self, rng, dtype, tolerance):
        """The weights belong to the whole step, so losses, gradients and stats add up."""
        b = self.draw(rng).to(dtype)
        loss, gradient, stats = self.run(b)
        for _ in range(20):
            pieces = np.split(rng.permutation(len(b.mask)),
                              np.sort(rng.integers(1, len(b.mask), size=rng.integers(1, 5))))
            runs = [(rows, self.run(b.rows(rows).trimmed())) for rows in pieces if len(rows)]
            check(sum(piece_loss for _, (piece_loss, _, _) in runs), loss, atol=tolerance)
            for rows, (_, piece_gradient, _) in runs:
                width = piece_gradient.shape[1]
                check(piece_gradient, gradient[rows, :width], atol=tolerance)
            for name, value in stats.items():
                total = sum(piece[name] for _, (_, _, piece) in runs)
                assert total == pytest.approx(value, abs=tolerance), f"stats[{name!r}]"

    def test_weights_are_summed_not_averaged(self, rng):
        """Weights that sum to 1/4, as in a quarter of a step: a quarter of the loss."""
        b = self.draw(rng)
        loss, gradient, _ = self.run(b)
        quarter, quarter_gradient, _ = self.run(b.but(weights=b.weights / 4))
        check(quarter, loss / 4, {
            "the mean of micro-batch means: the weights are normalised again": loss})
        check(quarter_gradient, gradient / 4)

    def test_answers_without_tokens_or_weight_count_nothing(self, rng):
        """Ranks with fewer micro-batches fill up with such rows."""
        b = self.draw(rng)
        b.mask[0] = b.weights[0] = 0
        b.weights[1] = 0
        loss, gradient, stats = self.run(b)
        rest_loss, rest_gradient, rest_stats = self.run(b.rows(slice(2, None)))
        check(loss, rest_loss)
        check(gradient, np.concatenate([np.zeros_like(gradient[:2]), rest_gradient]))
        assert stats == pytest.approx(rest_stats, abs=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_is_kept(self, rng, dtype):
        b = self.draw(rng).to(dtype)
        assert self.call(b)[0].dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
    def test_mask_may_be_of_any_dtype(self, rng, dtype):
        b = self.draw(rng)
        loss, gradient, _ = self.run(b)
        same_loss, same_gradient, _ = self.run(b.but(mask=b.mask.to(dtype)))
        check(same_loss, loss)
        check(same_gradient, gradient)

    def test_stats_are_numbers_without_a_graph(self, rng):
        """A stat that keeps its graph keeps every activation of the step alive."""
        b = self.draw(rng)
        x = getattr(b, self.trained).clone().requires_grad_()
        _, stats = self.call(b.but(**{self.trained: x}))
        assert not [name for name, x in stats.items() if torch.is_tensor(x) and x.requires_grad]


class PolicyLossProperties(LossProperties):
    """The clipped losses: subclasses add the limits and which ratio they clip."""

    low, high = 0.2, 0.2
    ratio = staticmethod(token_ratio)

    def test_value_against_a_loop(self, rng):
        b = self.draw(rng)
        check(self.run(b)[0], weighted(b, clipped_loss(self.low, self.high), self.ratio),
              surrogate_mistakes(b, self.low, self.high, self.ratio))

    def test_gradient_vanishes_exactly_where_the_clip_bites(self, rng):
        """dL/dlogp of one token is -weight * advantage * ratio, or 0 if clipped."""
        for b in (self.draw(rng) for _ in range(5)):
            expected = torch.zeros_like(b.logp)
            for i, t in cells(b.mask):
                A, r = advantage(b, i, t), self.ratio(b, i, t)
                if not is_clipped(self.low, self.high)(A, r):
                    expected[i, t] = -b.weights[i, t] * A * r
            check(self.run(b)[1], expected, {
                "the wrong sign": -expected,
                "a ratio that carries no gradient": torch.zeros_like(expected)})

    def test_clip_frac_is_the_weight_of_what_was_clipped(self, rng):
        """Only a limit that holds the advantage back counts, not every ratio out of range."""
        b = self.draw(rng)
        outside = weighted(b, lambda A, r: not 1 - self.low <= r <= 1 + self.high, self.ratio)
        check(self.run(b)[2]["clip_frac"], weighted(b, is_clipped(self.low, self.high),
                                                    self.ratio), {
            "every ratio out of range, also those the advantage pulls back": outside,
            "the share of tokens rather than of answers": weighted(
                b, is_clipped(self.low, self.high), self.ratio, token_mean_weights(b.mask)),
            "token ratios in place of one ratio per answer": weighted(
                b, is_clipped(self.low, self.high), token_ratio)})

    def test_approx_kl_is_k3_of_old_and_new(self, rng):
        b = self.draw(rng)

        def average(term):
            return weighted(b, lambda A, r: term(math.log(r)), token_ratio)
        check(self.run(b)[2]["approx_kl"], average(k3), {
            "k3 reversed, KL(new||old)": average(lambda x: k3(-x)),
            "k1, old minus new": average(lambda x: -x),
            "k1, new minus old": average(lambda x: x),
            "k2, half the square": average(lambda x: x * x / 2)}, atol=1e-12)

    def test_first_update_has_ratio_one_and_a_gradient(self, rng):
        """Before any update nothing is clipped, the loss is minus the weighted mean advantage
        (0 for advantages that cancel), and still every token has its gradient."""
        b = self.draw(rng)
        b.old_logp, b.ref_logp = b.logp, b.logp
        loss, gradient, stats = self.run(b)
        each = torch.tensor([[advantage(b, i, t) for t in range(b.mask.shape[1])]
                             for i in range(len(b.mask))])
        check(loss, -(b.weights * each).sum())
        check(gradient, -b.weights * each, {
            "a ratio that is a constant 1 without gradient": torch.zeros_like(b.logp)})
        assert stats["clip_frac"] == 0 and stats["approx_kl"] == 0

    @pytest.mark.parametrize("width, vocabulary", [(2, 2), (2, 3), (3, 2), (3, 3)])
    def test_expected_gradient_is_the_policy_gradient(self, rng, width, vocabulary):
        """REINFORCE, exactly: with raw rewards as advantages and every token weighted by its
        answer's probability (no 1/|o|), the loss has minus the gradient of E[reward]."""
        logits = normal(rng, width, vocabulary).requires_grad_()
        logp, mask = toy_answers(logits)
        rewards = normal(rng, len(mask))
        chance = (logp * mask).sum(1, keepdim=True).exp().detach()
        advantages = rewards[:, None] * mask if self.per_token else rewards
        loss, _ = self.call(Batch(logp=logp, old_logp=logp.detach(), ref_logp=logp.detach(),
                                  advantages=advantages, mask=mask, weights=mask * chance))
        true = -toy_gradient(logits, rewards)
        check(torch.autograd.grad(loss, logits)[0], true, {"the wrong sign": -true})


# --- properties of functions that scripts repeat -------------------------------------------------

class GroupAdvantages:
    """A sample is judged against the other answers to its own question."""

    module = None

    def call(self, rewards, *args, **kwargs):
        return self.module.group_advantages(torch.as_tensor(rewards), *args, **kwargs)

    def test_by_hand(self):
        """Rewards 1 0 0 0: mean 1/4, unbiased std 1/2. Rewards 2 4: mean 3, std sqrt(2)."""
        x = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
        check(self.call(x, 4, eps=0), [1.5, -0.5, -0.5, -0.5])
        x = torch.tensor([2.0, 4], dtype=torch.float64)
        check(self.call(x, 2, eps=0), [-math.sqrt(0.5), math.sqrt(0.5)])

    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    def test_against_numpy(self, rng, size):
        """A large eps shows where it enters."""
        r = rng.normal(size=(6, size))
        mean, std = r.mean(1, keepdims=True), r.std(1, ddof=1, keepdims=True)
        leave_one_out = (size * mean - r) / (size - 1)
        columns = r.reshape(size, 6)
        mistakes = {
            "the wrong sign": (mean - r) / (std + 0.1),
            "the standard deviation without Bessel's correction (divide by G - 1, not G)":
                (r - mean) / (r.std(1, keepdims=True) + 0.1),
            "eps inside the root": (r - mean) / np.sqrt(std**2 + 0.1),
            "eps forgotten": (r - mean) / std,
            "the variance in place of its root": (r - mean) / (std**2 + 0.1),
            "no division by the standard deviation (Dr. GRPO)": r - mean,
            "no baseline": r / (std + 0.1),
            "the batch's mean rather than the group's": (r - r.mean()) / (std + 0.1),
            "the batch's standard deviation rather than the group's":
                (r - mean) / (r.std(ddof=1) + 0.1),
            "mean and standard deviation of the batch rather than of the group":
                (r - r.mean()) / (r.std(ddof=1) + 0.1),
            "a baseline without the sample itself (RLOO)": (r - leave_one_out) / (std + 0.1),
            "groups made of every P-th row: rows of one prompt are consecutive":
                (columns - columns.mean(0)) / (columns.std(0, ddof=1) + 0.1),
        }
        check(self.call(r.reshape(-1), size, eps=0.1), ((r - mean) / (std + 0.1)).reshape(-1),
              {name: value.reshape(-1) for name, value in mistakes.items()})

    def test_groups_do_not_see_each_other(self):
        """Both answers right, both wrong: nothing to learn (the batch's mean would say +-0.87)."""
        assert self.call([1.0, 1, 0, 0], 2).tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize("reward", [0.1, 0.3, -0.7, 1 / 3, 1e-3, 1e4])
    def test_equal_rewards_give_exactly_zero(self, reward):
        """In float32 the mean of eight 0.1 is not 0.1, and rounding over eps is not small:
        -0.0074 with eps 1e-6, -0.41 with 1e-8."""
        for dtype in (torch.float32, torch.float64):
            advantages = self.call(torch.full((16,), reward, dtype=dtype), 8)
            assert (advantages == 0).all(), f"{advantages[0]:.2g}: rounding error over eps"

    def test_default_eps_is_1e_6(self):
        """Rewards 0 and 1e-6: std 0.7071e-6, so eps more than halves the advantage."""
        right = 0.5e-6 / (math.sqrt(0.5) * 1e-6 + 1e-6)
        x = torch.tensor([0, 1e-6], dtype=torch.float64)
        check(self.call(x, 2), [-right, right])

    def test_shift_and_scale_of_the_reward_change_nothing(self, rng):
        r = torch.tensor(rng.normal(size=12))
        check(self.call(3 * r + 5, 4, eps=0), self.call(r, 4, eps=0))

    def test_each_group_sums_to_zero(self, rng):
        total = self.call(torch.tensor(rng.normal(size=24)), 6).view(4, 6).sum(1)
        check(total, [0, 0, 0, 0], atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_and_shape_are_kept(self, rng, dtype):
        out = self.call(torch.tensor(rng.normal(size=12), dtype=dtype), 3)
        assert out.dtype == dtype and out.shape == (12,)

    @pytest.mark.parametrize("rows, size", [(4, 1), (4, 0), (4, -2), (4, 3), (2, 4)])
    def test_impossible_groups_are_refused(self, rows, size):
        """One answer has no other to be compared with: its std is NaN."""
        with pytest.raises(ValueError):
            self.call(torch.zeros(rows), size)

    def test_peers(self):
        case = peer("group_adv_std_verl")
        check(self.call(case.score, 4), case.expected.adv_seq, atol=case.atol)


class TokenWeights:
    """How much a token counts. The two rules differ in what counts the same: answers
    (`oracle = sequence_weights`) or tokens (`oracle = token_mean_weights`)."""

    module, oracle = None, None
    other = {sequence_weights: token_mean_weights, token_mean_weights: sequence_weights}

    def units(self, mask):
        """What `total` counts."""
        return len(mask) if self.oracle is sequence_weights else int(mask.sum())

    def test_against_a_loop(self, rng):
        mask = mask_of(rng.integers(1, 7, size=8), 6)
        padded = mask / 6 / (8 if self.oracle is sequence_weights else 1)
        check(self.module.token_weights(mask), self.oracle(mask), {
            "the other rule (answers count the same in GRPO and GSPO, tokens in DAPO and PPO)":
                self.other[self.oracle](mask),
            "a mean over the padded width": padded,
            "a mean over all cells, padding included": mask / mask.numel(),
            "weights that reach into the padding": torch.full((8, 6), 1 / 48)})

    def test_sum_is_one(self, rng):
        mask = mask_of(rng.integers(1, 7, size=8), 6)
        check(self.module.token_weights(mask).sum(), 1)

    def test_total_makes_parts_add_up(self, rng):
        """Losses 1 | 3 3 3 in two micro-batches: each part's own mean would be averaged to 2."""
        mask = mask_of(rng.integers(1, 7, size=8), 6)
        whole, total = self.oracle(mask), self.units(mask)
        for cut in range(1, 8):
            for rows in (slice(0, cut), slice(cut, 8)):
                check(self.module.token_weights(mask[rows], total), whole[rows], {
                    "`total` ignored: the part is normalised by itself": self.oracle(mask[rows])})

    def test_padding_width_changes_nothing(self, rng):
        mask = mask_of(rng.integers(1, 7, size=8), 6)
        check(self.module.token_weights(F.pad(mask, (0, 3)))[:, :6], self.oracle(mask))

    def test_empty_row_gets_zero(self):
        weights = self.module.token_weights(mask_of([2, 0, 1], 3), 3)
        check(weights, self.oracle(mask_of([2, 0, 1], 3), 3))
        assert not self.module.token_weights(torch.zeros(2, 3)).any(), "an empty batch"

    def test_one_token(self):
        assert self.module.token_weights(torch.ones(1, 1)).tolist() == [[1]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_is_kept(self, dtype):
        assert self.module.token_weights(torch.ones(2, 3, dtype=dtype)).dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
    def test_mask_may_be_of_any_dtype(self, dtype):
        mask = mask_of([2, 3, 1], 3)
        weights = self.module.token_weights(mask.to(dtype))
        check(weights, self.oracle(mask), atol=1e-6)
        assert weights.is_floating_point()
