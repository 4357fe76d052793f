"""Course: your loop, stage by stage: python tests/check_stages.py grpo

Runs the script from a given model until the first blank stage, or for three steps, and compares
each stage you have written with what the solution had there (stages.json): the first difference is
said.
"""

import csv
import importlib
import json
import math
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEAR = 2e-3  # relative; other machines round differently


def run_script(script, arguments, out):
    """(the name of the stage that is blank or "", the variables of `train` there)."""
    import experiment

    module = importlib.import_module(script)
    try:
        module.train(experiment.parse_args(
            module.Config, module.TINY, [*arguments.split(), "--out_dir", str(out)]))
    except NotImplementedError as error:
        trace = error.__traceback__
        while trace.tb_next and trace.tb_frame.f_code.co_name != "train":
            trace = trace.tb_next
        return str(error), trace.tb_frame.f_locals
    return "", {}


def numbers(values):
    """stage -> name -> number: what the first step had made when it met a blank."""
    found, batch, advantages = {}, values.get("batch"), values.get("advantages")
    if batch is not None:
        found["1"] = {"answers": len(batch), "tokens of all answers": int(batch.mask.sum()),
                      "sum of their ids": int((batch.tokens * batch.mask).sum())}
        if batch.rewards is not None:
            found["2"] = {"mean batch.rewards": float(batch.rewards.mean()),
                          "mean batch.correct": float(batch.correct.mean())}
    if advantages is not None:
        found["3"] = {"mean |advantage|": float(advantages.abs().mean()),
                      "largest advantage": float(advantages.max())}
    if "meter" in values:
        found["4"] = {}
        for name, updates in values["meter"].result().items():
            found["4"] |= {f"{name} of update {i + 1}": x for i, x in enumerate(updates)}
    return found


def rows_of(folder):
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def first_difference(got, right):
    """"name: got a, expected b" of the first number that differs, or ""."""
    for name, b in right.items():
        a = got.get(name)
        try:
            same = math.isclose(float(a), float(b), rel_tol=NEAR, abs_tol=1e-6)
        except (TypeError, ValueError):
            same = (a or "") == b
        if not same:
            return f"{name}: got {'nothing' if a in (None, '') else a}, expected {b or 'nothing'}"
    return ""


def compare(blank, values, out, right):
    """[(stage, first difference or "")] of the stages that are written."""
    if blank:
        got = numbers(values)
        return [(stage, first_difference(got.get(stage, {}), wanted))
                for stage, wanted in right["first step"].items() if stage < blank]
    rows, told = rows_of(out), []
    for stage, columns in right["columns"].items():
        said = ""
        for i, row in enumerate(right["rows"]):
            wanted = {f"{c} of step {i}": row[c] for c in columns}
            got = {f"{c} of step {i}": rows[i].get(c) for c in columns} if i < len(rows) else {}
            said = said or first_difference(got, wanted)
        told.append((stage, said))
    return told


def main(script):
    right = json.loads((HERE / "stages.json").read_text())[script]
    sys.path.insert(0, str(HERE.parent))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        arguments = f"--model {HERE / 'model'} {right['arguments']}"
        blank, values = run_script(script, arguments, out)
        told = compare(blank, values, out, right)
    for stage, said in told:
        print(f"stage {stage}: {said or 'right'}")
    if blank:
        print(f"stage {blank}: not written yet")
    return 1 if blank or any(said for _, said in told) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
