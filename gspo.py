"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071), in one file.

GRPO with one ratio per answer, the geometric mean of its tokens': the reward judges the answer as
a whole; so does the clip, a thousandth as wide. No KL. Up to a rollout's second update it is GRPO.

    A_i  = (R_i - mean_G R) / std_G R                          one advantage for all its tokens
    s_i  = exp(1/|o_i| sum_t log pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t))
    loss = 1/N sum_i max(-A_i s_i, -A_i clip(s_i, 1 - 3e-4, 1 + 4e-4))

q: a question, o_i: its i-th answer, R_i: its reward; N answers make an update.

    python gspo.py                                                a laptop: no download, 2 minutes
    python gspo.py --model Qwen2.5-0.5B                           one GPU, on GSM8K
    torchrun --nproc_per_node 8 gspo.py --model Qwen2.5-7B --gradient_checkpointing
"""

from dataclasses import dataclass
from typing import Literal

import torch

import common
import experiment
from experiment import flag


@dataclass
class Config:
    """Every field is a flag. Defaults: the algorithm's constants from its paper, the workload of a
    7B run on GSM8K (article 000, plots/README.md). TINY below overrides them for the tiny model."""

    # what is trained, and on what
    model: str = flag("tiny", "tiny, tiny-moe (built in), a hub name or a folder")
    data: str = flag("gsm8k", "words (built in), gsm8k, a .jsonl or .parquet file or a folder")
    question_column: str = flag("question", "what the file calls a question, e.g. problem")
    answer_column: str = flag("answer", "and an answer or its solution: solution, final_answer")
    skip_unusable: bool = flag(False, "train without the rows whose answer no reward can check")
    out_dir: str = flag("", "where the run goes; empty: a fresh numbered folder in runs/")
    seed: int = flag(0, "decides questions, samples and the tiny model", ">= 0")
    resume: bool = flag(False, "go on with the run in --out_dir from its last checkpoint")
    # rollout
    steps: int = flag(435, "rollout steps (7B on GSM8K: 435); 0 evaluates only", ">= 0")
    prompts_per_step: int = flag(256, "P: questions per step, over all processes", ">= 1")
    group_size: int = flag(8, "G: answers per question (GRPO's paper: 64, DAPO's: 16)", ">= 2")
    max_prompt_len: int = flag(512, "tokens; longer questions are dropped and counted", ">= 1")
    max_new_tokens: int = flag(512, "tokens of an answer; longer ones are truncated", ">= 2")
    temperature: float = flag(1.0, "softmax temperature of sampling and every log-prob", ">= 0.01")
    rollout_batch: int = flag(0, "answers sampled at once; 0: what 1/4 of the GPU holds", ">= 0")
    # reward
    reward: str = flag("correct", "names joined by +, e.g. correct+0.5*think_format")
    reward_model: str = flag("", "hub name or folder of what scores with --reward model")
    # the algorithm
    clip_low: float = flag(3e-4, "the answer's ratio is clipped below 1 - this", "> 0, < 1")
    clip_high: float = flag(4e-4, "and above 1 + this", "> 0")
    # optimization
    lr: float = flag(1e-6, "learning rate, constant after warm-up", "> 0")
    lr_warmup: int = flag(0, "optimizer steps of linear warm-up", ">= 0")
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this; 0 never clips", ">= 0")
    minibatches: int = flag(4, "optimizer steps per pass over a rollout (papers: 1 to 16)", ">= 1")
    epochs: int = flag(1, "passes over each rollout", ">= 1")
    micro_tokens: int = flag(16384, "padded tokens per forward pass: bounds memory", ">= 1")
    cold_start: int = flag(0, "supervised steps first, for a model that never answers", ">= 0")
    cold_batch: int = flag(32, "answers in each of these steps", ">= 1")
    cold_start_lr: float = flag(0.0, "their learning rate; 0: 20 x lr", ">= 0")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of the computation; auto: "
        "bfloat16 on GPUs, float32 on CPUs; master weights are float32 always")
    device: str = flag("auto", "cpu, cuda, mps; auto: a GPU, an Apple one only if named")
    gradient_checkpointing: bool = flag(False, "less memory, a third more time")
    # evaluation and files
    eval_every: int = flag(10, "steps between evaluations on held-out questions", ">= 1")
    eval_size: int = flag(256, "held-out questions", ">= 1")
    test_size: int = flag(0, "questions of the test file read once at the end; 0: all", ">= 0")
    save_every: int = flag(50, "steps between checkpoints", ">= 1")
    keep: int = flag(2, "checkpoints kept", ">= 1")
    samples: int = flag(4, "questions whose answers each evaluation keeps; 0: none", ">= 0")
    wandb: str = flag("", "also log to this Weights & Biases project")

    def check(self):
        """Combinations that no single range can refuse. ValueError: one line for the user."""


TINY = dict(  # the built-in run: 0.2M parameters learn word problems on two cores
    data="words", steps=60, prompts_per_step=16, max_prompt_len=128, max_new_tokens=48,
    rollout_batch=512, lr=2e-4, cold_start=600, save_every=20, cold_start_lr=20 * 3e-4,
)


# --- the algorithm -------------------------------------------------------------------------------


def group_advantages(rewards, group_size, eps=1e-6):
    """How much better each answer is than its own group (DeepSeekMath, section 4.1.2).

    rewards: (N,), groups in consecutive rows. Returns (N,) = (R - mean) / (std + eps), with the
    unbiased std; exactly 0 in a group of equal rewards, where float32 rounding of the mean would
    otherwise be blown up by 1/eps. ValueError if `group_size` < 2 or does not divide N.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size {group_size}: must be at least 2 and divide {len(rewards)}")
    if not len(rewards):
        return rewards
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / (groups.std(1, keepdim=True) + eps)
    tied = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return advantages.masked_fill(tied, 0.0).view(-1)


def token_weights(mask, total=None):
    """How much each token counts: 1/N · 1/|o_i|, a mean over answers of means over tokens.

    mask: (N, T). `total` counts the whole minibatch (default: these rows), so that the weights of
    all its micro-batches, on all ranks, sum to 1 and its loss is a plain weighted sum, however it
    is cut. An empty row gets 0. Returns (N, T).
    """
    mask = mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
    total = len(mask) if total is None else total
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / total


def policy_loss(
    logp, old_logp, advantages, mask, weights, clip_low=3e-4, clip_high=4e-4
):
    """The clipped objective, one ratio per answer (GSPO, eq. 5 and 7), to be minimised.

    logp, old_logp, mask, weights: (N, T); advantages: (N,). What lies under mask 0 may be anything,
    NaN too, where the weights are 0. Returns (loss, stats): 0-d tensors, sums over these rows that
    add up to the minibatch's means: `pg_loss`, `clip_frac` (the share whose clipped branch is the
    larger), `approx_kl` (k3 of old || new, per token).
    """
    mask = mask.bool()
    log_ratio = (logp - old_logp).masked_fill(~mask, 0.0)  # before exp: 0 * inf would be NaN
    ratio = (log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).exp()  # (N, 1)
    unclipped = -advantages[:, None] * ratio
    clipped = -advantages[:, None] * ratio.clamp(1 - clip_low, 1 + clip_high)
    # PPO's minimum: -min(x, y) = max(-x, -y), the more pessimistic of the two
    loss = (weights * torch.maximum(unclipped, clipped)).sum()
    stats = {
        "pg_loss": loss.detach(),
        "clip_frac": (weights * (clipped > unclipped)).sum(),
        "approx_kl": (weights * (torch.expm1(log_ratio) - log_ratio)).sum().detach(),
    }
    return loss, stats


# --- the loop ------------------------------------------------------------------------------------


def rollout(sampler, questions, group_size, seed):
    """G answers to each of P questions. Every rank samples its share, then all hold all of them.

    Returns a `common.Batch` of P * G rows, answers of one question consecutive, not yet scored.
    """
    common.seed_all(*seed, common.rank())  # each rank draws its own answers
    questions = common.my_share(questions)
    prompt_ids, prompt_mask = sampler.encode(questions)  # (P, L) each, padded on the left
    # Of 32 answers' first tokens also the log-probs, to compare with those of the update.
    tokens, sampler_logp = sampler.generate(prompt_ids, prompt_mask, group_size, record=32)
    mask = common.response_mask(tokens, sampler.stop_ids)  # (P * G, T), with the end token
    batch = common.Batch(
        questions=[q for q in questions for _ in range(group_size)],
        texts=sampler.decode(tokens, mask),
        prompt_ids=prompt_ids.repeat_interleave(group_size, 0),
        prompt_mask=prompt_mask.repeat_interleave(group_size, 0),
        tokens=tokens,
        mask=mask,
        truncated=sampler.truncated(tokens),
        sampler_logp=sampler_logp,
        group_size=group_size,
    )
    return common.gather(batch, sampler.pad)


def train(cfg):
    """The whole run: sample, score, advantage, update, log; again."""
    run, log, data, policy, sampler = experiment.set_up(cfg, __file__)
    optimizer = run.optimizer(policy, cfg.lr)
    score = experiment.Scorer(cfg)
    experiment.begin(run, log, sampler, data)

    while run.step < cfg.steps and not run.stopping():
        # 1 sample: G answers to each of P questions ----------------------------------------------
        questions = run.next_questions(data.train)
        batch = rollout(sampler, questions, cfg.group_size, seed=(cfg.seed, run.step))

        # 2 score ---------------------------------------------------------------------------------
        batch.rewards, batch.correct = score(batch)  # (N,) each
        log.lap("t_sample")

        # 3 advantage: how much better than its own group -----------------------------------------
        advantages = group_advantages(batch.rewards, cfg.group_size)  # (N,)

        # 4 update: pi_old is fixed, pi_theta moves -----------------------------------------------
        #   step       all N answers to be learned from, whose pi_old is the policy that gave them
        #   minibatch  some of them: one optimizer step
        #   micro      as many as one forward pass holds: their gradients add up to a minibatch's
        minibatches = common.cut(batch, cfg.minibatches, cfg.micro_tokens)
        # Not generate()'s own log-probs: other kernels made those, and the ratio must start at 1.
        on_policy = len(minibatches) * cfg.epochs == 1  # one update: pi_old is pi_theta, no pass
        old_logp = None if on_policy else common.whole_logps(
            policy, batch, minibatches, cfg.temperature)  # (N, T)
        log.lap("t_logp")
        meter = common.Meter()
        for minibatch in minibatches * cfg.epochs:  # the same ones, epoch after epoch
            for micro in minibatch.micros:  # this rank's share of the rows
                # In effect (the head sees answers only, in chunks; entropy is for the log):
                #   logits = policy(prompt and answer).logits, each one place before its token
                #   log_probs = log_softmax(logits / temperature)         over the vocabulary
                #   logp = log_probs[token]        entropy = -sum(exp(log_probs) * log_probs)
                logp, entropy = common.micro_logps(policy, batch, micro, cfg.temperature)
                old = logp.detach() if on_policy else micro.take(old_logp)
                log.note(minibatch, micro, logp=logp, old_logp=old, entropy=entropy)
                weights = token_weights(micro.mask, total=len(minibatch.rows))
                loss, stats = policy_loss(
                    logp, old, micro.take(advantages), micro.mask, weights,
                    cfg.clip_low, cfg.clip_high,
                )
                (loss * common.world()).backward()  # FSDP averages over ranks, we want the sum
                meter.add(**stats, entropy=(weights * entropy).sum())
                # stale weights or shifted positions in the sampler show here and nowhere else:
                meter.gap(micro.take(batch.sampler_logp), old, micro.mask)
            lr = cfg.lr * min(1.0, (run.updates + 1) / max(1, cfg.lr_warmup))  # warm-up
            norm = common.optimizer_step(policy, optimizer, lr, cfg.max_grad_norm)
            meter.step(grad_norm=norm, lr=lr)
            run.updates += 1
        sampler.refresh()
        log.lap("t_update")

        # 5 log, evaluate, save -------------------------------------------------------------------
        run.advance()
        due = run.due(cfg.eval_every)
        evaluation = experiment.evaluate(sampler, data.heldout, cfg.seed) if due else {}
        tied = (advantages.view(-1, cfg.group_size) == 0).all(1).float().mean().item()
        log.add(run.step, batch, advantages, meter, evaluation, tied_frac=tied)
        if run.due(cfg.save_every):
            run.save(sampler)
    experiment.finish(run, log, sampler, data)


if __name__ == "__main__":
    train(experiment.parse_args(Config, TINY))
