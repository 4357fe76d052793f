"""Course: exercise.py makes a folder without the solution and grades what comes back."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import exercise
from problems import LEARN, PROBLEMS, SCRIPTS, STAGES
from sandbox import Sandbox, protection

ROOT = exercise.ROOT
FULL = {p.name: p.points for p in PROBLEMS}


@pytest.fixture(scope="module")
def box():
    """One sandbox for all: it imports torch once."""
    with Sandbox(protection()[0]) as box:
        yield box


@pytest.fixture
def grade(box, capsys):
    """folder -> (points by problem, problem -> result, what is printed)."""
    def grade(folder, algorithms=("shared", *SCRIPTS)):
        results = exercise.grade(folder, algorithms, "functions", 7, 2, False, box)
        capsys.readouterr()
        exercise.say(results, 7)
        by_name = {r["name"]: r for r in results}
        return {n: r["points"] for n, r in by_name.items()}, by_name, capsys.readouterr().out
    return grade


def solution(folder, **changes):
    """A copy of the scripts; changes: module -> [(old, new), ...]."""
    folder.mkdir()
    for module in (*SCRIPTS, "common", "experiment", "rewards"):
        text = (ROOT / f"{module}.py").read_text()
        for old, new in changes.get(module, []):
            assert text.count(old) >= 1, f"{module}.py has no more: {old}"
            text = text.replace(old, new, 1)
        (folder / f"{module}.py").write_text(text)
    return folder


# --- make ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    out = tmp_path_factory.mktemp("make") / "student"
    exercise.make(out, ["shared", *SCRIPTS], "functions")
    return out


def test_handout_is_complete(handout):
    names = {str(p.relative_to(handout)) for p in handout.rglob("*") if p.is_file()}
    assert names == {*(f"{m}.py" for m in (*SCRIPTS, "common", "experiment", "rewards")), "HANDOUT.md",
                     "LICENSE", "requirements.txt", "tests/cases.json", "tests/test_cases.py",
                     "tests/worker.py"}
    page = (handout / "HANDOUT.md").read_text()
    assert all(f"-k {problem.name}`" in page for problem in PROBLEMS)


@pytest.mark.parametrize("level", ["functions", "loop"])
def test_nothing_of_the_solution_is_left(handout, level):
    """And what is left is the same: no line but the bodies' is gone, none but hints is new."""
    files, gone = exercise.student_files(SCRIPTS, level)
    assert len(gone) > 100
    exercise.refuse_leaks(files, gone)
    for name, text in files.items():
        compile(text, name, "exec")
        before, after = (ROOT / name).read_text().splitlines(), text.splitlines()
        assert all(line in before or line.lstrip().startswith(("#", "raise NotImplementedError"))
                   for line in after)
        assert [line for line in before if line not in after and line not in gone] == []
    if level == "functions":
        written = {str(p): p.read_text() for p in handout.rglob("*") if p.is_file()}
        exercise.refuse_leaks(written, gone)


def test_a_leak_is_refused():
    with pytest.raises(SystemExit, match="grpo.py still holds"):
        exercise.refuse_leaks({"grpo.py": "a\n    # return torch.expm1(d) - d  # k3"},
                              ["    return torch.expm1(d) - d"])


def test_docstrings_and_hints_take_the_place_of_bodies(handout):
    """Every blank says in 2 to 25 lines what to do."""
    text = (handout / "ppo.py").read_text()
    body = re.search(r'def gae\(.*?"""\n(.*?)\n\n\n', text, re.S)[1].splitlines()
    assert body[0].startswith("    # 1. ")
    assert body[-1] == '    raise NotImplementedError("ppo.gae")'
    for problem in PROBLEMS:
        assert 2 <= len(exercise.comment(problem.hints, "    ")) + 1 <= 25, problem.name
    for level in ("functions", "loop"):
        for name, text in exercise.student_files(SCRIPTS, level)[0].items():
            new = set(text.splitlines()) - set((ROOT / name).read_text().splitlines())
            assert max(map(len, new), default=0) <= 100


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit, match="not empty"):
        exercise.make(tmp_path, ["grpo"], "loop")


def test_loop_handout(tmp_path, capsys):
    exercise.make(tmp_path / "out", ["grpo"], "loop")
    text = (tmp_path / "out" / "grpo.py").read_text()
    assert "# 4 update: pi_old is fixed, pi_theta moves ---" in text and "backward()" not in text
    assert not (tmp_path / "out" / "dapo.py").exists()
    assert "--algorithms grpo --level loop" in capsys.readouterr().out


def test_public_tests_pass_on_the_solution_and_name_mistakes(handout, tmp_path):
    """A folder that is right everywhere but in one place."""
    folder = solution(tmp_path / "done", grpo=[("groups.std(1, keepdim=True)",
                                                "groups.std(1, keepdim=True, correction=0)")])
    (folder / "tests").mkdir()
    for file in (handout / "tests").iterdir():
        (folder / "tests" / file.name).write_text(file.read_text())
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=short", "-p",
                           "no:cacheprovider", "tests", "-k", "grpo"], cwd=folder, capture_output=True, text=True)
    failed = re.findall(r"^FAILED \S+\[(\S+?)-", done.stdout, re.M)
    assert set(failed) == {"grpo.group_advantages"}
    assert "looks like the standard deviation without Bessel's correction" in done.stdout


# --- grade ---------------------------------------------------------------------------------------


def test_the_solution_gets_full_marks(grade, tmp_path):
    points, results, printed = grade(solution(tmp_path / "right"))
    assert points == FULL
    assert f"{sum(FULL.values())} of {sum(FULL.values())}" in printed
    suites = ElementTree.fromstring(exercise.junit(results.values()))
    assert [s.get("name") for s in suites] == [p.name for p in PROBLEMS]
    assert all(len(s) >= 2 and s.get("failures") == "0" for s in suites)


def test_the_untouched_handout_gets_nothing(grade, handout):
    points, results, printed = grade(handout)
    assert points == dict.fromkeys(FULL, 0)
    assert printed.count("not written yet") == sum(len(p.functions) == 1 for p in PROBLEMS)


def test_an_empty_folder_gets_nothing(grade, tmp_path):
    (tmp_path / "empty").mkdir()
    points, results, printed = grade(tmp_path / "empty")
    assert points == dict.fromkeys(FULL, 0) and printed.count("no grpo.py") == 4


PLANTED = {  # problem -> an edit of the solution, and the mistake's name where the tests know it
    "grpo.kl_k3": ("    d = ref_logp - logp\n", "    d = logp - ref_logp\n", "k3 reversed"),
    "grpo.group_advantages": ("groups.std(1, keepdim=True)",
                              "groups.std(1, keepdim=True, correction=0)", "Bessel"),
    "ppo.policy_loss": ("torch.maximum(unclipped, clipped)", "torch.minimum(unclipped, clipped)",
                        "min where a loss needs max"),
    "common.response_mask": ("(stops.cumsum(-1) - stops == 0)", "(stops.cumsum(-1) == 0)",
                             "the end token itself left out"),
    "common.head_logps": ("logits if temperature == 1 else logits / temperature", "logits",
                          "temperature forgotten"),
    "rewards.extract_answer": ('text.rpartition("####")', 'text.partition("####")', ""),
}
HOSTILE = {  # problem -> what its function does in place of its work, what the report says
    "ppo.gae": ("while True:\n        pass", "over the time limit of 2 s: an endless loop"),
    "ppo.whiten": ("for i in range(10**6):\n        print(i)", "printed more than 10,000 lines"),
    "ppo.value_loss": ("import os\n    os._exit(0)", "ended without an answer: os._exit"),
    "ppo.token_weights": ("raise SystemExit(0)", "SystemExit"),
    "ppo.token_rewards": ("import oracles\n    return oracles", "No module named 'oracles'"),
    "dapo.keep_group": ("return (", r"dapo.py can't be imported: SyntaxError: .*dapo.py line"),
}


def test_a_fault_costs_its_own_problem_only(grade, tmp_path):
    """One folder with many: planted mistakes, which are named, and files that misbehave."""
    changes = {}
    for name, (old, new, _) in PLANTED.items():
        changes.setdefault(name.split(".")[0], []).append((old, new))
    changes["gspo"] = [("import torch\n", "import torch, no_such_package\n")]
    folder = solution(tmp_path / "faulty", **changes)
    for name, (code, _) in HOSTILE.items():
        module, function = name.split(".")
        text = (folder / f"{module}.py").read_text()
        first = re.search(rf'def {function}\(.*?""".*?"""\n', text, re.S)
        (folder / f"{module}.py").write_text(
            text[: first.end()] + f"    {code}\n" + text[first.end() :])
    points, results, printed = grade(folder)

    wanted = {name: words for name, (*_, words) in (PLANTED | HOSTILE).items()}
    wanted["gspo.policy_loss"] = "gspo.py can't be imported: ModuleNotFoundError: .*no_such_package"
    for name, words in wanted.items():
        said = results[name]["note"] + " ".join(c["message"] for c in results[name]["checks"])
        assert re.search(words, said), f"{name}: {said[:400]}"
        assert points[name] == 0 or name in PLANTED, name
    faulty = {name for name in FULL if name in wanted or name.startswith(("dapo.", "gspo."))}
    assert {name for name, full in FULL.items() if points[name] < full} == faulty
    assert len(printed) < 20_000


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_is_compared_stage_by_stage(tmp_path):
    """Without a run: two tables, of which one has another loss in its second step."""
    right = [{"step": "0", "pg_loss": ""}, {"step": "1", "pg_loss": "0.5"},
             {"step": "2", "pg_loss": "0.25"}]
    rows = [*right[:2], {"step": "2", "pg_loss": "0.3"}]
    assert exercise.same_column("step", rows, right) == (True, "")
    assert exercise.same_column("pg_loss", rows, right) == (
        False, "step 2: got 0.3, expected 0.25")
    assert exercise.same_column("pg_loss", [], right)[1] == "step 1: got no row, expected 0.5"


def test_every_script_has_its_thresholds():
    assert set(LEARN) == set(STAGES) == set(SCRIPTS)
