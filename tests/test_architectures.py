"""Tests: every architecture either trains exactly or is refused in one line, before a file is made.

    pytest -m slow tests/test_architectures.py
    python tests/test_architectures.py            writes the table, plots/models.md
"""

import importlib
import io
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import experiment
import grpo
import ppo
from models import VOCAB, plain_logps, ragged_batch, save_folder, settings, tiny_tokenizer
from oracles import check

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48, max_position_embeddings=128, initializer_range=0.25)
SMALL = dict(d_model=32, n_layer=2, n_head=4, n_embd=32, n_positions=128, initializer_range=0.25)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=16)
HEAD = dict(head_dim=8)
LINEAR = dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
              linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
MAMBA = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_expand=2)
BART = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, init_std=0.25,
            max_position_embeddings=128)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
              num_key_value_heads=4)
ARCHITECTURES = {  # model type -> what differs from a small config of its class
    # dense
    "llama": SHAPE, "mistral": SHAPE | dict(sliding_window=4), "qwen3": SHAPE | HEAD,
    "phi": SHAPE, "phi3": SHAPE | dict(pad_token_id=0), "olmo": SHAPE, "olmo2": SHAPE, "olmo3":
    SHAPE, "gemma": SHAPE | HEAD, "gemma2": SHAPE | HEAD, "gemma3_text": SHAPE | HEAD,
    "cohere": SHAPE, "granite": SHAPE, "starcoder2": SHAPE, "stablelm": SHAPE, "smollm3": SHAPE,
    "glm4": SHAPE | HEAD, "ernie4_5": SHAPE | HEAD, "exaone4": SHAPE | dict(sliding_window=4),
    "gpt2": SMALL, "gpt_neox": SHAPE, "gptj": SMALL | dict(rotary_dim=4), "ctrl": SMALL | dict(
        dff=48), "opt": SHAPE | dict(ffn_dim=48, word_embed_proj_dim=32), "biogpt": SHAPE,
    "seed_oss": SHAPE | HEAD, "helium": SHAPE | HEAD, "nemotron": SHAPE, "apertus": SHAPE,
    # alibi
    "bloom": SMALL | dict(hidden_size=32), "mpt": dict(d_model=32, n_heads=4, n_layers=2),
    "falcon": SHAPE | dict(alibi=True),
    # mixtures of experts
    "mixtral": SHAPE | EXPERTS | dict(router_jitter_noise=0.3), "qwen2_moe": SHAPE | EXPERTS,
    "qwen3_moe": SHAPE | EXPERTS | HEAD, "olmoe": SHAPE | EXPERTS, "phimoe": SHAPE | EXPERTS,
    "deepseek_v3": SHAPE | EXPERTS | LATENT, "gpt_oss": SHAPE | EXPERTS | HEAD,
    "granitemoe": SHAPE | EXPERTS, "doge": SHAPE | EXPERTS, "llama4_text": SHAPE | EXPERTS | HEAD,
    # linear attention, state spaces, hybrids
    "qwen3_next": SHAPE | EXPERTS | HEAD | LINEAR, "qwen3_5_text": SHAPE | HEAD | LINEAR,
    "lfm2": SHAPE | dict(layer_types=["conv", "full_attention"]), "jamba": SHAPE | dict(
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=2),
    "falcon_h1": SHAPE | HEAD | MAMBA | dict(mamba_d_ssm=64),
    "bamba": SHAPE | MAMBA | dict(attn_layer_indices=[1]),
    "granitemoehybrid": SHAPE | MAMBA | dict(layer_types=["mamba", "attention"]),
    "minimax": SHAPE | EXPERTS | HEAD | dict(layer_types=["linear_attention", "full_attention"]),
    "mamba": dict(hidden_size=32, num_hidden_layers=2, state_size=8),
    "mamba2": dict(hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16,
                   n_groups=1),
    "rwkv": dict(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    "recurrent_gemma": SHAPE | HEAD | dict(lru_width=32),
    # encoder-decoders, their decoders, other kinds
    "bart": BART, "mbart": BART, "t5": dict(d_model=32, d_ff=48, num_layers=2, num_heads=4),
    "xlnet": SMALL | dict(d_inner=48), "bert": SHAPE | dict(is_decoder=True),
    "xglm": dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, init_std=0.25),
    # wrappers with a text part, whose dropout is in a config of its own
    "gemma3": dict(text_config=SHAPE | HEAD | dict(vocab_size=VOCAB, attention_dropout=0.3)),
    "qwen3_5": dict(text_config=SHAPE | HEAD | LINEAR | dict(vocab_size=VOCAB)),
}


def folder_of(name, folder):
    """A folder of a random model of this architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    ids = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
    config = transformers.AutoConfig.for_model(
        name, **dict(vocab_size=VOCAB) | ids | ARCHITECTURES[name])
    torch.manual_seed(0)
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():  # a model that doubts everything would hide every fault
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return save_folder(folder, model, tiny_tokenizer())


def outcome(name):
    """("works", largest error in nats) or ("refused", the line)."""
    with tempfile.TemporaryDirectory() as home, redirect_stderr(io.StringIO()) as said:
        folder, cfg = folder_of(name, Path(home) / "model"), settings()
        try:
            tokenizer = common.load_tokenizer(folder)
            policy = common.load_policy(folder, "float32")
            sampler = common.Sampler(policy, tokenizer, cfg)
            experiment.check_law(sampler)
        except SystemExit as stop:
            lines = said.getvalue().splitlines()
            assert stop.code == 2 and len(lines) == 1, said.getvalue()
            return "refused", lines[0].replace(folder, "FOLDER").removeprefix("error: ")
        return "works", largest_error(sampler, policy)


def largest_error(sampler, policy):
    """The largest distance, nats, of all that a step computes from the plain forward pass of each
    single answer: with prompts shared and not, padding, train mode twice, and the sampler's."""
    batch = ragged_batch(np.random.default_rng(0))
    batch.group_size = 2  # rows of a pair have one prompt
    batch.prompt_ids = batch.prompt_ids[::2].repeat_interleave(2, 0)
    batch.prompt_mask = batch.prompt_mask[::2].repeat_interleave(2, 0)
    errors, real = [], batch.mask.bool()
    with torch.no_grad():
        right, _ = plain_logps(policy.eval(), batch)
        policy.train()
        for micro_tokens in (40, 40, 100000):  # twice the same
            got = common.whole_logps(policy, batch, common.cut(batch, 2, micro_tokens), 1.0)
            errors.append((got - right)[real].abs().max().item())
        batch.group_size = 1
        got = common.whole_logps(policy, batch, common.cut(batch, 1, 100000), 1.0)
        errors.append((got - right)[real].abs().max().item())
        batch.tokens, seen = sampler.generate(
            batch.prompt_ids[::2], batch.prompt_mask[::2], group_size=2, record=32)
        batch.mask = common.response_mask(batch.tokens, sampler.stop_ids)
        right, _ = plain_logps(policy.eval(), batch)
        errors.append((seen - right)[batch.mask.bool()].abs().nan_to_num(0.0).max().item())
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_works_exactly_or_is_refused_in_one_line(name):
    verdict, what = outcome(name)
    assert verdict == "refused" or what < 1e-4


CRITICS = [name if name in ("olmo2", "mamba") else pytest.param(name, marks=pytest.mark.slow)
           for name in ARCHITECTURES]


@pytest.mark.parametrize("name", CRITICS)
def test_every_policy_can_have_a_critic(tmp_path, name, monkeypatch):
    """Transformers has no class for a critic of 23 of these. Its values are those of each answer
    alone, without padding, and it comes back from a checkpoint."""
    if outcome(name)[0] == "refused":
        pytest.skip("no policy either")
    folder, tokenizer = folder_of(name, tmp_path / "model"), tiny_tokenizer()
    experiment.check_critic(folder)  # as set_up does
    run = SimpleNamespace(start=folder, checkpoint=None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        critic = ppo.load_critic(run, tokenizer, settings())
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    assert all(x.isfinite().all() for x in [*critic.parameters(), *critic.buffers()])
    batch = ragged_batch(np.random.default_rng(0))
    torch.nn.init.normal_((getattr(critic, "score", None) or critic.classifier).weight)
    values = common.whole(ppo.micro_values, critic, batch, common.cut(batch, 1, 200))
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        answer = batch.tokens[row][batch.mask[row].bool()]
        alone = critic(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1, 0]
        check(values[row, : len(answer)], alone, atol=1e-4)
    sampler = SimpleNamespace(policy=None, tokenizer=tokenizer)
    experiment.save_model(sampler, critic, tmp_path / "critic")
    run = SimpleNamespace(start=folder, checkpoint=tmp_path)
    again = ppo.load_critic(run, tokenizer, settings()).state_dict()
    assert all(torch.equal(again[key], x) for key, x in critic.state_dict().items())


SCRIPTS = ["ppo", "grpo", "dapo", "gspo"]
RUN = ("--cold_start 1 --steps 2 --prompts_per_step 2 --group_size 2 --minibatches 1 --eval_size 2 "
       "--max_prompt_len 200 --max_new_tokens 20 --samples 0 --reward contains").split()


def test_a_refused_model_leaves_nothing_behind(tmp_path, capsys):
    """The line comes before the run's folder and before a cold start."""
    folder, made = folder_of("bart", tmp_path / "model"), tmp_path / "run"
    args = [*RUN, "--model", folder, "--data", "words", "--out_dir", str(made)]
    with pytest.raises(SystemExit) as stop:
        grpo.train(experiment.parse_args(grpo.Config, grpo.TINY, args))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "padding on the left" in line and not made.exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "doge", "qwen3_next", "olmo2", "mamba"])
def test_two_steps_of_each_script(tmp_path, script, name):
    """Olmo2 and Mamba have no class of transformers for a critic."""
    module, folder = importlib.import_module(script), folder_of(name, tmp_path / "model")
    args = [*RUN, "--model", folder, "--data", "words", "--out_dir", str(tmp_path / "run")]
    args += ["--overlong_buffer", "4"] if script == "dapo" else []
    module.train(experiment.parse_args(module.Config, module.TINY, args))
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def table():
    """The text of plots/models.md."""
    rows = []
    for name in ARCHITECTURES:
        verdict, what = outcome(name)
        what = f"{what:.0e} nats" if verdict == "works" else what.partition(": ")[2]
        rows.append(f"| {name} | {verdict} | {what} |")
    works = sum("| works |" in row for row in rows)
    return "\n".join([
        "# Which models work", "",
        "A small random model of each architecture, in float32 on a CPU: either everything that a",
        "step computes (prompts shared and not, padding, train mode, the sampler) equals the plain",
        "forward pass of each single unpadded answer, and the largest distance is given; or the",
        "model is refused at load, in one line, before a file is made. By",
        f"`python tests/test_architectures.py` with transformers {transformers.__version__}: "
        f"{works} of {len(rows)} work.", "",
        "| model type | verdict | largest distance, or the line |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "plots" / "models.md").write_text(table())
