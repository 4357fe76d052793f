"""Course: where courses live: Gradescope's autograder, GitHub Classroom's workflow.

`exercise.py make OUT --gradescope FILE.zip --classroom` writes them. Formats: Gradescope's
specification of autograders (setup.sh, run_autograder, results.json); GitHub Classroom's command
grader and reporter.
"""

import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# --- Gradescope ----------------------------------------------------------------------------------

SETUP = """#!/usr/bin/env bash
# Once, when the image is built. It runs as root; the submission later runs as another user.
set -euo pipefail
AT=${AUTOGRADER:-/autograder}
cd "$AT/source"
python3 -m pip install torch --extra-index-url https://download.pytorch.org/whl/cpu
python3 -m pip install -r house/requirements.txt
export XDG_CACHE_HOME="$AT/warm"
PYTHONPATH=house/tests/course python3 -c 'import exercise; exercise.warm_start()'
chmod -R go-rwx house
"""
RUN = """#!/usr/bin/env bash
set -euo pipefail
AT=${{AUTOGRADER:-/autograder}}
export XDG_CACHE_HOME="$AT/warm"
mkdir -p "$AT/results"
exec python3 "$AT/source/house/tests/course/exercise.py" grade "$AT/submission" \\
    --algorithms {algorithms} --level {level} --untrusted \\
    --results "$AT/results/results.json" ${{GRADE_OPTIONS:-}}
"""
KINDS = ("*.py", "requirements.txt", "tests/*.py", "tests/*.json", "tests/course/*.py",
         "tests/course/*.md", "tests/course/variants/*", "plots/figures.py", "plots/table.py")


def gradescope(file, algorithms, level):
    """Write the autograder's zip: set-up, the command, and the house under house/."""
    entries = {"setup.sh": SETUP,
               "run_autograder": RUN.format(algorithms=" ".join(algorithms), level=level)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, text)
        for path in sorted({p for kind in KINDS for p in ROOT.glob(kind) if p.is_file()}):
            archive.write(path, Path("house", path.relative_to(ROOT)))
    print(f"{file}: Gradescope's autograder; it holds the solution")


def results(graded, lines_of):
    """results.json: a test for each problem, and how accurate each trained model is."""
    tests = [{"name": r["name"], "score": r["points"], "max_score": r["of"],
              "status": "passed" if r["points"] == r["of"] else "failed",
              "output": lines_of(r), "visibility": "visible"} for r in graded]
    board = [{"name": r["name"].replace(".learns", " held-out accuracy"),
              "value": round(r["accuracy"], 3), "order": "desc"} for r in graded if "accuracy" in r]
    return {"score": sum(r["points"] for r in graded), "visibility": "visible",
            "stdout_visibility": "hidden", "tests": tests, "leaderboard": board}


# --- GitHub Classroom ----------------------------------------------------------------------------

WORKFLOW = """# Public checks only, and whoever pushes can edit them: for practice. Marks are given
# by the teacher's `exercise.py grade`, which has other inputs and a sandbox.
name: Autograding
on: [push, repository_dispatch]
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  autograding:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: |
          pip install torch --extra-index-url https://download.pytorch.org/whl/cpu
          pip install -r requirements.txt
{steps}
      - uses: classroom-resources/autograding-grading-reporter@v1
        env:
{env}
        with:
          runners: {ids}
"""
STEP = """      - id: {id}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: {name}
          command: {command}
          timeout: 10
          max-score: {points}"""


def classroom(problems, scripts):
    """The workflow: a step a problem, or, at level loop (no problems), one a script."""
    rows = [(p.name, f"python -m pytest tests -k {p.name}", p.points) for p in problems]
    rows = rows or [(f"{s}.train", f"python tests/check_stages.py {s}", 50) for s in scripts]
    ids = [name.replace(".", "-").replace("_", "-") for name, *_ in rows]
    steps = [STEP.format(id=i, name=name, command=command, points=points)
             for i, (name, command, points) in zip(ids, rows)]
    env = [f"          {i.upper()}_RESULTS: ${{{{ steps.{i}.outputs.result }}}}" for i in ids]
    return WORKFLOW.format(steps="\n".join(steps), env="\n".join(env), ids=",".join(ids))
