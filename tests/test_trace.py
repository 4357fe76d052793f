"""Tests: plots/trace.py: does the loss follow from the numbers on the screen, and only them?"""
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plots"))
import trace  # noqa: E402  ours, not the standard library's

TERMS = {  # what the screen says a term is, from the line's own numbers and the answer's A
    "grpo": lambda x, a: clipped(a, x["ratio"], 0.2, 0.2) + 0.01 * x["KL"],
    "dapo": lambda x, a: clipped(a, x["ratio"], 0.2, 0.28),
    "gspo": lambda x, a: clipped(a, x["ratio"], 3e-4, 4e-4),
    "ppo": lambda x, a: clipped(x["A"], x["ratio"], 0.2, 0.2),
}


def clipped(advantage, ratio, low, high):
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def read(text):
    """The screen's token tables, each (answer, [{heading: number}]); {answer: its A}."""
    tables, advantages, headings = [], {}, []
    for line in text.splitlines():
        cells = re.sub("w x term|A [+] V", "other", line.replace("new - old", "difference")).split()
        if line.startswith("answer ") and line[7:8].isdigit() and ":" not in line:
            headings = cells[2:]
            tables.append((int(cells[1]), []))
        elif headings and re.match(r"  \S", line):
            values = [float(c) if re.match(r"-?\d", c) else c == "yes" for c in cells[1:]]
            tables[-1][1].append(dict(zip(headings, values, strict=True)))
        elif re.match(r" +\d", line) and not headings:
            advantages[int(cells[0])] = float(cells[-1 - ("dropped" in line)])
    return tables, advantages


def stated(text, name):
    return float(re.search(rf"^{name} = (\S+)", text, re.M)[1])


@pytest.mark.parametrize("name", TERMS)
def test_loss_from_the_screen(name, capsys):
    trace.main([name])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    tables, advantages = read(text)
    total, weights, clips = 0, 0, set()
    for answer, rows in tables:
        for row in rows:
            if "ratio" in row:
                term = TERMS[name](row, advantages.get(answer))
                assert row["term"] == pytest.approx(term, abs=3e-5)
                total, weights = total + row["weight"] * term, weights + row["weight"]
                clips.add(row["clip"])
    assert total == pytest.approx(stated(text, "policy_loss"), abs=2e-4)
    assert weights == pytest.approx(1, abs=3e-4)
    assert True in clips or name == "dapo"  # whose 1.28 lets GRPO's clipped 1.26 pass


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_ratio_is_of_the_tokens(name, capsys):
    trace.main([name])
    tables, _ = read(capsys.readouterr().out)
    rows = [row for _, rows in tables for row in rows if "ratio" in row]
    assert rows and all(
        row["ratio"] == pytest.approx(math.exp(row["new"] - row["old"]), abs=1e-5) for row in rows)


def test_gspo_has_one_ratio_an_answer(capsys):
    trace.main(["gspo"])
    for _, rows in read(capsys.readouterr().out)[0]:
        mean = sum(row["difference"] for row in rows) / len(rows)
        ratios = {row["ratio"] for row in rows}
        assert len(ratios) == 1 and ratios.pop() == pytest.approx(math.exp(mean), abs=1e-5)


def test_ppo_values_and_advantages(capsys):
    trace.main(["ppo"])
    text = capsys.readouterr().out
    tables, _ = read(text)
    loss = 0
    for _, rows in tables:
        if "reward" in rows[0]:
            following = {"V": 0, "A": 0}
            for row in reversed(rows):
                delta = row["reward"] + following["V"] - row["V"]
                assert row["A"] == pytest.approx(delta + 0.95 * following["A"], abs=3e-5)
                following = row
        if "V_new" in rows[0]:
            for row in rows:
                near = min(max(row["V_new"], row["V"] - 0.2), row["V"] + 0.2)
                term = 0.5 * max((row["V_new"] - row["G"]) ** 2, (near - row["G"]) ** 2)
                loss += row["weight"] * term
    assert loss == pytest.approx(stated(text, "value_loss"), abs=1e-4)


def test_help(capsys):
    trace.main(["--help"])
    assert "python plots/trace.py grpo" in capsys.readouterr().out


def test_unknown_name_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        trace.main(["sarsa"])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
