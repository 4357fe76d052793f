"""Does a run fit? GB per GPU by part and stage, and disk, from a model's shape: no weights load.

    python plots/memory.py --script dapo --model Qwen2.5-1.5B --gpus 1 --gb 80
    python plots/memory.py --table                        the table of plots/README.md

Takes every flag of the script, so it plans with the defaults of a run. An upper bound: all prompts
and answers are as long as allowed. tests/test_memory.py holds it against what small models take.
"""
import argparse
import importlib
import itertools
import sys
from dataclasses import replace
from functools import cache
from math import ceil, inf
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
import experiment  # noqa: E402

GB = 1e9  # bytes
RESERVE = 2 * GB  # CUDA context, NCCL, cuBLAS, gaps between the allocator's blocks: an allowance
LOGIT_COPIES = 4  # float32: logits, their log_softmax, its exp, the product of both
KEYS = ("hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
        "vocab_size tie_word_embeddings").split()
QWEN = {"Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),  # shapes that need no network
        "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
        "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
        "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False)}


@cache
def shape(name, task="CausalLM"):
    """A model's size, counted on the meta device, where tensors have no storage: numbers in all
    (`params`), in a `layer`, `outside` of layers (embedding, head, last norm: FSDP gathers them
    together), in the `head`, in the largest `weight`; and the widths that a token takes."""
    known = QWEN.get(name.removeprefix("Qwen/").removesuffix("-Instruct"))
    try:
        if known and not Path(name).is_dir():
            config = transformers.Qwen2Config(**dict(zip(KEYS, known)), dtype="bfloat16")
        else:
            path = experiment.find_model(name)
            config = common.from_pretrained(transformers.AutoConfig, path)
        config.num_labels = 1
        with torch.device("meta"):
            model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    except (OSError, ValueError, KeyError):
        common.fail(f"{name}: can't be had; give a causal LM's folder or one of {', '.join(QWEN)}")
    sizes = {m: sum(p.numel() for p in m.parameters()) for m in model.modules()}
    layers = [n for m, n in sizes.items() if type(m).__name__ in model._no_split_modules]
    get = lambda key, default: getattr(config, key, None) or default  # noqa: E731
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim, wide = get("head_dim", hidden // heads), get("intermediate_size", 4 * hidden)
    return SimpleNamespace(
        params=sizes[model], layer=max(layers), outside=sizes[model] - sum(layers),
        head=sizes[model.get_output_embeddings()] if task == "CausalLM" else 0,
        weight=max(p.numel() for p in model.parameters()), layers=config.num_hidden_layers,
        hidden=hidden, vocabulary=config.vocab_size, attention=heads * head_dim,
        wide=get("moe_intermediate_size", wide) * get("num_experts_per_tok", 1),
        kv=2 * get("num_key_value_heads", heads) * head_dim,
        tied=task == "CausalLM" and config.tie_word_embeddings,
        file_bytes=get("dtype", torch.float32).itemsize)


def models(cfg):
    """({role: shape} of what trains, {role: shape} of what is frozen)."""
    trained, frozen = {"policy": shape(cfg.model)}, {}
    if hasattr(cfg, "critic"):
        trained["critic"] = shape(cfg.critic or cfg.model, "TokenClassification")
    if getattr(cfg, "beta", 0) or getattr(cfg, "kl_coef", 0):
        frozen["reference"] = trained["policy"]
    if cfg.reward_model:
        frozen["reward model"] = shape(cfg.reward_model, "SequenceClassification")
    return trained, frozen


def fullest(moments):
    """The {part: bytes} of the largest sum."""
    return max(moments, key=lambda parts: sum(parts.values()))


def backward(model, cfg, gpus, c, sharded):
    """{part: bytes} of a micro-batch at the fullest of five moments of its backward pass.

    Per token a layer keeps: of each norm a float32 copy, the normalised one and the result; q, k, v
    (repeated to all heads) and the attention's output; four tensors of the MLP; a row of the mask.
    Two more of the MLP's are made before the first of these are freed. A prompt that rows share
    runs once (for sure on one GPU only; not with checkpointing, nor in a critic), its keys and
    values are copied to each.
    """
    row = cfg.max_prompt_len + cfg.max_new_tokens
    rows = ceil(cfg.prompts_per_step * cfg.group_size / cfg.minibatches / gpus)
    rows = max(1, min(cfg.micro_tokens / row, rows))
    once = model.head and not cfg.gradient_checkpointing and gpus == 1
    prompts = min(rows, ceil(cfg.prompts_per_step / cfg.minibatches)) if once else rows
    tokens = rows * cfg.max_new_tokens + prompts * cfg.max_prompt_len
    lent = (rows - prompts) * cfg.max_prompt_len * 2 * c * model.attention
    norm = (4 + 2 * c) * model.hidden
    layer = 2 * norm + 4 * c * (model.attention + model.wide) + c * row
    kept = model.layers * (c * model.hidden if cfg.gradient_checkpointing else
                           layer + lent / tokens)
    again = layer * cfg.gradient_checkpointing + 2 * c * (model.wide + model.hidden)
    answers, most = rows * cfg.max_new_tokens, common.HEAD_FLOATS // model.vocabulary
    chunks = answers > most  # then gradients of the head add up: the old sum, the new part, the sum
    logits = (most // 4 if chunks else answers) * model.vocabulary * bool(model.head)
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
    return fullest(dict(zip(names, (c * sharded * first, *rest))) for first, *rest in moments)


def sampling(model, cfg, gpus, c):
    """{part: bytes} of the sampler with `rollout_batch` sequences on each rank: reading prompts (as
    many different ones in an evaluation) or drawing the last token."""
    prompts = min(max(1, cfg.rollout_batch // cfg.group_size), ceil(cfg.prompts_per_step / gpus))
    evaluated = min(cfg.rollout_batch, ceil(cfg.eval_size / gpus))
    rows = max(prompts * cfg.group_size, evaluated)
    read = max(prompts, evaluated) * cfg.max_prompt_len
    token = c * model.kv * (model.layers + 0.5)  # half: keys of one layer are copied as they grow
    return fullest([  # three tensors of an MLP, four of the residual stream, none kept; or logits,
        # in float32 again, a copy, their softmax, the noise, 32 rows whose log-probs are recorded
        {"KV cache": token * read, "activations": c * read * (3 * model.wide + 4 * model.hidden)},
        {"KV cache": token * rows * (cfg.max_prompt_len + cfg.max_new_tokens),
         "logits": ((c + 16) * rows + 4 * 32) * model.vocabulary}])


def plan(cfg, gpus):
    """{stage: {part: bytes per GPU}}: a stage needs the sum of its parts, a run its largest stage.

    Gradients are None while sampling, so they and the KV cache never meet. Frozen models are whole
    on every rank (shards would spare 7B on 4 GPUs 11 GB); their passes need less than an update.
    """
    c = 4 if cfg.dtype == "float32" else 2  # bytes in forward passes; auto: native bfloat16
    sharded = gpus > 1 or c == 2  # by FSDP, as common.py decides
    always, gradients, (trained, frozen) = {}, {}, models(cfg)
    for role, model in trained.items():
        always[f"{role}, float32"] = 4 * model.params / gpus
        always[f"{role}, Adam's two moments"] = 8 * model.params / gpus
        gradients[f"{role}, float32 gradients"] = 4 * model.params / gpus
    if sharded:  # else the sampler generates with the policy itself
        always["sampler's copy"] = c * trained["policy"].params
    always |= {role: c * model.params for role, model in frozen.items()}
    always["CUDA context, allocator"] = RESERVE
    stages = {"sample": sampling(trained["policy"], cfg, gpus, c)}
    for role, model in trained.items():
        stages[f"update {role}"] = gradients | backward(model, cfg, gpus, c, sharded)
    # AdamW's square roots: of all tensors at once, but of sharded ones one by one, in two copies
    roots = max(2 * m.weight / gpus if sharded else m.params for m in trained.values())
    stages["AdamW"] = gradients | {"square roots": 4 * roots}
    return {stage: always | parts for stage, parts in stages.items()}


def peak(cfg, gpus):
    """GB per GPU of the fullest stage."""
    return sum(fullest(plan(cfg, gpus).values()).values()) / GB


def disk(cfg):
    """GB of (a checkpoint: float32 weights and moments of all that trains; final/: the policy)."""
    trained, policy = models(cfg)[0].values(), shape(cfg.model)
    return sum(12 * m.params for m in trained) / GB, policy.file_bytes * policy.params / GB


def remedy(cfg, gpus, gb):
    """The flags of the smallest change that makes the plan fit, each planned anew, or None: first
    what only costs time, then a smaller critic, more GPUs, no reference."""
    halves = lambda n, least: [n >> k for k in range(16) if k == 0 or n >> k >= least]  # noqa: E731
    free = {"rollout_batch": halves(cfg.rollout_batch, max(8, cfg.group_size)),
            "micro_tokens": halves(cfg.micro_tokens, cfg.max_prompt_len + cfg.max_new_tokens),
            "gradient_checkpointing": [cfg.gradient_checkpointing, True]}
    free = [{k: v for k, v in zip(free, values) if v != getattr(cfg, k)}
            for values in itertools.product(*free.values())]
    smaller = {"critic": "Qwen2.5-0.5B"} if hasattr(cfg, "critic") and cfg.model in QWEN else {}
    without = {weight: 0 for weight in ("beta", "kl_coef") if hasattr(cfg, weight)}
    more = [({}, gpus * 2**k) for k in range(1, 7)]
    dear = [({}, gpus), (smaller, gpus), *more, (without, gpus)]
    for (last, count), first in itertools.product(dear, sorted(free, key=len)):
        if peak(replace(cfg, **first, **last), count) <= gb:
            change = first | last | ({"gpus": count} if count > gpus else {})
            return " ".join(f"--{k}" + f" {v}" * (v is not True) for k, v in change.items())


def report(script, cfg, gpus, gb):
    """The plan of one run as text; its last line is the verdict."""
    stages, (trained, frozen) = plan(cfg, gpus), models(cfg)
    lines = [f"{script.upper()}, {cfg.model} on {gpus} x {gb:g} GB (1 GB = 1e9 bytes)"]
    lines += [f"  {role:12} {m.params / 1e9:6.3f} B parameters"
              for role, m in (trained | frozen).items()]
    lines += ["", f"{'GB per GPU':26}" + "".join(f"{stage:>15}" for stage in stages)]
    for part in dict.fromkeys(itertools.chain(*stages.values(), ["together"])):
        cells = [(sum(parts.values()) if part == "together" else parts.get(part, 0)) / GB
                 for parts in stages.values()]
        lines.append(f"  {part:24}" + "".join(f"{x:15.2f}" if x else " " * 15 for x in cells))
    answers, row = cfg.prompts_per_step * cfg.group_size, cfg.max_prompt_len + cfg.max_new_tokens
    rounds = getattr(cfg, "max_gen_rounds", 1)
    change = None if peak(cfg, gpus) <= gb else remedy(cfg, gpus, gb) or "the model for a smaller"
    lines += ["", f"answers generated at once: {cfg.rollout_batch} on each GPU",
              f"tokens per step: {answers:,} answers x {row:,} = {answers * row:,} at most"
              + f", after sampling up to {rounds} times as many" * (rounds > 1),
              f"disk: {disk(cfg)[0]:.1f} GB a checkpoint, {cfg.keep} kept while one more is written"
              f"; final/ {disk(cfg)[1]:.1f} GB", "",
              f"does not fit in {gb:g} GB: change {change}" if change else f"fits in {gb:g} GB"]
    return "\n".join(line.rstrip() for line in lines)


def config(script, argv, gb=80):
    """The script's own Config from its own flags; --rollout_batch 0 as on a GPU of `gb` GB."""
    module = importlib.import_module(script)
    cfg = experiment.parse_args(module.Config, module.TINY, argv)
    if cfg.rollout_batch or cfg.model in experiment.BUILTIN:
        return cfg
    model, c = shape(cfg.model), 4 if cfg.dtype == "float32" else 2
    cache = (cfg.max_prompt_len + cfg.max_new_tokens) * model.layers * model.kv * c
    return replace(cfg, rollout_batch=common.rows_that_fit(gb * GB, cache, model.vocabulary))


def table():
    """The table of plots/README.md: GB per GPU, struck out where it doesn't fit; GB on disk."""
    machines = [(1, 24), (1, 80), (4, 80), (8, 80)]
    lines = ["| | model | " + " | ".join(f"{n}×{gb} GB" for n, gb in machines) + " | checkpoint |",
             "|---|---|" + "---:|" * (len(machines) + 1)]
    rows = [(script, name) for script in ("grpo", "dapo", "gspo") for name in QWEN]
    rows += [("ppo", name, "--critic", n) for name in QWEN for n in {"Qwen2.5-0.5B": 0, name: 0}]
    for script, name, *critic in rows:
        flags = ["--model", name, "--gradient_checkpointing", *critic]
        cells = [script.upper() + "".join(f", {n[8:]} critic" for n in critic[1:]), name[8:]]
        needs = [(peak(config(script, flags, gb), gpus), gb) for gpus, gb in machines]
        cells += [f"{need:.0f}" if need <= gb else f"~~{need:.0f}~~" for need, gb in needs]
        lines.append(f"| {' | '.join(cells)} | {disk(config(script, flags))[0]:.0f} |")
    return "\n".join(lines)


def main(argv=None):
    """Command line -> the plan or the table, printed. A fault: one line and exit status 2."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: common.fail(f"{message}; --help lists the flags")
    parser.add_argument("--script", choices=("ppo", "grpo", "dapo", "gspo"), default="grpo")
    parser.add_argument("--gpus", type=int, default=1, help="one process each")
    parser.add_argument("--gb", type=float, default=80, help="memory of a GPU, GB")
    parser.add_argument("--table", action="store_true", help="of plots/README.md, nothing else")
    own, flags = parser.parse_known_args(argv)
    if not (0 < own.gpus and 0 < own.gb < inf):
        common.fail(f"--gpus {own.gpus} --gb {own.gb}: must be numbers > 0")
    cfg = None if own.table else config(own.script, flags, own.gb)
    if cfg and cfg.model in experiment.BUILTIN:
        common.fail(f"--model {cfg.model} fits anywhere; name another, e.g. --model Qwen2.5-7B")
    print(report(own.script, cfg, own.gpus, own.gb) if cfg else table())


if __name__ == "__main__":
    main()
