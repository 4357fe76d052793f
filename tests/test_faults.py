"""Tests: what may befall a run from outside: a second writer, damaged files, a dead terminal, a
full disk. It goes on from what is whole, and every loss is said in one line."""

import errno
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import common
import experiment
import grpo
from forks import Fork
from test_runs import (  # noqa: F401  fixtures among them
    SCRIPTS, assert_same_run, checkpoints, exit_now, guesser, metrics, place, run, same_weights,
    samples, short, stopped, wait_for, whole,
)


def refusal(capsys, *argv):
    """The one line with which a run refuses to start."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# --- one folder, one writer ----------------------------------------------------------------------

HOLD = """import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_two_at_once(impl, short, tmp_path):
    """Of two starts one wins; the other names it and has written nothing."""
    folder = tmp_path / "run"
    forks = [Fork(tmp_path / str(i), impl / "grpo.py", *short("grpo"), "--out_dir", folder)
             for i in range(2)]
    ended = [fork.wait() for fork in forks]
    loser = min(range(2), key=lambda i: ended[i][0] == 0)
    code, _, err = ended[loser]
    assert ended[1 - loser][0] == 0 and code == 2 and err.count("\n") == 1
    winner = forks[1 - loser].process.pid
    said = (f"process {winner} on ", "another process is writing", "holds a run")
    assert any(words in err for words in said)  # before it had left its name; it came and went
    assert [row["step"] for row in metrics(folder)] == list("01234")


def test_the_writers_lock_goes_with_its_process(stopped, whole, capsys):
    folder = stopped("grpo", 2)
    (folder / ".locked-by").write_text("process 7 on elsewhere")
    before = (folder / "metrics.csv").read_bytes(), (folder / "config.json").read_bytes()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, folder / ".lock"], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == "held\n"
        assert "process 7 on elsewhere" in refusal(capsys, "grpo", "--resume", "--out_dir", folder)
    finally:
        holder.kill()
        holder.communicate()
    assert before == ((folder / "metrics.csv").read_bytes(), (folder / "config.json").read_bytes())
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))


def test_a_run_that_came_since_the_command_line_was_read(short, whole, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "_check_common", lambda cfg: None)
    argv = [*short("grpo"), "--out_dir", whole("grpo")]
    assert "holds a run" in refusal(capsys, "grpo", *argv)


def test_a_refused_try_leaves_no_run(short, tmp_path, monkeypatch, capsys):
    argv = [*short("grpo"), "--out_dir", tmp_path / "run", "--steps", 1, "--cold_start", 1]
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "check_law", lambda sampler: common.fail("no such law"))
        assert "no such law" in refusal(capsys, "grpo", *argv)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run/start").mkdir(parents=True)  # as a kill in the cold start may leave it
    run("grpo", *argv)
    assert (tmp_path / "run/final").is_dir()


# --- checkpoints ---------------------------------------------------------------------------------

def test_checkpoints_in_order_of_number_without_strangers(stopped, whole):
    folder = stopped("grpo", 2)
    beside = folder / "checkpoints"
    shutil.copytree(beside / "step-000001", beside / "step-backup")
    (beside / "step-x.txt").write_text("a note")
    (beside / "step-9").write_text("a file")
    for number in (999999, 1000000):
        (beside / f"step-{number}").mkdir()
    names = [path.name for path in experiment.checkpoints(folder)]
    assert names == ["step-000001", "step-000002", "step-999999", "step-1000000"]
    for number in (999999, 1000000):
        (beside / f"step-{number}").rmdir()
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))
    assert (beside / "step-backup").is_dir() and (beside / "step-x.txt").is_file()


def test_the_start_is_part_of_the_run(stopped, capsys):
    """Without it the reference would be another model."""
    folder = stopped("grpo", 2, "--cold_start", 1)
    shutil.rmtree(folder / "start")
    assert str(folder / "start") in refusal(capsys, "grpo", "--resume", "--out_dir", folder)


@pytest.fixture
def halted(short, tmp_path, request):
    """A copy of the folder of a run, with a cold start of its own, that stopped after two steps."""
    first = Path("halted")
    if not first.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiment.Run, "stopping", lambda run: run.step >= 2)
            run("grpo", *short("grpo"), "--cold_start", 1, "--out_dir", first)
    return shutil.copytree(first, tmp_path / "halted")


def go_on(folder):
    """What --resume does with the run's files before it trains; returns the Run."""
    argv = ["--resume", "--out_dir", str(folder)]
    resumed = experiment.Run(experiment.parse_args(grpo.Config, grpo.TINY, argv), "grpo")
    resumed.tidy()
    resumed.lock.release(force=True)
    return resumed


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


NEWEST = "checkpoints/step-000002"
DEEP = "[" * 100_000
DAMAGES = {  # what befell the newest checkpoint, and what is said of it
    "optimizer cut": (lambda c: os.truncate(c / "optimizer.exp_avg.safetensors", 99),
                      "has 99 bytes"),
    "optimizer gone": (lambda c: remove(c / "optimizer.step.safetensors"),
                       "optimizer.step.safetensors is"),
    "state gone": (lambda c: remove(c / "state.json"), "state.json is missing"),
    "state empty": (lambda c: (c / "state.json").write_text(""), "has 0 bytes"),
    "state a folder": (lambda c: (remove(c / "state.json"), (c / "state.json").mkdir()), "missing"),
    "one bit": (lambda c: flip(c / "model.safetensors"), "model.safetensors has changed"),
    "empty folder": (lambda c: (remove(c), c.mkdir()), "manifest.json can't be read"),
    "manifest gone": (lambda c: remove(c / "manifest.json"), "manifest.json can't be read"),
    "manifest null": (lambda c: (c / "manifest.json").write_text("null"), "can't be read"),
    "manifest []": (lambda c: (c / "manifest.json").write_text("[]"), "can't be read"),
    "manifest deep": (lambda c: (c / "manifest.json").write_text(DEEP), "can't be read"),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_kept_and_the_one_before_is_taken(what, halted, capsys):
    harm, reason = DAMAGES[what]
    harm(halted / NEWEST)
    assert go_on(halted).step == 1
    said, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert f"{NEWEST} is damaged" in said and reason in said and f"{NEWEST}.bak" in said
    assert checkpoints(halted) == ["step-000001", "step-000002.bak"]
    assert [row["step"] for row in metrics(halted)] == ["0", "1"]


def test_steps_after_a_damaged_checkpoint_are_done_again(stopped, whole):
    folder = stopped("grpo", 3)
    os.truncate(folder / "checkpoints/step-000003/model.safetensors", 1000)
    run("grpo", "--resume", "--out_dir", folder)
    assert_same_run(folder, whole("grpo"))
    assert (folder / "checkpoints/step-000003.bak/state.json").is_file()


def test_a_copy_under_a_newer_number_is_no_newer_checkpoint(halted, capsys):
    shutil.copytree(halted / NEWEST, halted / "checkpoints/step-000007")
    assert go_on(halted).step == 2 and "a copy of step-000002" in capsys.readouterr().out


def test_no_checkpoint_is_whole(halted, capsys):
    """Nothing is renamed then: someone may mend one."""
    for name in checkpoints(halted):
        remove(halted / "checkpoints" / name / "state.json")
    before = checkpoints(halted)
    said = refusal(capsys, "grpo", "--resume", "--out_dir", halted)
    assert "step-000001: state.json" in said and "step-000002: state.json" in said
    assert checkpoints(halted) == before


@pytest.mark.parametrize("harm", [
    lambda start: remove(start), lambda start: remove(start / "model.safetensors"),
    lambda start: (start / "config.json").write_text("{}")])
def test_a_damaged_start_is_refused(harm, halted, capsys):
    harm(halted / "start")
    assert str(halted / "start") in refusal(capsys, "grpo", "--resume", "--out_dir", halted)


# --- logs and settings ---------------------------------------------------------------------------

OTHER_BYTES = {
    "spreadsheet": lambda data: data.replace(b",", b";"), "empty": lambda data: b"",
    "UTF-16": lambda data: data.decode().encode("utf-16"), "null": lambda data: b"null\n",
    "list": lambda data: b"[]\n", "zeros": lambda data: bytes(len(data)),
    "infinite": lambda data: b'{"step": Infinity}\n', "deep": lambda data: DEEP.encode(),
}


@pytest.mark.parametrize("name", ["metrics.csv", "samples.jsonl"])
@pytest.mark.parametrize("what", OTHER_BYTES)
def test_a_log_that_cannot_be_read_is_kept(name, what, halted, capsys):
    other = OTHER_BYTES[what]((halted / name).read_bytes())
    (halted / name).write_bytes(other)
    (halted / f"{name}.bak").write_text("of another day")
    go_on(halted)
    assert f"{name}.bak.bak, 0 lines go on" in capsys.readouterr().out
    assert (halted / f"{name}.bak.bak").read_bytes() == other
    assert (halted / f"{name}.bak").read_text() == "of another day"
    assert (halted / name).read_bytes() == experiment.LOGS[name]


@pytest.mark.parametrize("name", ["metrics.csv", "samples.jsonl"])
def test_lines_that_can_be_read_go_on(name, halted, capsys):
    lines = (halted / name).read_bytes().splitlines(keepends=True)
    (halted / name).write_bytes(b"".join(lines[:1] + [b"spilt coffee\n"] + lines[1:]))
    go_on(halted)
    assert (halted / name).read_bytes().splitlines(keepends=True) == lines
    assert f"{name}.bak" in capsys.readouterr().out


@pytest.mark.parametrize("name, missing", [("metrics.csv", 1), ("metrics.csv", 3),
                                           ("samples.jsonl", 1)])
def test_a_last_line_that_was_cut_is_no_line(name, missing, halted):
    """Cut within its last cell it has all its commas, and the next row would grow on to it."""
    lines = (halted / name).read_bytes().splitlines(keepends=True)
    (halted / name).write_bytes(b"".join(lines)[:-missing])
    go_on(halted)
    assert (halted / name).read_bytes().splitlines(keepends=True) == lines[:-1]


def test_logs_that_are_gone_or_folders(halted, capsys):
    remove(halted / "metrics.csv")
    remove(halted / "samples.jsonl")
    (halted / "samples.jsonl").mkdir()
    go_on(halted)
    said = capsys.readouterr().out
    assert "metrics.csv is not what the run wrote: gone" in said
    assert "samples.jsonl.bak" in said and (halted / "samples.jsonl.bak").is_dir()
    assert (halted / "metrics.csv").read_bytes() == experiment.LOGS["metrics.csv"]


WRONG_VALUES = [("steps", "3"), ("steps", 3.5), ("steps", None), ("lr", "x"), ("lr", [1]),
                ("seed", True), ("model", 3), ("data", {}), ("dtype", "float8"), ("dtype", []),
                ("resume", "yes"), ("beta", float("nan")), ("keep", 0), ("model", "\udc80x")]


@pytest.mark.parametrize("name, value", WRONG_VALUES)
def test_settings_of_the_wrong_type(name, value, halted, capsys):
    about = json.loads((halted / "config.json").read_text())
    about["config"][name] = value
    (halted / "config.json").write_text(json.dumps(about))
    assert name in refusal(capsys, "grpo", "--resume", "--out_dir", halted)


@pytest.mark.parametrize("data", [
    b"null", b"[]", b"", b"\xff\xfe\x00", b'{"script": "grpo", "config": [1]}', DEEP.encode()])
def test_settings_that_are_none(data, halted, capsys):
    (halted / "config.json").write_bytes(data)
    assert "config.json is damaged" in refusal(capsys, "grpo", "--resume", "--out_dir", halted)


# --- a dead terminal -----------------------------------------------------------------------------

DEAD = """import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(writer, 1)
os.dup2(full, 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_run_whose_terminal_is_dead(impl, short, whole, tmp_path):
    """As behind `| head -1` and with 2> on a full disk; its status is its own."""
    (tmp_path / "dead.py").write_text(DEAD)
    fork = Fork(tmp_path / "log", tmp_path / "dead.py", impl / "grpo.py", *short("grpo"),
                "--out_dir", tmp_path / "run")
    assert fork.wait()[0] == 0
    assert_same_run(tmp_path / "run", whole("grpo"))


def test_a_stream_that_was_closed_at_the_start(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    experiment.guard_output()
    print("nobody reads this")
    print("nor this", file=sys.stderr, flush=True)
    guarded = sys.stdout
    experiment.guard_output()
    assert sys.stdout is guarded


def test_sighup_saves_but_not_under_nohup(short, whole, tmp_path, monkeypatch, exit_now):
    original, calls = grpo.policy_loss, itertools.count()

    def signalling(*args, **kwargs):
        if next(calls) == 2:
            signal.raise_signal(signal.SIGHUP)
        return original(*args, **kwargs)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        monkeypatch.setattr(grpo, "policy_loss", signalling)
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
        assert metrics(tmp_path / "run") == metrics(whole("grpo"))[:3]
        calls = itertools.count()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "nohup")
        assert_same_run(tmp_path / "nohup", whole("grpo"))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_says_so_without_print(monkeypatch, tmp_path):
    """It may come in the middle of a print, which can't be entered twice."""
    listening = experiment.Run(grpo.Config(**grpo.TINY), "grpo")
    listening.saved = False
    with open(tmp_path / "said", "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.setattr("builtins.print", lambda *_, **__: pytest.fail("printed"))
        listening._on_signal(signal.SIGTERM, None)
        listening._on_signal(signal.SIGTERM, None)  # moments later: torchrun's second
        patch.setattr(sys, "stderr", io.StringIO())  # has no file behind it
        listening.signals.clear()
        listening._on_signal(signal.SIGTERM, None)
    assert (tmp_path / "said").read_text().count("stopping:") == 1


def test_a_signal_ends_the_last_evaluation(short, whole, tmp_path, monkeypatch, capsys):
    """Also one that comes twice, as torchrun sends them."""
    original = experiment.evaluate

    def signalling(sampler, questions, seed):
        if len(questions) == 3:  # the test questions
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
        return original(sampler, questions, seed)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "evaluate", signalling)
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    out = capsys.readouterr().out
    assert "test accuracy" not in out and "stopped after step 4" in out
    assert not (tmp_path / "run/final").exists()
    run("grpo", "--resume", "--out_dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", whole("grpo"))


# --- a full disk ---------------------------------------------------------------------------------

@pytest.fixture
def limit():
    """limit(n): no file may grow beyond n bytes, as under a quota; limit(None): any may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [300, 100_000])  # a row of metrics.csv, a checkpoint
def test_a_full_disk_holds_the_run_until_there_is_room(
    size, short, whole, tmp_path, monkeypatch, limit
):
    said, say = [], common.say

    def noted(text):
        if "can't be written" in text:
            said.append(text)
            assert not list((tmp_path / "run").rglob(".tmp-*"))  # it left the room to others
            limit(None)
        say(text)

    advance = experiment.Run.advance
    monkeypatch.setattr(experiment, "HOLD_SECONDS", 0)
    monkeypatch.setattr(experiment, "say", noted)
    monkeypatch.setattr(experiment.Run, "advance", lambda run: (advance(run), limit(size)))
    run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    assert said and all(str(tmp_path / "run") in text and "File too large" in text for text in said)
    limit(None)
    assert_same_run(tmp_path / "run", whole("grpo"))


def test_a_held_run_stops_when_told_to(short, whole, tmp_path, monkeypatch, capsys, limit):
    """From the newest whole checkpoint it goes on."""
    def stop(text):
        if "make room" in text:
            signal.raise_signal(signal.SIGTERM)

    advance = experiment.Run.advance

    def fill(run):
        advance(run)
        if run.step == 3:
            limit(100_000)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(experiment, "say", stop)
        patch.setattr(experiment.Run, "advance", fill)
        run("grpo", *short("grpo"), "--out_dir", tmp_path / "run")
    assert ended.value.code == 2
    assert "--resume goes on from step 2" in capsys.readouterr().err
    limit(None)
    run("grpo", "--resume", "--out_dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", whole("grpo"))


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, limit):
    path = tmp_path / "log"
    experiment.append(path, "one\n")
    limit(10)
    with pytest.raises(OSError) as error:
        experiment.append(path, "a longer line\n")
    limit(None)
    assert error.value.errno == errno.EFBIG and path.read_text() == "one\n"


def test_a_cache_that_is_full(tmp_path, monkeypatch, capsys, limit):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limit(100_000)
    said = refusal(capsys, *"grpo --data words --steps 0 --cold_start 1".split())
    assert str(tmp_path / "cache") in said and "XDG_CACHE_HOME" in said
    limit(None)
    left = list((tmp_path / "cache/nanopo").iterdir())
    assert all(path.name.endswith(".lock") for path in left)


def test_too_small_a_disk_is_refused_at_the_start(short, tmp_path, capsys):
    """A real one, of 3 MB, for three checkpoints of 2.6."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        said = refusal(capsys, "grpo", *short("grpo"), "--out_dir", disk / "run")
        assert str(disk / "run") in said and "3.1 MB free" in said and "8.1 MB" in said
        assert not (disk / "run/config.json").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- a cache that is not ours, and small print ---------------------------------------------------

def test_a_planted_model_is_not_taken(guesser, tmp_path, monkeypatch, capsys):
    """Under the very name that the cache would use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = grpo.Config(**grpo.TINY | dict(cold_start=1, eval_size=4, max_new_tokens=4))
    train = experiment.load_questions(cfg).train
    folder = Path(experiment.builtin_folder(cfg, train))
    capsys.readouterr()
    assert experiment.builtin_folder(cfg, train) == str(folder) and not capsys.readouterr().out
    original = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(guesser, folder)  # with a manifest, but that of another folder
    experiment.builtin_folder(cfg, train)
    assert "not as it was written (it is a copy of final)" in capsys.readouterr().out
    assert (folder / "model.safetensors").read_bytes() == original


@pytest.mark.parametrize("owner", ["us", "another", "all", "link", "file"])
def test_the_cache_in_the_shared_temporary_folder(owner, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    home = tmp_path / f"nanopo-cache-{os.getuid()}"
    if owner == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        home.symlink_to(tmp_path / "elsewhere")
    elif owner == "file":
        home.write_text("")
    else:
        home.mkdir(mode=0o700)
        home.chmod(0o777 if owner == "all" else 0o700)
    if owner == "another":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(home, 12345, -1)
    if owner == "us":
        assert experiment._cache_home() == home
        return
    with pytest.raises(SystemExit):
        experiment._cache_home()
    assert str(home) in capsys.readouterr().err


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd"])
def test_an_index_that_points_outside_its_folder(file, guesser, tmp_path, capsys):
    folder = shutil.copytree(guesser, tmp_path / "model")
    remove(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refusal(capsys, "grpo", "--model", folder, "--data", "data", "--steps", 1)
    assert "outside the folder" in said


@pytest.mark.parametrize("name", ["link", "link/run"])
def test_a_link_that_leads_nowhere(name, short, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    said = refusal(capsys, "grpo", *short("grpo"), "--out_dir", tmp_path / name)
    assert f"--out_dir {tmp_path / name}" in said and not (tmp_path / "nowhere").exists()


def test_a_name_that_the_locale_cannot_spell(short, tmp_path, capsys):
    """What Python makes of UTF-8 bytes under an ASCII locale."""
    name = "Größe".encode().decode("ascii", "surrogateescape")
    said = refusal(capsys, "grpo", *short("grpo"), "--out_dir", tmp_path / name)
    assert "--out_dir" in said and "PYTHONUTF8=1" in said


# --- all of it -----------------------------------------------------------------------------------

class Chaos:
    """A run of one script, its folder, and what of its logs it has said to be lost."""

    def __init__(self, file, argv, folder, rng):
        self.file, self.argv, self.folder, self.rng = file, argv, folder, rng
        self.begun, self.lost, self.log = False, set(), folder.with_name(f"{folder.name}-log")

    def start(self, *wrapper):
        """Begin or go on; returns when a checkpoint more is there, or one less, and a moment on."""
        argv = ["--resume"] if self.begun else self.argv
        before = self.newest()
        fork = Fork(self.log, *wrapper, self.file, *argv, "--out_dir", self.folder)
        wait_for(lambda: self.newest() not in (None, before), fork)
        self.begun = True
        time.sleep(self.rng.uniform(0.1, 0.6))
        return fork

    def newest(self):
        found = experiment.checkpoints(self.folder)
        return found[-1].name if found else None

    def kill(self, fork=None):
        fork = fork or self.start()
        fork.process.kill()
        fork.wait()

    def sigterm(self):
        fork = self.start()
        fork.process.terminate()
        status, out, _ = fork.wait()
        assert status == -signal.SIGTERM or status == 0 and "stopped after step" in out

    def dead_terminal(self):
        dead = self.folder.with_name("dead.py")
        dead.write_text(DEAD)
        self.kill(self.start(dead))

    def second_writer(self):
        first = self.start()
        second = Fork(f"{self.log}2", self.file, "--resume", "--out_dir", self.folder)
        status, _, err = second.wait()
        assert status == 2 and err.count("\n") == 1 and f"process {first.process.pid} on " in err
        self.kill(first)

    def full_disk(self):
        fork = self.start()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(fork.process.pid, resource.RLIMIT_FSIZE, (100_000, limits[1]))
        wait_for(lambda: "can't be written" in fork.out.read_text(), fork)
        fork.process.terminate()
        status, _, err = fork.wait()
        assert status == 2 and "--resume goes on from step" in err

    def damage(self):
        """Of one file, of those that a resume reads; it is equal, or said to be damaged."""
        self.kill()
        newest = self.folder / "checkpoints" / self.newest()
        files = [path for path in newest.rglob("*") if path.is_file()]
        logs = [self.folder / name for name in ("config.json", *experiment.LOGS)]
        path = self.rng.choice([self.rng.choice(files), self.rng.choice(logs)])
        good = path.read_bytes()
        spoilt = self.rng.choice([b"", good[: len(good) // 2], good[::-1], None])
        path.unlink() if spoilt is None else path.write_bytes(spoilt)
        if path.name == "config.json" and path.parent == self.folder:
            fork = Fork(self.log, self.file, "--resume", "--out_dir", self.folder)
            status, _, err = fork.wait()
            assert status == 2 and "config.json" in err and err.count("\n") == 1
            path.write_bytes(good)
            return
        fork = self.start()
        said = fork.out.read_text()
        if path in files:
            assert f"{newest} is damaged" in said
        if path in logs and f"{path} is not what the run wrote" in said:
            self.lost.add(path.name)
        self.kill(fork)


KINDS = ("kill", "damage", "full_disk", "second_writer", "dead_terminal", "sigterm")


@pytest.mark.slow
def test_thirty_faults_in_a_row(impl, short, tmp_path, request):
    """Over the four scripts, each fault followed by --resume: at the end the run is what it would
    have been, but for the lines of logs that were said to be lost. `pytest -s` prints the count."""
    rng = random.Random(request.config.getoption("--hidden-seed"))
    faults = list(KINDS) * 5
    rng.shuffle(faults)
    lost = []
    for i, name in enumerate(SCRIPTS):
        argv = [*short(name), "--steps", 1000, "--eval_every", 5, "--keep", 3]
        chaos = Chaos(impl / f"{name}.py", argv, tmp_path / name, rng)
        for kind in faults[i::4]:
            getattr(chaos, kind)()
            print(f"{name}: {kind}, then at {chaos.newest()}", flush=True)
        steps = int(chaos.newest()[5:]) + 1
        run(name, "--resume", "--out_dir", chaos.folder, "--steps", steps)
        run(name, *argv, "--steps", steps, "--out_dir", tmp_path / f"whole-{name}")
        for file, read in {"metrics.csv": metrics, "samples.jsonl": samples}.items():
            rows, expected = read(chaos.folder), read(tmp_path / f"whole-{name}")
            assert rows == expected or (
                file in chaos.lost and rows and all(row in expected for row in rows))
            lost += [f"{name}/{file}"] * (rows != expected)
        assert same_weights(chaos.folder / "final", tmp_path / f"whole-{name}/final")
    print(f"{len(faults)} faults in 4 runs; the weights of all 4 are those of runs undisturbed, "
          f"bit for bit; logs that lost lines, and said so: {', '.join(lost) or 'none'}")
