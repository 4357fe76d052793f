"""Tests: plots/claims.py: are verdicts drawn from the numbers rightly? Made-up runs.

The quick form of every claim takes minutes: CLAIMS=all pytest tests/test_claims.py; by default the
cheapest one runs.
"""
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
import claims  # noqa: E402
import figures  # noqa: E402
import measures  # noqa: E402
import trials  # noqa: E402
from claims import CLAIMS  # noqa: E402
from trials import Statement  # noqa: E402


def run(settings=None, **columns):
    """A run of 40 steps after the row of step 0; a number stands for a constant column."""
    made = figures.Run(step=np.arange(41.0))
    for name, values in columns.items():
        made[name] = np.concatenate([[np.nan], np.broadcast_to(values, 40)]).astype(float)
    made.settings = settings or {}
    return made


def statement(seeds=8, **bounds):
    return Statement("it is so", "number", None, {}, seeds=seeds, **bounds)


@pytest.mark.parametrize("values, bounds, verdict", [
    ([0.30, 0.31, 0.29], dict(above=0), "seen"),
    ([0.30, 0.31, 0.29], dict(above=0.5), "not seen"),
    ([0.30, 0.31, 0.29], dict(below=0), "not seen"),
    ([-0.30, -0.31, -0.29], dict(below=0), "seen"),
    ([0.3, -0.2, 0.1], dict(above=0), "undecided"),
    ([0.01, 0.012, 0.011], dict(above=0, matters=0.1), "not seen"),  # there, but negligible
    ([0.080, 0.081, 0.079], dict(above=0, matters=0.1), "not seen"),  # the same, nearer to 0.1
    ([0.01, -0.012, 0.011], dict(above=0, matters=0.1), "not seen"),
    ([-0.01, 0.012, -0.011], dict(below=0, matters=-0.1), "not seen"),
    ([0.2, -0.1, 0.11], dict(above=0, matters=0.1), "undecided"),
    ([0.2, 0.21, 0.19], dict(above=0, matters=0.1), "seen"),
    ([0.3], dict(above=0), "undecided"),  # a single seed has no spread
    ([0.0, 0.0, 0.0], dict(above=0), "not seen"),  # no difference at all
    ([0.0, 0.0, 0.0], dict(below=1e-6), "seen"),
    ([1.0, 1.0, 1.0], dict(above=0), "seen"),
])
def test_verdict(values, bounds, verdict):
    result = dict(seeds=8) | trials.judge(statement(**bounds), values)
    trials.decide([result], tested=1)
    assert result["verdict"] == verdict


def test_exact_needs_no_seeds():
    for value, verdict in ((1.2, "seen"), (1.05, "not seen")):
        result = dict(seeds=1) | trials.judge(statement(seeds=1, above=1.1), [value])
        trials.decide([result], tested=40)
        assert result["verdict"] == verdict


def test_interval_is_students():
    result = trials.judge(statement(above=0), [1.0, 2.0, 3.0])
    assert result["mean"] == 2 and result["half"] == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    # tabulated: t with 7 degrees of freedom exceeds 2.3646 in 5 % and 5.4079 in 0.1 % of cases
    assert trials.p_value(2.3646, 7) == pytest.approx(0.05, rel=1e-3)
    assert trials.p_value(-5.4079, 7) == pytest.approx(0.001, rel=1e-3)
    assert trials.quantile(2) == pytest.approx(4.3027, rel=1e-4)


def test_seeds_it_would_take():
    """Effect 1, spread 2, level 0.05: t = sqrt(n) / 2 passes Student's at n = 18 (2.121 > 2.110;
    n = 17: 2.062 < 2.120); a level of 0.05 / 10 takes more."""
    values = [1 + 2 * x for x in (-1, 1, 0, -1, 1)]  # their standard deviation is exactly 2
    result = dict(seeds=5) | trials.judge(statement(above=0), values)
    trials.decide([result], tested=1)
    assert result["verdict"] == "undecided" and result["needed"] == 18
    trials.decide([result], tested=10)
    assert result["needed"] > 30
    result = dict(seeds=2) | trials.judge(statement(above=0), [0.5, -0.5])  # no effect at all
    trials.decide([result], tested=1)
    assert result.get("needed") is None


def test_holm():
    """Three of five tested statements were run: 0.01 <= 0.05 / 5, 0.0126 > 0.05 / 4 stops."""
    def judged(*ps):
        results = [dict(p=p, side="seen", seeds=8, clear=0) for p in ps]
        results += [dict(seeds=8), dict(p=0.0, side="seen", seeds=1)]
        trials.decide(results, tested=5)
        assert "verdict" not in results[-2] and results[-1]["verdict"] == "seen"
        return [result["verdict"] for result in results[:-2]]
    assert judged(0.0126, 0.01, 0.012) == ["seen"] * 3  # 0.05 / 5, / 4, / 3
    assert judged(0.0126, 0.01, 0.2) == ["undecided", "seen", "undecided"]
    assert judged(0.011, 0.011, 0.011) == ["undecided"] * 3


@pytest.mark.parametrize("p, side, verdict", [
    (0.01, "not seen", "depends"), (0.06, "not seen", "seen"), (0.01, "seen", "seen")])
def test_what_a_second_setting_turns_around(p, side, verdict):
    result = dict(p=1e-6, side="seen", seeds=8, clear=1, again=dict(p=p, side=side))
    trials.decide([result], tested=1)
    assert result["verdict"] == verdict


def test_quantities():
    steps = np.arange(1, 41)
    assert measures.late("reward")(run(reward=steps)) == pytest.approx(35.5)
    assert measures.over_all("reward")(run(reward=steps)) == pytest.approx(20.5)
    assert measures.gain(run(eval_sampled=np.linspace(0.2, 0.8, 40))) == pytest.approx(0.6)
    assert measures.typical("reward")(run(reward=[1.0] * 39 + [1000])) == 1
    assert measures.contrast("a", "x", "y")({"a": dict(x=3, y=1)}) == 2
    assert measures.hacked(run(reward=0.9, accuracy=0.2)) == pytest.approx(0.7)
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
def test_entries_are_sound(name, tmp_path):
    """Every statement has its words, arms that the scripts accept, a margin, and a picture."""
    claim = CLAIMS[name]
    assert claim.headline and claim.source and claim.statements
    for one in trials.jobs(claim.statements, tmp_path):
        assert one.path.parent == tmp_path
        if not one.measures:
            flags = {k: "a folder" if callable(v) else v for k, v in one.flags.items()}
            cfg = trials.Job(one.script, flags, one.seed, one.steps, one.path).config()
            cfg.check()
            tiny = sys.modules[one.script].TINY
            assert (cfg.seed, cfg.steps) == (one.seed, one.flags.get("steps", one.steps))
            line = " ".join(trials.command(one.script, cfg))
            assert all(f"--{k}" in line or f"--no_{k}" in line or v == tiny[k]
                       for k, v in flags.items())
    for each in claim.statements:
        assert each.text and each.effect and (each.above is None) != (each.below is None)
        if each.matters is not None:  # on the claimed side of the margin
            assert each.matters > each.above if each.below is None else each.matters < each.below


def test_no_cold_start_but_the_default_is_made_for_another_learning_rate():
    """What is cached is keyed by 20 x lr."""
    import grpo
    assert claims.COLD["cold_start_lr"] == 20 * grpo.TINY["lr"]


def test_jobs_are_shared_and_second_settings_come_last(tmp_path):
    arms = {"a": ("grpo", {}), "b": ("grpo", {"beta": 0.1})}
    short = Statement("x", "y", None, {"a": arms["a"]}, above=0, seeds=2, steps=10)
    long = Statement("x", "y", None, arms, above=0, seeds=2, again=dict(lr=1e-4), again_seeds=1)
    assert trials.jobs([long, short], tmp_path)[0].steps == 20
    found = [(one.path.name, one.steps) for one in trials.jobs([short, long], tmp_path)]
    assert found == [("grpo-s0", 20), ("grpo-s1", 20), ("grpo-beta-0.1-s0", 20),
                     ("grpo-beta-0.1-s1", 20), ("grpo-lr-0.0001-s0", 20),
                     ("grpo-lr-0.0001-beta-0.1-s0", 20)]


def finished(folder, cfg, **columns):
    """A run's folder as the scripts leave it, by hand."""
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"config": cfg}))
    names = ["step", *columns]
    rows = [",".join(str(x) for x in row) for row in zip(range(41), *columns.values())]
    (folder / "metrics.csv").write_text("\n".join([",".join(names), *rows]) + "\n")


def test_finished_runs_are_not_run_again(tmp_path):
    one = trials.job(("grpo", {"beta": 0.1}), 2, 20, tmp_path)
    assert one.path == tmp_path / "grpo-beta-0.1-s2" and not one.done()
    cfg = trials.asdict(one.config()) | dict(steps=40, eval_every=10)
    finished(one.path, cfg, accuracy=np.arange(41.0))
    (one.path / "cpu_seconds").write_text("10.0")
    assert one.done()
    found, seconds = one.load("label")
    assert found["accuracy"][-1] == 20 and seconds == 5  # of 40 steps 20 are its own
    assert not trials.job(("grpo", {"beta": 0.1}), 2, 80, tmp_path).done()
    (one.path / "config.json").write_text(json.dumps({"config": cfg | {"lr": 1.0}}))
    with pytest.raises(SystemExit):
        one.done()


def test_evidence_ends_where_a_seed_is_missing(tmp_path):
    """Seeds 0, 1 and 3 are there: two seeds, not three."""
    each = Statement("x", "y", measures.of("a", measures.late("accuracy")),
                     {"a": ("grpo", {}), "n": len}, above=0, seeds=4)
    for seed in (0, 1, 3):
        one = trials.job(("grpo", {}), seed, 20, tmp_path)
        finished(one.path, trials.asdict(one.config()), accuracy=np.full(41, seed))
        (one.path / "cpu_seconds").write_text("10.0")
        (tmp_path / f"len-s{seed}.json").write_text('{"cpu_seconds": 1, "x": 2}')
    found, seconds = trials.evidence(each, tmp_path)
    assert [each.value(arms) for arms in found] == [0, 1] and seconds == 2 * (5 + 1)
    assert found[0]["n"]["x"] == 2
    later = replace(each, pilot=1, seeds=2)  # seeds 1 and 2
    assert [each.value(arms) for arms in trials.evidence(later, tmp_path)[0]] == [1]
    wanted = {one.seed for one in trials.jobs([later], tmp_path)}
    assert wanted == {1, 2} and {one.seed for one in trials.jobs([later], tmp_path, True)} == {0}


def nothing(seed, out, **flags):
    return dict(seed=seed) | flags


def broken(seed, out, **flags):
    raise ValueError("no such thing")


@pytest.mark.slow
def test_series(tmp_path, capsys):
    """Jobs in processes of their own; a failing one is named in one line."""
    todo = [trials.job(nothing, seed, 20, tmp_path, dict(lr=0.5)) for seed in (0, 1)]
    trials.run_all(todo, workers=2)
    numbers = json.loads((tmp_path / "nothing-lr-0.5-s1.json").read_text())
    assert numbers.pop("cpu_seconds") >= 0 and numbers == dict(seed=1, lr=0.5)
    with pytest.raises(SystemExit):
        trials.run_all([trials.job(broken, 0, 20, tmp_path)], workers=1)
    assert "broken-s0.json failed: ValueError('no such thing')" in capsys.readouterr().err


def stored(**results):
    row = dict(text="a|b", effect="accuracy", n=2, seeds=8, minutes=1.0)
    return {"clip-higher": [row | result for result in results.values()]}


def test_table(tmp_path, monkeypatch, capsys):
    judged = dict(n=8, mean=0.5, half=0.1, claimed="> 0", p=1e-9, needed=12, side="seen")
    again = dict(setting="lr 1", mean=-0.2, half=0.01, p=0.01, side="not seen", values=[1, 2])
    rows = stored(a=judged | dict(verdict="seen", again=again), b={},
                  c=judged | dict(verdict="undecided"))
    (tmp_path / "claims.json").write_text(json.dumps(rows))
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    claims.main(["--table"])
    head, rule, title, *rows = capsys.readouterr().out.splitlines()
    cells = [re.split(r"(?<!\\)\|", line) for line in (head, rule, title, *rows)]
    assert {len(c) for c in cells} == {9} and "claims-clip-higher.png" in title
    assert "| 1 seen, 1 undecided, 1 not run yet |" in title
    assert "**seen**" in rows[0] and "0.5 ± 0.1" in rows[0]
    assert "not seen: -0.2 ± 0.01 (lr 1, n 2)" in rows[0]
    assert "**not run yet (2 of 8 seeds)**" in rows[1]  # never undecided
    assert "about 12 seeds would tell" in rows[2]


def test_readme_holds_the_table():
    """What is printed by `python plots/claims.py --table`, and each picture that it names."""
    page = (ROOT / "plots" / "README.md").read_text()
    assert claims.table(claims.stored_results()) in page
    pictures = re.findall(r"claims-[\w-]+\.png", page + (ROOT / "README.md").read_text())
    assert pictures and all((ROOT / "plots" / name).is_file() for name in pictures)


def test_list_and_mistakes(capsys):
    claims.main([])
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed and CLAIMS[name].source in listed for name in CLAIMS)
    assert all(each.text in listed for claim in CLAIMS.values() for each in claim.statements)
    for words in (["no-such-claim"], ["cold-start", "--jobs", "0"], ["--nonsense"]):
        with pytest.raises(SystemExit) as stop:
            claims.main(words)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS if os.environ.get("CLAIMS") == "all" else ["one-update"])
def test_quick_form_runs(name, tmp_path):
    line = [sys.executable, str(ROOT / "plots" / "claims.py"), name, "--quick", "--out", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("UNDECIDED") + done.stdout.count("EXACT") == len(
        CLAIMS[name].statements)  # a single seed
    assert (tmp_path / "quick" / f"claims-{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("update", (False, True))
def test_the_repositorys_results_are_written_only_when_asked_for(update, tmp_path, monkeypatch):
    home = tmp_path / "plots"
    home.mkdir()
    monkeypatch.setattr(claims, "RESULTS", home / "claims.json")
    monkeypatch.setattr(claims, "examine", lambda *_: ([dict(seeds=8, n=0)], [[]]))
    monkeypatch.setattr(claims, "text", lambda results: "")
    monkeypatch.setattr(claims, "draw", lambda claim, results, seen, file: file.write_text("x"))
    claims.main(["cold-start", "--as_is", "--out", str(tmp_path / "runs"),
                 *["--update"] * update])
    assert sorted(p.name for p in home.iterdir()) == (
        ["claims-cold-start.png", "claims.json"] if update else [])


def test_results_are_not_replaced_by_fewer(tmp_path, monkeypatch, capsys):
    """A fresh checkout holds no runs: --as_is --update there would wipe the table."""
    before = json.dumps(stored(a=dict(n=3)))
    (tmp_path / "claims.json").write_text(before)
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    with pytest.raises(SystemExit):
        claims.main(["clip-higher", "--as_is", "--update", "--out", str(tmp_path / "runs")])
    assert "run it first" in capsys.readouterr().err
    assert (tmp_path / "claims.json").read_text() == before
