"""Course: a student's folder made from the scripts, and its grader.

    python tests/course/exercise.py make OUT         all four scripts, functions left out
    python tests/course/exercise.py make OUT --algorithms grpo --level loop
    python tests/course/exercise.py grade DIR        points per problem
    python tests/course/exercise.py grade DIR --skip-training --json report.json --junit report.xml
    python tests/course/exercise.py grade submissions/* --untrusted --jobs 2 --csv grades.csv

What is left out, with hints and points, is the table in problems.py; README.md has the rest.
"""

import argparse
import ast
import csv
import hashlib
import io
import json
import math
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

from filelock import FileLock

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(HERE), str(TESTS)]

import handout_stages  # noqa: E402
import measure  # noqa: E402
import platforms  # noqa: E402
import variants  # noqa: E402
from problems import (LEARN, LEARN_POINTS, LEARN_SECONDS, LOOP_POINTS, PROBLEMS,  # noqa: E402
                      SCRIPTS, STAGE_NAMES, STAGES, variant)
from sandbox import Sandbox, protection  # noqa: E402

# --- leaving out ---------------------------------------------------------------------------------


def functions_of(source):
    """Top-level functions by name: (first line, first line after the docstring, last line)."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            start = node.body[0].lineno
            if ast.get_docstring(node, clean=False) is not None:
                start = node.body[0].end_lineno + 1
            found[node.name] = node.lineno, start, node.end_lineno
    return found


def comment(hints, indent):
    """Hints as comment lines of at most 100 columns; a line set in by 2 or 3 goes on the last."""
    items = []
    for line in hints.strip("\n").splitlines():
        if re.match(r" {2,3}\S", line):
            items[-1] += " " + line.strip()
        else:
            items.append(line)
    lines = []
    for item in items:
        hang = " " * (len(item) - len(item.lstrip()) + 2)
        lines += textwrap.wrap(item, 98 - len(indent), subsequent_indent=hang,
                               break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def some(hints, level):
    """All hints, the first words of each step alone (few), or nothing (none)."""
    if level == "none":
        return ""
    if level == "all":
        return hints.strip("\n")
    steps = re.sub(r"\n {2,}(?=\S)", " ", hints.strip("\n")).splitlines()
    return "\n".join(re.split(r"(?<=[a-z)])[.:;] ", step)[0] for step in steps)


def leave_out_functions(source, problems, hints="all"):
    """(source with hints for bodies, the lines that are gone)."""
    lines, gone = source.splitlines(), []
    marked = {name: problem for problem in problems for name in problem.functions}
    for name, (_, start, end) in sorted(functions_of(source).items(), key=lambda x: -x[1][1]):
        if name in marked:
            problem = marked[name]
            first = name == problem.functions[0]
            told = some(problem.hints, hints) if first else f"See {problem.functions[0]}."
            gone += lines[start - 1 : end]
            lines[start - 1 : end] = [
                *comment(told, "    "), f'    raise NotImplementedError("{problem.name}")']
    return "\n".join(lines) + "\n", gone


def ruled(source):
    """[(number, index of its ruler, index behind its last line)] of the stages of `train`."""
    lines = source.splitlines()
    _, start, end = functions_of(source)["train"]
    rulers = [i for i in range(start, end) if re.match(r" {8}# [1-5] .*-{3,}$", lines[i])]
    last = next((i for i in range(start, end) if lines[i].startswith("    experiment.finish")), end)
    return [(int(lines[i].split()[1]), i, after) for i, after in zip(rulers, [*rulers[1:], last])]


def leave_out_stages(source, hints, level="all", only="12345"):
    """(source with hints for the ruled stages of `train`, the lines that are gone)."""
    lines, gone, stages = source.splitlines(), [], ruled(source)
    if not stages or {number for number, *_ in stages} != set(hints):
        raise SystemExit(f"error: train() has the stages {stages}, problems.py {sorted(hints)}")
    for number, at, after in reversed(stages):
        if str(number) in only:
            gone += lines[at + 1 : after]
            told = comment(some(hints[number], level), " " * 8)
            told.append(" " * 8 + f'raise NotImplementedError("{number}")')
            lines[at + 1 : after] = told if number == stages[-1][0] else [*told, ""]
    return "\n".join(lines) + "\n", gone


def with_stage(solution, student, number):
    """The solution's script with the student's stage of that number; None if it can't be found."""
    try:
        text = student.decode()
        theirs = {n: text.splitlines()[at:after] for n, at, after in ruled(text)}
    except (SyntaxError, ValueError, KeyError):
        return None
    lines = solution.splitlines()
    for n, at, after in ruled(solution):
        if n == (number if number in theirs else 1) and n in theirs:  # DAPO's first is "1, 2"
            lines[at:after] = theirs[n]
            return ("\n".join(lines) + "\n").encode()
    return None


def chosen(algorithms):
    shared = ("common", "rewards") if "shared" in algorithms else ()
    return [p for p in PROBLEMS if p.module in (*algorithms, *shared)] + [
        variant(name) for name in algorithms if name in variants.names()]


def scripts_of(algorithms):
    return [a for a in algorithms if a in SCRIPTS]


def house_text(module):
    """The solution's script of that name; a variant's is its patched parent."""
    file = ROOT / f"{module}.py"
    return variants.patched(module) if module in variants.names() else file.read_text()


def student_files(algorithms, level, hints="all"):
    """({file name: text}, the lines that are gone) of the handout's scripts."""
    files, gone = {}, []
    later = [name for name in algorithms if name in variants.names()]
    for module in (*scripts_of(algorithms), *later, "common", "experiment", "rewards"):
        text, lines = house_text(module), []
        if level == "functions":
            marked = [p for p in chosen(algorithms) if p.module == module]
            text, lines = leave_out_functions(text, marked, hints)
        elif module in STAGES:
            text, lines = leave_out_stages(text, STAGES[module], hints)
        files[f"{module}.py"] = text
        gone += lines
    return files, gone


# --- make ----------------------------------------------------------------------------------------


def run_tests(plugin, modules, seed=0, more=()):
    """The house's tests of these modules, in this process, under a plugin. Nothing is printed."""
    import pytest

    places = [(HERE if module == "variants" else TESTS) / f"test_{module}.py" for module in modules]
    files = list(map(str, [*places, *more]))
    options = ["-q", "--tb=native", "-p", "no:cacheprovider", "-c", os.devnull,
               "--rootdir", str(TESTS), "--hidden-seed", str(seed)]
    with redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([*options, *files], plugins=[plugin])
    if code not in (0, 1):
        raise SystemExit(f"error: the tests do not run\n{printed.getvalue()[-2000:]}")
    return code


def make(out, algorithms, level, hints="all", classroom=False):
    """Write the student's folder."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"error: {out} is not empty; name a new folder")
    files, gone = student_files(algorithms, level, hints)
    for name in ("requirements.txt", "LICENSE", "plots/figures.py", "plots/table.py"):
        files[name] = (ROOT / name).read_text()
    files["HANDOUT.md"] = handout(algorithms, level)
    files["MEASURE.md"] = measure.page(scripts_of(algorithms))
    if level == "functions":
        files |= public_cases(algorithms)
    else:
        files |= public_stages(scripts_of(algorithms))
    if classroom:
        files[".github/workflows/classroom.yml"] = platforms.classroom(chosen(algorithms)
            if level == "functions" else [], scripts_of(algorithms))
    refuse_leaks({n: text for n, text in files.items() if isinstance(text, str)}, gone)
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data.encode() if isinstance(data, str) else data)
    names = " ".join(algorithms)
    print(f"{out}: {len(files)} files. To grade what comes back:\n"
          f"  python tests/course/exercise.py grade DIR --algorithms {names} --level {level}")


def public_cases(algorithms):
    """{file name: text}: what the solution's functions answer, and the test of it."""
    from standin import Recorder

    recorder = Recorder(chosen(algorithms))
    modules = sorted({p.file or p.module for p in chosen(algorithms)})
    if run_tests(recorder, modules, seed=1, more=[HERE / "drawn.py"]):
        raise SystemExit("error: the solution fails its own tests; run pytest")
    recorder.name_mistakes()
    cases = "[\n" + ",\n".join(map(json.dumps, recorder.cases)) + "\n]\n"
    return {"tests/cases.json": cases, "tests/worker.py": (HERE / "worker.py").read_text(),
            "tests/test_cases.py": (HERE / "handout_cases.py").read_text(),
            "pytest.ini": "[pytest]\naddopts = -q -rN --no-header --maxfail 3 "
                          "-p no:cacheprovider\n"}


def public_stages(scripts):
    """{file name: text or bytes}: what the solution's loop had after each stage, the check of it,
    and the model it starts from."""
    files = {"tests/check_stages.py": (HERE / "handout_stages.py").read_text()}
    files |= {f"tests/model/{path.name}": path.read_bytes() for path in warm_start().iterdir()}
    recorded = {}
    for script in scripts:
        told = subprocess.run([sys.executable, str(HERE / "exercise.py"), "record", script],
                              capture_output=True, text=True)
        if told.returncode:
            raise SystemExit(f"error: {script}.py does not run: {told.stderr[-500:]}")
        recorded[script] = json.loads(told.stdout.splitlines()[-1])
    return files | {"tests/stages.json": json.dumps(recorded, indent=1) + "\n"}


def record(script):
    """Print, as JSON, what the solution's loop had: at its fifth stage, and after three steps."""
    arguments = loop_arguments(1)
    text, _ = leave_out_stages((ROOT / f"{script}.py").read_text(), STAGES[script], only="5")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{script}_5.py").write_text(text)
        sys.path.insert(0, folder)
        flags = f"--model {warm_start()} {arguments}"
        first = handout_stages.run_script(f"{script}_5", flags, Path(folder, "first"))
        numbers = handout_stages.numbers(first[1])
        handout_stages.run_script(script, flags, Path(folder, "run"))
        rows = handout_stages.rows_of(Path(folder, "run"))
    columns = {stage: [c for c in columns.split() if any(row[c] for row in rows)]
               for stage, (_, columns) in LOOP_POINTS.items()}
    print(json.dumps({"arguments": arguments, "first step": numbers, "rows": rows,
                      "columns": {stage: c for stage, c in columns.items() if c}}))


def refuse_leaks(files, gone):
    """Stop if a line of the solution is still anywhere, as code, as a comment or in a data file."""
    secret = {line.strip() for line in gone if len(line.strip()) >= 25}
    for name, text in files.items():
        for line in map(str.strip, text.splitlines()):
            code = name.endswith(".py")
            start = line.lstrip("# ")
            found = [s for s in secret if start.startswith(s) or (not code and s in line)]
            if found:
                raise SystemExit(f"error: {name} still holds a line of the solution: {found[0]}")


def handout(algorithms, level):
    """HANDOUT.md."""
    scripts = scripts_of(algorithms)
    if level == "functions":
        rows = [(p.name, f"`{p.module}.py`: {', '.join(f'`{f}`' for f in p.functions)}", p.points,
                 f"`python -m pytest tests -k {p.name}`", p.minutes)
                for p in sorted(chosen(algorithms), key=lambda p: p.module in SCRIPTS)]
    else:
        rows = [(f"{s}.train {stage}", f"`{s}.py`: stage {stage} of `train`", points,
                 f"`python tests/check_stages.py {s}`", 35)
                for s in scripts for stage, (points, _) in LOOP_POINTS.items()]
    rows += [(f"{s}.learns", f"`{s}.py`, all together", LEARN_POINTS,
              f"`python {s}.py --steps {LEARN[s][0]}`", 2) for s in scripts]
    learn = "\n".join(f"| {s} | {LEARN[s][0]} | {LEARN[s][1]:.2f} |" for s in scripts)
    learn = LEARN_TEXT.format(seconds=LEARN_SECONDS, rows=learn) if scripts else ""
    names = "\n".join(f"  - `{s}.py`: {STAGE_NAMES[s]}" for s in scripts)
    return (HERE / "handout.md").read_text().format(
        table="\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows),
        total=sum(row[2] for row in rows), scripts=", ".join(algorithms), learn=learn,
        level=(LOOP_TEXT if level == "loop" else FUNCTIONS_TEXT).format(names=names))


FUNCTIONS_TEXT = """- A problem's points are shared out by the checks passed; a test with many cases
  is one check. But a problem pays only if a check on inputs drawn afresh is passed: all values and
  gradients within 1e-6.
- Each problem is graded by itself: a mistake in one function costs nothing in another. (The check
  here runs your own helpers: `policy_loss` calls your `kl_k3`.)
- 30 seconds of CPU time and 10,000 printed lines per problem."""

LEARN_TEXT = """- `learns`: your script as it is, with our shared files, from a model that gets a
  fifth of the questions right. Five points for each of three seeds that reaches the accuracy
  below (`sampled`, one sample a question; greedy starts above it) on 256 held-out questions, within
  {seconds} seconds of CPU time a run. Your first run makes the model: a minute of CPU time, once:

| script | steps | accuracy |
|---|---|---|
{rows}
"""

LOOP_TEXT = """- Three steps of your script, with drawn settings, beside the solution's: a stage's
  points are shared out by its columns of `metrics.csv`, each within 0.2 %. A stage that differs is
  tried once more with the solution's other stages around it, so keep the names that go from stage
  to stage:
{names}
- Write the stages in their order: the check runs as far as the first that is blank. 60 seconds of
  CPU time."""

# --- grade: functions ----------------------------------------------------------------------------

GATE = re.compile(r"test_drawn\[")  # right values on inputs that nobody has seen before


def grade_functions(student, problems, seed, limit, box):
    """A result for each problem: the house's tests, each in the name of one problem alone."""
    from standin import Grader, Remote

    remotes = {problem: Remote(box, lay_out(problem, student[f"{problem.module}.py"]),
                               problem.module, limit)
               for problem in problems if f"{problem.module}.py" in student}
    grader = Grader(remotes)
    if remotes:
        run_tests(grader, sorted({p.file or p.module for p in remotes}), seed, [HERE / "drawn.py"])
    box.sweep()  # from here on no process of the submission lives
    return [score(p, grader.results[p], remotes[p].dead) if p in remotes else
            result(p.name, p.points, [], f"no {p.module}.py") for p in problems]


def submission(folder):
    """{name: bytes} of the scripts in a student's folder: plain files of a sane size, no links."""
    found = {}
    for module in (*SCRIPTS, *variants.names(), "common", "experiment", "rewards"):
        name, path = f"{module}.py", folder / f"{module}.py"
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= 2**20:
            found[name] = path.read_bytes()
    return found


def lay_out(problem, text):
    """The handout's files, with the student's one; the functions it may call are put in."""
    algorithms = [] if problem.module in ("common", "rewards") else [problem.module]
    given = student_files([*algorithms, "shared"], "functions")[0]
    files = {name: source.encode() for name, source in given.items()}
    for name in problem.given:
        text = put_in(text, name, (ROOT / f"{problem.module}.py").read_text())
    return files | {f"{problem.module}.py": text}


def put_in(text, name, solution):
    """The student's file with the solution's function `name`; as it is if it can't be parsed."""
    first, _, last = functions_of(solution)[name]
    right = solution.splitlines()[first - 1 : last]
    try:
        source = text.decode()
        lines, found = source.splitlines(), functions_of(source)
    except (SyntaxError, ValueError):
        return text
    start, _, end = found.get(name, (len(lines) + 1, 0, len(lines)))
    lines[start - 1 : end] = right
    return ("\n".join(lines) + "\n").encode()


def score(problem, checks, dead):
    """Points by the share of checks passed; none unless one of those with drawn inputs is passed.

    A parametrized test is one check, passed if all its cases are; a drawn one is a check each."""
    grouped = {}
    for name, passed, message in checks:
        short = name if GATE.search(name) else name.split("[")[0]
        kept = grouped.setdefault(short, [True, ""])
        kept[0] &= passed
        kept[1] = kept[1] or message
    checks = [(name, *rest) for name, rest in grouped.items()]
    right = [name for name, passed, _ in checks if passed]
    share = len(right) / len(checks) if any(map(GATE.search, right)) else 0
    return result(problem.name, problem.points, checks, dead or "", share)


def result(name, of, checks, note="", share=0.0):
    return {"name": name, "points": round(of * share, 1), "of": of, "note": note, "checks": [
        {"name": n, "passed": passed, "message": message} for n, passed, message in checks]}


# --- grade: runs ---------------------------------------------------------------------------------


def run_script(box, files, script, arguments, seconds, wanted=()):
    """Run a script in the sandbox: (its last line, "" if all went well; the files wanted; CPU s).

    `seconds` are of CPU time, so that a busy machine costs nobody points."""
    told = box.run(files, f"{script}.py", [*arguments.split(), "--out_dir", "out"], seconds,
                   wall=20 * seconds, wanted=[f"out/{name}" for name in wanted])
    lines = told["words"].splitlines() or [f"exit status {told['code']}"]
    trouble = "" if told["code"] == 0 else lines[-1][:300]
    return trouble, {name.removeprefix("out/"): x for name, x in told["files"].items()}, told["cpu"]


def house_files():
    """{name: bytes} of the solution's scripts."""
    names = (*SCRIPTS, "common", "experiment", "rewards")
    return {f"{name}.py": (ROOT / f"{name}.py").read_bytes() for name in names}


def beside_ours(student, script):
    """The student's script with our shared files: a fault in those costs its own problem only."""
    shared = {name: text for name, text in house_files().items()
              if name.removesuffix(".py") not in SCRIPTS}
    return shared | {f"{script}.py": student[f"{script}.py"]}


def warm_start():
    """The folder of the tiny model after its cold start: made once, then read by all, read-only."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanopo-course"
    code = [text for name, text in house_files().items() if name.removesuffix(".py") not in SCRIPTS]
    folder = home / f"warm-{hashlib.sha256(b''.join(code)).hexdigest()[:12]}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            print(f"making the warm start, once: {folder}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=home) as temporary:
                command = [sys.executable, "grpo.py", "--steps", "0", "--eval_size", "8",
                           "--test_size", "1", "--out_dir", f"{temporary}/run"]
                one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                done = subprocess.run(command, cwd=ROOT, env=os.environ | one, capture_output=True)
                if done.returncode:
                    raise SystemExit(f"error: no warm start: {done.stderr[-500:].decode()}")
                made = Path(temporary, "run", "final")
                made.chmod(0o755)
                for file in made.iterdir():  # submissions read it under another user id
                    file.chmod(0o644)
                made.rename(folder)
    return folder


def from_warm(box):
    """Flags of a run from the warm start, which the sandbox shows; its settings are TINY's."""
    return f"--model {box.shown(warm_start())} --data words"


def table_of(files):
    """The rows of a run's metrics.csv."""
    try:
        return list(csv.DictReader(io.StringIO(files.get("metrics.csv", b"").decode())))
    except (csv.Error, UnicodeDecodeError):
        return []


def loop_arguments(seed):
    """Settings of the three steps, drawn."""
    rng = random.Random(seed)
    return (f"--steps 3 --prompts_per_step {rng.randint(8, 12)} --minibatches "
            f"{rng.randint(2, 3)} --temperature {rng.uniform(0.8, 1):.2f} --eval_every 2 "
            "--eval_size 8 --test_size 1 --save_every 2 --lr_warmup 4 --micro_tokens 900")


def grade_loop(student, script, seed, box):
    """The student's three steps beside the solution's: metrics.csv, stage by stage. A stage that
    differs is tried once more among the solution's others: no stage pays for another's fault."""
    arguments = f"{from_warm(box)} {loop_arguments(seed)}"

    def rows_of(files):
        said, found, _ = run_script(box, files, script, arguments, 60, ["metrics.csv"])
        return said, table_of(found)

    said, right = rows_of(house_files())
    if said:
        raise SystemExit(f"error: the solution does not run: {said}")
    trouble, rows, results = f"no {script}.py", [], []
    if f"{script}.py" in student:
        trouble, rows = rows_of(beside_ours(student, script))
    for stage, (points, columns) in LOOP_POINTS.items():
        columns = [c for c in columns.split() if any(row[c] for row in right)]
        checks, note = [(c, *same_column(c, rows, right)) for c in columns], trouble
        if not all(passed for _, passed, _ in checks) and f"{script}.py" in student:
            alone = with_stage((ROOT / f"{script}.py").read_text(), student[f"{script}.py"],
                               int(stage[0]))
            if alone:
                said, own = rows_of(house_files() | {f"{script}.py": alone})
                again = [(c, *same_column(c, own, right)) for c in columns]
                if sum(passed for _, passed, _ in again) > sum(passed for _, passed, _ in checks):
                    checks, note = again, said
        share = sum(passed for _, passed, _ in checks) / max(len(checks), 1)
        results.append(result(f"{script}.train {stage}", points, checks, note, share))
    return results


def same_column(name, rows, right):
    """(whether a column is the solution's, the first difference)."""
    got = [row.get(name) or "" for row in rows[1:]]
    wanted = [row[name] for row in right[1:]]
    for step in range(len(wanted)):
        a, b = (got[step] if step < len(got) else "no row"), wanted[step]
        try:
            same = math.isclose(float(a), float(b), rel_tol=2e-3, abs_tol=1e-6)
        except ValueError:
            same = a == b
        if not same:
            return False, f"step {step + 1}: got {a or 'nothing'}, expected {b or 'nothing'}"
    return True, ""


def grade_learning(student, script, box):
    """Whether the student's script learns the built-in task: three seeds, judged by our own
    evaluation of the weights it leaves in final/, after its last process has ended."""
    steps, wanted = LEARN[script]
    if f"{script}.py" not in student:
        return result(f"{script}.learns", LEARN_POINTS, [], f"no {script}.py")
    checks, accuracies = [], []
    for seed in range(3):
        reached, message, cpu = learned(student, script, box, steps, seed)
        good = reached >= wanted
        checks.append((f"seed {seed}: {reached:.3f} after {steps} steps, {cpu:.0f} CPU s", good,
                       "" if good else message or
                       f"{reached:.3f} of the held-out questions, wanted {wanted}"))
        accuracies.append(reached)
    share = sum(good for _, good, _ in checks) / 3
    return result(f"{script}.learns", LEARN_POINTS, checks, "", share) | {
        "accuracy": sum(accuracies) / 3}


def learned(student, script, box, steps, seed):
    """(accuracy after `steps` steps, why it is 0, CPU seconds)."""
    weights = "final/model.safetensors"
    message, files, cpu = run_script(
        box, beside_ours(student, script), script, f"{from_warm(box)} --steps {steps} "
        f"--seed {seed} --eval_every 1000 --eval_size 8 --test_size 1 --save_every 1000",
        LEARN_SECONDS, [weights])
    if message or weights not in files:
        return 0.0, message or "it left no final/", cpu
    judged = house_files() | {f"model/{p.name}": p.read_bytes() for p in warm_start().iterdir()}
    judged["model/model.safetensors"] = files[weights]
    message, files, more = run_script(
        box, judged, "grpo", "--model model --data words --steps 0 --eval_size 256 --test_size 1",
        60, ["metrics.csv"])
    rows = table_of(files)
    return float(rows[0]["eval_sampled"]) if rows else 0.0, message, cpu + more


# --- report --------------------------------------------------------------------------------------


def sandbox_for(kind, level, training):
    """The sandbox of one submission."""
    return Sandbox(kind, shared=[warm_start()] if training or level == "loop" else [])


def grade(folder, algorithms, level, seed, limit, training, box):
    """All results."""
    if not folder.is_dir():
        raise SystemExit(f"error: {folder}: no such folder")
    student, results = submission(folder), []
    if level == "functions":
        results += grade_functions(student, chosen(algorithms), seed, limit, box)
    else:
        for script in scripts_of(algorithms):
            results += grade_loop(student, script, seed, box)
    if training:
        results += [grade_learning(student, s, box) for s in scripts_of(algorithms)]
    return results


def lines_of(r):
    """One problem's part of the report: points, and the first three failures."""
    passed = sum(c["passed"] for c in r["checks"])
    share = f"{passed} of {len(r['checks'])} checks" if r["checks"] else ""
    lines = [f"{r['name']:32}{r['points']:6g} of {r['of']:<4}{share}"]
    if r["note"]:
        lines.append(f"    {r['note']}")
    failed = [c for c in r["checks"] if not c["passed"] and c["message"] != r["note"]]
    for c in failed[:3]:
        words = "\n".join(c["message"].splitlines()[:8])
        lines.append(f"    {c['name']}: " + words.replace("\n", "\n        "))
    if len(failed) > 3:
        lines.append(f"    ... and {len(failed) - 3} more")
    return "\n".join(lines)


def say(results, seed):
    """The report that a student can learn from."""
    print("\n".join(map(lines_of, results)))
    points, of = sum(r["points"] for r in results), sum(r["of"] for r in results)
    print(f"{'total':32}{points:6g} of {of}    (--hidden-seed {seed})")


def junit(results):
    """JUnit's XML, a suite per problem."""
    suites = ElementTree.Element("testsuites")
    for r in results:
        failures = sum(not c["passed"] for c in r["checks"])
        suite = ElementTree.SubElement(suites, "testsuite", name=r["name"], failures=str(failures),
                                       tests=str(len(r["checks"])))
        for c in r["checks"] or [{"name": "file", "passed": False, "message": r["note"]}]:
            case = ElementTree.SubElement(suite, "testcase", classname=r["name"], name=c["name"])
            if not c["passed"]:
                message = re.sub(r"[^\n\x20-\ud7ff]", "?", c["message"])
                ElementTree.SubElement(case, "failure", message=message)
    return ElementTree.tostring(suites, encoding="unicode")


# --- a class -------------------------------------------------------------------------------------


def grade_class(folders, table, jobs, options, seed):
    """Grade many folders, `jobs` at a time; a row each in `table`, what is there is not done anew.

    Beside grades.csv lies a folder grades/ with each one's full report."""
    names = [folder.name for folder in folders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"error: two submissions are named {twice[0]}; rename one")
    reports = table.with_suffix("")
    reports.mkdir(parents=True, exist_ok=True)
    seeds = {json.loads(p.read_text())["hidden_seed"] for p in reports.glob("*.json")}
    seed = min(seeds, default=seed)  # one class, one set of inputs

    def one(folder):
        report = reports / f"{folder.name}.json"
        if not report.exists():
            command = [sys.executable, str(HERE / "exercise.py"), "grade", str(folder), *options,
                       "--hidden-seed", str(seed), "--json", f"{report}.part"]
            done = subprocess.run(command, capture_output=True, text=True)
            (reports / f"{folder.name}.txt").write_text(done.stdout + done.stderr)
            if done.returncode:
                return f"{folder.name}: not graded, see {reports / folder.name}.txt"
            Path(f"{report}.part").rename(report)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        troubles = [words for words in pool.map(one, folders) if words]
    graded = {p.stem: json.loads(p.read_text()) for p in sorted(reports.glob("*.json"))
              if p.stem in names}
    write_table(table, graded)
    print(summary(graded))
    if troubles:
        raise SystemExit("\n".join(troubles))


def write_table(table, graded):
    """grades.csv: a row for each submission, a column for each problem."""
    with open(table, "w", newline="") as file:
        columns = [r["name"] for report in [*graded.values()][:1] for r in report["problems"]]
        writer = csv.writer(file)
        writer.writerow(["submission", "points", "of", *columns])
        for name, report in graded.items():
            writer.writerow([name, report["points"], report["of"],
                             *(r["points"] for r in report["problems"])])


def summary(graded):
    """How the class did, and which check failed how often."""
    points = sorted(report["points"] for report in graded.values())
    if not points:
        return "nobody was graded"
    lines = [f"{len(points)} submissions: {points[0]:g} to {points[-1]:g} points, half of them "
             f"{points[len(points) // 2]:g} or more"]
    failed = Counter(f"{r['name']}: {c['name']}" for report in graded.values()
                     for r in report["problems"] for c in r["checks"] if not c["passed"])
    lines += [f"{count:5} of {len(points)} failed {what}" for what, count in failed.most_common(15)]
    return "\n".join(lines)


# --- command line --------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")  # make's own: a process for each loop
    recording.add_argument("script", choices=SCRIPTS)
    for name, what in (("make", "a new folder for students"), ("grade", "students' folders")):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("folder", type=Path, help=what, nargs="+" if name == "grade" else None)
        command.add_argument("--algorithms", nargs="+", default=list(SCRIPTS),
                             choices=(*SCRIPTS, "shared", *variants.names()), metavar="NAME",
                             help=f"of {', '.join(SCRIPTS)}; shared: blanks of common.py and "
                             "rewards.py, which scripts need; a variant: see variants.py")
        command.add_argument("--level", choices=("functions", "loop"), default="functions")
        if name == "make":
            command.add_argument("--hints", choices=("none", "few", "all"), default="all")
            command.add_argument("--classroom", action="store_true",
                                 help="also a workflow of GitHub Classroom")
            command.add_argument("--gradescope", type=Path, metavar="FILE.zip",
                                 help="also an autograder for Gradescope")
    command.add_argument("--hidden-seed", type=int, default=secrets.randbelow(10**6),
                         help="of the random inputs; default: another one every time")
    command.add_argument("--time-limit", type=int, default=30, help="CPU seconds per problem")
    command.add_argument("--skip-training", action="store_true", help="leave out the last item")
    command.add_argument("--untrusted", action="store_true",
                         help="refuse to grade where nothing protects this machine")
    command.add_argument("--json", type=Path, help="also write the results here")
    command.add_argument("--junit", type=Path, help="also write JUnit's XML here")
    command.add_argument("--results", type=Path, help="also write Gradescope's results.json here")
    command.add_argument("--csv", type=Path, help="a class: a row for each folder")
    command.add_argument("--jobs", type=int, default=1, help="a class: so many at a time")
    return parser.parse_args()


def main():
    args = arguments()
    if args.command == "make":
        make(args.folder, args.algorithms, args.level, args.hints, args.classroom)
        if args.gradescope:
            platforms.gradescope(args.gradescope, args.algorithms, args.level)
        return
    if args.command == "record":
        return record(args.script)
    import torch

    torch.set_num_threads(1)  # the same work whatever else the machine does
    kind, words = protection()
    if args.untrusted and kind == "none":
        print(f"error: --untrusted: {words}", file=sys.stderr)
        sys.exit(2)
    print(f"protected by {words}" if kind != "none" else f"notice: {words}", file=sys.stderr)
    if args.csv:
        options = ["--algorithms", *args.algorithms, "--level", args.level, "--time-limit",
                   str(args.time_limit), *["--skip-training"] * args.skip_training,
                   *["--untrusted"] * args.untrusted]
        if not args.skip_training or args.level == "loop":
            warm_start()
        folders = [folder.resolve() for folder in args.folder if folder.is_dir()]
        return grade_class(folders, args.csv, args.jobs, options, args.hidden_seed)
    if len(args.folder) > 1:
        raise SystemExit("error: more than one folder: name a table, --csv grades.csv")
    with sandbox_for(kind, args.level, not args.skip_training) as box:
        results = grade(args.folder[0].resolve(), args.algorithms, args.level, args.hidden_seed,
                        args.time_limit, not args.skip_training, box)
    say(results, args.hidden_seed)
    if args.json:
        report = {"hidden_seed": args.hidden_seed, "points": sum(r["points"] for r in results),
                  "of": sum(r["of"] for r in results), "problems": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.results:
        args.results.write_text(json.dumps(platforms.results(results, lines_of), indent=1) + "\n")
    if args.junit:
        args.junit.write_text(junit(results))


if __name__ == "__main__":
    main()
