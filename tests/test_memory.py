"""Tests: plots/memory.py: does a run take what it plans?

Every byte that torch allocates is counted, on small random models; FSDP runs for
real, its collectives among pretended ranks don't.
"""
import contextlib
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(Path(__file__).parents[1] / "plots"))
import memory  # noqa: E402
from memory import common, experiment  # noqa: E402

import ppo  # noqa: E402  memory has put its folder on the path

SMALL = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
DEEP = SMALL | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=1000)
WORDY = SMALL | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=16000)
THIN = DEEP | dict(hidden_size=128, intermediate_size=512, vocab_size=4000)
UNTIED = WORDY | dict(tie_word_embeddings=False)
FAT = WORDY | dict(intermediate_size=3072, num_hidden_layers=3, vocab_size=1000)
STUB = SimpleNamespace(pad_token_id=0, eos_token_id=1, unk_token_id=None, chat_template=None,
                       all_special_ids=[0, 1], added_tokens_decoder={}, get_vocab=dict)


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


# --- update --------------------------------------------------------------------------------------

UPDATES = {  # shape, GPUs, dtype, checkpointing, (rows, tokens a row, of them answer), HEAD_FLOATS
    "every layer keeps its activations": (
        DEEP, 1, "float32", False, (4, 256, 64), 2**25, ["activations"]),
    "bfloat16 halves most of them": (
        DEEP | dict(intermediate_size=128), 4, "bfloat16", False, (4, 256, 64), 2**25,
        ["activations"]),
    "checkpointed, one layer does": (
        DEEP, 4, "bfloat16", True, (4, 256, 64), 2**25, ["activations"]),
    "logits": (
        THIN, 1, "float32", True, (1, 1024, 512), 2**25, ["logits"]),
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
        return logps(policy, ids, mask, answer)[0].sum()

    check_update(cfg, gpus, load_policy, loss, "policy", telling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_of_shared_prompts(folder, dtype):
    cfg = replace(memory.config("grpo", ["--model", folder(DEEP)]), dtype=dtype, prompts_per_step=4,
                  group_size=4, minibatches=1, max_prompt_len=192, max_new_tokens=64)
    ids, groups = torch.randint(1000, (16, 256)), torch.arange(16) // 4
    ids[:, :192] = ids[::4, :192].repeat_interleave(4, 0)
    mask = (torch.arange(256) >= 3 * (groups == 0)[:, None]).long()

    def loss(policy):
        return logps(policy, ids, mask, 64, groups=groups)[0].sum()

    check_update(cfg, 1, load_policy, loss, "policy", ["activations"])


@pytest.mark.parametrize("gpus, dtype", [(1, "float32"), (4, "bfloat16")])
def test_update_of_the_critic(folder, monkeypatch, gpus, dtype):
    cfg = replace(memory.config("ppo", ["--model", folder(DEEP)]), dtype=dtype, micro_tokens=1024,
                  max_prompt_len=192, max_new_tokens=64)
    ids, mask = torch.randint(1000, (4, 256)), torch.ones(4, 256, dtype=torch.long)
    mask[0, :3] = 0
    micro = common.Micro(torch.arange(4), 192, 64, mask[:, 192:])
    batch = common.Batch(None, [], ids[:, :192], mask[:, :192], ids[:, 192:], mask[:, 192:])
    monkeypatch.setattr(common, "load_tokenizer", lambda path: STUB)  # a made-up model has none

    def load_critic(cfg):
        return ppo.load_critic(SimpleNamespace(start=cfg.model, checkpoint=None), STUB, cfg)

    def loss(critic):
        return ppo.micro_values(critic, batch, micro).sum()

    check_update(cfg, gpus, load_critic, loss, "critic", ["activations"])


def logps(policy, *args, **options):
    """As `common.micro_logps` calls it: a sharded model's own method gathers its weights first."""
    function = getattr(policy, "token_logps", None) or partial(common.token_logps, policy)
    return function(*args, **options)


def load_policy(cfg):
    return common.load_policy(cfg.model, cfg.dtype, cfg.gradient_checkpointing)


def check_update(cfg, gpus, load, loss, role, telling):
    """Load, forward, backward and step as the scripts do; hold all of it against the plan."""
    plan = memory.plan(cfg, gpus)
    update, step = plan[f"update {role}"], plan["AdamW"]
    sharded = "sampler's copy" in update
    assert sharded == (gpus > 1 or cfg.dtype == "bfloat16")
    with ranks(gpus if sharded else 0), Meter() as meter:
        with record_function("WEIGHTS"):
            model = load(cfg)
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

SAMPLES = {  # shape, dtype, (questions, answers to each, prompt, answer), the part that tells
    "cache": (DEEP, "float32", (8, 8, 200, 8), "KV cache"),
    "cache in bfloat16": (DEEP, "bfloat16", (8, 8, 200, 8), "KV cache"),
    "logits": (THIN | dict(vocab_size=40000), "bfloat16", (8, 8, 10, 6), "logits"),
    "prompts": (FAT, "float32", (16, 1, 200, 4), "activations"),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_sampling(folder, case):
    shape, dtype, (questions, group, prompt, answer), telling = SAMPLES[case]
    path = folder(shape)
    cfg = replace(memory.config("grpo", ["--model", path]), prompts_per_step=questions, eval_size=1,
                  group_size=group, max_prompt_len=prompt, max_new_tokens=answer, dtype=dtype)
    sampler = common.Sampler(common.load_frozen(path, cfg.dtype), STUB, cfg)
    ids = torch.randint(2, shape["vocab_size"], (questions, prompt))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with Meter() as meter, record_function("SAMPLE"):
        sampler.generate(ids, mask, group, record=32)
    stage = memory.plan(cfg, 1)["sample"]
    agree({k: stage[k] for k in ("KV cache", "logits", "activations") if k in stage},
          meter["SAMPLE"].peak, [telling])


# --- whole runs ----------------------------------------------------------------------------------

FLAGS = "--group_size 4 --micro_tokens 1350 --gradient_checkpointing --dtype".split()
RUNS = {"grpo": [*FLAGS, "float32"], "ppo": [*FLAGS, "bfloat16"]}


def worker(folder):
    """Train a step by the scripts' own loops; a line of JSON tells what each of them took.

    Run by `trained` below, in a process of its own: python tests/test_memory.py FOLDER
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "?": 2}, "?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="?")
    common.load_tokenizer = lambda path: tokenizer
    experiment.evaluate = lambda *_: {}
    experiment.end_processes = lambda together: None
    finish = experiment.finish
    for script, flags in RUNS.items():
        out = f"{folder}/{script}"
        cfg = memory.config(script, [
            "--model", folder, "--data", f"{folder}/data.jsonl", "--out_dir", out, "--steps", "1",
            "--prompts_per_step", "8", "--minibatches", "2", "--eval_size", "1",
            "--max_new_tokens", "16", *flags])
        questions = experiment.load_questions(cfg).train
        experiment.encode(tokenizer, questions, cfg)
        cfg.max_prompt_len = max(len(question.prompt_ids) for question in questions)
        with contextlib.ExitStack() as blocks:
            meter = blocks.enter_context(Meter())
            blocks.enter_context(record_function("RUN"))

            def measured(run, *rest):  # all models are still there, gradients are gone
                blocks.close()
                finish(run, *rest)

            experiment.finish = measured
            importlib.import_module(script).train(cfg)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # the handlers hold on to the run
        disk = [sum(file.stat().st_size for file in Path(out, part).rglob("*.safetensors"))
                for part in ("checkpoints", "final")]
        print(json.dumps([asdict(cfg), meter["RUN"].peak, meter["RUN"].left, disk]), flush=True)
    os._exit(0)  # gloo's threads can abort an ordinary exit


@pytest.fixture(scope="module")
def trained(folder, impl):
    """script -> (settings, bytes at the peak, bytes between steps, bytes on disk).

    Models load in this one thread: the profiler does not see what others allocate.
    """
    path = folder(DEEP)
    rows = [{"question": f"{k:02}" + "1" * (38 - k % 2), "answer": "#### 4"} for k in range(16)]
    Path(path, "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run([sys.executable, __file__, path], text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(impl),
                                            "HF_DEACTIVATE_ASYNC_LOAD": "1"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    return dict(zip(RUNS, map(json.loads, lines), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_whole_run(trained, script):
    settings, peak, left, disk = trained[script]
    cfg = importlib.import_module(script).Config(**settings)
    stages = memory.plan(cfg, 1)
    passing = ("KV cache", "logits", "activations", "CUDA context, allocator")
    models = {part: size for part, size in stages["sample"].items() if part not in passing}
    assert set(models) == {"policy, float32", "policy, Adam's two moments", "reference"} | (
        {"critic, float32", "critic, Adam's two moments", "sampler's copy"} if script == "ppo"
        else set())
    agree(models, left, models, within=0.02)
    assert memory.peak(cfg, 1) * memory.GB - memory.RESERVE == pytest.approx(peak, rel=0.15)
    assert memory.disk(cfg) == pytest.approx([size / memory.GB for size in disk], rel=0.01)


# --- the plan of a large run ---------------------------------------------------------------------


def plan(script, *flags, gpus=1):
    """The plan of a 7B run by its flags."""
    return memory.plan(memory.config(script, ["--model", "Qwen2.5-7B", *flags]), gpus)


def test_what_trains_is_sharded_and_copies_are_whole():
    one, four = (plan("ppo", gpus=n)["AdamW"] for n in (1, 4))
    whole = {"sampler's copy", "reference", "CUDA context, allocator"}
    assert one["reference"] == one["sampler's copy"] == 2 * 7615616512
    for part, size in one.items():
        assert four[part] == (size if part in whole else size / 4), part


@pytest.mark.parametrize("script, flags, role", [
    ("grpo", ["--beta", "0"], "reference"), ("ppo", ["--kl_coef", "0"], "reference"),
    ("dapo", [], "reference"), ("gspo", [], "reference"), ("dapo", [], "reward model"),
    ("grpo", [], "critic, float32")])
def test_models_that_a_run_does_without(script, flags, role):
    assert all(role not in stage for stage in plan(script, *flags).values())


def test_a_reward_model_is_held_whole():
    stage = plan("grpo", "--reward", "model", "--reward_model", "Qwen2.5-0.5B", gpus=8)["sample"]
    assert stage["reward model"] == 2 * (494032768 + 896)


def test_flags_change_what_they_should():
    base, more = (plan("grpo", "--rollout_batch", n) for n in ("128", "256"))
    # --rollout_batch 0: a quarter of 80 GB holds all questions of an evaluation at once
    assert plan("grpo")["sample"] == more["sample"] != base["sample"]
    assert more["sample"]["KV cache"] == 2 * base["sample"]["KV cache"]
    wide, narrow = (plan("grpo", "--micro_tokens", n)["update policy"] for n in ("16384", "8192"))
    assert wide["activations"] == base["update policy"]["activations"] == 2 * narrow["activations"]
    assert plan("grpo", "--micro_tokens", "1")["update policy"]["activations"] > 0  # a row at least
    assert plan("grpo", "--dtype", "float32")["sample"]["reference"] == 4 * 7615616512


# --- command line --------------------------------------------------------------------------------


def run(capsys, line):
    """The lines that a command prints."""
    memory.main(line.split())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("line, verdict", [
    ("--script grpo --gpus 8 --gradient_checkpointing", "fits in 80 GB"),
    ("--script ppo --gpus 4 --gradient_checkpointing --critic Qwen2.5-0.5B", "fits in 80 GB"),
    ("--script ppo --gpus 4 --gradient_checkpointing", "change --critic Qwen2.5-0.5B"),
    ("--script grpo --gpus 4", "change --gradient_checkpointing"),
    ("--script gspo --gradient_checkpointing", "change --gpus 4"),
    ("--script ppo --gpus 2", ""), ("--script dapo --gpus 4 --gb 48", ""),
    ("--script grpo --gb 24", "change the model for a smaller")])
def test_verdict_and_its_remedy(capsys, line, verdict):
    line = f"--model Qwen2.5-7B {line}"
    *_, last = run(capsys, line)
    assert last.endswith(verdict)
    if "change --" in last:
        flags = ["--" + flag.strip() for flag in last.split("change --")[1].split("--")]
        assert run(capsys, f"{line} {' '.join(flags)}")[-1].startswith("fits in")
        for flag in flags:  # nothing is asked for in vain
            fewer = " ".join(other for other in flags if other != flag)
            assert run(capsys, f"{line} {fewer}")[-1].startswith("does not fit in")


def test_table_agrees_with_the_command(capsys):
    lines = run(capsys, "--table")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    cells = {(label, name): row for label, name, *row in rows}
    assert len(cells) == 3 * 4 + 7 and all(len(row) == 5 for row in cells.values())
    assert cells["PPO, 7B critic", "7B"][2].startswith("~~")  # 4 x 80 GB
    assert "~~" not in cells["PPO, 0.5B critic", "7B"][2]
    out = run(capsys, "--script ppo --model Qwen2.5-7B --gpus 4 --gradient_checkpointing")
    need = max(float(x) for x in next(x for x in out if "together" in x).split()[1:])
    assert cells["PPO, 7B critic", "7B"][2] == f"~~{need:.0f}~~"
    assert f"{cells['PPO, 7B critic', '7B'][4]}." in next(x for x in out if x.startswith("disk"))


@pytest.mark.parametrize("line, culprit", [
    ("--model Qwen2.5-70T", "Qwen2.5-70T"), ("--model /no/folder", "/no/folder"), ("", "tiny"),
    ("--model Qwen2.5-7B --gpus 0", "--gpus 0"), ("--model Qwen2.5-7B --gb nan", "--gb nan"),
    ("--model Qwen2.5-7B --gpus two", "two"), ("--model Qwen2.5-7B --micro_tokens 0", "--micro"),
    ("--model Qwen2.5-7B --lambda 1", "--lambda"), ("--script sac", "sac")])
def test_faults_are_one_line(capsys, monkeypatch, line, culprit):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stop:
        memory.main(line.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1) and culprit in err


if __name__ == "__main__":
    worker(sys.argv[1])
