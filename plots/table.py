"""The results table of plots/README.md, from runs' metrics.csv: a row per label, seeds as a range.

    python plots/table.py runs/*

Labels and seeds are those of plots/figures.py: runs of one script are seeds of it, or LABEL=RUN.
"""

import sys
import warnings

import numpy as np
from figures import group_runs, load_runs, warn_of_unlike

COLUMNS = {  # heading -> a number of one run
    "greedy, before": lambda run: first(run["eval_accuracy"]),
    "greedy, after": lambda run: last(run["eval_accuracy"]),
    "best": lambda run: np.nanmax(run["eval_accuracy"]),
    "sampled, before": lambda run: first(run["eval_sampled"]),
    "sampled, after": lambda run: last(run["eval_sampled"]),
    "entropy": lambda run: last(run["entropy"]),
    "KL to start": lambda run: last(run["ref_kl"]),
    "clip fraction, steps 1-10": lambda run: np.nanmean(run["clip_frac"][1:11]),
    "thousand answers": lambda run: np.nansum(run["samples"]) / 1000,
    "s per step": lambda run: np.nanmedian(run["t_total"]),
}


def first(column):
    """The first number of a column, NaN if there is none."""
    return next((x for x in column if not np.isnan(x)), np.nan)


def last(column):
    """The last number of a column."""
    return first(column[::-1])


def cell(numbers):
    """The median of the seeds, and their range where it shows: `0.95 (0.93 ... 0.96)`."""
    numbers = [x for x in numbers if not np.isnan(x)]
    if not numbers:
        return ""
    median, low, high = (f"{x:.3g}" for x in (np.median(numbers), min(numbers), max(numbers)))
    return median if low == high else f"{median} ({low} … {high})"


def main(arguments):
    """Print the markdown table."""
    try:
        runs = load_runs(arguments or sys.exit("usage: python plots/table.py RUN [RUN ...]"))
    except ValueError as problem:
        print(f"table.py: {problem}", file=sys.stderr)
        sys.exit(2)
    warn_of_unlike(group_runs(runs), sys.stderr)
    # numpy's words for a column without a number, whose cell stays empty
    warnings.filterwarnings("ignore", "Mean of empty slice|All-NaN slice", RuntimeWarning)
    print("| | seeds | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for label, seeds in group_runs(runs).items():
        cells = [cell([number(run) for run in seeds]) for number in COLUMNS.values()]
        print(f"| {label} | {len(seeds)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
