"""Tests: what `train` hands to the functions that are tested elsewhere.

Two steps of each script, watched. Answers and verdicts are made up (some groups all alike), so a
random model will do.
"""

import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import common
import dapo
import experiment
import grpo
import gspo
import ppo

SCRIPTS = {"grpo": grpo, "dapo": dapo, "gspo": gspo, "ppo": ppo}
LIMIT, G = 12, 4


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch):
    """A folder, a cache of models and signal handlers of the test's own."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(common.Sampler, "generate", generate)
    monkeypatch.setattr(experiment.Scorer, "__call__", verdicts)
    monkeypatch.setattr(experiment, "evaluate", lambda *_: {})
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def generate(self, prompt_ids, prompt_mask, group_size=1, greedy=False, record=0):
    """Random answers that stop or are cut; lengths from 1 to the limit."""
    rows = torch.randint(3, 50, (len(prompt_ids) * group_size, LIMIT))
    for row, stop in zip(rows, torch.randint(0, LIMIT + 4, (len(rows),)).tolist()):
        if stop < LIMIT:
            row[stop], row[stop + 1 :] = self.stop_ids[0], self.pad
    return rows, torch.full(rows.shape, float("nan"))


def verdicts(self, batch):
    """Every third group all wrong, the others half right."""
    n = torch.arange(len(batch.texts))
    right = ((n % 2 == 0) & (n // G % 3 != 0)).float()
    return right.clone(), right


class Watch:
    """Notes the arguments and results of functions while a script trains."""

    def __init__(self, monkeypatch, script):
        self.patch, self.script, self.calls = monkeypatch, script, []
        self.on(common, "cut", "micro_logps", "optimizer_step", "token_logps")
        names = "group_advantages policy_loss keep_group gae whiten token_rewards value_loss"
        self.on(script, *[name for name in names.split() if hasattr(script, name)])

    def on(self, module, *names):
        for name in names:
            self.patch.setattr(module, name, self.noting(name, getattr(module, name)))

    def noting(self, name, function):
        def noted(*args, **kwargs):
            result = function(*args, **kwargs)
            self.calls.append(SimpleNamespace(name=name, args=args, kwargs=kwargs, result=result))
            return result
        return noted

    def of(self, *names):
        return [call for call in self.calls if call.name in names]

    def updates(self):
        """For each optimizer step of the policy the calls of policy_loss before it."""
        steps, now = [], []
        for call in self.of("policy_loss", "optimizer_step"):
            if call.name == "policy_loss":
                now.append(call)
            elif now:
                steps.append(now)
                now = []
        return steps


def train(script, *extra):
    argv = (f"--cold_start 0 --prompts_per_step 6 --minibatches 2 --max_new_tokens {LIMIT} "
            "--micro_tokens 300 --eval_size 4 --lr 1e-3 --keep 9 --temperature 0.7 --out_dir run")
    argv = f"{argv} --group_size {G}".split() if "--resume" not in extra else ["--out_dir", "run"]
    argv += ["--overlong_buffer", "4"] * (script is dapo and "--resume" not in extra)
    cfg = experiment.parse_args(script.Config, script.TINY, [*argv, *extra])
    script.train(cfg)
    return cfg


@pytest.fixture(params=SCRIPTS.values(), ids=SCRIPTS.keys())
def watched(request, monkeypatch):
    watch = Watch(monkeypatch, request.param)
    watch.cfg = train(request.param, "--steps", "1", "--lr_warmup", "3")
    return watch


def test_a_step_is_what_it_says(watched):
    """Two updates, from one cut into several micro-batches."""
    updates, (cut,) = watched.updates(), watched.of("cut")
    batch, cuts = cut.args[0], cut.result
    assert len(updates) == 2 and all(len(update) > 1 for update in updates)
    rows = [micro.rows for minibatch in cuts for micro in minibatch.micros]
    calls = [call for update in updates for call in update]

    # the weights of an update sum to 1
    for update in updates:
        assert sum(call.args[4].sum().item() for call in update) == pytest.approx(1, abs=1e-5)

    # pi_old is fixed: exactly pi_theta in the first update, not any more in the second
    for update, moved in zip(updates, (False, True)):
        for call in update:
            logp, old, mask = call.args[0], call.args[1], call.args[3].bool()
            assert logp.requires_grad and not old.requires_grad
            assert torch.equal(logp[mask], old[mask]) != moved

    # the learning rate warms up, by as much for PPO's critic
    rates = [call.args[2] for call in watched.of("optimizer_step")]
    if watched.script is ppo:
        critic, rates = watched.cfg.critic_lr, rates[::2]
        assert [call.args[2] for call in watched.of("optimizer_step")][1::2] == pytest.approx(
            [critic / 3, critic * 2 / 3])
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3])

    # temperature in every log-prob
    start = watched.calls.index(cut)  # before it the check at load has its own passes
    passes = [call for call in watched.calls[start:] if call.name == "token_logps"]
    assert passes and {call.args[4] for call in passes} == {0.7}

    # each row has its own advantage
    if watched.script is ppo:
        advantages, returns = (x.result for x in watched.of("whiten", "gae")[::-1])
        returns = returns[1]
        for call, value, r in zip(calls, watched.of("value_loss"), rows):
            width = call.args[3].shape[1]
            assert torch.equal(call.args[2], advantages[r, :width])
            assert torch.equal(value.args[2], returns[r, :width])
    else:
        (call,) = watched.of("group_advantages")
        assert torch.equal(call.args[0], batch.rewards)
        for loss, r in zip(calls, rows):
            assert torch.equal(loss.args[2], call.result[r])


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_single_updates_have_a_ratio_of_1_and_a_gradient(script, monkeypatch):
    """pi_old is pi_theta, but a constant: where both move, the ratio has no gradient."""
    watch = Watch(monkeypatch, script)
    train(script, "--steps", "2", "--minibatches", "1")
    first, second = (call.args[0].tokens for call in watch.of("cut"))
    assert not torch.equal(first, second), "both steps sample alike"
    for call in sum(watch.updates(), []):
        logp, old, mask = call.args[0], call.args[1], call.args[3].bool()
        assert torch.equal(logp[mask], old[mask])
        assert logp.requires_grad and not old.requires_grad


@pytest.mark.parametrize("watched", [dapo], indirect=True, ids=["dapo"])
def test_dapo_filters_by_verdicts_and_shapes_rewards(watched):
    """Groups all wrong differ in their shaped rewards, and still teach nothing."""
    kept = watched.of("keep_group")
    assert all(set(call.args[0].unique().tolist()) == {0, 1} for call in kept)
    (batch,) = [call.args[0] for call in watched.of("cut")]
    assert len(batch) == 6 * G and batch.correct.view(6, G).sum(1).tolist() == [G / 2] * 6
    penalty = ((LIMIT - 4 - batch.mask.sum(1)) / 4).clamp(-1, 0)
    assert torch.allclose(batch.rewards, 2 * batch.correct - 1 + penalty)
    assert (penalty < 0).any()


@pytest.mark.parametrize("watched", [ppo], indirect=True, ids=["ppo"])
def test_ppo_rewards_the_old_policy(watched):
    """KL between old and reference (here equal), the score on the last token, whitened after."""
    (batch,) = [call.args[0] for call in watched.of("cut")]
    (rewards,), (gae,), (whiten,) = (watched.of(n) for n in ("token_rewards", "gae", "whiten"))
    assert torch.equal(rewards.args[0], batch.rewards) and rewards.args[4] == watched.cfg.kl_coef
    assert torch.equal(gae.args[0], rewards.result)
    assert torch.equal(whiten.args[0], gae.result[0]) and torch.equal(whiten.args[1], batch.mask)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_resume_goes_on_bit_for_bit(script, tmp_path, monkeypatch):
    """Two steps at once, and one and then another: the same weights."""
    weights = []
    for name, first in (("whole", "2"), ("halves", "1")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        train(script, "--steps", first)
        if first == "1":
            train(script, "--resume", "--steps", "2")
        weights.append(load_file("run/final/model.safetensors"))
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
