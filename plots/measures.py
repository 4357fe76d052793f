"""Numbers for plots/claims.py: quantities of a run, and what only a function can measure.

A quantity takes a run (its columns; row 0 is the state before the first step); combined ones take
{arm: run or measured numbers} of one seed. A measuring function takes (seed, out, **flags), calls
the scripts' own functions and returns {name: number}.
"""

import copy
import importlib
import subprocess
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import experiment  # noqa: E402
import figures  # noqa: E402

# --- quantities: functions of an arm's run -------------------------------------------------------


def late(column, last=10):
    """Mean of a column over the last steps; NaN if none of them has a value."""
    def value(run):
        cells = run[column][1:][-last:]
        return float(cells[np.isfinite(cells)].mean()) if np.isfinite(cells).any() else np.nan
    return value


def over_all(column):
    """Mean of a column over all steps."""
    return late(column, last=0)  # [-0:] is all of them


def difference(one, other, quantity):
    """Arm `one` minus arm `other`, on the same seed."""
    return lambda arms: quantity(arms[one]) - quantity(arms[other])


def of(arm, quantity):
    """A quantity of one arm."""
    return lambda arms: quantity(arms[arm])


def measured(arm, name):
    """A number that a measuring function gave."""
    return lambda arms: arms[arm][name]


def times(arm, one, other):
    """Number `one` over number `other` of what a measuring function gave."""
    return lambda arms: arms[arm][one] / arms[arm][other]


def contrast(arm, one, other):
    """Number `one` minus number `other` of what a measuring function gave."""
    return lambda arms: arms[arm][one] - arms[arm][other]


def gain(run):
    """Rise of the held-out accuracy of sampled answers."""
    seen = run["eval_sampled"][np.isfinite(run["eval_sampled"])]
    return float(seen[-1] - seen[0])


def typical(column):
    """Median of a column over all steps: a busy machine's outliers don't count."""
    return lambda run: float(np.nanmedian(run[column][1:]))


def hacked(run):
    """What the reward pays beyond right answers, last 10 steps."""
    return late("reward")(run) - late("accuracy")(run)


def at_equal_tokens(one, other):
    """Accuracy of arm `one` minus `other` where both have sampled as many tokens as the cheaper
    one did in all (trailing mean of 10 steps)."""
    def value(arms):
        curves = [(np.cumsum(arms[arm]["tokens"][1:]),
                   figures.trailing_mean(arms[arm]["accuracy"][1:], 10)) for arm in (one, other)]
        budget = min(tokens[-1] for tokens, _ in curves)
        first, second = (np.interp(budget, *curve) for curve in curves)
        return float(first - second)
    return value


def ratio_of(one, other, quantity):
    """Arm `one` over arm `other`."""
    return lambda arms: quantity(arms[one]) / max(quantity(arms[other]), 1e-12)


def largest(column):
    """The largest value in any arm and step."""
    return lambda arms: max(float(np.nanmax(run[column][1:])) for run in arms.values())


def first_gap(one, other, column):
    """Relative difference of a column in the first step, where both arms hold the same answers."""
    def value(arms):
        a, b = (arms[arm][column][1] for arm in (one, other))
        return float(abs(a - b) / abs(b))
    return value


# --- measured on the scripts' own functions ------------------------------------------------------


def plan_7b(seed, out, **flags):
    """PPO and GRPO with Qwen2.5-7B on 8 GPUs, planned by plots/memory.py: models and GB per GPU."""
    import memory

    numbers = {}
    for script in ("ppo", "grpo"):
        cfg = importlib.import_module(script).Config(
            model="Qwen2.5-7B", data="gsm8k", gradient_checkpointing=True)
        stages = memory.plan(cfg, 8)
        names = " ".join(next(iter(stages.values())))
        numbers[f"models, {script.upper()}"] = sum(
            name in names for name in ("policy", "critic", "reference"))
        numbers[f"GB, {script.upper()}"] = max(
            sum(parts.values()) for parts in stages.values()) / memory.GB
    return numbers


def step_seconds(seed, out, **flags):
    """CPU seconds of a step of PPO and of GRPO, as many answers: median of five."""
    numbers = {}
    for script in ("ppo", "grpo"):
        module = importlib.import_module(script)
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(
                experiment.time, "perf_counter", time.process_time):  # others may use the machine
            module.train(module.Config(**module.TINY | dict(
                seed=seed, steps=5, out_dir=folder, test_size=16) | flags))
            numbers[script.upper()] = typical("t_total")(figures.load_run(folder))
    return numbers


def begun(script, seed, **flags):
    """A script before its first step: (module, cfg, run, data, policy, sampler)."""
    module = importlib.import_module(script)
    with tempfile.TemporaryDirectory() as folder:
        cfg = module.Config(**module.TINY | dict(seed=seed, out_dir=folder) | flags)
        run, _, data, policy, sampler = experiment.set_up(cfg, module.__file__)
    return module, cfg, run, data, policy, sampler


def sampled(module, cfg, run, data, sampler):
    """A scored rollout of the next questions: (batch, advantages)."""
    questions = run.next_questions(data.train)
    batch = module.rollout(sampler, questions, cfg.group_size, seed=(cfg.seed, run.cursor))
    batch.rewards, batch.correct = experiment.Scorer(cfg)(batch)
    return batch, module.group_advantages(batch.rewards, cfg.group_size)


def first_rollout(script, seed, **flags):
    """What a script holds in its first step: (module, cfg, policy, batch, advantages, cuts).

    32 questions for a steadier measurement, one rollout of the policy after its cold start.
    """
    module, cfg, run, data, policy, sampler = begun(
        script, seed, **dict(prompts_per_step=32) | flags)
    batch, advantages = sampled(module, cfg, run, data, sampler)
    cuts = common.cut(batch, cfg.minibatches, cfg.micro_tokens)
    return module, cfg, policy, batch, advantages, cuts


def update(module, cfg, policy, batch, advantages, cuts, old, *clip):
    """One optimizer step for each of `cuts`, with the script's own loss and a fresh optimizer."""
    optimizer = common.make_optimizer(policy, cfg.lr)
    for minibatch in cuts:
        total = minibatch.tokens if module.__name__ == "dapo" else len(minibatch.rows)
        for micro in minibatch.micros:
            logp, _ = common.micro_logps(policy, batch, micro, cfg.temperature, "off")
            weights = module.token_weights(micro.mask, total=total)
            loss, _ = module.policy_loss(logp, micro.take(old), micro.take(advantages), micro.mask,
                                         weights, *clip)
            loss.backward()
        common.optimizer_step(policy, optimizer, cfg.lr, cfg.max_grad_norm)


def gradient(policy, loss):
    """The gradient of a loss over all parameters, one vector."""
    parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def length_bias(seed, out, **flags):
    """What averaging per answer (GRPO's weights) and per token (DAPO's) do with length.

    short_over_long: the loss's |gradient| by a log-prob, mean over tokens of the shortest quarter
    of the answers over that of the longest; answer mean over token mean. length_push: how fast the
    mean length changes along each gradient (both of length 1), by the policy gradient of length.
    """
    grpo = importlib.import_module("grpo")
    dapo, cfg, policy, batch, advantages, cuts = first_rollout(
        "dapo", seed, **flags, prompts_per_step=16, minibatches=1, micro_tokens=10**9)
    micros = cuts[0].micros
    logp = [common.micro_logps(policy, batch, micro, cfg.temperature, "off")[0] for micro in micros]
    logp, mask = common.pad_cat(logp, 0.0), common.pad_cat([micro.mask for micro in micros], 0)
    advantage = torch.cat([micro.take(advantages) for micro in micros])
    lengths = mask.sum(1).float()
    longer = (lengths - lengths.mean())[:, None] * mask / len(mask)
    uphill = gradient(policy, (longer * logp).sum())  # of the expected length
    short, long = lengths <= lengths.quantile(0.25), lengths >= lengths.quantile(0.75)
    share, push = {}, {}
    for name, module in (("answer", grpo), ("token", dapo)):
        weights = module.token_weights(mask)
        loss, _ = dapo.policy_loss(logp, logp.detach(), advantage, mask, weights)
        (by_token,) = torch.autograd.grad(loss, logp, retain_graph=True)
        by_token = by_token.abs() / advantage.abs().clamp(min=1e-9)[:, None]
        trained = (advantage != 0)[:, None] * mask.bool()
        share[name] = by_token[short[:, None] * trained].mean() / by_token[
            long[:, None] * trained].mean()
        downhill = -gradient(policy, loss)
        push[name] = uphill @ downhill / downhill.norm()
    return {"short_over_long": (share["answer"] / share["token"]).item(),
            "answer mean": push["answer"].item(), "token mean": push["token"].item()}


def clip_ranges(seed, out, **flags):
    """What the upper clip range does in 2 x 16 updates on one rollout, from the same start.

    gain R: by how much log pi of the unlikely tokens (pi_old < 0.2) of better than average answers
    has risen with clip range R; entropy R: in all states of the rollout, afterwards.
    """
    dapo, cfg, policy, batch, advantages, cuts = first_rollout("dapo", seed, **flags,
                                                               minibatches=16)
    start, old = copy.deepcopy(policy.state_dict()), common.whole_logps(
        policy, batch, cuts, cfg.temperature)
    mask, numbers = batch.mask.bool(), {}
    unlikely = mask & (old < np.log(0.2)) & (advantages > 0)[:, None]

    def entropies(model, batch, micro):
        return common.micro_logps(model, batch, micro, cfg.temperature)[1]

    for high in (0.2, 0.28):
        policy.load_state_dict(start)
        update(dapo, cfg, policy, batch, advantages, cuts * 2, old, cfg.clip_low, high)
        moved = common.whole_logps(policy, batch, cuts, cfg.temperature)
        entropy = common.whole(entropies, policy, batch, cuts)
        numbers[f"gain {high}"] = (moved - old)[unlikely].mean().item()
        numbers[f"entropy {high}"] = entropy[mask].mean().item()
    return numbers


def agreement(seed, out, **flags):
    """How well the first gradients of independent rollouts agree, by questions x answers: mean
    cosine of the six pairs of four gradients. Noise is what differs between them."""
    numbers = {}
    for questions, answers in ((16, 2), (64, 2), (32, 4), (16, 8), (8, 16), (4, 32)):
        grpo, cfg, run, data, policy, sampler = begun("grpo", seed, **flags, group_size=answers,
                                                      prompts_per_step=questions, beta=0.0)
        rows = []
        for _ in range(4):
            batch, advantages = sampled(grpo, cfg, run, data, sampler)
            total = 0
            for micro in common.cut(batch, 1, cfg.micro_tokens)[0].micros:
                logp, _ = common.micro_logps(policy, batch, micro, cfg.temperature, "off")
                weights = grpo.token_weights(micro.mask, total=len(batch))
                loss, _ = grpo.policy_loss(logp, logp.detach(), micro.take(advantages), micro.mask,
                                           weights)
                total = total + gradient(policy, loss)
            rows.append(total / total.norm().clamp(min=1e-12))
        cosines = torch.stack(rows) @ torch.stack(rows).T
        numbers[f"{questions} x {answers}"] = (cosines.sum() - cosines.trace()).item() / 12
    return numbers


@torch.no_grad()
def routes(policy, batch, cuts):
    """(layers, tokens, experts chosen) of the rows of the last minibatch; None without experts."""
    if not hasattr(policy.config, "num_experts_per_tok"):
        return None
    chosen = []
    for micro in cuts[-1].micros:
        ids, mask = common.micro_input(batch, micro)
        out = policy(input_ids=ids, attention_mask=mask, position_ids=common.positions(mask),
                     use_cache=False, output_router_logits=True)
        real = torch.cat([torch.zeros_like(mask[:, : micro.prompt_len]), micro.mask], 1).bool()
        logits = torch.stack(out.router_logits)[:, real.flatten()]
        chosen.append(logits.topk(policy.config.num_experts_per_tok, -1).indices.sort(-1).values)
    return torch.cat(chosen, 1)


def ratios(seed, out, **flags):
    """How far three of four updates of a rollout move the log-probs of the fourth minibatch.

    tokens, answers: variance of the tokens' log ratios, of the answers' (their means); reduction:
    the first over the second; rerouted: share of (token, layer) whose set of experts is another
    one after the updates.
    """
    gspo, cfg, policy, batch, advantages, cuts = first_rollout(
        "gspo", seed, **dict(prompts_per_step=64) | flags)
    old = common.whole_logps(policy, batch, cuts, cfg.temperature)
    before = routes(policy, batch, cuts)
    update(gspo, cfg, policy, batch, advantages, cuts[:-1], old, cfg.clip_low, cfg.clip_high)
    rows = cuts[-1].rows
    mask = batch.mask[rows].bool()
    moved = common.whole_logps(policy, batch, cuts, cfg.temperature)
    shift = (moved - old)[rows] * mask
    token, answer = shift[mask].var().item(), (shift.sum(1) / mask.sum(1)).var().item()
    after = routes(policy, batch, cuts)
    rerouted = 0.0 if after is None else (before != after).any(-1).float().mean().item()
    return dict(tokens=token, answers=answer, reduction=token / answer, rerouted=rerouted)


def ratios_moe(seed, out, **flags):
    """The same with a mixture of experts, 2 x 64 of whose 8 x 64 units act on a token."""
    return ratios(seed, out, **flags, model="tiny-moe")


def ratios_narrow(seed, out, **flags):
    """The same with a dense model of as many active units, 128."""
    model = own_model(seed, out, "narrow", dict(intermediate_size=128), **flags)
    return ratios(seed, out, **flags | dict(model=model, cold_start=0))


def small_critic(seed, out, **flags):
    """The folder of a value model with a thirteenth of the policy's parameters: a quarter as wide
    and one layer deep, after the policy's cold start."""
    shape = dict(hidden_size=16, num_hidden_layers=1, intermediate_size=64, head_dim=4)
    return own_model(seed, out, "small-critic", shape, **flags)


def own_model(seed, out, name, shape, **flags):
    """The folder of the tiny model in another shape after the cold start, made on first use."""
    grpo, home = importlib.import_module("grpo"), out / f"{name}-s{seed}"
    if not (home / "final" / "config.json").is_file():
        cold = flags.get("cold_start", grpo.TINY["cold_start"])
        cfg = grpo.Config(**grpo.TINY | dict(seed=seed, cold_start=1))
        tiny = experiment.builtin_folder(cfg, experiment.load_questions(cfg).train)
        config = transformers.AutoConfig.from_pretrained(tiny)
        config.update(shape)
        config.layer_types = config.layer_types[: config.num_hidden_layers]
        common.seed_all(seed, name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "raw")
        common.load_tokenizer(tiny).save_pretrained(home / "raw")
        words = f"--steps 0 --cold_start {cold} --seed {seed} --eval_size 16 --test_size 16"
        line = [sys.executable, str(ROOT / "grpo.py"), "--model", str(home / "raw"),
                "--out_dir", str(home), *words.split()]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            common.fail(f"{home} was not made: {done.stderr.strip().splitlines()[-1]}")
    return str(home / "final")
