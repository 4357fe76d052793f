"""plots/memory.py: does a run take what it plans? Every byte that torch allocates is counted, on
small random models; FSDP runs for real, its collectives among pretended ranks don't."""
import contextlib
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(Path(__file__).parents[1] / "plots"))
import memory  # noqa: E402
from memory import common  # noqa: E402

SMALL = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
DEEP = SMALL | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=1000)
WORDY = SMALL | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=16000)
UNTIED = WORDY | dict(tie_word_embeddings=False)
FAT = WORDY | dict(intermediate_size=3072, num_hidden_layers=3, vocab_size=1000)
STUB = SimpleNamespace(pad_token_id=0, eos_token_id=1, chat_template=None)  # in place of a tokenizer


class Meter(dict):
    """Counts the bytes allocated less those freed in a with block. meter[NAME] then tells of the
    inner block `record_function(NAME)`, in capitals: bytes at its `peak`, and `left` at its end."""

    def __enter__(self):
        gc.collect()
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        self.profile.__exit__(*error)
        events = sorted(self.profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        for block in (e for e in events if e.name().isupper()):
            end = block.start_ns() + block.duration_ns()
            steps = [n for at, n in changes if block.start_ns() <= at <= end]
            levels = list(itertools.accumulate(steps, initial=0))
            self[block.name()] = SimpleNamespace(peak=max(levels), left=levels[-1])


@contextlib.contextmanager
def ranks(n):
    """This process as rank 0 of `n` whose collectives move nothing; 0: no process group."""
    if n:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        yield
    finally:
        if n:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """shape -> the folder of a random model."""
    folders = {}

    def save(shape):
        key = str(shape)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("model"))
            config = transformers.Qwen2Config(**shape)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[key])
        return folders[key]
    return save


def agree(planned, measured, telling=(), within=0.15):
    """The parts add up to what was measured, and would not if one of `telling` were forgotten or
    counted twice."""
    total = sum(planned.values())
    assert total == pytest.approx(measured, rel=within), (planned, measured)
    for part in telling:
        for wrong in (total - planned[part], total + planned[part]):
            assert wrong != pytest.approx(measured, rel=within), (part, planned, measured)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, params", [("Qwen2.5-0.5B", 494_032_768), ("Qwen2.5-3B", 3085938688),
                                          ("Qwen2.5-1.5B", 1543714304), ("Qwen2.5-7B", 7615616512)])
def test_parameters_are_those_of_the_model_cards(name, params):
    policy, critic = memory.shape(name), memory.shape(name, "TokenClassification")
    assert policy.params == params == policy.outside + policy.layers * policy.layer
    assert policy.tied == (name != "Qwen2.5-7B")
    assert critic.params == params - policy.head * (not policy.tied) + policy.hidden + 1
    assert policy.file_bytes == 2


@pytest.mark.parametrize("shape", [WORDY, UNTIED], ids=["tied", "untied"])
def test_parameters_of_a_folder(folder, shape):
    path = folder(shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    size = memory.shape(path)
    assert size.params == sum(p.numel() for p in model.parameters())
    assert size.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert size.head == size.weight == 16000 * 256
    assert size.outside == (1 if shape["tie_word_embeddings"] else 2) * size.head + 256
    assert (size.wide, size.attention, size.kv, size.file_bytes) == (1024, 256, 2 * 2 * 64, 4)


# --- update: (shape, GPUs, dtype, checkpointing, rows, tokens a row, of them answer, HEAD_FLOATS) --

UPDATES = {
    "every layer keeps its activations": (
        DEEP, 1, "float32", False, (4, 256, 64), 2**25, ["activations"]),
    "bfloat16 halves most of them": (
        DEEP, 4, "bfloat16", False, (4, 256, 64), 2**25, ["activations"]),
    "checkpointed, one layer does": (
        DEEP, 4, "bfloat16", True, (4, 256, 64), 2**25, ["activations"]),
    "logits": (
        SMALL | dict(hidden_size=128, intermediate_size=512, num_hidden_layers=4, vocab_size=4000),
        1, "float32", True, (1, 1024, 512), 2**25, ["logits"]),
    "chunks of logits, the head's gradients add up": (
        UNTIED, 1, "float32", True, (4, 64, 32), 2**19, ["gradients on their way"]),
    "gathered layers and their gradients": (
        FAT, 4, "bfloat16", True, (4, 64, 32), 2**25,
        ["gathered weights", "gradients on their way", "activations"]),
    "one rank gathers nothing ahead": (
        FAT, 1, "bfloat16", True, (4, 64, 32), 2**25,
        ["gathered weights", "gradients on their way", "activations"]),
    "gathered in float32, in chunks": (
        UNTIED, 2, "float32", False, (4, 64, 32), 2**19,
        ["gathered weights", "gradients on their way", "activations"]),
    "the head's gradient joins the embedding's": (
        WORDY, 2, "float32", True, (4, 64, 32), 2**25,
        ["gathered weights", "gradients on their way"]),
    "all outside of layers is reduced at once": (
        UNTIED, 1, "bfloat16", True, (4, 64, 32), 2**25, ["gradients on their way"]),
}


@pytest.mark.parametrize("case", UPDATES)
def test_update(folder, monkeypatch, case):
    shape, gpus, dtype, checkpointing, (rows, row, answer), floats, telling = UPDATES[case]
    monkeypatch.setattr(common, "HEAD_FLOATS", floats)
    cfg = replace(memory.config("grpo", ["--model", folder(shape)]), dtype=dtype,
                  gradient_checkpointing=checkpointing, micro_tokens=rows * row,
                  max_prompt_len=row - answer, max_new_tokens=answer)
    ids = torch.randint(shape["vocab_size"], (rows, row))
    mask = (torch.arange(row) >= 3 * (torch.arange(rows) == 0)[:, None]).long()  # some padding

    def loss(policy):
        return common.token_logps(policy, ids, mask, answer)[0].sum()

    check_update(cfg, gpus, common.load_policy, loss, "policy", telling)


@pytest.mark.parametrize("gpus, dtype", [(1, "float32"), (4, "bfloat16")])
def test_update_of_the_critic(folder, gpus, dtype):
    cfg = replace(memory.config("ppo", ["--model", folder(DEEP)]), dtype=dtype, micro_tokens=1024,
                  max_prompt_len=192, max_new_tokens=64)
    ids, mask = torch.randint(1000, (4, 256)), torch.ones(4, 256, dtype=torch.long)
    mask[0, :3] = 0
    micro = common.Micro(torch.arange(4), 192, 64, mask[:, 192:])
    batch = common.Batch(None, [], ids[:, :192], mask[:, :192], ids[:, 192:], mask[:, 192:])
    load = lambda path, cfg: common._trainable(common.from_pretrained(  # noqa: E731
        transformers.AutoModelForTokenClassification, path, num_labels=1), cfg)
    check_update(cfg, gpus, load, lambda critic: common.micro_values(critic, batch, micro).sum(),
                 "critic", ["activations"])


def check_update(cfg, gpus, load, loss, role, telling):
    """Load, forward, backward and step as the scripts do; hold all of it against the plan."""
    plan = memory.plan(cfg, gpus)
    update, step = plan[f"update {role}"], plan["AdamW"]
    sharded = "sampler's copy" in update
    assert sharded == (gpus > 1 or cfg.dtype == "bfloat16")
    with ranks(gpus if sharded else 0), Meter() as meter:
        with record_function("WEIGHTS"):
            model = load(cfg.model, cfg)
        optimizer = common.make_optimizer(model, 1e-6)
        if not sharded:
            optimizer.param_groups[0]["foreach"] = True  # as it is on a GPU
        with record_function("GRADIENTS"):
            loss(model).backward()
        with record_function("PASSES"):
            loss(model).backward()
        with record_function("MOMENTS"):
            optimizer.step()
        with record_function("ROOTS"):
            optimizer.step()
    agree({"": update[f"{role}, float32"]}, meter["WEIGHTS"].left, within=0.02)
    agree({"": update[f"{role}, float32 gradients"]}, meter["GRADIENTS"].left, within=0.02)
    agree({"": update[f"{role}, Adam's two moments"]}, meter["MOMENTS"].left, within=0.02)
    if memory.shape(cfg.model).weight == memory.shape(cfg.model).head:
        agree({"": step["square roots"]}, meter["ROOTS"].peak)
    names = ("gathered weights", "gradients on their way", "activations", "logits")
    agree({name: update[name] for name in names}, meter["PASSES"].peak, telling)


# --- sampling ------------------------------------------------------------------------------------

SAMPLES = {  # shape, (questions, answers to each, prompt, answer), the part that tells
    "cache": (SMALL | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=6,
                           vocab_size=500), (8, 8, 200, 8), ["KV cache"]),
    "logits": (SMALL | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                            vocab_size=30000), (8, 8, 10, 6), ["logits"]),
    "prompts": (SMALL | dict(hidden_size=256, intermediate_size=1536, num_hidden_layers=2,
                             vocab_size=500), (16, 1, 200, 4), ["activations"]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SAMPLES)
def test_sampling(folder, case, dtype):
    shape, (questions, group, prompt, answer), telling = SAMPLES[case]
    path = folder(shape)
    cfg = replace(memory.config("grpo", ["--model", path]), prompts_per_step=questions, eval_size=1,
                  group_size=group, max_prompt_len=prompt, max_new_tokens=answer, dtype=dtype)
    sampler = common.Sampler(common.load_frozen(path, cfg), path, STUB, cfg)
    ids = torch.randint(2, shape["vocab_size"], (questions, prompt))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with Meter() as meter, record_function("SAMPLE"):
        sampler.generate(ids, mask, group, record=32)
    stage = memory.plan(cfg, 1)["sample"]
    agree({k: stage[k] for k in ("KV cache", "logits", "activations") if k in stage},
          meter["SAMPLE"].peak, telling)


# --- a whole run: python tests/test_memory.py SCRIPT FOLDER [flags] trains one step, prints bytes --


def worker(script, folder, *flags):
    """Train by the script's own loop and print what it took, as JSON."""
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "?": 2}, "?"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\\s\\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="<eos>", unk_token="?")
    cfg = memory.config(script, ["--model", folder, "--data", f"{folder}/data.jsonl", *flags])
    questions = common.load_questions(cfg).train
    common.encode(tokenizer, questions, cfg)
    cfg.max_prompt_len = max(len(question.prompt_ids) for question in questions)
    common.load_tokenizer = lambda path: tokenizer
    common.evaluate = lambda *_: {}
    common.end_processes = lambda: None
    meter, finish = Meter(), common.Run.finish

    def measured_finish(run, sampler, data):  # all models are still there, all gradients gone
        gc.collect()
        block.__exit__(None, None, None)
        meter.__exit__(None, None, None)
        finish(run, sampler, data)
        size = lambda where: sum(f.stat().st_size  # noqa: E731
                                 for f in Path(cfg.out_dir, where).rglob("*.safetensors"))
        print(json.dumps([asdict(cfg), meter["RUN"].peak, meter["RUN"].left,
                          size("checkpoints"), size("final")]))

    common.Run.finish = measured_finish
    meter.__enter__()
    block = record_function("RUN")
    block.__enter__()
    importlib.import_module(script).train(cfg)


@pytest.mark.parametrize("script, flags", [
    ("grpo", ["--dtype", "float32", "--group_size", "4"]),
    ("ppo", ["--dtype", "bfloat16", "--gradient_checkpointing", "--group_size", "4"])])
def test_a_whole_run(tmp_path, folder, script, flags):
    path = folder(DEEP)
    rows = [{"question": "1" * (40 - k % 2), "answer": "#### 4"} for k in range(16)]
    Path(path, "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags += ["--steps", "1", "--prompts_per_step", "8", "--minibatches", "2", "--eval_size", "1",
              "--max_new_tokens", "16", "--micro_tokens", "1350", "--out_dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, __file__, script, path, *flags], text=True,
                          capture_output=True, env=os.environ | {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    assert done.returncode == 0, done.stderr
    settings, peak, left, checkpoint, final = json.loads(done.stdout.splitlines()[-1])
    module = importlib.import_module(script)
    cfg = module.Config(**settings)
    plan = memory.plan(cfg, 1)
    models = {part: size for part, size in plan["sample"].items()
              if part not in ("KV cache", "logits", "activations", "CUDA context, allocator")}
    agree(models, left, list(models), within=0.02)
    print(settings["max_prompt_len"], peak, {k: sum(v.values()) - memory.RESERVE for k, v in plan.items()})
    assert memory.peak(cfg, 1) * memory.GB - memory.RESERVE == pytest.approx(peak, rel=0.15)
    assert memory.disk(cfg) == pytest.approx((checkpoint / memory.GB, final / memory.GB), rel=0.01)


# --- command line --------------------------------------------------------------------------------


def run(capsys, *argv):
    """The lines that a command prints."""
    memory.main(list(argv))
    return capsys.readouterr().out.splitlines()


if __name__ == "__main__":
    worker(*sys.argv[1:])
