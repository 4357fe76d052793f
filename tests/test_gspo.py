"""Tests: the functions of gspo.py. One: pytest tests/test_gspo.py -k policy_loss"""

import math

import pytest
import torch

import gspo
from oracles import (GroupAdvantages, PolicyLossProperties, TokenWeights, cells, check,
                     clipped_loss, mask_of, mean_ratio, peer, product_ratio,
                     ragged_batch, sequence_weights, token_mean_weights, token_ratio, weighted)


class Test_group_advantages(GroupAdvantages):
    module = gspo


class Test_token_weights(TokenWeights):
    module, oracle = gspo, staticmethod(sequence_weights)


def test_token_weights_by_hand():
    """Two answers count 1/2 each; the longer one shares its half among three tokens."""
    check(gspo.token_weights(mask_of([1, 3], 4)), [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]])


# --- policy_loss ---------------------------------------------------------------------------------

class Test_policy_loss(PolicyLossProperties):
    low, high = 3e-4, 4e-4
    ratio = staticmethod(mean_ratio)
    spread = 1e-3

    def call(self, b):
        return gspo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)


def other_ratios(b, low, high):
    """The objective with every ratio that is not GSPO's."""
    loss = clipped_loss(low, high)

    def arithmetic(b, i, t):
        row = [token_ratio(b, *cell) for cell in cells(b.mask) if cell[0] == i]
        return sum(row) / len(row)

    def over_width(b, i, t):
        return product_ratio(b, i, t) ** (1 / b.mask.shape[1])
    return {
        "the product of the token ratios: take its |o|-th root": weighted(b, loss, product_ratio),
        "a ratio per token (GRPO)": weighted(b, loss, token_ratio),
        "the arithmetic mean of the ratios: average the logs": weighted(b, loss, arithmetic),
        "a root by the padded width rather than |o|": weighted(b, loss, over_width),
        "a token average: every answer counts the same": weighted(
            b, loss, mean_ratio, token_mean_weights(b.mask)),
        "an answer counting once per token: sum of weights, not of ones": weighted(
            b, loss, mean_ratio, b.mask / len(b.mask)),
    }


def test_policy_loss_has_one_ratio_per_answer(rng):
    """Wide limits and a wide spread, so that every kind of ratio gives another value."""
    b = ragged_batch(rng, sequence_weights, spread=0.3)
    loss, _ = gspo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights, 0.1, 0.2)
    check(loss, weighted(b, clipped_loss(0.1, 0.2), mean_ratio), {
        **other_ratios(b, 0.1, 0.2),
        "clip_low and clip_high ignored": weighted(b, clipped_loss(3e-4, 4e-4), mean_ratio),
        "the two limits swapped": weighted(b, clipped_loss(0.2, 0.1), mean_ratio)})


def test_policy_loss_by_hand():
    """Ratios 2 and 1/2 cancel to 1; 4 alone is 4; both with advantage 1: -(1 + 1.2) / 2."""
    mask = mask_of([2, 1], 2)
    logp = torch.tensor([[2, 0.5], [4, 1]], dtype=torch.float64).log()
    one = torch.ones(2, dtype=torch.float64)
    loss, stats = gspo.policy_loss(logp, 0 * logp, one, mask, sequence_weights(mask), 0.2, 0.2)
    check(loss, -1.1, {"a ratio per token (GRPO)": -(1.2 + 0.5) / 4 - 0.6,
                       "no clipping at all": -2.5})
    check(stats["clip_frac"], 0.5, {"a clip fraction per token": 1 / 3})


@pytest.mark.parametrize("A, s, expected, clipped", [
    (+1, 1.0003, -1.0003, 0), (+1, 1.0005, -1.0004, 1), (+1, 0.9, -0.9, 0),
    (-1, 0.9998, 0.9998, 0), (-1, 0.99965, 0.9997, 1), (-1, 1.1, 1.1, 0)])
def test_policy_loss_of_one_answer(A, s, expected, clipped):
    """Limits 0.9997 and 1.0004: copying 0.2 from PPO would never clip anything."""
    mask = mask_of([3], 3)
    logp = torch.full((1, 3), math.log(s), dtype=torch.float64)
    loss, stats = gspo.policy_loss(logp, 0 * logp, A * mask[0, :1], mask, mask / 3)
    check(loss, expected)
    check(stats["clip_frac"], clipped)


def test_policy_loss_gradient_reaches_every_token(rng):
    """dL/dlogp = -A s / (N |o|) on each token of an answer that is not clipped."""
    b = ragged_batch(rng, sequence_weights, spread=0.3)
    logp = b.logp.clone().requires_grad_()
    loss, _ = gspo.policy_loss(logp, b.old_logp, b.advantages, b.mask, b.weights, 10, 10)
    right = torch.zeros_like(b.logp)
    for i, t in cells(b.mask):
        right[i, t] = -b.advantages[i] * mean_ratio(b, i, t) / len(b.mask) / b.mask[i].sum()
    check(torch.autograd.grad(loss, logp)[0], right, {
        "a gradient that forgets 1/|o|": right * b.mask.sum(1, keepdim=True),
        "a ratio that carries no gradient": 0 * right,
        "GRPO's gradient, each token by its own ratio": torch.tensor([[
            float(-b.weights[i, t] * b.advantages[i]) * token_ratio(b, i, t) * float(b.mask[i, t])
            for t in range(b.mask.shape[1])] for i in range(len(b.mask))])})


def test_policy_loss_equals_grpo_before_the_first_update(rng):
    """At ratio 1 both have the gradient -A / (N |o|), whatever the lengths; from the second
    update on they part."""
    for _ in range(10):
        b = ragged_batch(rng, sequence_weights)
        logp = b.logp.clone().requires_grad_()
        loss, _ = gspo.policy_loss(logp, b.logp, b.advantages, b.mask, b.weights)
        grpo = -b.advantages[:, None] * b.mask / b.mask.sum(1, keepdim=True) / len(b.mask)
        check(torch.autograd.grad(loss, logp)[0], grpo, {
            "a token average": -b.advantages[:, None] * b.mask / b.mask.sum()})


def test_policy_loss_lets_answers_of_any_length_cancel():
    """Lengths 1 and 3, advantages +1 and -1, ratio 1: 0 (weighted by length it is 0.5)."""
    mask = mask_of([1, 3], 3)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    loss, _ = gspo.policy_loss(zeros, zeros, torch.tensor([1.0, -1]).double(), mask,
                               sequence_weights(mask))
    check(loss, 0, {"answers weighted by their length": 0.5, "a sum over tokens": 1.0})


def test_policy_loss_of_a_long_answer_does_not_overflow():
    """4096 tokens that each moved by 0.05: the ratio is e**0.05, its 4096th power is not."""
    logp = torch.full((1, 4096), -1.0)
    mask = torch.ones(1, 4096)
    loss, _ = gspo.policy_loss(logp, logp - 0.05, -torch.ones(1), mask, mask / 4096)
    check(loss, math.exp(0.05), {"an overflow: average the logs before exp": math.inf}, atol=1e-5)


def test_policy_loss_peers():
    """verl counts its clip fraction in tokens, so only loss and gradient are compared."""
    case = peer("gspo_seqadv_3e-4_4e-4_verl")
    logp = case.logp_new.clone().requires_grad_()
    loss, _ = gspo.policy_loss(logp, case.logp_old, case.adv[:, 0], case.mask,
                               sequence_weights(case.mask))
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)
