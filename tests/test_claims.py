"""Tests: plots/claims.py: are verdicts drawn from the numbers rightly? Made-up runs.

The quick form of every claim takes minutes: CLAIMS=all pytest tests/test_claims.py; by default the
cheapest one runs.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
import claims  # noqa: E402
import figures  # noqa: E402
import measures  # noqa: E402
from claims import CLAIMS, Claim, Part  # noqa: E402


def run(settings=None, **columns):
    """A run of 40 steps after the row of step 0; a number stands for a constant column."""
    made = figures.Run(step=np.arange(41.0))
    for name, values in columns.items():
        made[name] = np.concatenate([[np.nan], np.broadcast_to(values, 40)]).astype(float)
    made.settings = settings or {}
    return made


@pytest.mark.parametrize("values, margin, verdict", [
    ([0.30, 0.31, 0.29], dict(above=0), "seen"),
    ([0.30, 0.31, 0.29], dict(above=0.5), "not seen"),
    ([0.30, 0.31, 0.29], dict(below=0), "not seen"),
    ([-0.30, -0.31, -0.29], dict(below=0), "seen"),
    ([0.3, -0.2, 0.1], dict(above=0), "undecided"),
    ([0.3], dict(above=0), "undecided"),  # a single seed has no spread
    ([0.0, 0.0, 0.0], dict(above=0), "not seen"),  # no difference at all
    ([0.0, 0.0, 0.0], dict(below=1e-6), "seen"),
    ([1.0, 1.0, 1.0], dict(above=0), "seen"),
])
def test_verdict(values, margin, verdict):
    assert Part("x", None, **margin).judge(values)["verdict"] == verdict


def test_interval_is_students():
    result = Part("x", None, above=0).judge([1.0, 2.0, 3.0])
    assert result["mean"] == 2 and result["spread"] == pytest.approx(2.92 / 3**0.5)


@pytest.mark.parametrize("effects, verdict", [
    ([1, 1], "seen"), ([1, -1], "not seen"), ([1, None], "undecided"), ([-1, None], "not seen")])
def test_a_claim_needs_all_its_parts(effects, verdict):
    parts = [Part(str(i), lambda arms, i=i: arms[i], above=0) for i in range(len(effects))]
    evidence = [{i: seed * (-1) ** seed if effect is None else effect + seed / 100
                 for i, effect in enumerate(effects)} for seed in (1, 2, 3)]
    assert claims.judge(Claim("", "", {}, parts), evidence)["verdict"] == verdict


def test_quantities():
    steps = np.arange(1, 41)
    assert measures.late("reward")(run(reward=steps)) == pytest.approx(35.5)
    assert measures.over_all("reward")(run(reward=steps)) == pytest.approx(20.5)
    assert measures.gain(run(eval_sampled=np.linspace(0.2, 0.8, 40))) == pytest.approx(0.6)
    assert measures.unsteadiness(run(accuracy=steps / 100)) == pytest.approx(0)
    assert measures.hacked(run(reward=0.9, accuracy=0.2)) == pytest.approx(0.7)
    mixed = measures.mixed_groups(run({"group_size": 8}, samples=256, groups_dropped=8))
    assert mixed == pytest.approx(0.75)
    arms = {"a": run(reward=3.0), "b": run(reward=2.0)}
    assert measures.difference("a", "b", measures.late("reward"))(arms) == pytest.approx(1)
    assert measures.ratio_of("a", "b", measures.late("reward"))(arms) == pytest.approx(1.5)
    assert measures.first_gap("a", "b", "reward")(arms) == pytest.approx(0.5)


def test_accuracy_at_equal_tokens():
    """Twice the tokens for the same curve: behind by half of the steps, and its 10-step mean."""
    steps = np.arange(1, 41)
    arms = {name: run(tokens=tokens, accuracy=steps / 40)
            for name, tokens in (("dear", 200), ("cheap", 100))}
    value = measures.at_equal_tokens("dear", "cheap")(arms)
    assert value == pytest.approx((20 - 40) / 40)


@pytest.mark.parametrize("name", CLAIMS)
def test_entries_are_sound(name):
    """Every claim has a statement, a source, arms that the scripts accept, and pictures."""
    claim = CLAIMS[name]
    assert claim.statement and claim.source and claim.parts and len(claim.panels) <= 3
    for arm in claim.arms.values():
        if not callable(arm):
            script, flags = arm
            flags = {k: "a folder" if callable(v) else v for k, v in flags.items()}
            cfg = claims.settings((script, flags), 1, claim.steps, False, None)
            cfg.check()
            assert cfg.seed == 1 and cfg.steps == claim.steps
            line = " ".join(claims.command(script, cfg)[2:])
            assert all(f"--{k}" in line or f"--no_{k}" in line for k in flags)
    for part in claim.parts:
        assert (part.above is None) != (part.below is None)


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda line, **_: calls.append(line) or
                        subprocess.CompletedProcess(line, 0, "", ""))
    arm, folder = ("grpo", {"beta": 0.1}), tmp_path / "grpo-beta-0.1-s2"
    cfg = claims.asdict(claims.settings(arm, 2, 60, False, tmp_path))
    (folder / "final").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": cfg}))
    claims.run_arm(arm, 2, 40, False, tmp_path)
    assert calls[0][-1] == "--resume"  # it was never finished
    (folder / "final" / "config.json").write_text("{}")
    assert claims.run_arm(arm, 2, 40, False, tmp_path) == folder and len(calls) == 1  # 60 >= 40
    claims.run_arm(arm, 2, 80, False, tmp_path)
    assert len(calls) == 2
    (folder / "config.json").write_text(json.dumps({"config": cfg | {"lr": 1.0}}))
    with pytest.raises(SystemExit):
        claims.run_arm(arm, 2, 40, False, tmp_path)


def test_table(tmp_path, monkeypatch, capsys):
    part = Part("accuracy, a|b", None, above=0).judge([0.5, 0.5, 0.5])
    stored = {"clip-higher": dict(verdict="seen", parts=[part], seeds=3, steps=40)}
    (tmp_path / "claims.json").write_text(json.dumps(stored))
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    claims.main(["--table"])
    head, rule, row = capsys.readouterr().out.splitlines()
    cells = [re.split(r"(?<!\\)\|", line) for line in (head, rule, row)]
    assert {len(c) for c in cells} == {7}
    assert "**seen**" in row and "0.5 ± 0 (seen)" in row and "claims-clip-higher.png" in row


def test_list_and_mistakes(capsys):
    claims.main([])
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed and CLAIMS[name].source in listed for name in CLAIMS)
    for words in (["no-such-claim"], ["cold-start", "--seeds", "0"], ["--nonsense"]):
        with pytest.raises(SystemExit) as stop:
            claims.main(words)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS if os.environ.get("CLAIMS") == "all" else ["one-update"])
def test_quick_form_runs(name, tmp_path):
    line = [sys.executable, str(ROOT / "plots" / "claims.py"), name, "--quick", "--out", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verdict: UNDECIDED" in done.stdout and done.stdout.count("undecided") >= 1
    assert (tmp_path / "quick" / f"claims-{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("update", (False, True))
def test_the_repositorys_results_are_written_only_when_asked_for(update, tmp_path, monkeypatch):
    home = tmp_path / "plots"
    home.mkdir()
    monkeypatch.setattr(claims, "RESULTS", home / "claims.json")
    monkeypatch.setattr(claims, "load_arm", lambda *_: None)
    monkeypatch.setattr(claims, "judge", lambda *_: dict(verdict="seen", parts=[]))
    monkeypatch.setattr(claims, "draw", lambda claim, evidence, file: file.write_text("picture"))
    claims.main(["cold-start", "--out", str(tmp_path / "runs"), *["--update"] * update])
    assert sorted(p.name for p in home.iterdir()) == (
        ["claims-cold-start.png", "claims.json"] if update else [])
