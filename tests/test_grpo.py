"""Tests: the functions of grpo.py. One: pytest tests/test_grpo.py -k kl_k3"""

import itertools
import math

import numpy as np
import pytest
import torch

import grpo
from oracles import (GroupAdvantages, LossProperties, PolicyLossProperties, TokenWeights, cells,
                     check, clipped_loss, k3, mask_of, normal, peer, product_ratio, ragged_batch,
                     sequence_weights, token_mean_weights, token_ratio, toy_answers, toy_gradient,
                     weighted)


class Test_group_advantages(GroupAdvantages):
    module = grpo


class Test_token_weights(TokenWeights):
    module, oracle = grpo, staticmethod(sequence_weights)


def test_token_weights_by_hand():
    """Two answers count 1/2 each; the longer one shares its half among three tokens."""
    check(grpo.token_weights(mask_of([1, 3], 4)), [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]])


# --- kl_k3 ---------------------------------------------------------------------------------------

def kl_mistakes(d):
    """d = log ref - log policy, an array."""
    return {
        "k3 reversed, KL(ref||policy): ref over policy, not policy over ref":
            np.exp(-d) + d - 1,
        "k1": -d, "k1 with the wrong sign": d, "k2": d * d / 2, "minus k3": d + 1 - np.exp(d)}


def test_kl_k3_by_hand():
    """log p = -1, log q = -2: d = -1 and e**-1 + 1 - 1 = 0.3679 (reversed: 0.718)."""
    check(grpo.kl_k3(torch.tensor([-1.0]), torch.tensor([-2.0])), [math.exp(-1)],
          kl_mistakes(np.array([-1.0])), atol=1e-6)


def test_kl_k3_against_a_loop(rng):
    logp, ref = normal(rng, 4, 5), normal(rng, 4, 5)
    expected = [[k3(float(r - p)) for p, r in zip(*rows)] for rows in zip(logp, ref)]
    check(grpo.kl_k3(logp, ref), expected, kl_mistakes((ref - logp).numpy()))


def test_kl_k3_gradient_is_one_minus_the_ratio(rng):
    logp, ref = normal(rng, 4, 5).requires_grad_(), normal(rng, 4, 5)
    gradient, = torch.autograd.grad(grpo.kl_k3(logp, ref).sum(), logp)
    right = 1 - (ref - logp).exp()
    check(gradient, right, {"k3 reversed": (logp - ref).exp() - 1, "k1": torch.ones(4, 5),
                            "k2": logp - ref, "a constant": torch.zeros(4, 5)})


@pytest.mark.parametrize("d", [1e-6, -1e-6, 1e-4, -1e-4, 1e-3])
def test_kl_k3_of_near_policies_keeps_its_digits_in_float32(d):
    """exp(d) - d - 1 is -6e-8 at d = 1e-6, where the truth is 5e-13: expm1 keeps the digits."""
    value = grpo.kl_k3(torch.tensor(0.0), torch.tensor(d))
    naive = torch.tensor(d).exp() - torch.tensor(d) - 1
    assert value >= 0, "a negative KL: looks like exp(d) - d - 1, use expm1(d) - d"
    check(value, math.expm1(d) - d, {"exp(d) - d - 1, use expm1(d) - d": naive}, atol=1e-7 * abs(d))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_k3_of_equal_policies_is_zero(rng, dtype):
    logp = normal(rng, 3, 4).to(dtype)
    assert grpo.kl_k3(logp, logp).dtype == dtype and not grpo.kl_k3(logp, logp).any()


@pytest.mark.parametrize("policy, ref", [((0.9, 0.1), (0.5, 0.5)), ((0.2, 0.3, 0.5),
                                                                    (0.6, 0.3, 0.1))])
def test_kl_k3_estimates_one_kl_and_descends_another(policy, ref):
    """Averaged over the policy's samples, the value is KL(policy||ref), but the gradient is
    that of KL(ref||policy): unbiased estimate, biased gradient."""
    logits = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    logq = torch.tensor(ref, dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    p, q = logp.exp(), logq.exp()
    reverse, forward = (p * (logp - logq)).sum(), (q * (logq - logp)).sum()
    expected_k3 = (p.detach() * grpo.kl_k3(logp, logq)).sum()

    check(expected_k3, reverse, {"k3 reversed": (p * ((logp - logq).exp() - 1 - logp + logq)).sum(),
                                 "k1 of KL(ref||policy)": -reverse})
    check(torch.autograd.grad(expected_k3, logits, retain_graph=True)[0],
          torch.autograd.grad(forward, logits)[0])


def test_kl_k3_peers():
    case = peer("kl_k3_verl")
    value = grpo.kl_k3(case.logp_new, case.logp_ref)
    check(value * case.mask, case.expected.value, atol=case.atol)


# --- policy_loss ---------------------------------------------------------------------------------

class Test_policy_loss(PolicyLossProperties):
    def call(self, b):
        return grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)


@pytest.fixture
def right_kl(monkeypatch):
    """policy_loss may call kl_k3: a fault there is found above and not counted twice."""
    monkeypatch.setattr(grpo, "kl_k3", lambda logp, ref_logp: (
        torch.expm1(ref_logp - logp) - ref_logp + logp), raising=False)


@pytest.mark.usefixtures("right_kl")
class Test_policy_loss_with_kl(LossProperties):
    """The reference's log-probs are padded with garbage like the policy's."""

    def call(self, b):
        return grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights,
                                ref_logp=b.ref_logp, beta=0.5)


def test_policy_loss_by_hand():
    """Ratios 1.1 0.9 1.5, advantage 1: (1.1 + 0.9 + min(1.5, 1.2)) / 3 = 1.0667."""
    ratio = torch.tensor([[1.1, 0.9, 1.5]], dtype=torch.float64)
    ones = torch.ones(1, 3, dtype=torch.float64)
    loss, stats = grpo.policy_loss(ratio.log(), 0 * ones, ones[0, :1], ones, ones / 3)
    check(loss, -3.2 / 3, {
        "the product of the token ratios: GRPO clips every token by itself": -1.2,
        "no clipping at all": -3.5 / 3, "the wrong sign": 3.2 / 3,
        "a sum where a mean belongs": -3.2})
    check(stats["clip_frac"], 1 / 3)


@pytest.mark.parametrize("A, ratio, expected, slope", [
    (+1, 1.5, -1.2, 0), (+1, 0.5, -0.5, -0.5),     # good: no reward for going beyond 1.2
    (-1, 0.5, 0.8, 0), (-1, 1.5, 1.5, 1.5),        # bad: no reward for going below 0.8
    (+1, 1.1, -1.1, -1.1), (-1, 0.9, 0.9, 0.9), (0, 1.5, 0, 0)])
def test_policy_loss_of_one_token(A, ratio, expected, slope):
    """The clip takes away the reason to go further, never the way back."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, stats = grpo.policy_loss(logp, 0 * one, A * one[0], one, one, clip_eps=0.2)
    check(loss, expected)
    check(torch.autograd.grad(loss, logp)[0], [[slope]])
    assert stats["clip_frac"] == (A != 0 and slope == 0)


def test_policy_loss_default_clip_is_0_2(rng):
    b = ragged_batch(rng, sequence_weights)
    loss, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)
    wide, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights, clip_eps=0.4)
    check(loss, weighted(b, clipped_loss(0.2, 0.2), token_ratio))
    check(wide, weighted(b, clipped_loss(0.4, 0.4), token_ratio), {"clip_eps ignored": loss})


def test_policy_loss_clips_tokens_not_answers(rng):
    b = ragged_batch(rng, sequence_weights)
    loss, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)
    check(loss, weighted(b, clipped_loss(0.2, 0.2), token_ratio), {
        "the product of the token ratios": weighted(b, clipped_loss(0.2, 0.2), product_ratio)})


def kl_penalty(b, term, weights):
    return sum(float(weights[i, t]) * term(float(b.ref_logp[i, t] - b.logp[i, t]))
               for i, t in cells(b.mask))


def test_policy_loss_adds_beta_times_k3_inside_the_mean(rng, right_kl):
    """The KL is averaged as the rest: 1/N, 1/|o|, per token."""
    b = ragged_batch(rng, sequence_weights)
    surrogate = weighted(b, clipped_loss(0.2, 0.2), token_ratio)

    def total(term, weights=b.weights, beta=0.5):
        return surrogate + beta * kl_penalty(b, term, weights)
    loss, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights,
                               ref_logp=b.ref_logp, beta=0.5)
    check(loss, total(k3), {
        "no KL at all": surrogate, "beta ignored": total(k3, beta=1),
        "the KL subtracted": total(k3, beta=-0.5),
        "k3 reversed": total(lambda d: k3(-d)),
        "k1 in place of k3": total(lambda d: -d), "k2 in place of k3": total(lambda d: d * d / 2),
        "the KL summed outside the mean over tokens": total(k3, b.mask / len(b.mask)),
        "the KL averaged over all tokens": total(k3, token_mean_weights(b.mask)),
        "the KL taken between old and reference": 
            surrogate + 0.5 * kl_penalty(b.but(logp=b.old_logp), k3, b.weights)})


def test_policy_loss_kl_gradient(rng, right_kl):
    """Without advantages only beta * weight * (1 - ref/policy) is left: a tied group is still
    drawn to the reference."""
    b = ragged_batch(rng, sequence_weights)
    logp = b.logp.clone().requires_grad_()
    loss, _ = grpo.policy_loss(logp, b.old_logp, 0 * b.advantages, b.mask, b.weights,
                               ref_logp=b.ref_logp, beta=0.04)
    right = 0.04 * b.weights * (1 - (b.ref_logp - b.logp).exp())
    check(torch.autograd.grad(loss, logp)[0], right, {
        "a KL that carries no gradient": 0 * right,
        "a KL weighted by the ratio": right * (b.logp - b.old_logp).exp()})


def test_policy_loss_without_beta_needs_no_reference(rng):
    """beta = 0 loads no reference model: ref_logp may be None, and if given counts nothing."""
    b = ragged_batch(rng, sequence_weights)
    with_ref, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights,
                                   ref_logp=b.ref_logp, beta=0.0)
    without, _ = grpo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)
    check(with_ref, without)


@pytest.mark.parametrize("case_id, beta", [("ppo_seq-mean-token-mean_seqadv_clip0.2_verl", 0),
                                           ("grpo_full_objective_beta0.04_verl", 0.04)])
def test_policy_loss_peers(case_id, beta, right_kl):
    case = peer(case_id)
    logp = case.logp_new.clone().requires_grad_()
    loss, _ = grpo.policy_loss(logp, case.logp_old, case.adv[:, 0], case.mask,
                               sequence_weights(case.mask), clip_eps=0.2,
                               ref_logp=getattr(case, "logp_ref", None), beta=beta)
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)


# --- what the advantage and the averaging do to the policy gradient ------------------------------

def expected_gradient(logits, rewards, size, center, by_length=False):
    """The loss gradient averaged over every group of `size` answers the model could sample.
    `center` turns a group's rewards into advantages; `by_length` divides by |o|."""
    logp, mask = toy_answers(logits)
    chance = (logp * mask).sum(1).exp().detach()
    groups = torch.tensor(list(itertools.product(range(len(mask)), repeat=size)))
    rows = groups.reshape(-1)
    weights = chance[groups].prod(1).repeat_interleave(size)[:, None] / size * mask[rows]
    if by_length:
        weights = weights / mask[rows].sum(1, keepdim=True)
    loss, _ = grpo.policy_loss(logp[rows], logp[rows].detach(),
                               center(rewards[groups]).reshape(-1), mask[rows], weights)
    return torch.autograd.grad(loss, logits)[0]


def minus_mean(rewards):
    return rewards - rewards.mean(1, keepdim=True)


def over_std(rewards):
    return minus_mean(rewards) / (rewards.std(1, keepdim=True) + 1e-9)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("width, vocabulary", [(2, 2), (2, 3), (3, 2)])
def test_policy_loss_with_group_mean_shrinks_the_policy_gradient(rng, size, width, vocabulary):
    """The group's mean contains the sample itself, which costs the factor (G - 1) / G and
    nothing else: the direction is exact."""
    logits = normal(rng, width, vocabulary).requires_grad_()
    rewards = normal(rng, len(toy_answers(logits)[1]))
    true = -toy_gradient(logits, rewards)
    check(expected_gradient(logits, rewards, size, minus_mean), true * (size - 1) / size,
          {"the gradient of an unbiased baseline (RLOO)": true})


def test_policy_loss_averaged_by_length_slows_late_tokens():
    """Two positions, "stop" or "go on" at even odds, only the answer that goes on twice is
    right. 1/|o| halves the pull on the second token (1/4 of the true gradient instead of 1/2)
    and takes a quarter from the first (3/8), because the short wrong answer weighs more."""
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 0, 1], dtype=torch.float64)       # stop, go stop, go go
    true = -toy_gradient(logits, rewards)
    check(expected_gradient(logits, rewards, 2, minus_mean) / true, [[1 / 2] * 2, [1 / 2] * 2])
    check(expected_gradient(logits, rewards, 2, minus_mean, by_length=True) / true,
          [[3 / 8] * 2, [1 / 4] * 2])


@pytest.mark.parametrize("rewards, factor", [([0.0, 0, 1], 1.4247), ([1.0, 0, 0], 1.3995)])
def test_policy_loss_over_std_gives_each_question_its_own_step(rewards, factor):
    """Right once in 4 tries, or in 2: the mean alone scales both gradients by (G - 1)/G = 3/4,
    the std by more, and by more the rarer success is. For 0/1 rewards the direction stays."""
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor(rewards, dtype=torch.float64)
    true = -toy_gradient(logits, rewards)
    check(expected_gradient(logits, rewards, 4, minus_mean), 3 / 4 * true)
    check(expected_gradient(logits, rewards, 4, over_std), factor * true, atol=1e-4)


def test_policy_loss_over_std_bends_the_gradient_of_graded_rewards():
    """With more than two values of the reward not even the direction is the true one."""
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1, 5], dtype=torch.float64)
    gradient = expected_gradient(logits, rewards, 3, over_std)
    cosine = torch.cosine_similarity(-toy_gradient(logits, rewards).flatten(),
                                     gradient.flatten(), dim=0)
    check(cosine, 0.9605, atol=1e-4)


# --- all together --------------------------------------------------------------------------------

def test_pipeline_peers():
    """Rewards in, loss and gradient out, as verl's functions compute them."""
    case = peer("pipeline_grpo_verl")
    logp = case.logp_new.clone().requires_grad_()
    loss, _ = grpo.policy_loss(logp, case.logp_old, grpo.group_advantages(case.score, 4),
                               case.mask, grpo.token_weights(case.mask), clip_eps=0.2,
                               ref_logp=case.logp_ref, beta=0.04)
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)
