"""Tests: the functions of ppo.py. One: pytest tests/test_ppo.py -k gae"""

import math

import numpy as np
import pytest
import torch

import ppo
from oracles import (GARBAGE, Batch, LossProperties, PolicyLossProperties, TokenWeights, cells,
                     check, clip, clipped_loss, mask_of, normal, peer, ragged_batch,
                     sequence_weights, token_mean_weights, token_ratio, weighted)


class Test_token_weights(TokenWeights):
    module, oracle = ppo, staticmethod(token_mean_weights)


def test_token_weights_by_hand():
    """Four tokens in all, so a quarter each, whoever wrote them."""
    check(ppo.token_weights(mask_of([1, 3], 4)), [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]])


# --- token_rewards: KL on every token, score on the last -----------------------------------------

def test_token_rewards_by_hand():
    """Four tokens of six: the score belongs to the fourth, index 3, not to index 4."""
    logp, ref = torch.full((1, 6), -1.0), torch.full((1, 6), -1.5)
    rewards = ppo.token_rewards(torch.tensor([2.0]), logp, ref, mask_of([4], 6), 0.1)
    check(rewards, [[-0.05, -0.05, -0.05, 1.95, 0, 0]], {
        "the score on the wrong token: one after the last": [[-.05, -.05, -.05, -.05, 2, 0]],
        "the score on the wrong token: one before the last": [[-.05, -.05, 1.95, -.05, 0, 0]],
        "the score on the wrong token: the end of the padding": [[-.05, -.05, -.05, -.05, 0, 2]],
        "the score on the first token": [[1.95, -.05, -.05, -.05, 0, 0]],
        "the score on every token": [[1.95, 1.95, 1.95, 1.95, 0, 0]],
        "no score": [[-.05, -.05, -.05, -.05, 0, 0]],
        "the KL missing on the last token": [[-.05, -.05, -.05, 2, 0, 0]],
        "a reward for moving away from the reference": [[.05, .05, .05, 2.05, 0, 0]],
    }, atol=1e-6)


def test_token_rewards_against_a_loop(rng):
    b = ragged_batch(rng, token_mean_weights)
    scores = normal(rng, len(b.mask))

    def rewards(kl):
        out = np.zeros(b.mask.shape)
        for i, t in cells(b.mask):
            out[i, t] = -0.3 * kl(float(b.logp[i, t] - b.ref_logp[i, t]))
            if t == b.mask[i].sum() - 1:
                out[i, t] += scores[i]
        return out
    check(ppo.token_rewards(scores, b.logp, b.ref_logp, b.mask, 0.3), rewards(lambda d: d), {
        "k1 with the wrong sign: minus beta times (logp - ref)": rewards(lambda d: -d),
        "k2 in place of k1": rewards(lambda d: d * d / 2),
        "k3 in place of k1": rewards(lambda d: math.exp(-d) + d - 1),
        "kl_coef ignored": rewards(lambda d: d / 0.3), "no KL": rewards(lambda d: 0)})


def test_token_rewards_of_a_truncated_answer():
    """An answer that fills the width has no stop token; its last token still gets the score."""
    zeros = torch.zeros(1, 3)
    check(ppo.token_rewards(torch.ones(1), zeros, zeros, torch.ones(1, 3), 0.1), [[0, 0, 1]])


def test_token_rewards_sum_to_score_minus_kl(rng):
    b = ragged_batch(rng, token_mean_weights)
    scores = normal(rng, len(b.mask))
    total = ppo.token_rewards(scores, b.logp, b.ref_logp, b.mask, 0.05).sum(1)
    check(total, scores - 0.05 * ((b.logp - b.ref_logp) * b.mask).sum(1))


def test_token_rewards_leave_empty_rows_alone():
    """No token, no place for a score (and index -1 is not the last token)."""
    zeros = torch.zeros(2, 3)
    rewards = ppo.token_rewards(torch.ones(2), zeros, zeros, mask_of([0, 2], 3).float(), 0.1)
    check(rewards, [[0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_token_rewards_ignore_garbage_and_width(rng, garbage):
    """Multiplying by the mask does not do: 0 x NaN is NaN."""
    b = ragged_batch(rng, token_mean_weights)
    scores = normal(rng, len(b.mask))
    clean = ppo.token_rewards(scores, b.logp, b.ref_logp, b.mask, 0.3)
    dirty = b.padded(2).with_garbage(garbage)
    out = ppo.token_rewards(scores, dirty.logp, dirty.ref_logp, dirty.mask, 0.3)
    check(out[:, :-2], clean)
    assert (out[dirty.mask == 0] == 0).all(), "rewards in the padding"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_token_rewards_take_a_mask_of_any_dtype(dtype):
    zeros, mask = torch.zeros(1, 4), torch.tensor([[1, 1, 0, 0]], dtype=dtype)
    rewards = ppo.token_rewards(torch.tensor([2.0]), zeros, zeros, mask, 0.1)
    check(rewards, [[0, 2, 0, 0]])


def test_token_rewards_change_none_of_their_inputs(rng):
    b = ragged_batch(rng, token_mean_weights)
    before = b.each(lambda name, x: x.clone())
    ppo.token_rewards(b.advantages, b.logp, b.ref_logp, b.mask, 0.3)
    assert all(torch.equal(x, vars(before)[name]) for name, x in vars(b).items())


def test_token_rewards_peers():
    case = peer("token_reward_kl_k1_verl")
    rewards = ppo.token_rewards(case.score, case.logp_old, case.logp_ref, case.mask, 0.05)
    check(rewards, case.expected.token_reward, atol=case.atol)


# --- gae -----------------------------------------------------------------------------------------

def gae_sum(rewards, values, gamma, lam):
    """One answer, by the definition: A_t = sum over l of (gamma lam)**l delta_(t+l), where
    delta_t = r_t + gamma V_(t+1) - V_t and V after the last token is 0."""
    n = len(rewards)
    next_values = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * next_values[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def gae_rows(rewards, values, mask, gamma, lam, row=gae_sum):
    """`row` for each answer, by itself and without its padding."""
    out = np.zeros(mask.shape)
    for i, n in enumerate(mask.sum(1).int().tolist()):
        out[i, :n] = row(rewards[i, :n].tolist(), values[i, :n].tolist(), gamma, lam)
    return out


def gae_mistakes(rewards, values, mask, gamma, lam):
    """Advantages with a classic fault each."""
    right = gae_rows(rewards, values, mask, gamma, lam)

    def leaking(kind):
        r, v = (x if name in kind else x * mask for name, x in (("r", rewards), ("v", values)))
        return gae_rows(r, v, torch.ones_like(mask), gamma, lam) * mask.numpy()

    def bootstrapped(r, v, gamma, lam):
        return gae_sum([*r[:-1], r[-1] + gamma * v[-1]], v, gamma, lam)

    def swapped(r, v, gamma, lam):
        deltas = [r[t] + gamma * v[t] - (v[t + 1] if t + 1 < len(r) else 0) for t in range(len(r))]
        return gae_sum(deltas, [0] * len(r), gamma, lam)       # values 0: deltas are summed as are

    return {
        "a leak through the padding: V after the last token is 0": leaking("v"),
        "a leak through the padding: rewards under the mask": leaking("r"),
        "a leak through the padding": leaking("rv"),
        "no mask at all: padding treated as tokens": gae_rows(
            rewards, values, torch.ones_like(mask), gamma, lam),
        "a value off by one (the next position's)": gae_rows(
            rewards, values.roll(-1, 1), mask, gamma, lam),
        "a value off by one (the previous position's)": gae_rows(
            rewards, values.roll(1, 1), mask, gamma, lam),
        "a value off by one: r + gamma V_t - V_(t+1) for r + gamma V_(t+1) - V_t": gae_rows(
            rewards, values, mask, gamma, lam, swapped),
        "a bootstrap from the last value": gae_rows(rewards, values, mask, gamma, lam,
                                                    bootstrapped),
        "lambda forgotten": gae_rows(rewards, values, mask, gamma, 1.0),
        "lambda 0: only the one-step delta": gae_rows(rewards, values, mask, gamma, 0.0),
        "gamma forgotten": gae_rows(rewards, values, mask, 1.0, lam),
        "gamma and lambda swapped": gae_rows(rewards, values, mask, lam, gamma),
        "no baseline: the values are not subtracted": gae_rows(
            rewards, 0 * values, mask, gamma, lam),
        "reward minus value, without the later rewards": ((rewards - values) * mask).numpy(),
        "the recursion run forwards": gae_rows(
            rewards, values, mask, gamma, lam,
            lambda r, v, *discounts: gae_sum(r[::-1], v[::-1], *discounts)[::-1]),
        "the wrong sign": -right,
        "returns in place of advantages": right + (values * mask).numpy(),
        "advantages and returns whitened or centred": right - right[mask.numpy() > 0].mean(),
    }


DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.9, 0.0), (1.0, 0.0), (0.0, 0.5)]


def test_gae_by_hand():
    """Rewards 0 0 1, values .5 .25 .75, gamma 1, lambda 1/2.
    Deltas -.25 .5 .25; advantages .25, .5 + .25/2 = .625, -.25 + .625/2 = .0625."""
    rewards, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 0.25, 0.75]])
    advantages, returns = ppo.gae(rewards, values, torch.ones(1, 3), 1.0, 0.5)
    check(advantages, [[0.0625, 0.625, 0.25]],
          gae_mistakes(rewards, values, torch.ones(1, 3), 1.0, 0.5))
    check(returns, [[0.5625, 0.875, 1]])


@pytest.mark.parametrize("gamma, lam", DISCOUNTS)
def test_gae_is_the_discounted_sum_of_deltas(rng, gamma, lam):
    """Every length from 1 to the full width, garbage in the padding."""
    mask = mask_of(range(1, 8), 7)
    rewards, values = normal(rng, 7, 7), normal(rng, 7, 7)
    advantages, _ = ppo.gae(rewards, values, mask, gamma, lam)
    check(advantages, gae_rows(rewards, values, mask, gamma, lam),
          gae_mistakes(rewards, values, mask, gamma, lam))


@pytest.mark.parametrize("gamma, lam", DISCOUNTS)
def test_gae_returns_are_advantages_plus_values(rng, gamma, lam):
    """The critic's target: before whitening, and 0 in the padding."""
    mask = mask_of(range(1, 8), 7)
    rewards, values = normal(rng, 7, 7), normal(rng, 7, 7)
    _, returns = ppo.gae(rewards, values, mask, gamma, lam)
    right = gae_rows(rewards, values, mask, gamma, lam)
    white = (right - right[mask > 0].mean()) / right[mask > 0].std(ddof=1) * mask.numpy()
    check(returns, right + (values * mask).numpy(), {
        "the advantages themselves": right,
        "advantages minus values": right - (values * mask).numpy(),
        "returns that reach into the padding": right + values.numpy(),
        "returns from whitened advantages": white + (values * mask).numpy()})


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_1_is_reward_to_go_minus_value(rng, gamma):
    def reward_to_go(r, v, gamma, lam):
        return [sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) - v[t]
                for t in range(len(r))]
    mask = mask_of(range(1, 8), 7)
    rewards, values = normal(rng, 7, 7), normal(rng, 7, 7)
    check(ppo.gae(rewards, values, mask, gamma, 1.0)[0],
          gae_rows(rewards, values, mask, gamma, 1.0, reward_to_go))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_0_is_the_one_step_error(rng, gamma):
    def delta(r, v, gamma, lam):
        return [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0) - v[t] for t in range(len(r))]
    mask = mask_of(range(1, 8), 7)
    rewards, values = normal(rng, 7, 7), normal(rng, 7, 7)
    check(ppo.gae(rewards, values, mask, gamma, 0.0)[0],
          gae_rows(rewards, values, mask, gamma, 0.0, delta))


@pytest.mark.parametrize("lam, first", [(1.0, 1.0), (0.95, 0.95**511)])
def test_gae_carries_a_last_reward_back_by_lambda(lam, first):
    """With V = 0 a reward at token 512 reaches the first as lambda**511: 4e-12 at 0.95, which
    is why long answers want lambda 1."""
    rewards = torch.zeros(1, 512, dtype=torch.float64)
    rewards[0, -1] = 1
    advantages, _ = ppo.gae(rewards, 0 * rewards, torch.ones(1, 512), 1.0, lam)
    check(advantages[0, 0], first, atol=1e-15)


def test_gae_of_a_perfect_critic_is_zero(rng):
    """Values equal to the reward-to-go leave no surprise."""
    rewards = normal(rng, 3, 5)
    values = rewards.flip(1).cumsum(1).flip(1)
    advantages, returns = ppo.gae(rewards, values, torch.ones(3, 5), 1.0, 0.7)
    check(advantages, np.zeros((3, 5)))
    check(returns, values)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_gae_ignores_garbage_and_width(rng, garbage):
    """Multiplying by the mask does not do: 0 x NaN is NaN. One row has no token at all."""
    mask = mask_of(range(0, 7), 6)
    b = Batch(mask=mask, rewards=normal(rng, 7, 6), values=normal(rng, 7, 6))
    dirty = b.padded(2).with_garbage(garbage)
    clean = ppo.gae(b.rewards, b.values, mask, 0.9, 0.8)
    for name, x, out in zip(("advantages", "returns"), clean,
                            ppo.gae(dirty.rewards, dirty.values, dirty.mask, 0.9, 0.8)):
        check(out[:, :-2], x)
        assert (out[dirty.mask == 0] == 0).all(), f"{name} in the padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_keeps_dtype_and_inputs(rng, dtype):
    rewards, values = normal(rng, 3, 4).to(dtype), normal(rng, 3, 4).to(dtype)
    copies = rewards.clone(), values.clone()
    outs = ppo.gae(rewards, values, torch.ones(3, 4, dtype=dtype), 1.0, 0.95)
    assert [x.dtype for x in outs] == [dtype, dtype]
    assert torch.equal(rewards, copies[0]) and torch.equal(values, copies[1]), "inputs changed"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_gae_takes_a_mask_of_any_dtype(rng, dtype):
    rewards, values, mask = normal(rng, 3, 4), normal(rng, 3, 4), mask_of([1, 4, 2], 4)
    advantages, _ = ppo.gae(rewards, values, mask.to(dtype), 0.9, 0.8)
    check(advantages, gae_rows(rewards, values, mask, 0.9, 0.8))


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_gae_peers(lam):
    case = peer(f"gae_g1.0_l{lam}_verl")
    advantages, returns = ppo.gae(case.token_reward, case.values, case.mask, 1.0, lam)
    check(advantages, case.expected.adv_raw, atol=case.atol)
    check(returns, case.expected.returns, atol=case.atol)


# --- whiten --------------------------------------------------------------------------------------

def test_whiten_by_hand():
    """Two real cells 2 and 4: mean 3 (1.5 with the padding), unbiased variance 2."""
    x, mask = torch.tensor([[2.0, 4, 0, 0]]), torch.tensor([[1.0, 1, 0, 0]])
    check(ppo.whiten(x, mask), [[-math.sqrt(0.5), math.sqrt(0.5), 0, 0]], {
        "the biased variance (divide by n - 1, not n)": [[-1, 1, 0, 0]]}, atol=1e-6)


def test_whiten_against_numpy(rng):
    x, mask = (1 + 2 * normal(rng, 8, 6)).numpy(), mask_of(rng.integers(1, 7, size=8), 6).numpy()
    real, zeroed = x[mask > 0], x * mask
    mean, var, n = real.mean(), real.var(ddof=1), len(real)
    low_mean = zeroed.mean()

    def whitened(mean, var):
        return (x - mean) / np.sqrt(var + 1e-8) * mask
    check(ppo.whiten(torch.tensor(x), torch.tensor(mask)), whitened(mean, var), {
        "the biased variance (divide by n - 1, not n)": whitened(mean, real.var()),
        "statistics that read what lies in the padding": whitened(x.mean(), x.var(ddof=1)),
        "padding counted as zeros": whitened(low_mean, zeroed.var(ddof=1)),
        "padding counted in the number of tokens": whitened(
            low_mean, ((real - low_mean)**2).sum() / (x.size - 1)),
        "a mean over the padding": whitened(low_mean, var),
        "a mean over the padding, with the real tokens' variance around it": whitened(
            low_mean, ((real - low_mean)**2).sum() / (n - 1)),
        "a variance over the padding": whitened(mean, zeroed.var(ddof=1)),
        "a variance that adds the padding's squares": whitened(
            mean, ((zeroed - mean)**2).sum() / (n - 1)),
        "a result that is not 0 in the padding": (x - mean) / np.sqrt(var),
        "a result that is not 0 in the padding (it is minus the mean)":
            (zeroed - mean) / np.sqrt(var),
        "no subtraction of the mean": whitened(0, var),
        "no division by the standard deviation": whitened(mean, 1),
        "division by the variance": whitened(mean, var**2),
        "the mean added back": whitened(mean, var) + mean * mask})


def test_whiten_takes_the_whole_batch_together():
    """An answer that went well throughout keeps its lead: rows are not whitened one by one."""
    out = ppo.whiten(torch.tensor([[1.0, 2], [11, 12]]), torch.ones(2, 2))
    std = math.sqrt(101 / 3)
    check(out, [[-5.5 / std, -4.5 / std], [4.5 / std, 5.5 / std]], {
        "every answer whitened by itself": [[-math.sqrt(0.5), math.sqrt(0.5)]] * 2}, atol=1e-6)


def test_whiten_adds_1e_8_to_the_variance():
    """Cells 0 and 1e-4: variance 5e-9, so the place of the 1e-8 shows."""
    x = torch.tensor([[0, 1e-4]], dtype=torch.float64)
    half, var = 0.5e-4, 0.5e-8
    value = half / math.sqrt(var + 1e-8)
    check(ppo.whiten(x, torch.ones(1, 2)), [[-value, value]], {
        "eps outside the root": half / (math.sqrt(var) + 1e-8) * np.array([[-1, 1]]),
        "no eps": half / math.sqrt(var) * np.array([[-1, 1]])})


def test_whiten_has_mean_0_and_variance_1(rng):
    mask = mask_of(rng.integers(1, 7, size=8), 6)
    real = ppo.whiten(100 + 7 * normal(rng, 8, 6), mask)[mask > 0]
    check(real.mean(), 0)
    check(real.var(), 1, atol=1e-8)


@pytest.mark.parametrize("mask, what", [([[0.0, 1, 0]], "one token has no spread"),
                                        ([[0.0, 0, 0]], "no token at all")])
def test_whiten_of_nothing_to_compare_is_zero(mask, what):
    out = ppo.whiten(torch.tensor([[5.0, 7, 9]]), torch.tensor(mask))
    assert out.tolist() == [[0, 0, 0]], what


@pytest.mark.parametrize("garbage", GARBAGE)
def test_whiten_ignores_garbage_and_width(rng, garbage):
    """Multiplying by the mask does not do: 0 x NaN is NaN."""
    b = Batch(mask=mask_of([1, 4, 2, 6], 6), x=normal(rng, 4, 6))
    dirty = b.padded(2).with_garbage(garbage)
    out = ppo.whiten(dirty.x, dirty.mask)
    check(out[:, :-2], ppo.whiten(b.x, b.mask))
    assert (out[dirty.mask == 0] == 0).all(), "not 0 in the padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whiten_keeps_dtype(rng, dtype):
    assert ppo.whiten(normal(rng, 3, 4).to(dtype), torch.ones(3, 4).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whiten_takes_a_mask_of_any_dtype(dtype):
    x = torch.tensor([[2.0, 4, 9, 9]])
    out = ppo.whiten(x, torch.tensor([[1, 1, 0, 0]], dtype=dtype))
    check(out, [[-math.sqrt(0.5), math.sqrt(0.5), 0, 0]], atol=1e-6)


def test_whiten_peers():
    case = peer("whiten_masked_shift1_verl")
    check(ppo.whiten(case.x, case.mask), case.expected.y, atol=case.atol)


# --- policy_loss ---------------------------------------------------------------------------------

class Test_policy_loss(PolicyLossProperties):
    weigh = staticmethod(token_mean_weights)
    per_token = True

    def call(self, b):
        return ppo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights)


@pytest.mark.parametrize("A, ratio, expected, slope", [
    (+1, 1.5, -1.2, 0), (+1, 0.5, -0.5, -0.5), (-1, 0.5, 0.8, 0), (-1, 1.5, 1.5, 1.5),
    (+1, 1.1, -1.1, -1.1), (-1, 0.9, 0.9, 0.9), (0, 1.5, 0, 0)])
def test_policy_loss_of_one_token(A, ratio, expected, slope):
    """The clip takes away the reason to go further, never the way back."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, stats = ppo.policy_loss(logp, 0 * one, A * one, one, one)
    check(loss, expected)
    check(torch.autograd.grad(loss, logp)[0], [[slope]])
    assert stats["clip_frac"] == (A != 0 and slope == 0)


def test_policy_loss_takes_its_limit_as_argument(rng):
    b = ragged_batch(rng, token_mean_weights, per_token=True)
    loss, _ = ppo.policy_loss(b.logp, b.old_logp, b.advantages, b.mask, b.weights, clip_eps=0.4)
    check(loss, weighted(b, clipped_loss(0.4, 0.4), token_ratio), {
        "clip_eps ignored": weighted(b, clipped_loss(0.2, 0.2), token_ratio)})


def test_policy_loss_peers():
    case = peer("ppo_token-mean_tokadv_clip0.2_verl")
    logp = case.logp_new.clone().requires_grad_()
    loss, stats = ppo.policy_loss(logp, case.logp_old, case.adv, case.mask,
                                  token_mean_weights(case.mask), clip_eps=0.2)
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, logp)[0], case.expected.grad_logp_new, atol=case.atol)
    check(stats["clip_frac"], case.expected.clip_fraction, atol=case.atol_metrics)


# --- value_loss ----------------------------------------------------------------------------------

def value_batch(rng):
    b = ragged_batch(rng, token_mean_weights)
    old = normal(rng, *b.mask.shape)
    return Batch(mask=b.mask, weights=b.weights, old_values=old,
                 values=old + normal(rng, *b.mask.shape, scale=0.3),
                 returns=old + normal(rng, *b.mask.shape, scale=0.5))


class Test_value_loss(LossProperties):
    trained = "values"

    def draw(self, rng):
        return value_batch(rng)

    def call(self, b):
        return ppo.value_loss(b.values, b.old_values, b.returns, b.mask, b.weights)


def value_terms(b, c=0.2):
    """(cell, free error, clipped error) of every token."""
    for i, t in cells(b.mask):
        v, old, target = float(b.values[i, t]), float(b.old_values[i, t]), float(b.returns[i, t])
        yield (i, t), v - target, old + clip(v - old, -c, c) - target


def value_sum(b, term, weights=None, c=0.2):
    weights = b.weights if weights is None else weights
    return sum(float(weights[cell]) * term(free, held) for cell, free, held in value_terms(b, c))


def larger_square(free, held):
    return max(free**2, held**2) / 2


@pytest.mark.parametrize("value, expected, slope", [
    (0.1, 0.405, -0.9),      # within 0.2 of the old value 0: (0.1 - 1)**2 / 2
    (0.9, 0.32, 0),          # moved too far towards the target: judged as if at 0.2
    (-0.9, 1.805, -1.9)])    # moved away: judged where it is
def test_value_loss_of_one_token(value, expected, slope):
    """Old value 0, return 1. Moving more than 0.2 per rollout earns nothing."""
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, _ = ppo.value_loss(values, 0 * one, one, one, one)
    check(loss, expected, {"the factor 1/2 forgotten": 2 * expected})
    check(torch.autograd.grad(loss, values)[0], [[slope]])


def test_value_loss_against_a_loop(rng):
    b = value_batch(rng)
    shifted = b.but(old_values=0 * b.values)
    check(ppo.value_loss(b.values, b.old_values, b.returns, b.mask, b.weights)[0],
          value_sum(b, larger_square), {
        "the factor 1/2 forgotten": 2 * value_sum(b, larger_square),
        "min where a loss needs max": value_sum(b, lambda f, h: min(f * f, h * h) / 2),
        "no clipping": value_sum(b, lambda f, h: f * f / 2),
        "the clipped error alone": value_sum(b, lambda f, h: h * h / 2),
        "a clip around 0, not around the old value": value_sum(shifted, larger_square),
        "absolute in place of squared errors": value_sum(b, lambda f, h: max(abs(f), abs(h)) / 2),
        "a mean over answers": value_sum(b, larger_square, sequence_weights(b.mask)),
        "the weights forgotten (a plain sum)": value_sum(b, larger_square, b.mask)})


def test_value_loss_gradient(rng):
    """weight * (V - R), or 0 where the clipped error is the larger."""
    b = value_batch(rng)
    values = b.values.clone().requires_grad_()
    loss, _ = ppo.value_loss(values, b.old_values, b.returns, b.mask, b.weights)
    right = torch.zeros_like(b.values)
    for cell, free, held in value_terms(b):
        right[cell] = b.weights[cell] * free if free**2 >= held**2 else 0
    check(torch.autograd.grad(loss, values)[0], right, {
        "twice the gradient: no factor 1/2": 2 * right, "the wrong sign": -right})


def test_value_loss_has_its_whole_gradient_before_the_first_update(rng):
    """Value and old value agree, so both errors do; a tie must not halve the gradient."""
    b = value_batch(rng)
    values = b.old_values.clone().requires_grad_()
    loss, _ = ppo.value_loss(values, b.old_values, b.returns, b.mask, b.weights)
    right = b.weights * (b.old_values - b.returns)
    check(torch.autograd.grad(loss, values)[0], right, {"half the gradient": right / 2})


def test_value_loss_takes_its_limit_as_argument(rng):
    b = value_batch(rng)
    loss, _ = ppo.value_loss(b.values, b.old_values, b.returns, b.mask, b.weights, clip_eps=0.5)
    check(loss, value_sum(b, larger_square, c=0.5), {
        "clip_eps ignored": value_sum(b, larger_square, c=0.2)})


def test_value_loss_peers():
    case = peer("value_loss_clip0.2_token-mean_verl")
    values = case.values_new.clone().requires_grad_()
    loss, _ = ppo.value_loss(values, case.values_old, case.returns, case.mask,
                             token_mean_weights(case.mask), clip_eps=0.2)
    check(loss, case.expected.loss, atol=case.atol)
    check(torch.autograd.grad(loss, values)[0], case.expected.grad_values_new, atol=case.atol)


# --- all together --------------------------------------------------------------------------------

def test_pipeline_peers():
    """Scores in, both losses and gradients out, as verl's functions compute them."""
    case = peer("pipeline_ppo_verl")
    logp = case.logp_new.clone().requires_grad_()
    values = case.values_new.clone().requires_grad_()
    rewards = ppo.token_rewards(case.score, case.logp_old, case.logp_ref, case.mask, 0.05)
    raw, returns = ppo.gae(rewards, case.values_old, case.mask, 1.0, 0.95)
    advantages, weights = ppo.whiten(raw, case.mask), ppo.token_weights(case.mask)
    policy_loss, _ = ppo.policy_loss(logp, case.logp_old, advantages, case.mask, weights, 0.2)
    value_loss, _ = ppo.value_loss(values, case.values_old, returns, case.mask, weights, 0.2)

    right = case.expected
    check(rewards, right.token_reward, atol=case.atol)
    check(advantages, right.adv_white, atol=case.atol)
    check(returns, right.returns, atol=case.atol)
    check(policy_loss, right.policy_loss, atol=case.atol)
    check(value_loss, right.value_loss, atol=case.atol)
    check(torch.autograd.grad(policy_loss, logp)[0], right.grad_logp_new, atol=case.atol)
    check(torch.autograd.grad(value_loss, values)[0], right.grad_values_new, atol=case.atol)
