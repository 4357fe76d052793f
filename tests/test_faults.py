"""Tests: what may befall a run from outside: a second writer, damaged files, a dead terminal, a
full disk. It goes on from what is whole, and every loss is said in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import common
import experiment
from forks import Fork
from test_runs import (  # noqa: F401  fixtures among them
    assert_same_run, checkpoints, guesser, metrics, place, run, short, stopped, wait_for, whole,
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
    assert f"process {winner} on " in err or "holds a run" in err  # that came and went
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
