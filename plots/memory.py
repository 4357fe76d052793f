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
    rows = math.ceil(cfg.prompts_per_step * cfg.group_size / cfg.minibatches / gpus)
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
        (model.outside + 2 * model.layer,  # and the next one; the last one's gradient in float32
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
    """{part: bytes} of the sampler at its fullest: reading the prompts, or on the last token.

    `rollout_batch` sequences at once and rank; evaluation reads that many *different* prompts.
    """
    c = compute_bytes(cfg)
    prompts = max(1, cfg.rollout_batch // cfg.group_size)
    train = min(prompts, math.ceil(cfg.prompts_per_step / gpus))
    evaluate = min(cfg.rollout_batch, math.ceil(cfg.eval_size / gpus))
    rows = max(train * cfg.group_size, evaluate)
    cached = c * model.layers * model.kv  # bytes a token
    read = max(train, evaluate) * cfg.max_prompt_len
    moments = [
        {"KV cache": cached * read, "activations": forward_only(model, c, read)},
        {"KV cache": cached * rows * (cfg.max_prompt_len + cfg.max_new_tokens),
         "logits": (c + 12) * rows * model.vocabulary},  # and three float32 copies: law, draw
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def forward_only(model, c, tokens):
    """Bytes of a forward pass that keeps nothing: three tensors of an MLP, two of the stream."""
    return c * tokens * (3 * model.wide + 2 * model.hidden)


def compute_bytes(cfg):
    """Bytes of a number in every forward pass; `auto` plans for a GPU with native bfloat16."""
    return 4 if cfg.dtype == "float32" else 2


def is_sharded(cfg, gpus):
    """Whether FSDP works on the trained models, as in `common.start_processes`."""
    return gpus > 1 or compute_bytes(cfg) == 2


def plan(cfg, gpus):
    """{stage: {part: bytes per GPU}}. A stage's need is the sum of its parts, a run's the largest.

    Gradients are None while sampling, so they and the KV cache never meet.
    """
    c, policy = compute_bytes(cfg), shape(cfg.model)
    sharded = is_sharded(cfg, gpus)
    trained = {"policy": policy}
    always = {"CUDA context, allocator": RESERVE}
    if hasattr(cfg, "critic"):
        trained["critic"] = shape(cfg.critic or cfg.model, "critic")
    for name, model in trained.items():
        always[f"{name}: float32 weights"] = 4 * model.params / gpus
        always[f"{name}: Adam's two moments"] = 8 * model.params / gpus
    if sharded:  # else the sampler generates with the policy itself
        always["sampler's copy"] = c * policy.params
    if getattr(cfg, "beta", 0) > 0 or getattr(cfg, "kl_coef", 0) > 0:
        always["reference"] = c * policy.params
    if cfg.reward_model:
        always["reward model"] = c * shape(cfg.reward_model, "reward").params
    stages = {"sample": sampling(policy, cfg, gpus)}
    gradients = {f"{n}: float32 gradients": 4 * m.params / gpus for n, m in trained.items()}
    for name, model in trained.items():
        stages[f"update {name}"] = gradients | backward(model, cfg, gpus)
    return {stage: always | parts for stage, parts in stages.items()}
