"""Tests: the functions of dapo.py. One: pytest tests/test_dapo.py -k soft_overlong_penalty"""

import math

import numpy as np
import pytest
import torch

import dapo
from oracles import (GroupAdvantages, PolicyLossProperties, TokenWeights, check, clipped_loss,
                     mask_of, peer, ragged_batch, token_mean_weights, token_ratio, weighted)


class Test_group_advantages(GroupAdvantages):
    module = dapo


class Test_token_weights(TokenWeights):
    module, oracle = dapo, staticmethod(token_mean_weights)


def test_token_weights_by_hand():
    """Four tokens in all, so a quarter each, whoever wrote them."""
    check(dapo.token_weights(mask_of([1, 3], 4)), [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]])


def test_token_weights_over_micro_batches():
    """Token losses 1 | 3 3 3 have the mean 2.5."""
    losses = torch.tensor([[1.0, 0, 0], [3, 3, 3]])
    mask = mask_of([1, 3], 3)
    parts = [(dapo.token_weights(mask[i:i + 1], 4) * losses[i]).sum() for i in (0, 1)]
    check(sum(parts), 2.5, {"the mean of micro-batch means": 2.0, "`total` ignored": 4.0})


# --- policy_loss ---------------------------------------------------------------------------------

class Test_policy_loss(PolicyLossProperties):
    low, high = 0.2, 0.28
    weigh = staticmethod(token_mean_weights)

    def call(self, b):
        return dapo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)


@pytest.mark.parametrize("A, ratio, expected, slope", [
    (+1, 1.25, -1.25, -1.25), (+1, 1.3, -1.28, 0), (+1, 0.5, -0.5, -0.5),
    (-1, 0.75, 0.8, 0), (-1, 0.85, 0.85, 0.85), (-1, 1.5, 1.5, 1.5), (0, 1.5, 0, 0)])
def test_policy_loss_of_one_token(A, ratio, expected, slope):
    """Clip-higher: a rare good token may rise to 1.28, a bad one may fall to 0.8 only."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, stats = dapo.policy_loss(logp, 0 * one, A * one[0], one, one)
    check(loss, expected)
    check(torch.autograd.grad(loss, logp)[0], [[slope]])
    assert stats["clip_frac"] == (A != 0 and slope == 0)


def test_policy_loss_takes_its_limits_as_arguments(rng):
    b = ragged_batch(rng, token_mean_weights)
    loss, _ = dapo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights,
                               clip_low=0.1, clip_high=0.4)
    check(loss, weighted(b, clipped_loss(0.1, 0.4), token_ratio), {
        "clip_low and clip_high ignored": weighted(b, clipped_loss(0.2, 0.28), token_ratio),
        "the two limits swapped": weighted(b, clipped_loss(0.4, 0.1), token_ratio)})


def test_policy_loss_counts_tokens_not_answers():
    """Answers of 1 and 3 tokens, advantages +1 and -1, ratio 1: (-1 + 3) / 4, not 0."""
    mask = mask_of([1, 3], 3)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    loss, _ = dapo.policy_loss(zeros, zeros, torch.tensor([1.0, -1]).double(), mask, mask / 4)
    check(loss, 0.5, {"a mean over answers (GRPO)": 0})


def test_policy_loss_peers():
    case = peer("ppo_token-mean_seqadv_clip0.2-0.28_verl")
    logp = case.logp_new.clone().requires_grad_()
    loss, stats = dapo.policy_loss(logp, case.logp_old, case.adv[:, 0], case.mask,
                                   token_mean_weights(case.mask))
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)
    check(stats["clip_frac"], case.expected.clip_fraction, atol=case.atol_metrics)


# --- soft_overlong_penalty: equation 13, added to the reward -------------------------------------

def penalty(length, max_len, buffer_len):
    if length <= max_len - buffer_len:
        return 0.0
    if length <= max_len:
        return (max_len - buffer_len - length) / buffer_len
    return -1.0


@pytest.mark.parametrize("max_len, buffer_len", [(20, 8), (10, 1), (10, 10), (48, 16), (7, 3)])
def test_soft_overlong_penalty_at_every_length(max_len, buffer_len):
    """0 up to max_len - buffer_len, then a ramp that reaches -1 at max_len and stays there."""
    lengths = torch.arange(1, 2 * max_len + 3)
    n = lengths.numpy()
    ramp = (max_len - buffer_len - n) / buffer_len
    off_by_one = [np.clip((max_len - buffer_len + k - n) / buffer_len, -1, 0) for k in (1, -1)]
    check(dapo.soft_overlong_penalty(lengths, max_len, buffer_len),
          [penalty(length, max_len, buffer_len) for length in n], {
        "the ramp starting one token late": off_by_one[0],
        "the ramp starting one token early": off_by_one[1],
        "no floor: longer than max_len still costs -1": np.minimum(ramp, 0),
        "no ceiling: short answers get a bonus": np.maximum(ramp, -1),
        "a bonus in place of a penalty (wrong sign)": -np.clip(ramp, -1, 0),
        "a ramp that begins at max_len": np.clip((max_len - n) / buffer_len, -1, 0),
        "a step at max_len in place of a ramp": -1.0 * (n > max_len),
        "a ramp as long as max_len": np.clip((max_len - buffer_len - n) / max_len, -1, 0),
    }, atol=1e-6)


@pytest.mark.parametrize("length, expected", [(12, 0), (13, -1 / 8), (16, -1 / 2), (19, -7 / 8),
                                              (20, -1), (21, -1)])
def test_soft_overlong_penalty_by_hand(length, expected):
    """Limit 20, buffer 8: one token too many costs an eighth."""
    check(dapo.soft_overlong_penalty(torch.tensor([length]), 20, 8), [expected], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_soft_overlong_penalty_takes_any_number(dtype):
    out = dapo.soft_overlong_penalty(torch.tensor([1, 16, 99], dtype=dtype), 20, 8)
    assert out.is_floating_point() and out.tolist() == [0, -0.5, -1]


@pytest.mark.parametrize("max_len, buffer_len", [(20, 0), (20, -1), (20, 21)])
def test_soft_overlong_penalty_refuses_a_buffer_that_does_not_fit(max_len, buffer_len):
    with pytest.raises(ValueError):
        dapo.soft_overlong_penalty(torch.tensor([5]), max_len, buffer_len)


def test_soft_overlong_penalty_peers():
    case = peer("overlong_trl")
    check(dapo.soft_overlong_penalty(case.lengths, 20, 8), case.expected.penalty, atol=case.atol)


# --- keep_group: some right, some wrong ----------------------------------------------------------

@pytest.mark.parametrize("group, keep, why", [
    ([0, 0, 0, 0], False, "all wrong: no answer to imitate"),
    ([1, 1, 1, 1], False, "all right: no answer to avoid"),
    ([1, 0, 0, 0], True, "one right"),
    ([1, 1, 1, 0], True, "one wrong"),
    ([0, 0, 0, 1], True, "the order does not matter"),
    ([0, 1], True, "a group of two"),
    ([1, 1, 1], False, "three equal numbers, whose computed std need not be 0"),
])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_keep_group_of_one_kind(group, keep, why, dtype):
    out = dapo.keep_group(torch.tensor([group], dtype=dtype))
    assert out.dtype == torch.bool and out.shape == (1,)
    assert out.item() is keep, why


def test_keep_group_judges_each_group_alone(rng):
    """A column each of no, one, ... all right answers, shuffled."""
    correct = torch.tensor([[float(j < n) for j in range(8)] for n in range(9)])
    order = rng.permutation(9)
    expected = [0 < n < 8 for n in order]
    kept = dapo.keep_group(correct[order][:, rng.permutation(8)])
    check(kept, expected, {
        "the groups to drop, not those to keep": np.logical_not(expected),
        "all-right groups kept": order > 0, "all-wrong groups kept": order < 8,
        "a majority vote": order > 4})


def test_keep_group_peers():
    case = peer("dynamic_sampling_filter_acc_verl")
    kept = dapo.keep_group(case.correct.view(4, 4))
    assert [f"g{i}" for i in kept.nonzero()[:, 0].tolist()] == case.expected.kept_groups
