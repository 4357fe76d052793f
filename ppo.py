"""PPO: Proximal Policy Optimization (arXiv 1707.06347) as RLHF uses it (InstructGPT, 2203.02155).

One answer per question, and a critic that learns what to expect at every token. The KL to the
reference is part of the reward, token by token; an answer's score comes on its last token:

    R_t    = -beta log(pi_old / pi_ref)_t  + score on the last token     pi_ref: where we started
    delta_t = R_t + gamma V_t+1 - V_t     A_t = delta_t + gamma lambda A_t+1     (GAE), V_end = 0
    loss   = mean over tokens of max(-A_t r_t, -A_t clip(r_t, 1-eps, 1+eps))  with A_t whitened
    value  = mean over tokens of 1/2 max((V - G)^2, (clip(V, V_old -+ eps) - G)^2),  G = A + V_old

Four models: policy, critic, reference, and a reward model unless a rule scores.

    python ppo.py                                                 a laptop: no download, 2 minutes
    python ppo.py --model Qwen2.5-0.5B                            one GPU, on GSM8K
    torchrun --nproc_per_node 8 ppo.py --model Qwen2.5-7B --gradient_checkpointing
"""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForTokenClassification

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
    group_size: int = flag(1, "G: answers per question (GRPO's paper: 64, DAPO's: 16)", ">= 1")
    max_prompt_len: int = flag(512, "tokens; longer questions are dropped and counted", ">= 1")
    max_new_tokens: int = flag(512, "tokens of an answer; longer ones are truncated", ">= 2")
    temperature: float = flag(1.0, "softmax temperature of sampling and every log-prob", ">= 0.01")
    rollout_batch: int = flag(0, "answers sampled at once; 0: what 1/4 of the GPU holds", ">= 0")
    # reward
    reward: str = flag("correct", "names joined by +, e.g. correct+0.5*think_format")
    reward_model: str = flag("", "hub name or folder of what scores with --reward model")
    # the algorithm
    clip_eps: float = flag(0.2, "clip range of the ratio, 1 - eps to 1 + eps", "> 0, < 1")
    kl_coef: float = flag(0.001, "weight of the KL in the reward (InstructGPT: 0.02)", ">= 0")
    kl_target: float = flag(0.0, "KL per token that the weight is steered to; 0: fixed", ">= 0")
    kl_horizon: int = flag(10000, "answers over which the weight adapts", ">= 1")
    gamma: float = flag(1.0, "discount per token", ">= 0, <= 1")
    lam: float = flag(1.0, "GAE's lambda; at 0.95 a reward fades to 4e-12 over 511 tokens, so "
        "less than 1 is for short answers only", ">= 0, <= 1")
    bootstrap: bool = flag(False, "a truncated answer also earns gamma V of where it was cut")
    critic: str = flag("", "hub name or folder of the value model; empty: like the policy")
    critic_lr: float = flag(1e-5, "the critic's learning rate, ten times the policy's", "> 0")
    value_clip: float = flag(0.2, "clip range of the value around its old one", "> 0")
    entropy_coef: float = flag(0.0, "weight of an entropy bonus (none in RLHF)", ">= 0")
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
        if self.kl_target and not self.kl_coef:
            raise ValueError("--kl_target steers --kl_coef, which is 0: give it a start, e.g. 0.01")


TINY = dict(  # the built-in run: 0.2M parameters learn word problems on two cores
    data="words", steps=60, prompts_per_step=128, max_prompt_len=128, max_new_tokens=48,
    rollout_batch=512, lr=3e-4, cold_start=600, save_every=20,
    kl_coef=0.01, lam=0.95, critic_lr=1e-3,
)


# --- the algorithm -------------------------------------------------------------------------------


def token_rewards(scores, logp, ref_logp, mask, kl_coef):
    """The reward of each token (InstructGPT, eq. 2): the KL everywhere, the score at the end.

    scores: (N,); logp, ref_logp, mask: (N, T). Returns (N, T) = -kl_coef * (logp - ref_logp), plus
    the score on the last response token (the end token, or where the answer was cut); 0 outside
    the mask. This KL is k1: as part of a reward its policy gradient is the KL's own.
    """
    mask = mask.bool()
    rewards = -kl_coef * (logp - ref_logp).masked_fill(~mask, 0.0)
    after = mask.sum(1, keepdim=True)
    last = torch.arange(1, mask.shape[1] + 1, device=mask.device) == after  # (N, T)
    return rewards + scores[:, None] * last


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16), nothing after the last token.

    rewards, values, mask: (N, T); values[:, t] is V of the state *before* token t.
    Returns (advantages, returns), each (N, T), 0 outside the mask, not whitened:
    A_t = delta_t + gamma lam A_t+1 with delta_t = R_t + gamma V_t+1 - V_t, and returns = A + V.
    An answer that was cut is treated as ended, as one that ended is.
    """
    mask = mask.bool()
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(x, mask):
    """(x - mean) / sqrt(var + 1e-8) over all unmasked cells, unbiased variance; 0 elsewhere.

    x, mask: (N, T), of the whole rollout on all ranks. Returns (N, T); 0 for a single cell.
    """
    mask = mask.bool()
    cells = x[mask]
    if len(cells) < 2:
        return torch.zeros_like(x)
    white = (x - cells.mean()) / (cells.var() + 1e-8).sqrt()
    return white.masked_fill(~mask, 0.0)


def token_weights(mask, total=None):
    """How much each token counts: 1 / sum_i |o_i|, a mean over all tokens.

    mask: (N, T). `total` counts the whole minibatch (default: these rows), so that the weights of
    all its micro-batches, on all ranks, sum to 1 and its loss is a plain weighted sum, however it
    is cut. An empty row gets 0. Returns (N, T).
    """
    mask = mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
    return mask / max(mask.sum() if total is None else total, 1)


def policy_loss(
    logp, old_logp, advantages, mask, weights, clip_eps=0.2
):
    """The clipped objective (PPO, eq. 7), to be minimised.

    logp, old_logp, advantages, mask, weights: (N, T). What lies under mask 0 may be anything,
    NaN too, where the weights are 0. Returns (loss, stats): 0-d tensors, sums over these rows that
    add up to the minibatch's means: `pg_loss`, `clip_frac` (the share whose clipped branch is the
    larger), `approx_kl` (k3 of old || new, per token).
    """
    mask = mask.bool()
    log_ratio = (logp - old_logp).masked_fill(~mask, 0.0)  # before exp: 0 * inf would be NaN
    ratio = log_ratio.exp()  # (N, T)
    advantages = advantages.masked_fill(~mask, 0.0)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    # PPO's minimum: -min(x, y) = max(-x, -y), the more pessimistic of the two
    loss = (weights * torch.maximum(unclipped, clipped)).sum()
    stats = {
        "pg_loss": loss.detach(),
        "clip_frac": (weights * (clipped > unclipped)).sum(),
        "approx_kl": (weights * (torch.expm1(log_ratio) - log_ratio)).sum().detach(),
    }
    return loss, stats


def value_loss(values, old_values, returns, mask, weights, clip_eps=0.2):
    """Half the squared error, clipped around the old value (InstructGPT's and its peers' code).

    All (N, T), garbage under mask 0. Returns (loss, stats) like `policy_loss`: `value_loss`, and
    `value_clip_frac` (tokens whose clipped branch is the larger).
    """
    mask = mask.bool()
    values, old_values, returns = (
        x.masked_fill(~mask, 0.0) for x in (values, old_values, returns)
    )
    near = torch.minimum(torch.maximum(values, old_values - clip_eps), old_values + clip_eps)
    unclipped, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss = 0.5 * (weights * torch.maximum(unclipped, clipped)).sum()
    stats = {
        "value_loss": loss.detach(),
        "value_clip_frac": (weights * (clipped > unclipped)).sum(),
    }
    return loss, stats


def answer_means(x, mask):
    """Each answer's mean over its tokens: (N, T) -> (N,)."""
    return (x * mask).sum(1) / mask.sum(1)


def explained_variance(values, returns, mask):
    """1 - var(returns - values) / var(returns) over the mask, a float: 1 is perfect, 0 is no better
    than a constant; None where all returns are equal."""
    mask = mask.bool()
    spread = returns[mask].var()
    return (1 - (returns - values)[mask].var() / spread).item() if spread > 0 else None


# --- the critic ----------------------------------------------------------------------------------


def load_critic(run, tokenizer, cfg):
    """A value model of its own size, one number per position, (N, L, 1), zero at the start: from
    the checkpoint, else --critic, else where the policy started."""
    path = experiment.find_model(cfg.critic, "critic") if cfg.critic else run.start
    if common.load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        common.fail(f"--critic {cfg.critic}: its tokenizer is not the policy's; name a relative")
    path = run.checkpoint / "critic" if run.checkpoint else path
    critic = common.from_pretrained(AutoModelForTokenClassification, path, num_labels=1)
    if not run.checkpoint:
        for parameter in (getattr(critic, "score", None) or critic.classifier).parameters():
            torch.nn.init.zeros_(parameter)
    return common.trainable(critic, cfg.dtype, cfg.gradient_checkpointing)


def micro_values(critic, batch, micro, after=False):
    """(n, micro.response_len) values of the states before (or `after`) each response token.

    V_t is read where token t is predicted, one position to the left of the token itself.
    """
    ids, mask = common.micro_input(batch, micro)
    known = len(critic.get_input_embeddings().weight)  # a policy of its family may have more rows
    ids, place = ids.clamp(max=known - 1), common.positions(mask)
    out = critic(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False)
    end = out.logits.shape[1] - (not after)
    values = out.logits[:, end - micro.response_len : end, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
    reference = common.load_frozen(run.start, cfg.dtype) if cfg.kl_coef > 0 else None  # pi_ref
    critic = load_critic(run, sampler.tokenizer, cfg)
    optimizer = run.optimizer(policy, cfg.lr)
    critic_optimizer = run.optimizer(critic, cfg.critic_lr, "critic_optimizer")
    score = experiment.Scorer(cfg)
    kl_coef = run.kept.get("kl_coef", cfg.kl_coef)
    experiment.begin(run, log, sampler, data)

    while run.step < cfg.steps and not run.stopping():
        # 1 sample: G answers to each of P questions ----------------------------------------------
        questions = run.next_questions(data.train)
        batch = rollout(sampler, questions, cfg.group_size, seed=(cfg.seed, run.step))

        # 2 score ---------------------------------------------------------------------------------
        batch.rewards, batch.correct = score(batch)  # (N,) each
        log.lap("t_sample")

        # 3 advantage: how much better than the critic expected, token by token --------------------
        minibatches = common.cut(batch, cfg.minibatches, cfg.micro_tokens)
        # Not generate()'s own log-probs: other kernels made those, and the ratio must start at 1.
        old_logp = common.whole_logps(policy, batch, minibatches, cfg.temperature)  # (N, T)
        ref_logp = old_logp if reference is None else common.whole_logps(
            reference, batch, minibatches, cfg.temperature)
        old_values = common.whole(micro_values, critic, batch, minibatches)
        kl = answer_means(old_logp - ref_logp, batch.mask).mean().item()  # nats per token
        scores = batch.rewards
        if cfg.bootstrap:  # e.g. cut with score 0 where the critic still expects 0.6: earns 0.6
            ends = common.whole(micro_values, critic, batch, minibatches, after=True)
            last = ends.gather(1, batch.mask.sum(1, keepdim=True) - 1)[:, 0]
            scores = scores + cfg.gamma * last * batch.truncated
        rewards = token_rewards(scores, old_logp, ref_logp, batch.mask, kl_coef)
        advantages, returns = gae(rewards, old_values, batch.mask, cfg.gamma, cfg.lam)
        advantages = whiten(advantages, batch.mask)  # over the tokens of all ranks
        log.lap("t_logp")

        # 4 update: pi_old is fixed, pi_theta and the critic move ---------------------------------
        #   step       all N answers to be learned from, whose pi_old is the policy that gave them
        #   minibatch  some of them: one optimizer step
        #   micro      as many as one forward pass holds: their gradients add up to a minibatch's
        meter = common.Meter()
        for minibatch in minibatches * cfg.epochs:  # the same ones, epoch after epoch
            for micro in minibatch.micros:  # this rank's share of the rows
                # In effect (the head sees answers only, in chunks):
                #   logits = policy(prompt and answer).logits, each one place before its token
                #   log_probs = log_softmax(logits / temperature)         over the vocabulary
                #   logp = log_probs[token]        entropy = -sum(exp(log_probs) * log_probs)
                wanted = "grad" if cfg.entropy_coef else "value"
                logp, entropy = common.micro_logps(policy, batch, micro, cfg.temperature, wanted)
                old = micro.take(old_logp)
                log.note(
                    minibatch, micro, logp=logp, old_logp=old, entropy=entropy,
                    ref_logp=micro.take(ref_logp) if reference else None,
                    values=micro.take(old_values), token_rewards=micro.take(rewards),
                    advantages=micro.take(advantages),
                )
                weights = token_weights(micro.mask, total=minibatch.tokens)
                loss, stats = policy_loss(
                    logp, old, micro.take(advantages), micro.mask, weights, cfg.clip_eps
                )
                entropy = (weights * entropy).sum()
                loss = loss - cfg.entropy_coef * entropy
                (loss * common.world()).backward()  # FSDP averages over ranks, we want the sum
                values = micro_values(critic, batch, micro)
                v_loss, v_stats = value_loss(
                    values, micro.take(old_values), micro.take(returns), micro.mask, weights,
                    cfg.value_clip,
                )
                (v_loss * common.world()).backward()
                meter.add(**stats, value_loss=v_stats["value_loss"], entropy=entropy)
                # stale weights or shifted positions in the sampler show here and nowhere else:
                meter.gap(micro.take(batch.sampler_logp), old, micro.mask)
            warm = min(1.0, (run.updates + 1) / max(1, cfg.lr_warmup))  # linear warm-up
            lr = cfg.lr * warm
            norm = common.optimizer_step(policy, optimizer, lr, cfg.max_grad_norm)
            common.optimizer_step(
                critic, critic_optimizer, cfg.critic_lr * warm, cfg.max_grad_norm)
            meter.step(grad_norm=norm, lr=lr)
            run.updates += 1
        sampler.refresh()
        log.lap("t_update")

        # 5 log, evaluate, save -------------------------------------------------------------------
        run.advance()
        due = run.due(cfg.eval_every)
        evaluation = experiment.evaluate(sampler, data.heldout, cfg.seed) if due else {}
        log.add(
            run.step, batch, answer_means(advantages, batch.mask), meter, evaluation,
            ref_kl=kl if reference else None, kl_coef=kl_coef,
            explained_var=explained_variance(old_values, returns, batch.mask),
        )
        if cfg.kl_target:
            error = min(max(kl / cfg.kl_target - 1, -0.2), 0.2)
            kl_coef *= 1 + error * len(batch) / cfg.kl_horizon
            run.kept["kl_coef"] = kl_coef
        if run.due(cfg.save_every):
            run.save(sampler)
    experiment.finish(run, log, sampler, data)


if __name__ == "__main__":
    train(experiment.parse_args(Config, TINY))
