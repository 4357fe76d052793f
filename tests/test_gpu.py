"""Tests: the scripts on a pretended GPU (see pretended_gpu.py): no tensor is left behind on the
CPU, and the host waits for the GPU as seldom as counted here. What only a real one can show is in
bench/gpu.py.
"""

import csv
import importlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import common
import experiment
import rewards
from forks import ranks
from pretended_gpu import PretendedGpu

SCRIPTS = ("grpo", "dapo", "gspo", "ppo")
ARGV = (
    "--cold_start 2 --steps 1 --prompts_per_step 2 --group_size 2 --minibatches 2 "
    "--max_new_tokens 6 --eval_size 2 --test_size 2 --samples 1 --keep 9"
).split()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    """Threads, signals, determinism as before; a cache of these tests; some right answers."""
    kept = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "gpu-cache"))
    monkeypatch.setattr(common, "_device", "auto")  # and as before at the end
    monkeypatch.setattr(rewards, "is_correct", lambda text, *_, **__: zlib.crc32(text.encode()) % 2)
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(settings[0], warn_only=True)
    torch.set_num_threads(settings[1])
    signal.signal(signal.SIGINT, kept[0])
    signal.signal(signal.SIGTERM, kept[1])


def run(script, folder, *flags):
    """Run a script in this process; flags beat those of ARGV."""
    module = importlib.import_module(script)
    argv = [] if "--resume" in flags else ARGV
    argv = [*argv, *(("--overlong_buffer", "4") if script == "dapo" and argv else ()), *flags]
    cfg = experiment.parse_args(module.Config, module.TINY, [*argv, "--out_dir", str(folder)])
    module.train(cfg)


def numbers(folder):
    """metrics.csv without what depends on the clock and the machine."""
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k[:2] != "t_" and k != "mem_gb"} for row in rows]


@contextmanager
def planted(monkeypatch, where, old, new):
    """A function or class with one piece of its text replaced."""
    owner, _, name = where.rpartition(".")
    module, *path = owner.split(".")
    module = importlib.import_module(module)
    owner = getattr(module, path[0]) if path else module
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{where} reads otherwise now: plant the fault anew"
    scope = {}
    exec(compile(source.replace(old, new), where, "exec"), module.__dict__, scope)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, scope[name])
        yield


@pytest.mark.parametrize(
    "script", ["grpo", "ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dapo", "gspo"))])
def test_all_is_on_the_gpu(script, tmp_path):
    extra = ["--bootstrap"] if script == "ppo" else []
    with PretendedGpu():
        run(script, tmp_path / "run", *extra)
    assert numbers(tmp_path / "run")[-1]["pg_loss"]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_a_run_has_the_cpu_s_numbers(tmp_path):
    """Also on an Apple GPU, where all but one sum, in float32, is the same."""
    run("grpo", tmp_path / "cpu")
    with PretendedGpu():
        run("grpo", tmp_path / "gpu")
    with PretendedGpu("mps") as apple:
        run("grpo", tmp_path / "mps", "--device", "mps")
    assert numbers(tmp_path / "gpu") == numbers(tmp_path / "cpu") and apple.waits
    for ours, theirs in zip(numbers(tmp_path / "mps"), numbers(tmp_path / "cpu"), strict=True):
        for name, value in theirs.items():
            assert ours[name] == value or float(ours[name]) == pytest.approx(float(value), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_apple_gpu_is_used_when_asked_for(script, tmp_path):
    """All is on it, and no number there is a float64."""
    with PretendedGpu("mps") as gpu:
        run(script, tmp_path / "run", "--device", "mps")
    assert gpu.waits and numbers(tmp_path / "run")[-1]["pg_loss"]


def test_no_float64_reaches_an_apple_gpu():
    with PretendedGpu("mps"):
        common.use_device("mps", "auto")
        meter, one = common.Meter(), torch.ones((), device=common.device())
        meter.add(loss=one)
        with pytest.raises(TypeError, match="no float64 on mps"):
            one.double()


@pytest.mark.parametrize("kind, name, expected", [
    ("cuda", "auto", "cuda"), ("cuda", "cpu", "cpu"), ("cuda", "cuda", "cuda"),
    ("mps", "auto", "cpu"), ("mps", "mps", "mps"), ("mps", "cpu", "cpu")])
def test_which_device(kind, name, expected):
    with PretendedGpu(kind):
        common.use_device(name, "auto")
        assert common.device().type == expected


@pytest.mark.parametrize("kind, name, dtype, ranks, culprit", [
    ("cuda", "mps", "auto", 1, "--device mps"), ("mps", "cuda", "auto", 1, "--device cuda"),
    ("mps", "mps", "bfloat16", 1, "--dtype"), ("mps", "mps", "auto", 2, "torchrun")])
def test_a_device_that_is_not_there_is_refused(
        kind, name, dtype, ranks, culprit, monkeypatch, capsys):
    if ranks > 1:
        monkeypatch.setenv("RANK", "0")
    with PretendedGpu(kind), pytest.raises(SystemExit) as stop:
        common.use_device(name, dtype)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and culprit in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_experts_are_on_the_gpu(script, tmp_path):
    with PretendedGpu():
        run(script, tmp_path / "run", "--model", "tiny-moe")
    assert numbers(tmp_path / "run")[-1]["expert_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_is_on_the_gpu(script, tmp_path):
    with PretendedGpu():
        run(script, tmp_path / "whole", "--steps", "2")
        run(script, tmp_path / "run")
        run(script, tmp_path / "run", "--resume", "--steps", "2")
    assert numbers(tmp_path / "run")[-1] == numbers(tmp_path / "whole")[-1]


@pytest.mark.slow
def test_checkpointing_is_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "HEAD_FLOATS", 69 * 8)  # chunks of 2 tokens
    with PretendedGpu():
        run("grpo", tmp_path / "run", "--gradient_checkpointing")
    assert numbers(tmp_path / "run")[-1]["pg_loss"]


@pytest.fixture
def reward_model(tmp_path):
    """A folder of a one-label classifier with the built-in tokenizer."""
    tokenizer = experiment._tiny_tokenizer()
    config = experiment._tiny_config("tiny", tokenizer)
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    return ["--reward", "model", "--reward_model", str(tmp_path / "reward")]


@pytest.mark.slow
def test_a_reward_model_is_on_the_gpu(reward_model, tmp_path):
    with PretendedGpu():
        run("grpo", tmp_path / "run", *reward_model)
    assert float(numbers(tmp_path / "run")[-1]["reward"]) != 0


# (script, function, its text, the fault): a move or a `device=` left out
FAULTS = [
    ("grpo", "common.padded", "torch.tensor(row, device=device())", "torch.tensor(row)"),
    ("grpo", "common.Sampler.truncated", ", device=tokens.device", ""),
    ("grpo", "common.Sampler._generate", "ids.new_full(", "torch.full("),
    ("grpo", "common.Sampler._generate", ", device=ids.device", ""),
    ("grpo", "common._Recorder.result", ", device=device()", ""),
    ("grpo", "common.response_mask", ", device=tokens.device", ""),
    ("grpo", "common.load_frozen", ".to(device())", ""),
    ("grpo", "common.trainable", ".to(device())", ""),
    ("grpo", "common.cut", ", device=lengths.device", ""),
    ("grpo", "common.response_states", ", device=group.device", ""),
    ("grpo", "common.whole", "values.new_zeros(", "torch.zeros("),
    ("grpo", "experiment.Scorer.__call__", "torch.tensor(total, device=where)",
     "torch.tensor(total)"),
    ("grpo", "experiment.Log._gathered", "x.new_zeros(", "torch.zeros("),
    ("grpo", "experiment._tokens", "x[row, :length].tolist()", "x[row, :length].numpy()"),
    ("grpo", "experiment.builtin_folder", ".to(common.device())", ""),
    ("dapo", "common.Batch.select", "value[rows]", "value.to('cpu')[rows.to('cpu')]"),
    ("ppo", "ppo.load_critic", "common.trainable(critic, cfg.dtype, cfg.gradient_checkpointing)",
     "critic.float().train()"),
    ("ppo", "ppo.token_rewards", ", device=mask.device", ""),
    ("reward", "rewards.RewardModel.__call__", "ids.to(self.model.device)", "ids"),
    ("reward", "rewards.RewardModel.__call__", ".float().cpu()", ".float()"),
]
QUICK = ("common.padded", "common.cut", "ppo.load_critic")  # in the short suite


@pytest.mark.parametrize("script, where, old, new", [
    pytest.param(*fault, marks=[] if fault[1] in QUICK else pytest.mark.slow,
                 id=f"{fault[1]}-{k}") for k, fault in enumerate(FAULTS)])
def test_a_tensor_left_behind_is_caught(
        script, where, old, new, tmp_path, monkeypatch, reward_model, capsys):
    if "builtin" in where or "padded" in where:  # which an earlier test's cold start would hide
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags, name = (reward_model, "grpo") if script == "reward" else ([], script)
    with planted(monkeypatch, where, old, new), PretendedGpu():
        with pytest.raises((RuntimeError, TypeError, SystemExit)) as caught:
            run(name, tmp_path / "run", *flags)
    # where the check at load meets it first, it says so in one line
    assert "cuda:0" in str(caught.value) or "error: --model tiny" in capsys.readouterr().err


TWO = """
import sys, zlib
sys.path[:0] = [{impl!r}, {tests!r}]
import pytest
from contextlib import nullcontext
import common, experiment, grpo, rewards
from pretended_gpu import PretendedGpu
from test_gpu import planted
rewards.is_correct = lambda text, *_, **__: zlib.crc32(text.encode()) % 2
fault = {fault!r}
cfg = experiment.parse_args(grpo.Config, grpo.TINY, {argv!r})
with planted(pytest.MonkeyPatch(), *fault) if fault else nullcontext(), PretendedGpu():
    grpo.train(cfg)
"""


def two_processes(folder, impl, *flags, fault=()):
    """(exit status, stderr) of two ranks of grpo.py, sharded, each on its pretended GPU."""
    program, tests = folder / "program.py", str(Path(__file__).parent)
    argv = [*([] if "--resume" in flags else ARGV), "--out_dir", str(folder / "run"), *flags]
    program.write_text(TWO.format(impl=str(impl), tests=tests, argv=argv, fault=fault))
    done = [rank.wait() for rank in ranks(program, 2, program, LOCAL_RANK="0")]
    return max(status for status, *_ in done), "".join(error for *_, error in done)


@pytest.mark.slow
def test_two_processes_are_on_their_gpus(tmp_path, impl):
    """FSDP over gloo: what is sharded, gathered, saved and resumed."""
    for flags in ((), ("--resume", "--steps", "2")):
        status, error = two_processes(tmp_path, impl, *flags)
        assert status == 0, error[-3000:]
    assert numbers(tmp_path / "run")[-1]["pg_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [
    ("common.gather", 'batch.to("cpu")', "batch"),
    ("common.gather", ".to(device())", ""),
    ("common.empty_copy", "torch.device(device()), ", ""),
    ("common.share_like", "tensor.to(parameter.device, copy=True)", "tensor.clone()")],
    ids=lambda fault: fault[0])
def test_a_tensor_left_behind_by_two_processes_is_caught(fault, tmp_path, impl):
    for flags in ((), ("--resume", "--steps", "2")):
        status, error = two_processes(tmp_path, impl, *flags, fault=fault)
        if status:
            break
    assert status != 0 and "cuda:0" in error, error[-3000:]


def test_what_travels_between_hosts_is_on_the_cpu():
    with PretendedGpu():
        ids, mask = common.padded([[5, 6], [7]], pad=0)
        batch = common.Batch(["a", "b"], ["c", "d"], ids, mask, ids, mask)
        with pytest.raises(TypeError, match="cuda:0"):
            pickle.dumps(batch)
        back = pickle.loads(pickle.dumps(batch.to("cpu")))
        assert back.tokens.device.type == "cpu" and batch.tokens.device.type == "cuda"
        assert back.to(common.device()).tokens.device.type == "cuda"


@pytest.fixture
def sampled(tmp_path):
    """(sampler, batch) of answers that never end, on the pretended GPU, and the GPU."""
    with PretendedGpu() as gpu:
        tokenizer = experiment._tiny_tokenizer()
        model = transformers.AutoModelForCausalLM.from_config(
            experiment._tiny_config("tiny", tokenizer)).to(common.device())
        grpo = importlib.import_module("grpo")
        cfg = grpo.Config(**grpo.TINY)
        sampler = common.Sampler(model, tokenizer, cfg)
        yield sampler, tokenizer, gpu


def test_waits_of_sampling(sampled):
    """Our own code waits once for every chunk of tokens and once for every part, not per token."""
    sampler, tokenizer, gpu = sampled
    sampler.stop_ids = [10**6]  # no answer ends
    counts = []
    for tokens in (common.CHUNK, 3 * common.CHUNK):
        sampler.max_new_tokens = tokens
        gpu.waits.clear()
        ids, mask = common.padded([tokenizer("Question: Mia").input_ids] * 2, sampler.pad)
        sampler.generate(ids, mask, group_size=2, record=2)
        own = {k: v for k, v in gpu.waits.items() if k[1].startswith("common.")}
        counts.append((sum(own.values()), sum(gpu.waits.values())))
    assert [own for own, _ in counts] == [2, 4], gpu.waits  # a part's width, and a chunk's rows
    per_token = (counts[1][1] - counts[0][1]) / (2 * common.CHUNK)
    assert per_token <= 2.5, f"{per_token} waits a token with those inside transformers"


def test_waits_of_an_update(sampled):
    """A micro-batch waits for one number, how many prompts it has; a step for its norm, twice."""
    sampler, tokenizer, gpu = sampled
    ids, mask = common.padded([tokenizer("Question: Mia").input_ids] * 8, sampler.pad)
    batch = common.Batch(["q"] * 8, ["a"] * 8, ids, mask, ids, mask, group_size=4)
    optimizer = common.make_optimizer(sampler.policy, 1e-3)
    (minibatch,) = common.cut(batch, 1, 4 * 2 * ids.shape[1])
    assert len(minibatch.micros) == 2
    gpu.waits.clear()
    for micro in minibatch.micros:
        logp, _ = common.micro_logps(sampler.policy, batch, micro, 1.0)
        (logp * micro.mask).sum().backward()
    assert gpu.own_waits("common.response_states") == 2  # one each
    assert sum(v for k, v in gpu.waits.items() if k[1].startswith("common.")) == 2, gpu.waits
    gpu.waits.clear()
    common.optimizer_step(sampler.policy, optimizer, 1e-3, 1.0)
    assert gpu.own_waits("common.optimizer_step") == 2, gpu.waits


# --- how many answers at once --------------------------------------------------------------------


def test_rows_that_fit_by_hand():
    """16 GB, 0.5B (24 layers, 2 heads of 64, bfloat16: 12,288 bytes a token), 1,024 tokens a row:
    4e9 / (1,024 x 12,288 + 18 x 151,936) = 261.1."""
    assert common.rows_that_fit(16e9, 1024 * 12_288, 151_936) == 261
    assert common.rows_that_fit(1e6, 1024 * 12_288, 151_936) == 1


@pytest.mark.parametrize("asked, expected", [(0, "fit"), (7, 7)])
def test_rollout_batch_on_a_gpu(sampled, asked, expected):
    sampler, tokenizer, _ = sampled
    grpo = importlib.import_module("grpo")
    cfg = grpo.Config(**grpo.TINY | dict(rollout_batch=asked))
    made = common.Sampler(sampler.policy, tokenizer, cfg)
    # 3 layers, keys and values, 4 heads of 16 in float32; 128 + 48 tokens; 69 pieces
    fit = (16 << 30) // 4 // (3 * 2 * 4 * 16 * 4 * (128 + 48) + 18 * 69)
    assert made.rows_at_once == (fit if expected == "fit" else expected)


def test_rollout_batch_on_a_cpu_is_fixed(monkeypatch):
    grpo = importlib.import_module("grpo")
    tokenizer = experiment._tiny_tokenizer()
    model = transformers.AutoModelForCausalLM.from_config(
        experiment._tiny_config("tiny", tokenizer))
    sampler = common.Sampler(model, tokenizer, grpo.Config(**grpo.TINY | {"rollout_batch": 0}))
    assert sampler.rows_at_once == common.CPU_ROWS
    calls, generate = [], sampler._generate
    monkeypatch.setattr(sampler, "_generate", lambda *a: calls.append(a) or generate(*a))
    sampler.max_new_tokens = 2
    ids, mask = common.padded([[5, 6]] * 65, sampler.pad)
    sampler.generate(ids, mask, group_size=4)  # 260 answers: 128, 128 and 4
    assert [len(a[0]) for a in calls] == [32, 32, 1]


@pytest.mark.parametrize(
    "rows, group_size, calls", [(2, 1, 144), (4, 4, 72), (8, 4, 36), (16, 1, 18)])
def test_forward_calls_of_a_rollout(rows, group_size, calls):
    """16 answers of 17 tokens, none ends sooner: a pass for the prompts of each part, 17 for its
    answers; also of an evaluation, which asks each question once."""
    grpo = importlib.import_module("grpo")
    tokenizer = experiment._tiny_tokenizer()
    model = transformers.AutoModelForCausalLM.from_config(
        experiment._tiny_config("tiny", tokenizer))
    cfg = grpo.Config(**grpo.TINY | dict(rollout_batch=rows, max_new_tokens=common.CHUNK + 1))
    sampler, seen = common.Sampler(model, tokenizer, cfg), []
    sampler.stop_ids = [10**6]
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(1))
    ids, mask = common.padded([[5, 6, 7]] * (16 // group_size), sampler.pad)
    sampler.generate(ids, mask, group_size)
    assert len(seen) == calls


# --- stops, and what is decided once -------------------------------------------------------------


def test_a_gpu_s_memory_grows_in_segments():
    """torch reads the variable on first use: though it was imported before, that is in time."""
    settings = os.environ["PYTORCH_ALLOC_CONF"]
    assert "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "expandable_segments" in settings
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:
        pytest.skip("this torch doesn't tell what it has read")
    assert read() == settings


def test_more_processes_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with PretendedGpu(), pytest.raises(SystemExit) as stop:
        common.use_device("auto", "float32")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "1 GPUs" in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later",
    "probability tensor contains either `inf`, `nan` or element < 0"], ids=["CUDA", "CPU"])
def test_logits_that_are_not_finite_end_in_one_line(sampled, words, monkeypatch, capsys):
    sampler, tokenizer, _ = sampled
    ids, mask = common.padded([tokenizer("Question: Mia").input_ids], sampler.pad)

    def fails(*_, **__):
        raise RuntimeError(words)

    monkeypatch.setattr(sampler.model, "generate", fails)
    with pytest.raises(SystemExit) as stop:
        sampler.generate(ids, mask)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "not finite" in error and error.count("\n") == 1


def test_rank_0_says_which_checkpoint(tmp_path, monkeypatch):
    """Where a network's file system shows this rank an older one."""
    grpo = importlib.import_module("grpo")
    for step in (1, 2):
        with experiment.whole_folder(tmp_path / "checkpoints" / f"step-{step:06d}") as folder:
            state = json.dumps({"step": step, "cursor": 0, "updates": 0, "logs": {}})
            (folder / "state.json").write_text(state)
    theirs = tmp_path / "checkpoints" / "step-000001"
    monkeypatch.setattr(common, "from_all_ranks", lambda own: [theirs, own])
    run = experiment.Run(grpo.Config(out_dir=str(tmp_path), resume=True), "grpo")
    assert run.checkpoint.name == "step-000001" and run.step == 1


def test_a_weights_and_biases_run_is_finished(monkeypatch, tmp_path):
    wandb = mock.Mock(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    cfg = mock.Mock(wandb="project")
    log = experiment.Log(tmp_path, {}, mock.Mock(), cfg, hold=lambda write, path: write())
    monkeypatch.setattr(experiment, "asdict", lambda cfg: {})
    log.write({"step": 0})
    log.close()
    assert wandb.init.called and wandb.finish.called


SLOW_STEP = '''
import os, signal, sys, time
sys.path.insert(0, {impl!r})
import common, experiment, grpo
cut = common.cut

def slow(batch, *rest):
    if common.rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun is told to stop
    time.sleep(8)
    return cut(batch, *rest)

flags = "--cold_start 0 --steps 3 --prompts_per_step 2 --group_size 2 --minibatches 1 " \\
    "--max_new_tokens 4 --eval_size 2 --test_size 2 --out_dir run"
cfg = experiment.parse_args(grpo.Config, grpo.TINY, flags.split())
common.cut = slow
grpo.train(cfg)
'''


@pytest.mark.slow
@pytest.mark.parametrize("seconds, saved", [("1", False), ("120", True)])
def test_a_stop_waits_for_a_slow_step(seconds, saved, tmp_path, impl):
    """Under torchrun: with --shutdown-timeout, as the README's commands have it."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_STEP.format(impl=str(impl)))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "--shutdown-timeout", seconds, program],
        capture_output=True, timeout=300, cwd=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir() == saved
