"""One small batch from text to loss, every number printed: to project, and to check by hand.

    python plots/trace.py grpo          (or dapo, gspo, ppo)

The functions are the script's own. The answers are written by hand; log-probs and values are drawn
once and rounded, so that a pocket calculator gets the same. Every loss here is a plain sum of
weight x term, so a term is printed as what it is: the derivative of the loss by its weight.
"""

import importlib
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
import experiment  # noqa: E402

QUESTIONS = [  # question, gold, three answers; | stands for a line break, . for the end token
    ("Ana has 5 eggs, buys 2. How many now?", "7", ("5+2=7|#### 7.", "#### 3.", "5+2=7|wait.")),
    ("Leo has 9 cakes, eats 4. How many now?", "5", ("#### 13.", "#### 6.", "9-4=6|9-4=6|")),
]
GROUP, LIMIT, BUFFER = 3, 12, 4  # --group_size, --max_new_tokens, --overlong_buffer
FORMATS = {  # heading -> width, decimals; together at most 80 columns
    **dict.fromkeys(("old", "new", "ref", "V", "V_new"), (7, 3)), "clip": (5, 0), "KL": (8, 5),
    "new - old": (11, 5)}


def make_batch(cfg, answers):
    """The first `answers` answers to each question: a scored `common.Batch`, its tokens' names."""
    rows = [(experiment.Question(question, "", gold), text)
            for question, gold, texts in QUESTIONS for text in texts[:answers]]
    tokenizer = experiment._tiny_tokenizer()
    texts = [text.replace("|", "\n").removesuffix(".") for _, text in rows]
    ids = [tokenizer(text).input_ids + [tokenizer.eos_token_id] * row[1].endswith(".")
           for text, row in zip(texts, rows)]
    tokens = common.pad_cat([torch.tensor([row]) for row in ids], tokenizer.pad_token_id)
    mask = common.response_mask(tokens, [tokenizer.eos_token_id])
    batch = common.Batch([row[0] for row in rows], texts, None, None, tokens, mask)
    batch.rewards, batch.correct = (x.double() for x in experiment.Scorer(cfg)(batch))
    names = [tokenizer.convert_ids_to_tokens(row) for row in tokens.tolist()]
    return batch, [[{"\n": "\\n", " ": "_"}.get(name, name) for name in row] for row in names]


def near(base, spread, seed, decimals=3):
    """A tensor of `base` plus noise, rounded."""
    noise = torch.randn(base.shape, generator=torch.manual_seed(seed))
    return (base + spread * noise.double()).round(decimals=decimals)


def derivative(total, weights):
    """(N, T): by how much each weight moves a weighted sum, that is, what it is multiplied by."""
    return torch.autograd.grad(total, weights, retain_graph=True)[0].detach()


def show_title(text):
    """A heading as wide as the screen."""
    print(f"\n{text} ".ljust(80, "-"))


def show_text(batch, names):
    """Questions, answers, tokens, mask."""
    show_title("1 TEXT, TOKENS, MASK: 1 up to <eos>, which an answer that was cut lacks")
    for row, text in enumerate(batch.texts):
        question = batch.questions[row]
        if row == 0 or question.question != batch.questions[row - 1].question:
            print(f"{question.question}   gold {question.gold}")
        print(f"answer {row + 1}: {text!r}")
        print("  token" + "".join(f"{name[:5]:>6}" for name in names[row]))
        print("  mask " + "".join(f"{bit:6}" for bit in batch.mask[row].tolist()))


def show_tokens(names, mask, columns):
    """A line a token: its name, then the columns {heading: (N, T)}; yes or - for a boolean."""
    formats = [(name, x, *FORMATS.get(name, (9, 5))) for name, x in columns.items()]
    for row, tokens in enumerate(names):
        print(f"answer {tokens[-1]}" + "".join(f"{name:>{w}}" for name, _, w, _ in formats))
        for t in range(int(mask[row].sum())):
            line = f"  {tokens[t]:6}"
            for name, x, width, decimals in formats:
                cell = x[row, t].item()
                text = ("yes" if cell else "-") if name == "clip" else f"{cell:.{decimals}f}"
                line += f"{text:>{width}}"
            print(line.replace("-0.00000", " 0.00000"))


def show_rows(columns, kept):
    """A line an answer: the columns {heading: (N,)}, and whether its group is trained on."""
    print("answer" + "".join(f"{name:>9}" for name in columns))
    for row, keep in enumerate(kept.tolist()):
        cells = "".join(f"{column[row].item():9.5g}" for column in columns.values())
        print(f"{row + 1:6}{cells}" + ("" if keep else "   dropped"))


def advantages_of(module, batch):
    """Score, DAPO's shaping and filter, group statistics -> (advantages, kept), each (N,)."""
    show_title("2 REWARD, 3 ADVANTAGE = (R - mean) / (std + 1e-6), 0 in an equal group")
    columns, rewards = {"length": batch.mask.sum(1)}, batch.rewards
    kept = torch.ones(len(batch), dtype=torch.bool)
    if module.__name__ == "dapo":
        print("R = +1 or -1 + overlong; a group is kept if some but not all answers are right")
        penalty = module.soft_overlong_penalty(columns["length"].double(), LIMIT, BUFFER)
        columns |= {"correct": batch.correct, "overlong": penalty}
        rewards = rewards + batch.correct - 1 + penalty
        kept = module.keep_group(batch.correct.view(-1, GROUP)).repeat_interleave(GROUP)
    groups, advantages = rewards.view(-1, GROUP), module.group_advantages(rewards, GROUP)
    mean, std = (x.repeat_interleave(GROUP) for x in (groups.mean(1), groups.std(1)))
    show_rows(columns | {"R": rewards, "mean": mean, "std": std, "A": advantages}, kept)
    return advantages, kept


def show_sum(name, terms, weights, loss, stats):
    """The printed products added up, beside the script's own loss and statistics."""
    total = (weights * terms).sum().item()
    print(f"sum of w = {weights.sum():.6f}, sum of w x term = {total:.6f}\n{name} = {loss:.6f}")
    print("   " + ", ".join(f"{key} {value.item():.4g}" for key, value in stats.items()))
    assert abs(total - loss.item()) < 1e-12, "the numbers do not add up"


def trace_groups(module, cfg):
    """GRPO, DAPO and GSPO: one advantage an answer."""
    batch, names = make_batch(cfg, GROUP)
    show_text(batch, names)
    advantages, kept = advantages_of(module, batch)
    names = [row + [str(i + 1)] for i, row in enumerate(names) if kept[i]]
    advantages, mask = advantages[kept], batch.mask[kept]
    old = near(torch.full(mask.shape, -1.0).double(), 0.3, 1)
    new = near(old, -1.2e-3, 2, 5) if module.__name__ == "gspo" else near(old, 0.2, 2)
    weights = module.token_weights(mask.double()).requires_grad_()
    ratio, formula, extra = (new - old).exp(), "exp(new - old)", ""
    columns = {"old": old, "new": new, "ratio": ratio}
    if module.__name__ == "gspo":
        formula = "exp(mean of new - old), one an answer"
        ratio = (((new - old) * mask).sum(1, True) / mask.sum(1, True)).exp().expand_as(new)
        columns = {"old": old, "new - old": new - old, "ratio": ratio}
    if module.__name__ == "grpo":
        ref, low, high = near(old, 0.1, 3), cfg.clip_eps, cfg.clip_eps
        clips, extra = dict(clip_eps=low, ref_logp=ref, beta=cfg.beta), f" + {cfg.beta:g} KL"
        columns = {"old": old, "new": new, "ref": ref, "ratio": ratio, "KL": module.kl_k3(new, ref)}
    else:
        low, high = cfg.clip_low, cfg.clip_high
        clips = dict(clip_low=low, clip_high=high)
    loss, stats = module.policy_loss(new, old, advantages, mask, weights, **clips)
    w, terms = weights.detach(), derivative(loss, weights)
    columns |= {"clip": derivative(stats["clip_frac"], weights) > 0, "term": terms,
                "weight": w, "w x term": w * terms}
    show_title(f"4 LOSS: ratio = {formula}")
    print(f"term = max(-A ratio, -A clip(ratio, {1 - low:g}, {1 + high:g})){extra}")
    show_tokens(names, mask, columns)
    show_sum("policy_loss", terms, w, loss, stats)


def trace_ppo(module, cfg):
    """PPO: a reward, a value and an advantage for every token."""
    batch, names = make_batch(cfg, 1)
    show_text(batch, names)
    names, mask = [row + [str(i + 1)] for i, row in enumerate(names)], batch.mask
    old = near(torch.full(mask.shape, -1.0).double(), 0.3, 1)
    new, ref = near(old, 0.2, 2), near(old, 0.1, 3)
    values = near(torch.full(mask.shape, 0.5).double(), 0.15, 4)
    new_values = near(values, 0.15, 5)
    show_title(f"2 REWARD = -{cfg.kl_coef:g} (old - ref), + the score on the last token; 3 GAE")
    print(f"scores: {batch.rewards.tolist()}    delta = reward + {cfg.gamma:g} V_next - V, "
          f"A = delta + {cfg.gamma * cfg.lam:g} A_next")
    rewards = module.token_rewards(batch.rewards, old, ref, mask, cfg.kl_coef)
    advantages, returns = module.gae(rewards, values, mask, cfg.gamma, cfg.lam)
    white = module.whiten(advantages, mask)
    show_tokens(names, mask, {"old": old, "ref": ref, "reward": rewards, "V": values,
                              "A": advantages, "A + V": returns, "whitened": white})
    weights = module.token_weights(mask.double()).requires_grad_()
    loss, stats = module.policy_loss(new, old, white, mask, weights, cfg.clip_eps)
    v_loss, v_stats = module.value_loss(new_values, values, returns, mask, weights, cfg.value_clip)
    w, terms, v_terms = weights.detach(), derivative(loss, weights), derivative(v_loss, weights)
    show_title("4 POLICY LOSS: ratio = exp(new - old), A whitened")
    print(f"term = max(-A ratio, -A clip(ratio, {1 - cfg.clip_eps:g}, {1 + cfg.clip_eps:g}))")
    show_tokens(names, mask, {"old": old, "new": new, "A": white, "ratio": (new - old).exp(),
                              "clip": derivative(stats["clip_frac"], weights) > 0,
                              "term": terms, "weight": w, "w x term": w * terms})
    show_sum("policy_loss", terms, w, loss, stats)
    show_title("5 VALUE LOSS: term = half the larger of (V_new - G)^2 and (near - G)^2")
    print(f"G = A + V, near = V_new clipped to V +- {cfg.value_clip:g}")
    show_tokens(names, mask, {"V": values, "V_new": new_values, "G": returns, "term": v_terms,
                              "weight": w, "w x term": w * v_terms})
    show_sum("value_loss", v_terms, w, v_loss, v_stats)


def main(argv=None):
    """Trace the script that is named; a mistake is one line and exit status 2."""
    argv = argv or sys.argv[1:]
    if argv in (["--help"], ["-h"]):
        return print(__doc__.strip())
    if argv not in [["grpo"], ["dapo"], ["gspo"], ["ppo"]]:
        common.fail(f"trace.py {' '.join(argv)}: name one of grpo, dapo, gspo, ppo")
    module = importlib.import_module(argv[0])
    cfg = module.Config(**module.TINY)
    print(f"{argv[0].upper()}, one batch from text to loss")
    (trace_ppo if argv[0] == "ppo" else trace_groups)(module, cfg)


if __name__ == "__main__":
    main()
