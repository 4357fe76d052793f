"""Course: exercise.py makes a folder without the solution and grades what comes back."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import yaml

import exercise
import handout_stages
import platforms
import variants
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
        results = exercise.grade(folder, algorithms, "functions", 7, 5, False, box)
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
    assert names == {
        *(f"{m}.py" for m in (*SCRIPTS, "common", "experiment", "rewards")), "HANDOUT.md",
        "MEASURE.md", "LICENSE", "requirements.txt", "pytest.ini", "plots/figures.py",
        "plots/table.py", "tests/cases.json", "tests/test_cases.py", "tests/worker.py"}
    page = (handout / "HANDOUT.md").read_text()
    assert all(f"-k {problem.name}`" in page for problem in PROBLEMS)
    assert all(f"| {s} | {steps} | {wanted:.2f} |" in page for s, (steps, wanted) in LEARN.items())


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


def test_loop_handout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exercise, "public_stages", lambda scripts: {})  # half a minute
    exercise.make(tmp_path / "out", ["grpo"], "loop")
    text = (tmp_path / "out" / "grpo.py").read_text()
    assert "# 4 update: pi_old is fixed, pi_theta moves ---" in text and "backward()" not in text
    assert not (tmp_path / "out" / "dapo.py").exists()
    assert "--algorithms grpo --level loop" in capsys.readouterr().out


@pytest.mark.slow
def test_public_tests_pass_on_the_solution_and_name_mistakes(handout, tmp_path):
    """A folder that is right everywhere but in one place."""
    folder = solution(tmp_path / "done", grpo=[("groups.std(1, keepdim=True)",
                                                "groups.std(1, keepdim=True, correction=0)")])
    (folder / "tests").mkdir()
    for file in (handout / "tests").iterdir():
        (folder / "tests" / file.name).write_text(file.read_text())
    shutil.copy(handout / "pytest.ini", folder)
    done = subprocess.run([sys.executable, "-m", "pytest", "tests", "-k", "grpo", "--maxfail=99"],
                          cwd=folder, capture_output=True, text=True)
    failed = re.findall(r"^_+ test_case\[(\S+?)-", done.stdout, re.M)
    assert set(failed) == {"grpo.group_advantages"}
    assert "looks like the standard deviation without Bessel's correction" in done.stdout
    parts = re.split(r"^_+ test_case.* _+$", done.stdout, flags=re.M)[1:]
    assert len(parts) == len(failed) and all(len(part.splitlines()) <= 10 for part in parts)
    assert "looks like" in parts[0], "a case by hand names its mistake, too"


# --- grade ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["gspo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_the_solution_gets_full_marks(grade, tmp_path, script):
    """Those problems which `test_a_fault_costs_its_own_problem_only` spoils; it has the others."""
    points, results, printed = grade(solution(tmp_path / "right"), [script])
    full = {n: x for n, x in FULL.items() if n.startswith(f"{script}.")}
    assert points == full
    assert f"{sum(full.values())} of {sum(full.values())}" in printed
    suites = ElementTree.fromstring(exercise.junit(results.values()))
    assert [s.get("name") for s in suites] == list(full)
    assert all(len(s) >= 2 and s.get("failures") == "0" for s in suites)


@pytest.mark.slow
def test_the_untouched_handout_gets_nothing(grade, handout):
    points, results, printed = grade(handout, ["shared", "gspo"])
    mine = exercise.chosen(["shared", "gspo"])
    assert points == {p.name: 0 for p in mine}
    assert printed.count("not written yet") == sum(len(p.functions) == 1 for p in mine)


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
    "ppo.gae": ("while True:\n        pass", "over the time limit of 5 s: an endless loop"),
    "ppo.whiten": ("for i in range(10**6):\n        print(i)", "printed more than 10,000 lines"),
    "ppo.value_loss": ("import os\n    os._exit(0)", "ended without an answer: os._exit"),
    "ppo.token_weights": ("raise SystemExit(0)", "SystemExit"),
    "ppo.token_rewards": ("import oracles\n    return oracles", "No module named 'oracles'"),
    "dapo.keep_group": ("return (", r"dapo.py can't be imported: SyntaxError: .*dapo.py line"),
}


@pytest.mark.slow
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


def test_a_stage_among_the_solutions():
    """Its own lines move, no others; a script without that stage can't give it."""
    text = (ROOT / "grpo.py").read_text()
    other = text.replace("score(batch)", "mine(batch)").replace("group_advantages(b", "no(b")
    assert exercise.with_stage(text, text.encode(), 2) == text.encode()
    assert exercise.with_stage(text, other.encode(), 2) == text.replace(
        "score(batch)", "mine(batch)").encode()
    assert exercise.with_stage(text, b"def train(cfg):\n    pass\n", 2) is None
    assert exercise.with_stage(text, b"def train(", 2) is None


def test_check_of_stages_says_the_first_difference():
    class Two(SimpleNamespace):
        def __len__(self):
            return 2

    batch = Two(
        mask=torch.tensor([[1, 1], [1, 0]]), tokens=torch.tensor([[3, 4], [5, 6]]),
        rewards=torch.tensor([1.0, 0.0]), correct=torch.tensor([1.0, 0.0]))
    right = {"first step": handout_stages.numbers(
        {"batch": batch, "advantages": torch.tensor([0.7, -0.7])})}
    assert [stage for stage, _ in handout_stages.compare("3", {"batch": batch}, None, right)] == [
        "1", "2"]
    batch.rewards = torch.tensor([1.0, 1.0])
    told = dict(handout_stages.compare("4", {"batch": batch}, None, right))
    assert told["1"] == "" and told["2"] == "mean batch.rewards: got 1.0, expected 0.5"
    assert told["3"].startswith("mean |advantage|: got nothing")


def test_check_of_stages_sees_the_loops_variables(tmp_path, monkeypatch):
    """Those of the script's own `train`, at the stage that is blank."""
    (tmp_path / "blank_loop.py").write_text(
        "Config = TINY = None\n\n\ndef train(cfg):\n    batch = 5\n"
        "    raise NotImplementedError('4')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("experiment.parse_args", lambda *_: None)
    blank, values = handout_stages.run_script("blank_loop", "", tmp_path)
    assert (blank, values["batch"]) == ("4", 5)


# --- a class, and where it lives -----------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch):
    """Instead of grading: `exploded` fails, the others get a report; the calls are noted."""
    calls = []

    def run(command, **_):
        name = Path(command[3]).name
        calls.append(name)
        if name == "exploded":
            return SimpleNamespace(returncode=1, stdout="", stderr="bang")
        checks = [{"name": "by hand", "passed": name == "a", "message": "no"}]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({
            "hidden_seed": 7, "points": 5 * (name == "a"), "of": 5, "problems": [
                {"name": "grpo.kl_k3", "points": 5 * (name == "a"), "checks": checks}]}))
        return SimpleNamespace(returncode=0, stdout="", stderr="")
    monkeypatch.setattr(exercise.subprocess, "run", run)
    return calls


def test_a_class_goes_on_where_it_was_stopped(stub, tmp_path, capsys):
    folders = [tmp_path / name for name in ("a", "b", "exploded")]
    for expected in (["a", "b", "exploded"], ["exploded"]):
        stub.clear()
        with pytest.raises(SystemExit, match="exploded: not graded"):
            exercise.grade_class(folders, tmp_path / "grades.csv", 2, [], 7)
        assert sorted(stub) == expected
    assert "1 of 2 failed grpo.kl_k3: by hand" in capsys.readouterr().out
    rows = [line.split(",") for line in (tmp_path / "grades.csv").read_text().split()]
    assert rows == [["submission", "points", "of", "grpo.kl_k3"], ["a", "5", "5", "5"],
                    ["b", "0", "5", "0"]]
    with pytest.raises(SystemExit, match="two submissions are named a"):
        exercise.grade_class([tmp_path / "a", tmp_path / "x" / "a"], tmp_path / "g.csv", 1, [], 7)


@pytest.fixture(scope="module")
def cispo(tmp_path_factory):
    """(handout of a variant, with its workflow; Gradescope's zip)."""
    out = tmp_path_factory.mktemp("variant")
    exercise.make(out / "hand", ["cispo"], "functions", classroom=True)
    platforms.gradescope(out / "auto.zip", ["cispo"], "functions")
    return out / "hand", out / "auto.zip"


@pytest.mark.slow
def test_a_variant_is_an_exercise(box, cispo, tmp_path):
    """The solution gets all, the blank nothing, and so does DAPO's loss, which it comes from."""
    texts = {"blank": (cispo[0] / "cispo.py").read_text(), "right": variants.patched("cispo"),
             "parent": (ROOT / "dapo.py").read_text()}
    assert "raise NotImplementedError" in texts["blank"] and "2506.13585" in texts["blank"]
    points = {}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cispo.py").write_text(text)
        (graded,) = exercise.grade(tmp_path / name, ["cispo"], "functions", 7, 5, False, box)
        points[name] = graded["points"]
    assert points == {"blank": 0, "right": 10, "parent": 0}


def test_gradescopes_format():
    graded = [exercise.result("grpo.kl_k3", 5, [("by hand", False, "got 1")], "", 0.4),
              exercise.result("grpo.learns", 15, [], "", 1.0) | {"accuracy": 0.61}]
    told = platforms.results(graded, exercise.lines_of)
    assert told["score"] == 17 and told["leaderboard"] == [
        {"name": "grpo held-out accuracy", "value": 0.61, "order": "desc"}]
    assert [(t["score"], t["max_score"], t["status"]) for t in told["tests"]] == [
        (2.0, 5, "failed"), (15.0, 15, "passed")]
    assert "by hand: got 1" in told["tests"][0]["output"]


@pytest.mark.slow
def test_gradescopes_autograder_in_a_clean_folder(cispo, tmp_path):
    """Its own command on a blank and a full submission; setup.sh is only read (it installs)."""
    with zipfile.ZipFile(cispo[1]) as archive:
        archive.extractall(tmp_path / "source")
    for name in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", tmp_path / "source" / name], check=True)
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for text, points in (((cispo[0] / "cispo.py").read_text(), 0), (variants.patched("cispo"), 10)):
        (tmp_path / "submission").mkdir(exist_ok=True)
        (tmp_path / "submission" / "cispo.py").write_text(text)
        subprocess.run(["bash", tmp_path / "source" / "run_autograder"], check=True, cwd="/",
                       env=os.environ | {"AUTOGRADER": str(tmp_path), "PATH": python})
        told = json.loads((tmp_path / "results" / "results.json").read_text())
        assert told["score"] == points and len(told["tests"]) == 1


@pytest.mark.slow
def test_classrooms_commands_in_a_clean_folder(cispo, tmp_path):
    """What its steps run, on a blank and a full submission."""
    workflow = (cispo[0] / ".github/workflows/classroom.yml").read_text()
    steps = yaml.safe_load(workflow)["jobs"]["autograding"]["steps"]
    commands = [s["with"]["command"] for s in steps if "command" in s.get("with", {})]
    assert commands == ["python -m pytest tests -k cispo.policy_loss"]
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shutil.copytree(cispo[0], tmp_path / "repo")
    for text, passes in ((None, False), (variants.patched("cispo"), True)):
        if text:
            (tmp_path / "repo" / "cispo.py").write_text(text)
        done = subprocess.run(commands[0].split(), cwd=tmp_path / "repo", capture_output=True,
                              env=os.environ | {"PATH": python})
        assert (done.returncode == 0) == passes


BUSY_FUNCTION = """import time


def kl_k3(logp, ref_logp):
    import torch
    while time.process_time() < start + 0.05 * len(calls):
        pass
    calls.append(1)
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


calls, start = [1], time.process_time()
"""


@pytest.mark.slow
def test_a_busy_machine_costs_no_points(tmp_path):
    """A correct function that needs more than a second of CPU time, of 3, beside four loops."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        problem = next(p for p in PROBLEMS if p.name == "grpo.kl_k3")
        with Sandbox(protection()[0]) as box:
            (graded,) = exercise.grade_functions(
                {"grpo.py": BUSY_FUNCTION.encode()}, [problem], 7, 3, box)
    finally:
        for process in busy:
            process.kill()
    assert graded["points"] == 5, graded


@pytest.mark.slow
def test_check_of_stages_in_a_loop_handout(tmp_path):
    """The solution is right in all; with its fourth stage blank the first three are judged, and a
    fault in the second is said to be there."""
    exercise.make(tmp_path / "out", ["grpo"], "loop")
    text = (ROOT / "grpo.py").read_text()
    blank, _ = exercise.leave_out_stages(text, STAGES["grpo"], only="4")
    wrong = blank.replace("batch.rewards, batch.correct = score(batch)",
                          "batch.correct, batch.rewards = score(batch)[1], 1 - score(batch)[0]")
    wanted = {text: ["right"] * 5, blank: ["right"] * 3 + ["not written yet"],
              wrong: ["right", "mean batch.rewards: got"]}
    for script, words in wanted.items():
        (tmp_path / "out" / "grpo.py").write_text(script)
        done = subprocess.run([sys.executable, "tests/check_stages.py", "grpo"], text=True,
                              cwd=tmp_path / "out", capture_output=True)
        lines = [x for x in done.stdout.splitlines() if x.startswith("stage ")]
        assert all(w in x for w, x in zip(words, lines)), done.stdout + done.stderr[-2000:]
        assert len(lines) >= len(words)


def test_every_script_has_its_thresholds():
    assert set(LEARN) == set(STAGES) == set(SCRIPTS)
