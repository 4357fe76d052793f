"""Does a run fit? GB per GPU by part and stage, and disk, from a model's shape: no weights load.

    python plots/memory.py --script grpo --model Qwen2.5-7B --gpus 4 --gb 80
    python plots/memory.py --script ppo --model DIR --critic Qwen2.5-0.5B --micro_tokens 8192
    python plots/memory.py --table                              the table of the README

Takes the script's own flags, so it plans with the defaults of a run. The plan is an upper bound:
every prompt and answer as long as allowed. Sizes are in bytes, printed in GB (1 GB = 1e9 bytes).
tests/test_memory.py holds the arithmetic against the memory that small models really take.
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
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402

GB = 1e9
SCRIPTS = ("ppo", "grpo", "dapo", "gspo")
RESERVE = 2 * GB  # CUDA context, NCCL, cuBLAS, gaps between the allocator's blocks: an allowance
LOGIT_COPIES = 5  # float32: logits, CE's log_softmax, the entropy's log_softmax, its exp, product
KINDS = {  # role of a model -> its class and head
    "policy": (transformers.AutoModelForCausalLM, {}),
    "critic": (transformers.AutoModelForTokenClassification, {"num_labels": 1}),
    "reward": (transformers.AutoModelForSequenceClassification, {"num_labels": 1}),
}
QWEN = {  # hidden, layers, heads, key-value heads, intermediate, vocabulary: no network needed
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064),
}


# --- models --------------------------------------------------------------------------------------


def load_config(name):
    """The config of a built-in shape, a folder or a hub name."""
    known = QWEN.get(name.removeprefix("Qwen/").removesuffix("-Instruct"))
    if known and not Path(name).is_dir():
        keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size", "vocab_size")
        return transformers.Qwen2Config(
            **dict(zip(keys, known)), tie_word_embeddings="7B" not in name, dtype="bfloat16")
    try:
        return transformers.AutoConfig.from_pretrained(common.find_model(name))
    except (OSError, ValueError, KeyError):
        common.fail(f"{name}: no config to be had; give a folder with a config.json, or one of "
                    + ", ".join(QWEN))


@cache
def shape(name, role="policy"):
    """What the plan needs to know of a model: counted on the meta device, where weights are empty.

    `params` of the whole, of its largest `layer`, `outside` of layers (embedding, head, norm: FSDP
    gathers them together), of the `head` and the largest `weight`; widths in numbers per token.
    """
    config, (auto_class, labels) = load_config(name), KINDS[role]
    for key, value in labels.items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = auto_class.from_config(config)
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    kinds = model._no_split_modules or ()
    layers = [count(m) for m in model.modules() if type(m).__name__ in kinds] or [0]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if hasattr(config, "num_experts_per_tok"):  # a token meets few of the experts
        wide = config.num_experts_per_tok * config.moe_intermediate_size
    return SimpleNamespace(
        params=count(model), layer=max(layers), outside=count(model) - sum(layers),
        tied=role == "policy" and bool(config.tie_word_embeddings),
        head=model.get_output_embeddings().weight.numel() if role == "policy" else 0,
        weight=max(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers, hidden=config.hidden_size, wide=wide,
        attention=heads * head_dim, vocabulary=config.vocab_size,
        kv=2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        file_bytes=getattr(config.dtype or torch.float32, "itemsize", 4),
    )


# --- the plan ------------------------------------------------------------------------------------


def backward(model, cfg, gpus):
    """{part: bytes} of one micro-batch at the fullest of five moments of its backward pass.

    Per token a layer keeps for backward: of each norm a float32 copy, the normalised one and the
    result; q, k, v (repeated to all heads) and the attention's output; four tensors of the MLP;
    a row of the mask. Two more of the MLP's are made before the first of these are freed.
    """
    c, sharded = compute_bytes(cfg), is_sharded(cfg, gpus)
    row = cfg.max_prompt_len + cfg.max_new_tokens
    rows = -(-cfg.prompts_per_step * cfg.group_size // cfg.minibatches // gpus)
    tokens = max(row, min(cfg.micro_tokens, rows * row))
    norm = (4 + 2 * c) * model.hidden
    layer = 2 * norm + 4 * c * (model.attention + model.wide) + c * row
    kept = model.layers * (c * model.hidden if cfg.gradient_checkpointing else layer)
    again = layer * cfg.gradient_checkpointing + 2 * c * (model.wide + model.hidden)
    answers, most = tokens * cfg.max_new_tokens // row, common.HEAD_FLOATS // model.vocabulary
    chunk = min(answers, most) * model.vocabulary if model.head else 0
    sums = 3 if answers > most else 1  # of the chunks' gradients: the old, the new, the total
    moments = [  # numbers gathered by FSDP; bytes: gradients on their way, activations, logits
        # the head, computed again for a chunk; its gradient; the first layer from the top
        (model.outside + model.layer, c * model.head * (sums > 1),
         tokens * (kept + norm), 4 * LOGIT_COPIES * chunk),
        (model.outside + model.layer, c * model.head * sums, tokens * (kept + norm), c * chunk),
        (model.outside + (1 + (gpus > 1)) * model.layer,  # the next one too; the last one's gradient
         c * model.head * (sharded or model.tied) + c * model.hidden * model.wide
         + 4 * model.layer * sharded, tokens * (kept + again), 0),
        # the embedding, its gradient added to the head's if they are one; then all that is left
        (model.outside, c * model.weight * (3 if model.tied else 1) + 4 * model.layer * sharded,
         0, 0),
        (0, model.outside * (4 + max(c, 4 / gpus)) * sharded, 0, 0),
    ]
    parts = [
        {"gathered weights": c * numbers * sharded, "gradients on their way": gradients,
         "activations": activations, "logits": logits}
        for numbers, gradients, activations, logits in moments
    ]
    return max(parts, key=lambda moment: sum(moment.values()))


def sampling(model, cfg, gpus):
    """{part: bytes} of the sampler at its fullest: reading prompts, or drawing the last token.

    `rollout_batch` sequences at once on each rank; evaluation reads that many *different* prompts.
    """
    c = compute_bytes(cfg)
    prompts = min(max(1, cfg.rollout_batch // cfg.group_size), -(-cfg.prompts_per_step // gpus))
    evaluated = min(cfg.rollout_batch, -(-cfg.eval_size // gpus))
    rows = max(prompts * cfg.group_size, evaluated)
    read = max(prompts, evaluated) * cfg.max_prompt_len
    token = c * model.kv * (model.layers + 0.5)  # half: keys of one layer are copied as they grow
    # drawn from: float32 logits, their softmax, the noise; scripts record 32 rows' log-probs
    logits = ((c + 16) * rows + 4 * 32) * model.vocabulary
    moments = [
        {"KV cache": token * read, "activations": forward_only(model, c, read)},
        {"KV cache": token * rows * (cfg.max_prompt_len + cfg.max_new_tokens), "logits": logits},
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def forward_only(model, c, tokens):
    """Bytes of a pass that keeps nothing: three tensors of an MLP, four of the residual stream."""
    return c * tokens * (3 * model.wide + 4 * model.hidden)


def compute_bytes(cfg):
    """Bytes of a number in every forward pass; `auto` plans for a GPU with native bfloat16."""
    return 4 if cfg.dtype == "float32" else 2


def is_sharded(cfg, gpus):
    """Whether FSDP works on the trained models, as in `common.start_processes`."""
    return gpus > 1 or compute_bytes(cfg) == 2


def models(cfg):
    """{role: shape} of all that a run holds: policy, PPO's critic, reference, reward model."""
    roles = {"policy": shape(cfg.model)}
    if hasattr(cfg, "critic"):
        roles["critic"] = shape(cfg.critic or cfg.model, "critic")
    if getattr(cfg, "beta", 0) > 0 or getattr(cfg, "kl_coef", 0) > 0:
        roles["reference"] = roles["policy"]
    if cfg.reward_model:
        roles["reward model"] = shape(cfg.reward_model, "reward")
    return roles


def plan(cfg, gpus):
    """{stage: {part: bytes per GPU}}: a stage needs the sum of its parts, a run its largest stage.

    Gradients are None outside of updates, so they and the KV cache never meet. All are there in a
    backward pass, as from the second micro-batch on.
    """
    c, sharded, roles = compute_bytes(cfg), is_sharded(cfg, gpus), models(cfg)
    trained = {role: m for role, m in roles.items() if role in ("policy", "critic")}
    always, gradients = {}, {}
    for role, model in trained.items():
        always[f"{role}, float32"] = 4 * model.params / gpus
        always[f"{role}, Adam's two moments"] = 8 * model.params / gpus
        gradients[f"{role}, float32 gradients"] = 4 * model.params / gpus
    if sharded:  # else the sampler generates with the policy itself
        always["sampler's copy"] = c * roles["policy"].params
    always |= {role: c * m.params for role, m in roles.items() if role not in trained}
    always["CUDA context, allocator"] = RESERVE
    stages = {"sample": sampling(roles["policy"], cfg, gpus)}
    if cfg.reward_model:  # it reads 32 answers at once
        tokens = 32 * (cfg.max_prompt_len + cfg.max_new_tokens)
        stages["score"] = {"activations": forward_only(roles["reward model"], c, tokens)}
    for role, model in trained.items():
        stages[f"update {role}"] = gradients | backward(model, cfg, gpus)
    # AdamW's square root: of a list of all tensors at once, but of sharded ones one by one
    passing = max(2 * m.weight / gpus if sharded else m.params for m in trained.values())
    stages["AdamW"] = gradients | {"optimizer step": 4 * passing}
    return {stage: always | parts for stage, parts in stages.items()}


def peak(cfg, gpus):
    """Bytes per GPU of the fullest stage."""
    return max(sum(parts.values()) for parts in plan(cfg, gpus).values())


def disk(cfg):
    """(bytes of a checkpoint, bytes of final/): float32 weights and two moments of each model that
    trains; the policy alone in the dtype that it came in."""
    trained = [m for role, m in models(cfg).items() if role in ("policy", "critic")]
    return sum(12 * m.params for m in trained), trained[0].file_bytes * trained[0].params


# --- what to change ------------------------------------------------------------------------------


def halves(value, lowest):
    """value / 2, / 4, ... down to `lowest`."""
    return [value >> k for k in range(1, value.bit_length()) if value >> k >= lowest]


def remedy(cfg, gpus, gb):
    """The smallest change after which the plan fits: flags that cost time only, before a smaller
    critic, more GPUs or no reference. Every answer is planned anew; None if nothing helps."""
    free = [] if cfg.gradient_checkpointing else [{"gradient_checkpointing": True}]
    row = cfg.max_prompt_len + cfg.max_new_tokens
    free += [{"micro_tokens": n} for n in halves(cfg.micro_tokens, row)]
    free += [{"rollout_batch": n} for n in halves(cfg.rollout_batch, max(8, cfg.group_size))]
    dear = [{"critic": "Qwen2.5-0.5B"}] if hasattr(cfg, "critic") and cfg.model in QWEN else []
    dear += [{"gpus": gpus * 2**k} for k in range(1, 7)]
    dear += [{name: 0.0} for name in ("beta", "kl_coef") if getattr(cfg, name, 0)]
    for last in [{}, *dear]:
        for n in range(1 + len(free)):
            for few in itertools.combinations(free, n):
                change = {k: v for part in few for k, v in part.items()} | last
                flags = {k: v for k, v in change.items() if k != "gpus"}
                if peak(replace(cfg, **flags), change.get("gpus", gpus)) <= gb * GB:
                    return change
    return None


def as_flags(change):
    """{"beta": 0.0, "gradient_checkpointing": True} -> "--beta 0 --gradient_checkpointing"."""
    words = {k: "" if v is True else f" {v:g}" if isinstance(v, float) else f" {v}"
             for k, v in change.items()}
    return " ".join(f"--{k}{v}" for k, v in words.items())


# --- what is printed -----------------------------------------------------------------------------


def report(script, cfg, gpus, gb):
    """The plan of one run as text; the verdict is its last line."""
    stages = plan(cfg, gpus)
    parts = list(dict.fromkeys(part for stage in stages.values() for part in stage))
    lines = [f"{script.upper()}, {cfg.model} on {gpus} x {gb:g} GB (1 GB = 1e9 bytes)"]
    lines += [f"  {role:13}{m.params / 1e9:8.3f} B parameters" for role, m in models(cfg).items()]
    lines += ["", f"{'GB per GPU':28}" + "".join(f"{stage:>15}" for stage in stages)]
    rows = {part: [stage.get(part, 0) for stage in stages.values()] for part in parts}
    rows["together"] = [sum(stage.values()) for stage in stages.values()]
    for part, values in rows.items():
        if any(values):
            cells = "".join(f"{v / GB:15.2f}" if v else f"{'':15}" for v in values)
            lines.append(f"  {part:26}{cells}".rstrip())
    answers, row = cfg.prompts_per_step * cfg.group_size, cfg.max_prompt_len + cfg.max_new_tokens
    checkpoint, final = disk(cfg)
    lines += ["", f"tokens per step: {answers * row:,} at most, {answers:,} answers of {row:,}",
              f"disk: {checkpoint / GB:.1f} GB a checkpoint, {cfg.keep} kept and one being written; "
              f"final/ {final / GB:.1f} GB", ""]
    if peak(cfg, gpus) <= gb * GB:
        return "\n".join([*lines, f"fits in {gb:g} GB"])
    change = remedy(cfg, gpus, gb)
    advice = f"change {as_flags(change)}" if change else "choose a smaller model"
    return "\n".join([*lines, f"does not fit in {gb:g} GB: {advice}"])


def table():
    """The README's markdown table: four scripts, four models, four machines."""
    machines = [(1, 24), (1, 80), (4, 80), (8, 80)]
    lines = ["| | model | " + " | ".join(f"{n}×{gb} GB" for n, gb in machines) + " | checkpoint |",
             "|---|---|" + "---:|" * (len(machines) + 1)]
    kinds = [("GRPO", "grpo", ""), ("DAPO", "dapo", ""), ("GSPO", "gspo", ""),
             ("PPO, 0.5B critic", "ppo", "Qwen2.5-0.5B"), ("PPO, critic like policy", "ppo", "")]
    for label, script, critic in kinds:
        for name in QWEN:
            if critic == name:
                continue  # the row of a critic like the policy
            argv = ["--model", name, "--gradient_checkpointing"]
            cfg = config(script, argv + (["--critic", critic] if critic else []))
            cells = [(peak(cfg, n) / GB, gb) for n, gb in machines]
            lines.append(f"| {label} | {name.removeprefix('Qwen2.5-')} | " + " | ".join(
                f"{need:.0f}" if need <= gb else f"~~{need:.0f}~~" for need, gb in cells
            ) + f" | {disk(cfg)[0] / GB:.0f} |")
    return "\n".join(lines)


def config(script, argv):
    """The script's own Config from its own flags."""
    module = importlib.import_module(script)
    return common.parse_args(module.Config, module.TINY, argv)


def main(argv=None):
    """Command line -> printed plan or table. Faults end with one line and exit status 2."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
        epilog="and every flag of the script, as in python grpo.py --help")
    parser.error = lambda message: common.fail(f"{message}; --help lists the flags")
    parser.add_argument("--script", choices=SCRIPTS, default="grpo")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one GPU each")
    parser.add_argument("--gb", type=float, default=80, help="memory of a GPU, GB")
    parser.add_argument("--table", action="store_true", help="the README's table; other flags idle")
    own, rest = parser.parse_known_args(argv)
    if own.table:
        return print(table())
    for name in ("gpus", "gb"):
        if not 0 < getattr(own, name) < math.inf:
            common.fail(f"--{name} {getattr(own, name)}: must be a number > 0")
    cfg = config(own.script, rest)
    if cfg.model in common.BUILTIN:
        common.fail(f"--model {cfg.model}: fits anywhere; name a model, e.g. --model Qwen2.5-7B")
    print(report(own.script, cfg, own.gpus, own.gb))


if __name__ == "__main__":
    main()
