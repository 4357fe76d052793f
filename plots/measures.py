"""Numbers for plots/claims.py: quantities of a run, and what only a function can measure.

A quantity takes a run (its columns; row 0 is the state before the first step); combined ones take
{arm: run or measured numbers} of one seed. A measuring function takes (seed, quick, out), calls the
scripts' own functions and returns {name: number}.
"""

import importlib
import subprocess
import sys
import tempfile
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


def gain(run):
    """Rise of the held-out accuracy of sampled answers."""
    seen = run["eval_sampled"][np.isfinite(run["eval_sampled"])]
    return float(seen[-1] - seen[0])


def unsteadiness(run):
    """Standard deviation of the accuracy's change from step to step, last 20 steps."""
    return float(np.std(np.diff(run["accuracy"][1:][-20:])))


def mixed_groups(run):
    """Share of the sampled groups with both right and wrong answers, last 10 steps."""
    groups = run["samples"][1:] / run.settings["group_size"]
    return float((1 - run["groups_dropped"][1:] / groups)[-10:].mean())  # surplus ones are kept


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


def plan_7b(seed, quick, out):
    """PPO against GRPO with Qwen2.5-7B on 8 GPUs, planned by plots/memory.py (seed-free)."""
    import memory

    models, gb = {}, {}
    for script in ("ppo", "grpo"):
        cfg = importlib.import_module(script).Config(
            model="Qwen2.5-7B", data="gsm8k", gradient_checkpointing=True)
        stages = memory.plan(cfg, 8)
        gb[script] = max(sum(parts.values()) for parts in stages.values()) / memory.GB
        names = " ".join(next(iter(stages.values())))
        models[script] = sum(name in names for name in ("policy", "critic", "reference"))
    return dict(models=models["ppo"] - models["grpo"], memory_ratio=gb["ppo"] / gb["grpo"], **gb)


def first_rollout(script, seed, quick, **changes):
    """What a script holds in its first step: (module, cfg, policy, batch, advantages, cuts).

    32 questions for a steadier measurement, one rollout of the policy after its cold start.
    """
    module = importlib.import_module(script)
    small = dict(cold_start=20, prompts_per_step=4) if quick else dict(prompts_per_step=32)
    with tempfile.TemporaryDirectory() as folder:
        cfg = module.Config(**module.TINY | small | dict(seed=seed, out_dir=folder) | changes)
        run, _, data, policy, sampler = experiment.set_up(cfg, module.__file__)
        questions = run.next_questions(data.train)
        batch = module.rollout(sampler, questions, cfg.group_size, seed=(seed, 0))
    batch.rewards, batch.correct = experiment.Scorer(cfg)(batch)
    advantages = module.group_advantages(batch.rewards, cfg.group_size)
    return module, cfg, policy, batch, advantages, common.cut(
        batch, cfg.minibatches, cfg.micro_tokens)


def gradient(policy, loss):
    """The gradient of a loss over all parameters, one vector."""
    parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def length_bias(seed, quick, out):
    """What averaging per answer (GRPO's weights) and per token (DAPO's) do with length.

    short_over_long: the loss's |gradient| by a log-prob, mean over tokens of the shortest quarter
    of the answers over that of the longest; answer mean over token mean. length_push: how fast the
    mean length changes along each gradient (both of length 1), by the policy gradient of length.
    """
    grpo = importlib.import_module("grpo")
    dapo, cfg, policy, batch, advantages, cuts = first_rollout("dapo", seed, quick, minibatches=1,
                                                               micro_tokens=10**9)
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
    return dict(short_over_long=(share["answer"] / share["token"]).item(),
                length_push=(push["token"] - push["answer"]).item(),
                token=push["token"].item(), answer=push["answer"].item())


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


def ratios(seed, quick, out, model="tiny"):
    """How far three of four updates of a rollout move the log-probs of the fourth minibatch.

    reduction: variance of the tokens' log ratios over that of the answers' (their means); rerouted:
    share of (token, layer) whose set of experts is another one after the updates.
    """
    gspo, cfg, policy, batch, advantages, cuts = first_rollout("gspo", seed, quick, model=model)
    old = common.whole_logps(policy, batch, cuts, cfg.temperature)
    before = routes(policy, batch, cuts)
    optimizer = common.make_optimizer(policy, cfg.lr)
    for minibatch in cuts[:-1]:
        for micro in minibatch.micros:
            logp, _ = common.micro_logps(policy, batch, micro, cfg.temperature, "off")
            weights = gspo.token_weights(micro.mask, total=len(minibatch.rows))
            loss, _ = gspo.policy_loss(logp, micro.take(old), micro.take(advantages), micro.mask,
                                       weights, cfg.clip_low, cfg.clip_high)
            loss.backward()
        common.optimizer_step(policy, optimizer, cfg.lr, cfg.max_grad_norm)
    rows = cuts[-1].rows
    mask = batch.mask[rows].bool()
    moved = common.whole_logps(policy, batch, cuts, cfg.temperature)
    shift = (moved - old)[rows] * mask
    token, answer = shift[mask].var().item(), (shift.sum(1) / mask.sum(1)).var().item()
    after = routes(policy, batch, cuts)
    rerouted = 0.0 if after is None else (before != after).any(-1).float().mean().item()
    return dict(token=token, answer=answer, reduction=token / answer, rerouted=rerouted)


def ratios_moe(seed, quick, out):
    """The same with a mixture of experts."""
    return ratios(seed, quick, out, "tiny-moe")


def small_critic(seed, quick, out):
    """The folder of a value model with a thirteenth of the policy's parameters, made on first use:
    the tiny model, a quarter as wide and one layer deep, after the cold start of the policy's."""
    grpo, home = importlib.import_module("grpo"), out / f"small-critic-s{seed}"
    if not (home / "final" / "config.json").is_file():
        cold = 20 if quick else grpo.TINY["cold_start"]
        cfg = grpo.Config(**grpo.TINY | dict(seed=seed, cold_start=1))
        tiny = experiment.builtin_folder(cfg, experiment.load_questions(cfg).train)
        config = transformers.AutoConfig.from_pretrained(tiny)
        config.update(dict(hidden_size=16, num_hidden_layers=1, intermediate_size=64, head_dim=4))
        config.layer_types = config.layer_types[:1]
        common.seed_all(seed, "small critic")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "raw")
        common.load_tokenizer(tiny).save_pretrained(home / "raw")
        flags = f"--steps 0 --cold_start {cold} --seed {seed} --eval_size 16"
        line = [sys.executable, str(ROOT / "grpo.py"), "--model", str(home / "raw"),
                "--out_dir", str(home), *flags.split()]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            common.fail(f"the small critic was not made: {done.stderr.strip().splitlines()[-1]}")
    return str(home / "final")
