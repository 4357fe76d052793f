"""Course: exercises in which one measures: no code, only flags.

    python tests/course/measure.py                lists them
    python tests/course/measure.py --run RUNS     makes every run, seed 0 (half an hour of one core)
    python tests/course/measure.py --table RUNS   the figures of instructor.md, from those runs

A run that is there is not made anew. `page` is the student's text (MEASURE.md in the handout).
"""

import argparse
import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Question:
    """One exercise: the same script with several settings."""

    title: str
    script: str
    settings: tuple  # of flags, one run each
    hand_in: str
    columns: str  # of metrics.csv, that answer it

    def command(self, flags):
        return f"python {self.script}.py {flags}"


def several(flag, *values):
    return tuple(f"{flag.format(value)}" for value in values)


QUESTIONS = [
    Question("Warm-up: does it learn at all?", "grpo", ("--steps 10",),
             "held-out accuracy before and after, its 95 % interval, and whether the difference "
             "could be chance", "eval_accuracy eval_low eval_high"),
    Question("* What does a larger group buy, if the number of answers stays the same?", "grpo",
             ("--steps 40 --group_size 4 --prompts_per_step 32",
              "--steps 40 --group_size 8 --prompts_per_step 16",
              "--steps 40 --group_size 16 --prompts_per_step 8"),
             "accuracy and `tied_frac` over steps; which group size, and why not larger",
             "tied_frac grad_norm"),
    Question("* How much does the KL hold back?", "grpo",
             several("--steps 60 --beta {}", 0.0001, 0.01, 0.3),
             "accuracy against `ref_kl`, one point a run", "ref_kl entropy"),
    Question("* Colder sampling looks better. Is it better to learn from?", "grpo",
             several("--steps 40 --temperature {}", 0.6, 1.0, 1.4),
             "`entropy`, `eval_sampled` and `eval_accuracy` (greedy) of each; what temperature "
             "changes besides sampling", "entropy tied_frac reward"),
    Question("** How often does the clip bite, and when within a rollout?", "grpo",
             several("--steps 40 --minibatches {}", 1, 4, 16),
             "`clip_frac` and `approx_kl` of each; why the first is exactly 0",
             "clip_frac approx_kl t_update"),
    Question("** Does clip-higher keep the entropy up?", "dapo",
             several("--steps 60 --clip_high {}", 0.2, 0.28, 0.5),
             "`entropy` over steps, three seeds; whether the paper's claim shows at this size",
             "entropy clip_frac"),
    Question("** What does dynamic sampling cost, and what does it buy?", "dapo",
             ("--steps 40", "--steps 40 --no_dynamic_sampling"),
             "accuracy over steps *and* over `samples`, `gen_rounds`; which axis is the fair one",
             "samples gen_rounds tied_frac"),
    Question("** Which lambda for answers of 20 tokens?", "ppo",
             several("--steps 40 --lam {}", 0, 0.8, 0.95, 1),
             "accuracy and `explained_var`; how far a reward travels back at each",
             "explained_var value_loss"),
    Question("** Does the length penalty shorten answers, or only forbid the longest?", "dapo",
             several("--steps 60 --overlong_buffer {}", 0, 16, 40),
             "`response_len` and `truncated_frac`; a histogram by hand from `samples.jsonl`",
             "response_len truncated_frac"),
    Question("*** GSPO's clip is a thousandth of GRPO's. What happens with PPO's 0.2, and with "
             "3e-5?", "gspo", ("--steps 60 --clip_low 0.2 --clip_high 0.2", "--steps 60",
                               "--steps 60 --clip_low 3e-5 --clip_high 4e-5"),
             "`clip_frac`, `grad_norm`, accuracy; explain the share by the length of an answer",
             "clip_frac grad_norm"),
    Question("*** A reward that can be hacked: how soon is it found?", "grpo",
             ("--steps 60 --reward contains", "--steps 60 --reward correct+0.5*marker_format"),
             "`reward` beside `accuracy`; three answers from `samples.jsonl` that were paid and "
             "are wrong; a rule that would not have paid", "reward accuracy response_len"),
]

PAGE = """# Measure it

No code is needed, only flags: a script runs as soon as its functions do. Every run leaves
`metrics.csv` in its folder (`--out_dir NAME` names it); `python plots/figures.py RUN ...` draws
several in one picture, `python plots/table.py RUN ...` tells their ends. Runs take 1 to 2 minutes
on two CPU cores. Take three seeds (`--seed 0`, `1`, `2`) before you call a difference one. For each
question hand in a picture, the numbers asked for, and three to five sentences.
"""


def page(scripts):
    """MEASURE.md: the questions that these scripts answer."""
    lines = [PAGE]
    for number, question in enumerate(QUESTIONS):
        if question.script in scripts:
            lines += [f"**{number}. {question.title}**", "", "```",
                      *map(question.command, question.settings), "```", "",
                      f"Hand in: {question.hand_in}.", ""]
    return "\n".join(lines)


def folder_of(runs, number, setting):
    return runs / f"{number:02}-{setting}"


def run_all(runs):
    """Every run, one after the other; SystemExit where one fails."""
    for number, question in enumerate(QUESTIONS):
        for setting, flags in enumerate(question.settings):
            folder = folder_of(runs, number, setting)
            if not (folder / "final").is_dir():
                more = ["--resume"] if any(folder.glob("checkpoints/step-*")) else []
                command = [sys.executable, str(ROOT / f"{question.script}.py"), *flags.split(),
                           "--out_dir", str(folder), *more]
                print(" ".join(command), flush=True)
                if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
                    raise SystemExit(f"error: a run failed; look at {folder}")


def numbers(rows, column):
    return [float(row[column]) for row in rows if row.get(column)]


def table(runs):
    """Markdown: accuracies at the end, and each column as its mean over the first and the last
    ten steps, of the runs that are complete."""
    lines = ["| | run | greedy | sampled | first ten steps -> last ten |", "|---|---|---|---|---|"]
    for number, question in enumerate(QUESTIONS):
        for setting, flags in enumerate(question.settings):
            if not (folder_of(runs, number, setting) / "final").is_dir():
                continue  # not run, or not to its end
            with open(folder_of(runs, number, setting) / "metrics.csv") as file:
                rows = list(csv.DictReader(file))
            ends = [f"{numbers(rows, c)[-1]:.2f}" for c in ("eval_accuracy", "eval_sampled")]
            said = [f"{c} {mean(numbers(rows, c)[:10]):.3g} -> {mean(numbers(rows, c)[-10:]):.3g}"
                    for c in question.columns.split() if numbers(rows, c)]
            lines.append(f"| {number} | `{question.script} {flags}` | " + " | ".join(ends)
                         + f" | {', '.join(said)} |")
    return "\n".join(lines)


def mean(values):
    return sum(values) / len(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", type=Path, metavar="RUNS")
    parser.add_argument("--table", type=Path, metavar="RUNS")
    args = parser.parse_args()
    if args.run:
        run_all(args.run)
    elif args.table:
        print(table(args.table))
    else:
        print(page(("ppo", "grpo", "dapo", "gspo")))


if __name__ == "__main__":
    main()
