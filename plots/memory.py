"""Does a run fit? GB per GPU by part and stage, and disk, from a model's shape: no weights load.

    python plots/memory.py --script grpo --model Qwen2.5-7B --gpus 4 --gb 80
    python plots/memory.py --script ppo --model DIR --critic Qwen2.5-0.5B --micro_tokens 8192
    python plots/memory.py --table                                          the README's table

Takes the script's own flags, so it plans with the defaults of a run. An upper bound: every prompt
and answer is as long as allowed. GB = 1e9 bytes. tests/test_memory.py holds the arithmetic
against what small models really take.
"""
import argparse
import importlib
import itertools
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          AutoModelForTokenClassification, Qwen2Config)

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402

GB = 1e9
RESERVE = 2 * GB  # CUDA context, NCCL, cuBLAS, gaps between the allocator's blocks: an allowance
LOGIT_COPIES = 5  # float32: logits, CE's log_softmax, the entropy's log_softmax, its exp, product
AUTO = {"policy": AutoModelForCausalLM, "critic": AutoModelForTokenClassification,
        "reward model": AutoModelForSequenceClassification}
DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "intermediate_size", "vocab_size", "tie_word_embeddings")
QWEN = {"Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),  # shapes that need no network
        "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
        "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
        "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False)}
MACHINES = [(1, 24), (1, 80), (4, 80), (8, 80)]  # GPUs, GB each


@cache
def shape(name, role="policy"):
    """What the plan needs to know of a model, counted on the meta device: tensors without storage.

    `params` of the whole model, its largest `layer`, what lies `outside` of layers (embedding,
    head, last norm: FSDP gathers them together), the `head`, the largest `weight`; and widths.
    """
    known = QWEN.get(name.removeprefix("Qwen/").removesuffix("-Instruct"))
    try:
        if known and not Path(name).is_dir():
            config = Qwen2Config(**dict(zip(DIMENSIONS, known)), dtype="bfloat16")
        else:
            config = AutoConfig.from_pretrained(common.find_model(name))
        if role != "policy":
            config.num_labels = 1
        with torch.device("meta"):
            model = AUTO[role].from_config(config)
    except (OSError, ValueError, KeyError):
        common.fail(f"{name}: no shape to be had; give a folder with the config.json of a causal "
                    f"LM, or one of {', '.join(QWEN)}")
    sizes = {m: sum(p.numel() for p in m.parameters()) for m in model.modules()}
    layers = [n for m, n in sizes.items() if type(m).__name__ in (model._no_split_modules or ())]
    heads, wide = config.num_attention_heads, getattr(config, "intermediate_size", None)
    if hasattr(config, "num_experts_per_tok"):  # a token meets few of the experts
        wide = config.num_experts_per_tok * getattr(config, "moe_intermediate_size", wide)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return SimpleNamespace(
        params=sizes[model], layer=max(layers), outside=sizes[model] - sum(layers),
        head=sizes[model.get_output_embeddings()] if role == "policy" else 0,
        weight=max(p.numel() for p in model.parameters()), layers=config.num_hidden_layers,
        hidden=config.hidden_size, wide=wide or 4 * config.hidden_size, attention=heads * head_dim,
        kv=2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=config.vocab_size, tied=role == "policy" and bool(config.tie_word_embeddings),
        file_bytes=config.dtype.itemsize if config.dtype else 4)


def models(cfg):
    """({role: shape} of what trains, {role: shape} of what is frozen): one entry a model in use."""
    policy = shape(cfg.model)
    trained, frozen = {"policy": policy}, {}
    if hasattr(cfg, "critic"):
        trained["critic"] = shape(cfg.critic or cfg.model, "critic")
    if getattr(cfg, "beta", 0) or getattr(cfg, "kl_coef", 0):
        frozen["reference"] = policy
    if cfg.reward_model:
        frozen["reward model"] = shape(cfg.reward_model, "reward model")
    return trained, frozen


def compute(cfg, gpus):
    """(bytes of a number in forward passes, does FSDP shard what trains) as in common.py."""
    c = 4 if cfg.dtype == "float32" else 2  # auto: a GPU with native bfloat16
    return c, gpus > 1 or c == 2


def backward(model, cfg, gpus):
    """{part: bytes} of a micro-batch at the fullest of five moments of its backward pass.

    Per token a layer keeps: of each norm a float32 copy, the normalised one and the result; q, k, v
    (repeated to all heads) and the attention's output; four tensors of the MLP; a row of the mask.
    Two more of the MLP's are made before the first of these are freed.
    """
    c, sharded = compute(cfg, gpus)
    row = cfg.max_prompt_len + cfg.max_new_tokens
    rows = math.ceil(cfg.prompts_per_step * cfg.group_size / cfg.minibatches / gpus)
    tokens = max(row, min(cfg.micro_tokens, rows * row))
    norm = (4 + 2 * c) * model.hidden
    layer = 2 * norm + 4 * c * (model.attention + model.wide) + c * row
    kept = model.layers * (c * model.hidden if cfg.gradient_checkpointing else layer)
    again = layer * cfg.gradient_checkpointing + 2 * c * (model.wide + model.hidden)
    answers, most = tokens * cfg.max_new_tokens // row, common.HEAD_FLOATS // model.vocabulary
    logits = min(answers, most) * model.vocabulary * bool(model.head)
    chunks = answers > most  # then gradients of the head add up: the old sum, the new part, the sum
    down = c * model.hidden * model.wide  # gradient of an MLP's last matrix, the first to come
    onward = 4 * model.layer * sharded  # a layer's gradients in float32, on their way to all ranks
    inner, ahead = model.outside + model.layer, model.layer * (gpus > 1)
    moments = [  # numbers gathered by FSDP; bytes of gradients not yet summed, activations, logits
        # 1 the head, once more for a chunk; 2 its gradient; 3 a layer, the next one gathered ahead
        (inner, c * model.head * chunks, tokens * (kept + norm), 4 * LOGIT_COPIES * logits),
        (inner, c * model.head * (1 + 2 * chunks), tokens * (kept + norm), c * logits),
        (inner + ahead, c * model.head * (sharded or model.tied) + down + onward,
         tokens * (kept + again), 0),
        # 4 the embedding, where a tied head's gradient joins; 5 all outside of layers
        (model.outside, c * model.weight * (1 + 2 * model.tied) + onward, 0, 0),
        (0, model.outside * (4 + max(c, 4 / gpus)) * sharded, 0, 0)]
    names = ("gathered weights", "gradients on their way", "activations", "logits")
    return max((dict(zip(names, (c * sharded * gathered, *others)))
                for gathered, *others in moments), key=lambda parts: sum(parts.values()))


def forward(model, c, tokens):
    """Bytes of a pass that keeps nothing: three tensors of an MLP, four of the residual stream."""
    return c * tokens * (3 * model.wide + 4 * model.hidden)


def sampling(model, cfg, gpus):
    """{part: bytes} of the sampler at its fullest: reading prompts, or drawing the last token.

    `rollout_batch` sequences at once on each rank; evaluation reads that many *different* prompts.
    """
    c, _ = compute(cfg, gpus)
    prompts = min(max(1, cfg.rollout_batch // cfg.group_size),
                  math.ceil(cfg.prompts_per_step / gpus))
    evaluated = min(cfg.rollout_batch, math.ceil(cfg.eval_size / gpus))
    rows = max(prompts * cfg.group_size, evaluated)
    read = max(prompts, evaluated) * cfg.max_prompt_len
    token = c * model.kv * (model.layers + 0.5)  # half: keys of one layer are copied as they grow
    # in float32 logits, a copy, their softmax, the noise; and the 32 rows' log-probs on record
    logits = ((c + 16) * rows + 4 * 32) * model.vocabulary
    reading = {"KV cache": token * read, "activations": forward(model, c, read)}
    drawing = {"KV cache": token * rows * (cfg.max_prompt_len + cfg.max_new_tokens),
               "logits": logits}
    return max(reading, drawing, key=lambda parts: sum(parts.values()))


def plan(cfg, gpus):
    """{stage: {part: bytes per GPU}}: a stage needs the sum of its parts, a run its largest stage.

    Gradients are None outside of updates, so they and the KV cache never meet; in an update all of
    them are there, as from its second micro-batch on.
    """
    (c, sharded), (trained, frozen) = compute(cfg, gpus), models(cfg)
    always, gradients = {}, {}
    for role, model in trained.items():
        always[f"{role}, float32"] = 4 * model.params / gpus
        always[f"{role}, Adam's two moments"] = 8 * model.params / gpus
        gradients[f"{role}, float32 gradients"] = 4 * model.params / gpus
    if sharded:  # else the sampler generates with the policy itself
        always["sampler's copy"] = c * trained["policy"].params
    always |= {role: c * model.params for role, model in frozen.items()}  # whole on every rank
    always["CUDA context, allocator"] = RESERVE
    stages = {"sample": sampling(trained["policy"], cfg, gpus)}
    if cfg.reward_model:  # reads 32 answers at once
        tokens = 32 * (cfg.max_prompt_len + cfg.max_new_tokens)
        stages["score"] = {"activations": forward(frozen["reward model"], c, tokens)}
    for role, model in trained.items():
        stages[f"update {role}"] = gradients | backward(model, cfg, gpus)
    # AdamW's square roots: of all tensors at once, but of sharded ones one by one, in two copies
    roots = max(2 * m.weight / gpus if sharded else m.params for m in trained.values())
    stages["AdamW"] = gradients | {"square roots": 4 * roots}
    return {stage: always | parts for stage, parts in stages.items()}


def peak(cfg, gpus):
    """Bytes per GPU of the fullest stage."""
    return max(sum(parts.values()) for parts in plan(cfg, gpus).values())


def disk(cfg):
    """(bytes of a checkpoint, of final/): float32 weights and two moments of all that trains; the
    policy alone in the dtype that it came in."""
    policy, *others = models(cfg)[0].values()
    return sum(12 * m.params for m in (policy, *others)), policy.file_bytes * policy.params


def remedy(cfg, gpus, gb):
    """The flags of the smallest change that makes the plan fit, or None; each is planned anew.

    First what only costs time, then a smaller critic, more GPUs, no reference.
    """
    halves = lambda n, least: [n >> k for k in range(16) if k == 0 or n >> k >= least]  # noqa: E731
    free = {"rollout_batch": halves(cfg.rollout_batch, max(8, cfg.group_size)),
            "micro_tokens": halves(cfg.micro_tokens, cfg.max_prompt_len + cfg.max_new_tokens),
            "gradient_checkpointing": [cfg.gradient_checkpointing, True]}
    free = [{k: v for k, v in zip(free, values) if v != getattr(cfg, k)}
            for values in itertools.product(*free.values())]
    dear = [{"critic": "Qwen2.5-0.5B"}] if hasattr(cfg, "critic") and cfg.model in QWEN else []
    dear += [{"gpus": gpus * 2**k} for k in range(1, 7)]
    dear += [{name: 0} for name in ("beta", "kl_coef") if hasattr(cfg, name)]
    for last, first in itertools.product([{}, *dear], sorted(free, key=len)):
        flags = first | last
        count = flags.pop("gpus", gpus)
        if peak(replace(cfg, **flags), count) <= gb * GB:
            words = [f"--{k}" if v is True else f"--{k} {v}" for k, v in (first | last).items()]
            return " ".join(words)
    return None


def report(script, cfg, gpus, gb):
    """The plan of one run as text; its last line is the verdict."""
    stages, (trained, frozen) = plan(cfg, gpus), models(cfg)
    lines = [f"{script.upper()}, {cfg.model} on {gpus} x {gb:g} GB (1 GB = 1e9 bytes)"]
    lines += [f"  {role:12} {m.params / GB:6.3f} B parameters"
              for role, m in (trained | frozen).items()]
    lines += ["", f"{'GB per GPU':26}" + "".join(f"{stage:>15}" for stage in stages)]
    totals = {stage: parts | {"together": sum(parts.values())} for stage, parts in stages.items()}
    for part in sorted({p: 0 for parts in totals.values() for p in parts}, key="together".__eq__):
        cells = [parts.get(part, 0) / GB for parts in totals.values()]
        lines.append(f"  {part:24}" + "".join(f"{x:15.2f}" if x else " " * 15 for x in cells))
    answers, row = cfg.prompts_per_step * cfg.group_size, cfg.max_prompt_len + cfg.max_new_tokens
    checkpoint, final = (size / GB for size in disk(cfg))
    lines += ["", f"tokens per step: {answers:,} answers x {row:,} = {answers * row:,} at most",
              f"disk: {checkpoint:.1f} GB a checkpoint, {cfg.keep} kept while one more is written; "
              f"final/ {final:.1f} GB", ""]
    if peak(cfg, gpus) <= gb * GB:
        return "\n".join([*lines, f"fits in {gb:g} GB"])
    change = remedy(cfg, gpus, gb)
    return "\n".join([*lines, f"does not fit in {gb:g} GB: "
                      + (f"change {change}" if change else "choose a smaller model")])


def config(script, argv):
    """The script's own Config from its own flags."""
    module = importlib.import_module(script)
    return common.parse_args(module.Config, module.TINY, argv)


def table():
    """The README's markdown table: GB per GPU, struck out where it doesn't fit."""
    lines = ["| | model | " + " | ".join(f"{n}×{gb} GB" for n, gb in MACHINES) + " | checkpoint |",
             "|---|---|" + "---:|" * (len(MACHINES) + 1)]
    for script, critic in (("grpo", ""), ("dapo", ""), ("gspo", ""), ("ppo", "Qwen2.5-0.5B"),
                           ("ppo", "")):
        for name in (name for name in QWEN if name != critic):  # that is the last group's row
            flags = ["--critic", critic] if critic else []
            cfg = config(script, ["--model", name, "--gradient_checkpointing", *flags])
            label = script.upper() + f", critic {critic[8:] or name[8:]}" * (script == "ppo")
            needs = [(peak(cfg, n) / GB, gb) for n, gb in MACHINES]
            cells = [f"{need:.0f}" if need <= gb else f"~~{need:.0f}~~" for need, gb in needs]
            lines.append(f"| {label} | {name[8:]} | {' | '.join(cells)} | {disk(cfg)[0] / GB:.0f} |")
    return "\n".join(lines)


def main(argv=None):
    """Command line -> the plan or the table, printed. A fault: one line and exit status 2."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
        epilog="and every flag of the script: python grpo.py --help")
    parser.error = lambda message: common.fail(f"{message}; --help lists the flags")
    parser.add_argument("--script", choices=("ppo", "grpo", "dapo", "gspo"), default="grpo")
    parser.add_argument("--gpus", type=int, default=1, help="one process each")
    parser.add_argument("--gb", type=float, default=80, help="memory of a GPU")
    parser.add_argument("--table", action="store_true", help="the README's table, nothing else")
    own, flags = parser.parse_known_args(argv)
    if own.table:
        return print(table())
    for name, value in (("gpus", own.gpus), ("gb", own.gb)):
        if not 0 < value < math.inf:
            common.fail(f"--{name} {value}: must be a number > 0")
    cfg = config(own.script, flags)
    if cfg.model in common.BUILTIN:
        common.fail(f"--model {cfg.model} fits anywhere; name another, e.g. --model Qwen2.5-7B")
    print(report(own.script, cfg, own.gpus, own.gb))


if __name__ == "__main__":
    main()
