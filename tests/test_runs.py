"""Tests: whole runs, end to end: the files they leave, and that nothing can hurt a run for good.

A stopped, killed or failed run goes on as if nothing had happened: bit for bit the same numbers and
weights. The model is the tiny one after a very short cold start: it guesses 1, 2 or 3 and is right
now and then, so there is something to learn. A run of four steps takes a second.
"""

import csv
import dataclasses
import io
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as pieces

import common
import dapo
import experiment
import grpo
import gspo
import ppo
import rewards
from forks import Fork

SCRIPTS = {"grpo": grpo, "dapo": dapo, "gspo": gspo, "ppo": ppo}
every_script = pytest.mark.parametrize("name", SCRIPTS)

# Four steps of 3 questions out of 6: the second checkpoint lies between two epochs.
SHORT = ("--steps 4 --prompts_per_step 3 --group_size 4 --minibatches 2 --max_new_tokens 8 "
         "--lr 1e-3 --save_every 1 --eval_every 2 --eval_size 4").split()
OWN = {  # what is hardest to resume in each script
    "grpo": "--beta 0.1",
    "dapo": "--overlong_buffer 4 --max_gen_rounds 9",
    "gspo": "--lr_warmup 9",
    "ppo": "--kl_target 0.01 --kl_horizon 50 --bootstrap --entropy_coef 0.01",
}
CLOCK = {"t_sample", "t_logp", "t_update", "t_total", "mem_gb"}  # differ from run to run


# --- a workplace ---------------------------------------------------------------------------------

def write_rows(path, golds, question="Ana has {} coins. How many now?"):
    """One question per gold; what it asks does not matter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": question.format(i), "answer": f"#### {gold}"}
            for i, gold in enumerate(golds)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working folder of all runs: data, models, a cache; nothing outside it is touched."""
    place = tmp_path_factory.mktemp("place")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(place)
        write_rows(place / "data/train.jsonl", [1, 2, 3, 1, 2, 3, 2])  # one of them is held out
        write_rows(place / "data/test.jsonl", [1, 2, 3])
        write_rows(place / "guesses.jsonl", [1, 2, 3] * 70)
        write_rows(place / "always-two.jsonl", [2] * 70)
        yield place
    for number, handler in before.items():  # the runs have listened to signals
        signal.signal(number, handler)


def run(name, *argv):
    """A run in this process."""
    cfg = experiment.parse_args(SCRIPTS[name].Config, SCRIPTS[name].TINY, [str(a) for a in argv])
    SCRIPTS[name].train(cfg)


@pytest.fixture(scope="module")
def guesser(place):
    """A tiny model that answers 1, 2 or 3, whatever the question."""
    run("grpo", *"--data guesses.jsonl --cold_start 30 --cold_start_lr 3e-3 --steps 0".split(),
        *"--max_new_tokens 8 --eval_size 1 --out_dir guesser".split())
    return place / "guesser" / "final"


@pytest.fixture(scope="module")
def short(guesser):
    """short(name): the flags of a short run of that script."""
    return lambda name: [*SHORT, *OWN[name].split(), "--model", guesser, "--data", "data"]


@pytest.fixture(scope="module")
def whole(short):
    """whole(name): the folder of a short run that nothing disturbed."""
    def whole(name):
        folder = Path(f"whole-{name}")
        if not folder.exists():
            run(name, *short(name), "--out_dir", folder)
        return folder

    return whole


# --- what a run leaves ---------------------------------------------------------------------------

def metrics(folder):
    """metrics.csv as a list of rows, without the columns that a clock writes."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in CLOCK} for row in csv.DictReader(file)]


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def same_weights(a, b):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same_run(folder, expected):
    """Every number but the times, every sample, every final weight."""
    assert metrics(folder) == metrics(expected)
    assert samples(folder) == samples(expected)
    assert same_weights(folder / "final", expected / "final")


COLUMNS = """
    step reward accuracy eval_accuracy eval_low eval_high eval_sampled eval_lenient pg_loss
    value_loss entropy ref_kl approx_kl clip_frac grad_norm lr response_len truncated_frac tied_frac
    kl_coef explained_var gen_rounds groups_dropped expert_entropy sampler_gap samples tokens
    t_sample t_logp t_update t_total mem_gb
""".split()
EVALUATION = {name for name in COLUMNS if name.startswith("eval_")}
ONLY = {  # columns that stay empty elsewhere
    "grpo": {"ref_kl", "tied_frac"}, "gspo": {"tied_frac"},
    "dapo": {"tied_frac", "gen_rounds", "groups_dropped"},
    "ppo": {"ref_kl", "value_loss", "kl_coef", "explained_var"},
}


@every_script
def test_metrics(whole, name):
    """The same columns in every script; a row per step and one for where it started."""
    with open(whole(name) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4]
    filled = [{key for key, value in row.items() if value != ""} for row in rows]
    shared = set(COLUMNS) - EVALUATION - set().union(*ONLY.values()) - {"expert_entropy"}
    assert filled[0] == EVALUATION | {"step"}
    assert filled[1] == filled[3] == shared | ONLY[name]
    assert filled[2] == filled[4] == shared | ONLY[name] | EVALUATION
    assert all(float(value) == float(value) for row in rows for value in row.values() if value)


@every_script
def test_config(whole, name):
    """Every setting, so that the run can be repeated; and what it was made with."""
    about = json.loads((whole(name) / "config.json").read_text())
    fields = {field.name for field in dataclasses.fields(SCRIPTS[name].Config)}
    assert about["config"].keys() == fields and about["config"]["prompts_per_step"] == 3
    assert about["script"] == name
    assert about["torch"] == torch.__version__
    assert about["transformers"] == transformers.__version__


@every_script
def test_samples(whole, name):
    """A few rollouts of every evaluation, to be read by people."""
    rows = samples(whole(name))
    assert {row["step"] for row in rows} == {2, 4}
    for row in rows:
        assert row["gold"] in {"1", "2", "3"} and row["question"].startswith("Ana has")
        assert isinstance(row["completion"], str)
        assert isinstance(row["reward"], float) and isinstance(row["advantage"], float)


def test_the_advantage_in_a_sample_is_the_mean_of_its_own_tokens(short, tmp_path, monkeypatch):
    """PPO has one a token; padding is none of them."""
    given, whiten = [], ppo.whiten

    def note(x, mask):
        given.append((whiten(x, mask), mask.bool()))
        return given[-1][0]

    monkeypatch.setattr(ppo, "whiten", note)
    run("ppo", *short("ppo"), "--out_dir", tmp_path / "run")
    means = {round(advantages[i, mask[i]].mean().item(), 5)
             for advantages, mask in given for i in range(len(mask))}
    told = [round(row["advantage"], 5) for row in samples(tmp_path / "run")]
    assert told and set(told) <= means


SOUND = dict(truncated_frac=0.1, tied_frac=0.5, entropy=0.1, ref_kl=0.1, sampler_gap=1e-5,
             accuracy=0.5, reward=0.5, step=5, pg_loss=0.01)


@pytest.mark.parametrize("change, first_kl, right, warning", [
    ({}, 0.0, True, None), (dict(truncated_frac=0.6), 0.0, True, "--max_new_tokens"),
    (dict(tied_frac=1.0), 0.0, True, "--group_size"), (dict(entropy=0.004), 0.0, True, "entropy"),
    ({}, 1e-5, True, "ratio was not 1"), (dict(ref_kl=1.1), 0.0, True, "far from the reference"),
    (dict(sampler_gap=0.6), 0.0, True, "sampler and trainer"),
    (dict(accuracy=0.0, reward=0.0), 0.0, False, "ever right"),
    (dict(accuracy=0.0, reward=0.0), 0.0, True, None),
    (dict(pg_loss=None), 0.0, True, "no group was left"),
    (dict(tied_frac=1.0, accuracy=0.9), 0.0, True, None),  # nearly solved
    (dict(accuracy=None), 0.0, False, None)])
def test_what_is_unhealthy(change, first_kl, right, warning):
    """A step without any right answer is no alarm once there was one."""
    said = experiment.unhealthy(SOUND | change, first_kl, right)
    assert len(said) == (warning is not None)
    assert warning is None or warning in said[0][0]


@pytest.mark.parametrize("patience, steps, said_at", [
    (1, "x", [0]), (3, "xx", []), (3, "xxx", [2]), (3, "xx-xx-xx", []), (3, "xxxx-xxx", [2])])
def test_a_warning_is_said_once_it_has_lasted(patience, steps, said_at, monkeypatch):
    """One step is chance: it says so after `patience` in a row, and never again."""
    said, log = [], experiment.Log("", {}, mock.Mock(), None)
    monkeypatch.setattr(experiment, "say", said.append)
    for step, now in enumerate(steps):
        log._warn(step, [("it coughs", patience)] if now == "x" else [])
    assert said == [f"warning: step {step}: it coughs" for step in said_at]


def test_the_commands_at_the_end_can_be_pasted(short, tmp_path, capsys):
    """With the data, and a folder whose name has a space."""
    folder = tmp_path / "a run"
    run("grpo", *short("grpo"), "--out_dir", folder)
    said = capsys.readouterr().out.splitlines()
    figures, again, more = map(shlex.split, said[said.index("next:") + 1 :][:3])
    assert figures == ["python", "plots/figures.py", str(folder)]
    assert again[1:] == ["grpo.py", "--model", str(folder / "final"), "--data", "data",
                         "--steps", "0"]
    assert more[1:] == ["grpo.py", "--resume", "--out_dir", str(folder), "--steps", "8"]


def test_a_right_answer_is_remembered(short, tmp_path, monkeypatch, capsys):
    """Right in the first step only: what went wrong later is not that nothing is ever right."""
    verdicts = [1.0, 0.0, 0.0, 0.0]
    monkeypatch.setattr(experiment.Scorer, "__call__", lambda scorer, batch: (
        torch.zeros(len(batch)), torch.full((len(batch),), verdicts.pop(0))))
    run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    assert not verdicts and "ever right:" not in capsys.readouterr().out


def test_groups_dropped_are_those_without_contrast(short, tmp_path, monkeypatch):
    """Not those beyond the number a step wants."""
    teach, keep_group = [], dapo.keep_group

    def note(correct):
        teach.append(keep_group(correct))
        return teach[-1]

    monkeypatch.setattr(dapo, "keep_group", note)
    run("dapo", *short("dapo"), "--out_dir", tmp_path / "run")
    dropped = [row["groups_dropped"] for row in metrics(tmp_path / "run")[1:]]
    assert sum(map(float, dropped)) == sum((~mixed).sum().item() for mixed in teach)


@every_script
def test_checkpoints_kept(whole, name):
    """The newest --keep (2), and nothing unfinished beside them."""
    assert checkpoints(whole(name)) == ["step-000003", "step-000004"]
    assert not list(whole(name).rglob(".tmp-*"))


@every_script
def test_final_is_an_ordinary_model(whole, guesser, name):
    """It loads without this repository, reads as before, and generates; it is what was trained."""
    final = whole(name) / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    text = "Question: Ana has 2 coins. How many now?\nAnswer:\n#### 12"
    assert tokenizer(text).input_ids == common.load_tokenizer(guesser)(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    out = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > len(tokenizer(text).input_ids)
    assert same_weights(final, whole(name) / "checkpoints" / "step-000004")
    assert not same_weights(final, guesser)


def test_numbered_folders(short, monkeypatch, tmp_path):
    """Without --out_dir each run has a fresh folder."""
    argv = short("grpo")
    argv[argv.index("data")] = Path("data").resolve()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run("grpo", *argv, "--steps", 1)
    assert sorted(os.listdir("runs")) == ["grpo-1", "grpo-2"]


def test_no_steps_and_no_folder_leave_nothing(short, monkeypatch, tmp_path, capsys):
    """What the last lines of a run propose must not add a run without a step to runs/."""
    argv = short("grpo")
    argv[argv.index("data")] = Path("data").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run("grpo", *argv, "--steps", 0)
    assert "test accuracy" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["temporary"] and not os.listdir(tmp_path / "temporary")


def test_no_steps_only_evaluates(short, guesser, tmp_path, capsys):
    run("grpo", *short("grpo"), "--steps", 0, "--out_dir", tmp_path / "run")
    assert [row["step"] for row in metrics(tmp_path / "run")] == ["0"]
    assert "test accuracy" in capsys.readouterr().out
    assert same_weights(tmp_path / "run/final", guesser)


def test_text_that_the_terminal_cannot_show(short, tmp_path, monkeypatch):
    """A Windows console, or LANG=C: the run goes on, and samples.jsonl has the text in full."""
    write_rows(tmp_path / "data/train.jsonl", [1, 2] * 10, "¿Cuántas monedas 😀 {}?")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    run("grpo", *short("grpo"), "--data", tmp_path / "data", "--steps", 1,
        "--out_dir", tmp_path / "run")
    assert "¿Cuántas monedas 😀" in samples(tmp_path / "run")[0]["question"]


def test_the_cold_start_is_kept_for_the_same_lessons(tmp_path, capsys):
    """Other questions with the same answers are other lessons."""
    write_rows(Path("cats.jsonl"), [1, 2] * 10, "How many cats, {}?")
    write_rows(Path("dogs.jsonl"), [1, 2] * 10, "How many dogs, {}?")
    made = []
    for i, data in enumerate(["cats.jsonl", "dogs.jsonl", "cats.jsonl"]):
        run("grpo", "--data", data, *"--cold_start 1 --steps 0 --max_new_tokens 4".split(),
            "--out_dir", tmp_path / f"run{i}")
        made.append("making the tiny model" in capsys.readouterr().out)
    assert made == [True, True, False]


@pytest.mark.slow
def test_a_model_that_a_bug_made_does_not_outlive_the_bug(tmp_path, capsys, monkeypatch):
    """The cache is keyed by the code that fills it: plant, run, mend, run."""
    broken = tmp_path / "broken.py"
    broken.write_text(Path(common.__file__).read_text().replace(".log_softmax(", ".softmax("))
    made, rows = [], "--cold_start 1 --steps 0 --max_new_tokens 4 --eval_size 4".split()
    for i, file in enumerate([broken, Path(common.__file__), broken]):
        with monkeypatch.context() as patch:
            patch.setattr(common, "__file__", str(file))
            run("grpo", *rows, "--out_dir", tmp_path / f"run{i}")
        made.append("making the tiny model" in capsys.readouterr().out)
    assert made == [True, True, False]


def test_a_model_that_fails_the_check_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "check_law", lambda sampler: common.fail("it is off"))
    with pytest.raises(SystemExit):
        run("grpo", *"--cold_start 1 --steps 0 --max_new_tokens 4 --eval_size 4".split(),
            "--seed", 77, "--out_dir", tmp_path / "run")
    monkeypatch.undo()
    cfg = grpo.Config(**grpo.TINY | dict(cold_start=1, seed=77, max_new_tokens=4, eval_size=4))
    monkeypatch.setattr(experiment, "cold_start", lambda *_: common.fail("made anew"))
    with pytest.raises(SystemExit):
        experiment.builtin_folder(cfg, experiment.load_questions(cfg).train)


@every_script
def test_the_same_seed_gives_the_same_run(short, whole, name, tmp_path):
    run(name, *short(name), "--out_dir", tmp_path / "again")
    assert_same_run(tmp_path / "again", whole(name))


@pytest.mark.slow
def test_two_threads_on_a_busy_machine_give_the_same_run(tmp_path, monkeypatch):
    """Bit for bit, at the default sizes: what threads add in whatever order comes shows there."""
    monkeypatch.setattr(rewards, "is_correct", lambda text, *_, **__: zlib.crc32(text.encode()) % 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the user's choice: else the tiny model takes one
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    flags = "--steps 4 --cold_start 5 --eval_size 8 --test_size 8".split()
    try:
        for i in range(5):
            run("gspo", *flags, "--out_dir", tmp_path / str(i))
            assert_same_run(tmp_path / str(i), tmp_path / "0")
    finally:
        busy.kill()
        busy.wait()
        torch.set_num_threads(threads)


@every_script
def test_another_seed_gives_another_run(short, whole, name, tmp_path):
    run(name, *short(name), "--seed", 1, "--steps", 2, "--out_dir", tmp_path / "other")
    assert metrics(tmp_path / "other")[1]["entropy"] != metrics(whole(name))[1]["entropy"]


# --- stopped and resumed -------------------------------------------------------------------------

@pytest.fixture
def stopped(short, tmp_path, monkeypatch):
    """stopped(name, step): a short run that was told to stop in that step."""
    def stopped(name, step, *argv):
        folder = tmp_path / f"stopped-{name}"
        with monkeypatch.context() as patch:
            patch.setattr(experiment.Run, "stopping", lambda run: run.step >= step)
            run(name, *short(name), *argv, "--out_dir", folder)
        assert checkpoints(folder)[-1] == f"step-{step:06d}" and not (folder / "final").exists()
        return folder

    return stopped


@every_script
@pytest.mark.parametrize("step", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_is_as_if_never_stopped(stopped, whole, name, step):
    """Between two epochs over the questions and in the middle of one."""
    folder = stopped(name, step)
    run(name, "--resume", "--out_dir", folder)
    assert_same_run(folder, whole(name))


@pytest.mark.parametrize("name, column", [("dapo", "gen_rounds"), ("ppo", "kl_coef")])
def test_what_is_hardest_to_resume_took_place(whole, name, column):
    """Otherwise the test above would be easy: extra rounds, and a KL weight that moved."""
    assert len({row[column] for row in metrics(whole(name))[1:]}) > 1


@pytest.mark.slow
def test_resumed_experts(short, stopped, tmp_path):
    """Weights of experts are stored in another form than they are used in."""
    argv = "--model tiny-moe --cold_start 0 --reward contains+marker_format --steps 2".split()
    run("gspo", *short("gspo"), *argv, "--out_dir", tmp_path / "whole")
    folder = stopped("gspo", 1, *argv)
    run("gspo", "--resume", "--out_dir", folder)
    assert_same_run(folder, tmp_path / "whole")
    assert metrics(folder)[1]["expert_entropy"] != ""


def test_resumed_before_anything_was_trained(short, stopped, tmp_path):
    """DAPO drops every group of a model that is never right: its optimizer has no state yet."""
    argv = ["--data", "zero.jsonl", "--max_gen_rounds", 1]
    write_rows(Path("zero.jsonl"), [0] * 7)
    run("dapo", *short("dapo"), *argv, "--out_dir", tmp_path / "whole")
    assert metrics(tmp_path / "whole")[1]["grad_norm"] == ""
    assert metrics(tmp_path / "whole")[1]["tied_frac"] == ""
    folder = stopped("dapo", 1, *argv)
    run("dapo", "--resume", "--out_dir", folder)
    assert_same_run(folder, tmp_path / "whole")


@every_script
def test_every_rollout_draws_anew(short, name, tmp_path, monkeypatch):
    """Each has a seed of its own, and questions that no other of the epoch has had."""
    seeds, asked = [], []
    seed_all, rollout = common.seed_all, SCRIPTS[name].rollout

    def noted_rollout(sampler, questions, group_size, seed):
        asked.extend(row.question for row in questions)
        with monkeypatch.context() as patch:
            patch.setattr(common, "seed_all", lambda *n: (seeds.append(n), seed_all(*n)))
            return rollout(sampler, questions, group_size, seed)

    monkeypatch.setattr(SCRIPTS[name], "rollout", noted_rollout)
    run(name, *short(name), "--out_dir", tmp_path / "run")
    assert len(set(seeds)) == len(seeds) == len(asked) // 3 >= 4
    assert all(len(set(asked[i : i + 6])) == 6 for i in range(0, len(asked) - 5, 6))


def test_more_steps_than_asked_for_at_first(short, whole, tmp_path, monkeypatch):
    """The new number is remembered: stopped on the way to it, the run goes on to it."""
    folder = tmp_path / "run"
    run("grpo", *short("grpo"), "--steps", 2, "--out_dir", folder)
    with monkeypatch.context() as patch:
        patch.setattr(experiment.Run, "stopping", lambda run: run.step >= 3)
        run("grpo", "--resume", "--out_dir", folder, "--steps", 4)
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))


@every_script
def test_fewer_steps_than_are_done(short, whole, name, tmp_path, capsys):
    """Refused before anything is written: the run is as it was."""
    folder = shutil.copytree(whole(name), tmp_path / "run")
    before = (folder / "config.json").read_text()
    with pytest.raises(SystemExit) as stop:
        run(name, "--resume", "--out_dir", folder, "--steps", 3)
    assert stop.value.code == 2 and "--steps 3" in capsys.readouterr().err
    assert (folder / "config.json").read_text() == before
    assert_same_run(folder, whole(name))


def test_resumed_when_all_is_done(short, whole, tmp_path, capsys):
    """Nothing is left to do but to say again what was reached."""
    folder = shutil.copytree(whole("grpo"), tmp_path / "run")
    run("grpo", "--resume", "--out_dir", folder)
    assert "held-out accuracy: greedy" in capsys.readouterr().out
    assert_same_run(folder, whole("grpo"))


@pytest.mark.parametrize("name, flags", [
    ("grpo", "--beta 0.5"), pytest.param("ppo", "--kl_coef 0.5", marks=pytest.mark.slow)])
def test_the_reference_is_the_model_after_the_cold_start(short, stopped, tmp_path, name, flags):
    """Also after a resume, when the model that came in may be gone. KL is 0 before any update."""
    argv = [*flags.split(), "--cold_start", 3, "--minibatches", 1]
    run(name, *short(name), *argv, "--out_dir", tmp_path / "whole")
    rows = metrics(tmp_path / "whole")
    assert float(rows[1]["ref_kl"]) == 0 and any(float(row["ref_kl"]) for row in rows[2:])
    folder = stopped(name, 2, *argv)
    run(name, "--resume", "--out_dir", folder)
    assert_same_run(folder, tmp_path / "whole")


# --- killed --------------------------------------------------------------------------------------

class Killed(BaseException):
    """Stands for kill -9: nothing gets a chance to clean up."""


MOMENTS = {  # (module, function) and whether this call of it is the last thing that happens
    "before the first checkpoint":
        (experiment, "save_model", lambda sampler, model, path, *_, **__: "000001" in str(path)),
    "before the weights are written":
        (experiment, "save_model", lambda sampler, model, path, *_, **__: "000003" in str(path)),
    "before the optimizer is written":
        (experiment, "save_file", lambda tensors, path, *_: "000003" in str(path)),
    "before the checkpoint gets its name":
        (os, "replace", lambda old, new: str(new).endswith("step-000003")),
    "before an old checkpoint is removed":
        (shutil, "rmtree", lambda path, *_, **__: str(path).endswith("step-000001")),
    "before final gets its name":
        (os, "replace", lambda old, new: str(new).endswith("final")),
}


QUICK = "before the checkpoint gets its name"  # the others are slow


@pytest.mark.parametrize("moment", [
    pytest.param(x, marks=[] if x == QUICK else pytest.mark.slow) for x in MOMENTS])
def test_killed_at_the_worst_moments(short, whole, tmp_path, monkeypatch, moment):
    module, function, last = MOMENTS[moment]
    original = getattr(module, function)

    def deadly(*args, **kwargs):
        if last(*args, **kwargs):
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, function, deadly)
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    run("grpo", "--resume", "--out_dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", whole("grpo"))
    assert not list((tmp_path / "run").rglob(".tmp-*"))


@pytest.mark.parametrize("rest", [
    "17,0.5", *(pytest.param(x, marks=pytest.mark.slow) for x in ("3", "3,0.5,0.2"))])
def test_killed_in_the_middle_of_a_line(stopped, whole, rest):
    """The rest of a row of metrics.csv is not taken for a row, whatever number it starts with."""
    folder = stopped("grpo", 3)
    with open(folder / "metrics.csv", "a") as file:
        file.write(rest)
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"step": 2, "quest')
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))


def test_what_a_kill_left_is_swept_up(stopped, whole):
    """Unfinished checkpoints are not taken for finished ones, even if they look complete."""
    folder = stopped("grpo", 2)
    for name in ("checkpoints/.tmp-step-000009", ".tmp-final"):
        shutil.copytree(folder / "checkpoints/step-000002", folder / name)
    (folder / ".tmp-metrics.csv").write_text("step\n")
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))
    assert not list(folder.rglob(".tmp-*"))


def wait_for(condition, fork, seconds=300):
    """Until the condition holds; an error if the program ends before."""
    for _ in range(100 * seconds):
        if condition():
            return
        assert fork.process.exitcode is None, fork.err.read_text()
        time.sleep(0.01)
    raise TimeoutError


def last_checkpoint(folder):
    return max([int(path.name[5:]) for path in folder.glob("checkpoints/step-*")], default=0)


def test_a_kill_never_leaves_half_an_old_checkpoint(short, tmp_path, monkeypatch):
    """What goes is no checkpoint any more when its first file goes; a resume clears it away."""
    gone = []
    monkeypatch.setattr(experiment.shutil, "rmtree", lambda path, **_: gone.append(Path(path).name))
    run("grpo", *short("grpo"), "--steps", 3, "--keep", 1, "--out_dir", tmp_path / "run")
    old = [name for name in gone if "step-" in name]
    assert {".tmp-step-000001", ".tmp-step-000002"} <= set(old)
    assert all(name.startswith(".tmp-") for name in old)


@pytest.mark.slow
def test_kill_9_at_random_moments(impl, short, tmp_path):
    """Killed and resumed, twice; the rest is run here and compared with a run in one piece."""
    folder = tmp_path / "run"
    argv = [*short("grpo"), "--steps", 1000, "--eval_every", 1000, "--keep", 3]
    for attempt in range(2):
        begin = last_checkpoint(folder)
        command = argv if attempt == 0 else ["--resume"]
        fork = Fork(tmp_path / "log", impl / "grpo.py", *command, "--out_dir", folder)
        wait_for(lambda: last_checkpoint(folder) > begin, fork)
        time.sleep(random.uniform(0, 0.3))
        fork.process.kill()
        fork.process.join()
        for path in folder.glob("checkpoints/step-*"):  # each is whole
            assert json.loads((path / "state.json").read_text())["step"] == int(path.name[5:])
            load_file(path / "model.safetensors")
            load_file(path / "optimizer.exp_avg_sq.safetensors")
    steps = last_checkpoint(folder) + 1
    run("grpo", "--resume", "--out_dir", folder, "--steps", steps)
    run("grpo", *argv, "--steps", steps, "--out_dir", tmp_path / "whole")
    assert_same_run(folder, tmp_path / "whole")


def test_sigterm_ends_the_step_and_saves(impl, short, tmp_path):
    """A preempted job loses nothing, and prints the way to go on."""
    folder = tmp_path / "my run"
    fork = Fork(tmp_path / "log", impl / "grpo.py", *short("grpo"), "--steps", 1000,
                "--eval_every", 1000, "--save_every", 1000, "--out_dir", folder)
    table = folder / "metrics.csv"
    wait_for(lambda: table.exists() and table.read_text().count("\n") > 2, fork)
    fork.process.terminate()
    status, out, err = fork.wait()
    assert status == 0, err
    assert table.read_text().endswith("\n")
    step = last_checkpoint(folder)
    assert int(metrics(folder)[-1]["step"]) == step > 0
    assert f"stopped after step {step}" in out
    python, script, *argv = shlex.split(out.strip().splitlines()[-1])
    assert (python, script) == ("python", "grpo.py")
    run("grpo", *argv, "--steps", step + 1)
    assert int(metrics(folder)[-1]["step"]) == step + 1


@pytest.fixture
def exit_now(monkeypatch):
    """An exit without further ado ends the test, not pytest."""
    def exit_now(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", exit_now)


@every_script
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_in_the_middle_of_an_update(
    short, whole, name, number, tmp_path, monkeypatch, exit_now
):
    """The step is finished as if nothing had happened, and the last one."""
    script, original, calls = SCRIPTS[name], SCRIPTS[name].policy_loss, itertools.count()

    def signalling(*args, **kwargs):
        if next(calls) == 2:  # the first minibatch of the second step
            signal.raise_signal(number)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(script, "policy_loss", signalling)
        run(name, *short(name), "--out_dir", tmp_path / "run")
    assert checkpoints(tmp_path / "run") == ["step-000001", "step-000002"]
    assert metrics(tmp_path / "run") == metrics(whole(name))[:3]


def test_a_signal_in_the_last_step(short, whole, tmp_path, monkeypatch, exit_now, capsys):
    """All steps are done, but the test questions are left for --resume: who stops does not wait."""
    save = experiment.Run.save

    def signalling(run, sampler):
        if run.step == 4:
            signal.raise_signal(signal.SIGTERM)
        save(run, sampler)

    with monkeypatch.context() as patch:
        patch.setattr(experiment.Run, "save", signalling)
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    out = capsys.readouterr().out
    assert "test accuracy" not in out and "--resume" in out
    assert not (tmp_path / "run/final").exists()
    run("grpo", "--resume", "--out_dir", tmp_path / "run")
    assert "test accuracy" in capsys.readouterr().out
    assert_same_run(tmp_path / "run", whole("grpo"))


def test_a_second_signal_stops_at_once(short, tmp_path, monkeypatch, exit_now):
    """Who presses Ctrl-C again some seconds later does not want to wait for the step."""
    def twice(run, questions):
        signal.raise_signal(signal.SIGINT)
        run.signals[0] -= 3  # seconds ago
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(experiment.Run, "next_questions", twice)
    with pytest.raises(SystemExit) as stop:
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    assert stop.value.code == 128 + signal.SIGINT


# --- numbers that are none -----------------------------------------------------------------------

LOSSES = [(name, "policy_loss") for name in SCRIPTS] + [("ppo", "value_loss")]


@pytest.mark.parametrize("name, loss", LOSSES)
def test_a_loss_that_is_not_finite_never_reaches_a_checkpoint(
    short, whole, tmp_path, monkeypatch, capsys, name, loss
):
    """The run stops with one line; the cause mended, it goes on from before."""
    script, folder, calls = SCRIPTS[name], tmp_path / "run", itertools.count()
    original = getattr(script, loss)

    def spoilt(*args, **kwargs):
        value, stats = original(*args, **kwargs)
        return value * (float("nan") if next(calls) == 3 else 1.0), stats  # in the second step

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(script, loss, spoilt)
        run(name, *short(name), "--out_dir", folder)
    assert stop.value.code == 2
    error, = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "finite" in error and "--resume" in error
    assert checkpoints(folder) == ["step-000001"]
    run(name, "--resume", "--out_dir", folder)
    assert_same_run(folder, whole(name))


def test_weights_that_exploded(short, tmp_path, capsys):
    """After a huge step all weights are finite still, but not what they compute."""
    with pytest.raises(SystemExit) as stop:
        run("grpo", *short("grpo"), "--lr", 1e30, "--minibatches", 1, "--out_dir", tmp_path / "run")
    assert stop.value.code == 2
    assert "--lr" in capsys.readouterr().err


# --- one update per rollout ----------------------------------------------------------------------

class Two(list):
    """Minibatches that claim to be two, so that the old log-probs are computed for them."""

    def __len__(self):
        return 2


@every_script
def test_one_update_per_rollout(short, whole, name, tmp_path, monkeypatch):
    """The ratio is 1, nothing is clipped; not so at the second of two updates. And leaving out the
    pass for the old log-probs, which are those of the update itself then, changes nothing."""
    assert max(float(row["approx_kl"]) for row in metrics(whole(name))[1:]) > 1e-5
    argv = [*short(name), "--minibatches", 1, "--micro_tokens", 500, "--steps", 2]
    run(name, *argv, "--out_dir", tmp_path / "without")
    for row in metrics(tmp_path / "without")[1:]:
        assert float(row["approx_kl"] or 0) == float(row["clip_frac"] or 0) == 0
    if name == "ppo":  # needs them for the rewards, so has them anyway
        return
    cut = common.cut
    monkeypatch.setattr(common, "cut", lambda *args: Two(cut(*args)))
    run(name, *argv, "--out_dir", tmp_path / "with")
    assert_same_run(tmp_path / "with", tmp_path / "without")


# --- a model and data as they come from the hub --------------------------------------------------

GSM8K = [  # rows of its training file (MIT licence, OpenAI)
    ("What is fifteen more than a quarter of 48?",
     "A quarter of 48 is 48/4=<<48/4=12>>12.\nThe number is 12+15=<<12+15=27>>27.\n#### 27"),
    ("Twice Angie's age, plus 4, is 20. How old is Angie?",
     "Twice Angie's age is 20-4=<<20-4=16>>16.\nAngie is 16/2=<<16/2=8>>8.\n#### 8"),
    ("Tim buys 3 dozen eggs.  Eggs cost $.50 each.  How much did he pay for eggs?",
     "He bought 3*12=<<3*12=36>>36 eggs\nSo they cost 36*.5=$<<36*.5=18>>18\n#### 18"),
    ("Tim buys a cabinet for $1200 and gets a 15% discount.  How much did he pay?",
     "He got a discount of 1200*.15=$180\nSo he paid 1200-180=$<<1200-180=1020>>1020\n#### 1020"),
    ("Ali had $21. Leila gave him half of her $100. How much does Ali have now?",
     "Leila gave 100/2 = $<<100/2=50>>50 to Ali.\n"
     "Ali now has $21+ $50 = $<<21+50=71>>71.\n#### 71"),
]
CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
GENERATION = dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05,
                  eos_token_id=0, pad_token_id=0)


@pytest.fixture(scope="module")
def qwen(place):
    """A folder of the shape of Qwen2.5's base models: byte-level pieces, a chat template whose end
    of turn the generation config does not list, more embedding rows than tokens, bfloat16."""
    rust = Tokenizer(pieces.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.train_from_iterator(sum(GSM8K, ()), trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        chat_template=CHAT)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        vocab_size=len(tokenizer) + 24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=0, pad_token_id=0))
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    model.to(torch.bfloat16).save_pretrained(place / "qwen")
    tokenizer.save_pretrained(place / "qwen")
    return place / "qwen"


@pytest.fixture(scope="module")
def gsm8k(place):
    """A folder with GSM8K's files."""
    (place / "gsm8k").mkdir()
    for name, rows in (("train", GSM8K * 4), ("test", GSM8K[:2])):
        lines = [json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows]
        (place / "gsm8k" / f"{name}.jsonl").write_text("".join(lines))
    return place / "gsm8k"


@every_script
def test_a_real_models_folder_on_gsm8k(qwen, gsm8k, stopped, name, tmp_path):
    """Cold start on the worked solutions, two steps, stopped between them. `final` is in the form
    that its users know: dtype, generation config, template."""
    argv = ["--model", qwen, "--data", gsm8k, "--steps", 2, "--cold_start", 2]
    if name == "dapo":  # nobody gets anything right so soon
        argv.append("--no_dynamic_sampling")
    folder = stopped(name, 1, *argv, "--reward", "contains")
    run(name, "--resume", "--out_dir", folder)
    assert [row["step"] for row in metrics(folder)] == ["0", "1", "2"]
    final = load_file(folder / "final/model.safetensors")
    assert {weight.dtype for weight in final.values()} == {torch.bfloat16}
    config = json.loads((folder / "final/generation_config.json").read_text())
    assert GENERATION.items() <= config.items()
    assert transformers.AutoTokenizer.from_pretrained(folder / "final").chat_template == CHAT
    sample = samples(folder)[0]
    assert sample["question"] in dict(GSM8K) and sample["gold"] in {"27", "8", "18", "1020", "71"}


# --- rewards -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def reward_model(guesser):
    """A folder of a model with one number as its output, of random weights."""
    config = transformers.AutoConfig.from_pretrained(guesser, num_labels=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained("scorer")
    common.load_tokenizer(guesser).save_pretrained("scorer")
    return Path("scorer")


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo"])  # DAPO's rewards are not plain sums
def test_a_reward_model_and_a_rule(short, reward_model, name, tmp_path):
    """The first step samples the same answers whatever pays: its rewards add up by weight."""
    rewards = {}
    for spec in ("correct", "model", "correct+0.5*model"):
        extra = ["--reward_model", reward_model] if "model" in spec else []
        run(name, *short(name), "--steps", 1, "--reward", spec, *extra,
            "--out_dir", tmp_path / spec)
        rewards[spec] = float(metrics(tmp_path / spec)[1]["reward"])
    assert rewards["model"] not in (0, rewards["correct"])
    expected = rewards["correct"] + 0.5 * rewards["model"]
    assert rewards["correct+0.5*model"] == pytest.approx(expected, abs=1e-5)


@every_script
def test_a_short_training_raises_the_reward(guesser, name, tmp_path):
    """From guessing 1, 2 or 3 to what is always right here: 2."""
    argv = "--data always-two.jsonl --steps 8 --prompts_per_step 8 --group_size 8 --lr 2e-3"
    rest = "--max_new_tokens 8 --eval_size 4 --minibatches 2 --eval_every 8"
    own = {"dapo": "--overlong_buffer 0", "ppo": "--critic_lr 1e-2"}.get(name, "")
    run(name, *argv.split(), *rest.split(), *own.split(), "--model", guesser,
        "--out_dir", tmp_path / "run")
    accuracy = [float(row["accuracy"]) for row in metrics(tmp_path / "run")[1:]]
    assert accuracy[0] < 0.4
    assert sum(accuracy[-3:]) / 3 > accuracy[0] + 0.3  # 0.40 to 0.77 in 5 seeds of each script
