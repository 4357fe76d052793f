"""Course: a student's folder made from the scripts, and its grader.

    python tests/course/exercise.py make OUT         all four scripts, functions left out
    python tests/course/exercise.py make OUT --algorithms grpo --level loop
    python tests/course/exercise.py grade DIR        points per problem
    python tests/course/exercise.py grade DIR --skip-training --json report.json --junit report.xml

What is left out, with hints and points, is the table in problems.py; README.md has the rest.
"""

import argparse
import ast
import csv
import io
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from problems import (LEARN, LEARN_POINTS, LOOP_POINTS, PROBLEMS, SCRIPTS,  # noqa: E402
                      STAGES)

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


def leave_out_functions(source, problems):
    """(source with hints for bodies, the lines that are gone)."""
    lines, gone = source.splitlines(), []
    marked = {name: problem for problem in problems for name in problem.functions}
    for name, (_, start, end) in sorted(functions_of(source).items(), key=lambda x: -x[1][1]):
        if name in marked:
            problem = marked[name]
            first = name == problem.functions[0]
            hints = problem.hints if first else f"See {problem.functions[0]}."
            gone += lines[start - 1 : end]
            lines[start - 1 : end] = [
                *comment(hints, "    "), f'    raise NotImplementedError("{problem.name}")']
    return "\n".join(lines) + "\n", gone


def leave_out_stages(source, hints):
    """(source with hints for the ruled stages of `train`, the lines that are gone)."""
    lines, gone = source.splitlines(), []
    _, start, end = functions_of(source)["train"]
    rulers = [i for i in range(start, end) if re.match(r" {8}# [1-5] .*-{3,}$", lines[i])]
    numbers = [int(lines[i].split()[1]) for i in rulers]
    if not rulers or set(numbers) != set(hints):
        raise SystemExit(f"error: train() has the stages {numbers}, problems.py {sorted(hints)}")
    last = next(i for i in range(rulers[-1], end) if lines[i].startswith("    experiment.finish"))
    for at, number, after in reversed([*zip(rulers, numbers, [*rulers[1:], last])]):
        gone += lines[at + 1 : after]
        told = comment(hints[number], " " * 8)
        if at == rulers[0]:
            told.append(' ' * 8 + 'raise NotImplementedError("train")')
        lines[at + 1 : after] = told if after == last else [*told, ""]
    return "\n".join(lines) + "\n", gone


def chosen(algorithms):
    return [p for p in PROBLEMS if p.module in (*algorithms, "common", "rewards")]


def student_files(algorithms, level):
    """({file name: text}, the lines that are gone) of the handout's scripts."""
    files, gone = {}, []
    for module in (*algorithms, "common", "experiment", "rewards"):
        text, lines = (ROOT / f"{module}.py").read_text(), []
        if level == "functions":
            marked = [p for p in PROBLEMS if p.module == module]
            text, lines = leave_out_functions(text, marked)
        elif module in STAGES:
            text, lines = leave_out_stages(text, STAGES[module])
        files[f"{module}.py"] = text
        gone += lines
    return files, gone


# --- make ----------------------------------------------------------------------------------------


def run_tests(plugin, modules, seed=0):
    """The house's tests of these modules, in this process, under a plugin. Nothing is printed."""
    import pytest

    files = [str(TESTS / f"test_{module}.py") for module in modules]
    options = ["-q", "--tb=native", "-p", "no:cacheprovider", "-c", os.devnull,
               "--rootdir", str(TESTS), "--hidden-seed", str(seed)]
    with redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([*options, *files], plugins=[plugin])
    if code not in (0, 1):
        raise SystemExit(f"error: the tests do not run\n{printed.getvalue()[-2000:]}")
    return code


def make(out, algorithms, level):
    """Write the student's folder."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"error: {out} is not empty; name a new folder")
    files, gone = student_files(algorithms, level)
    for name in ("requirements.txt", "LICENSE"):
        files[name] = (ROOT / name).read_text()
    files["HANDOUT.md"] = handout(algorithms, level)
    if level == "functions":
        from standin import Recorder

        recorder = Recorder(chosen(algorithms))
        if run_tests(recorder, [*algorithms, "common", "rewards"]):
            raise SystemExit("error: the solution fails its own tests; run pytest")
        files["tests/cases.json"] = "[\n" + ",\n".join(map(json.dumps, recorder.cases)) + "\n]\n"
        files["tests/test_cases.py"] = (HERE / "handout_cases.py").read_text()
        files["tests/worker.py"] = (HERE / "worker.py").read_text()
    refuse_leaks(files, gone)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    names = " ".join(algorithms)
    print(f"{out}: {len(files)} files. To grade what comes back:\n"
          f"  python tests/course/exercise.py grade DIR --algorithms {names} --level {level}")


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
    if level == "functions":
        rows = [(p.name, f"`{p.module}.py`: {', '.join(f'`{f}`' for f in p.functions)}", p.points,
                 f"`python -m pytest tests -k {p.name}`", p.minutes) for p in chosen(algorithms)]
    else:
        rows = [(f"{s}.train", f"`{s}.py`: the stages of `train`",
                 sum(points for points, _ in LOOP_POINTS.values()),
                 f"`python {s}.py --steps 3 --prompts_per_step 4`", 180) for s in algorithms]
    rows += [(f"{s}.learns", f"`{s}.py`, all together", LEARN_POINTS,
              f"`python {s}.py --steps {LEARN[s][0]}`", 2) for s in algorithms]
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return (HERE / "handout.md").read_text().format(
        table=table, total=sum(row[2] for row in rows), scripts=", ".join(algorithms))


# --- grade: functions ----------------------------------------------------------------------------

CORE = re.compile("against|by_hand|peers|every_length|of_one|is_the_discounted|reading|"
                  "test_response_mask|test_positions")


def grade_functions(student, problems, seed, limit):
    """A result for each problem: the house's tests, each in the name of one problem alone."""
    from standin import Grader, Remote, Yard

    results, remotes = {}, {}
    for problem in problems:
        results[problem] = result(problem.name, problem.points, [], f"no {problem.module}.py")
    present = [p for p in problems if (student / f"{p.module}.py").is_file()]
    with tempfile.TemporaryDirectory() as temporary:
        if present:
            yard = Yard(temporary)
            for problem in present:
                folder = Path(temporary, problem.name)
                lay_out(folder, problem, (student / f"{problem.module}.py").read_bytes())
                remotes[problem] = Remote(yard, folder, problem.module, limit)
            grader = Grader(remotes)
            run_tests(grader, sorted({p.module for p in present}), seed)
            for problem, remote in remotes.items():
                remote.close()
                results[problem] = score(problem, grader.results[problem], remote.dead)
            yard.close()
    return [results[problem] for problem in problems]


def lay_out(folder, problem, text):
    """The handout's files, with the student's one; the functions it may call are put in."""
    folder.mkdir()
    algorithms = [problem.module] if problem.module in SCRIPTS else []
    for name, source in student_files(algorithms, "functions")[0].items():
        (folder / name).write_text(source)
    for name in problem.given:
        text = put_in(text, name, (ROOT / f"{problem.module}.py").read_text())
    (folder / f"{problem.module}.py").write_bytes(text)


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
    """Points by the share of checks passed; none unless one that compares values is passed.

    A parametrized test is one check, passed if all its cases are."""
    grouped = {}
    for name, passed, message in checks:
        kept = grouped.setdefault(name.split("[")[0], [True, ""])
        kept[0] &= passed
        kept[1] = kept[1] or message
    checks = [(name, *rest) for name, rest in grouped.items()]
    right = [name for name, passed, _ in checks if passed]
    share = len(right) / len(checks) if any(map(CORE.search, right)) else 0
    return result(problem.name, problem.points, checks, dead or "", share)


def result(name, of, checks, note="", share=0.0):
    return {"name": name, "points": round(of * share, 1), "of": of, "note": note, "checks": [
        {"name": n, "passed": passed, "message": message} for n, passed, message in checks]}


# --- grade: runs ---------------------------------------------------------------------------------


def run_script(folder, script, arguments, out, limit):
    """Run a script in `folder` for `limit` seconds at most; its last words, "" if all went well.

    It gets a copy of the cold-started models, so that it can't spoil the cache."""
    cache = Path.home() / ".cache" / "nanopo"
    with tempfile.TemporaryDirectory() as home:
        if cache.is_dir():
            shutil.copytree(cache, Path(home, "nanopo"), ignore=shutil.ignore_patterns("*.lock"))
        environment = {"PATH": os.environ["PATH"], "HOME": home, "XDG_CACHE_HOME": home,
                       "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
                       "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, f"{script}.py", *arguments.split(), "--out_dir", str(out)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        words = bytearray()
        reader = threading.Thread(target=keep_last, args=(process.stdout, words), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"over the time limit of {limit} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            reader.join(5)
    lines = words.decode(errors="replace").strip().splitlines() or [f"exit status {code}"]
    return "" if code == 0 else lines[-1][:300]


def keep_last(pipe, words, size=4000):
    while part := pipe.read1(65536):
        words += part
        del words[:-size]


def table_of(folder):
    """The rows of a run's metrics.csv."""
    try:
        with open(folder / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, csv.Error, UnicodeDecodeError):
        return []


def grade_loop(student, script, seed, limit):
    """The student's three steps beside the solution's: metrics.csv, stage by stage."""
    rng = random.Random(seed)
    arguments = (f"--steps 3 --prompts_per_step {rng.randint(8, 12)} --minibatches "
                 f"{rng.randint(2, 3)} --temperature {rng.uniform(0.8, 1):.2f} --eval_every 2 "
                 "--eval_size 8 --test_size 1 --save_every 2 --lr_warmup 4 --micro_tokens 900")
    with tempfile.TemporaryDirectory() as temporary:
        ours, theirs = Path(temporary, "ours"), Path(temporary, "theirs")
        if trouble := run_script(ROOT, script, arguments, ours, 10 * limit):
            raise SystemExit(f"error: the solution does not run: {trouble}")
        copy = Path(temporary, "student")
        shutil.copytree(student, copy, symlinks=True)
        trouble = run_script(copy, script, arguments, theirs, 10 * limit)
        right, rows = table_of(ours), table_of(theirs)
    results = []
    for stage, (points, columns) in LOOP_POINTS.items():
        checks = [(c, *same_column(c, rows, right)) for c in columns.split()
                  if any(row[c] for row in right)]
        share = sum(passed for _, passed, _ in checks) / max(len(checks), 1)
        results.append(result(f"{script}.train {stage}", points, checks, trouble, share))
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


def grade_learning(student, script, limit):
    """Whether the student's script learns the built-in task: three seeds, judged by our own
    evaluation of the model it leaves in final/."""
    steps, wanted = LEARN[script]
    checks = []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as temporary:
            copy, out, judged = (Path(temporary, name) for name in ("copy", "out", "judged"))
            shutil.copytree(student, copy, symlinks=True)
            message = run_script(
                copy, script, f"--steps {steps} --seed {seed} --eval_every 1000 --eval_size 1 "
                "--test_size 1 --save_every 1000", out, 20 * limit)
            reached = 0.0
            if not message:
                message = run_script(ROOT, "grpo", f"--model {out / 'final'} --steps 0 "
                                     "--eval_size 256 --test_size 1", judged, 10 * limit)
                rows = table_of(judged)
                reached = float(rows[0]["eval_sampled"]) if rows else 0.0
            good = reached >= wanted
            checks.append((f"seed {seed}: {reached:.3f} after {steps} steps", good, "" if good else
                           message or f"{reached:.3f} of the held-out questions, wanted {wanted}"))
    share = sum(good for _, good, _ in checks) / 3
    return result(f"{script}.learns", LEARN_POINTS, checks, "", share)


# --- report --------------------------------------------------------------------------------------


def grade(student, algorithms, level, seed, limit, training):
    """All results."""
    if not student.is_dir():
        raise SystemExit(f"error: {student}: no such folder")
    results = []
    if level == "functions":
        results += grade_functions(student, chosen(algorithms), seed, limit)
    else:
        for script in algorithms:
            results += grade_loop(student, script, seed, limit)
    if training:
        results += [grade_learning(student, script, limit) for script in algorithms]
    return results


def say(results, seed):
    """The report that a student can learn from: the first failures of each problem."""
    for r in results:
        passed = sum(c["passed"] for c in r["checks"])
        share = f"{passed} of {len(r['checks'])} checks" if r["checks"] else ""
        print(f"{r['name']:32}{r['points']:6g} of {r['of']:<4}{share}")
        if r["note"]:
            print(f"    {r['note']}")
        failed = [c for c in r["checks"] if not c["passed"] and c["message"] != r["note"]]
        for c in failed[:3]:
            print(f"    {c['name']}: " + c["message"].replace("\n", "\n        "))
        if len(failed) > 3:
            print(f"    ... and {len(failed) - 3} more")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("make", "a new folder for students"), ("grade", "a student's folder")):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("folder", type=Path, help=what)
        command.add_argument("--algorithms", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
        command.add_argument("--level", choices=("functions", "loop"), default="functions")
    command.add_argument("--hidden-seed", type=int, default=secrets.randbelow(10**6),
                         help="of the random inputs; default: another one every time")
    command.add_argument("--time-limit", type=int, default=30, help="seconds per problem")
    command.add_argument("--skip-training", action="store_true", help="leave out the last item")
    command.add_argument("--json", type=Path, help="also write the results here")
    command.add_argument("--junit", type=Path, help="also write JUnit's XML here")
    args = parser.parse_args()
    if args.command == "make":
        return make(args.folder, args.algorithms, args.level)
    results = grade(args.folder.resolve(), args.algorithms, args.level, args.hidden_seed,
                    args.time_limit, not args.skip_training)
    say(results, args.hidden_seed)
    if args.json:
        report = {"hidden_seed": args.hidden_seed, "points": sum(r["points"] for r in results),
                  "of": sum(r["of"] for r in results), "problems": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.junit:
        args.junit.write_text(junit(results))


if __name__ == "__main__":
    main()
