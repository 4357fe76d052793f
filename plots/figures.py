"""Pictures of runs, from what each left in its folder (metrics.csv, config.json).

    python plots/figures.py runs/grpo-1                       # one run, also while it trains
    python plots/figures.py runs/* --smooth 5 --out pictures  # runs of one script are its seeds
    python plots/figures.py "clip 0.2=runs/dapo-1" "clip 0.28=runs/dapo-2" --columns entropy reward

Writes accuracy.png and curves.png. A line is one label: a run, or its seeds' mean and range.
"""
import argparse
import contextlib
import json
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # not pyplot: needs no display and keeps no global state
from matplotlib.lines import Line2D

ALGORITHMS = ["PPO", "GRPO", "DAPO", "GSPO"]  # among themselves they look the same in every picture
# Okabe and Ito's colour-blind-safe palette, ordered so that the first four also differ in grey.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#D55E00"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]  # one more than colours: 56 pairs, all different
STAGES = {"t_sample": "0.25", "t_logp": "0.55", "t_update": "0.78"}  # greys
PANELS = {  # the default picture in reading order: title, unit
    "eval_accuracy": ("Held-out accuracy", "% of questions"),
    "final_accuracy": ("Final held-out accuracy", "% of questions"),
    "stage_time": ("Time in the three stages", "minutes"),
    "reward": ("Reward", "mean per answer"),
    "entropy": ("Entropy of the policy", "nats per token"),
    "ref_kl": ("KL to the reference", "nats per token"),
    "approx_kl": ("KL of an update, old to new", "nats per token"),
    "clip_frac": ("Clipped tokens (GSPO: answers)", "share, log scale"),
    "pg_loss": ("Policy loss", "mean of the step"),
    "response_len": ("Response length", "tokens"),
    "truncated_frac": ("Truncated answers", "% of answers"),
    "tied_frac": ("Groups of equal reward", "% of trained groups"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "t_total": ("Time per step", "seconds"),
    "mem_gb": ("Peak memory", "GB")}
BARS = {"final_accuracy", "stage_time", "t_total", "mem_gb"}

matplotlib.rcParams.update({
    "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.4,
    "lines.markersize": 5, "axes.axisbelow": True, "axes.formatter.limits": (-4, 5)})


class Run(dict):
    """A run's columns, an array each with NaN for an empty cell; its `label` and `settings`."""

    def __missing__(self, column):
        return np.full(len(self["step"]), np.nan)


def load_run(path, label=None):
    """Read the run in folder `path`, finished or not; ValueError says what is missing."""
    path, file = Path(path), Path(path) / "metrics.csv"
    if not file.is_file():
        raise ValueError(f"no metrics.csv in {path}" if path.is_dir() else f"no folder {path}")
    names, *lines = file.read_text(errors="replace").splitlines() or [""]
    # a short line is still being written; of a step logged twice, the last line counts
    rows = {line.split(",")[0]: line for line in lines if line.count(",") == names.count(",")}
    table = np.genfromtxt(list(rows.values()) or ["nan"], delimiter=",", comments=None, ndmin=2)
    table = table[np.isfinite(table[:, 0])]
    if not names.startswith("step,") or not len(table):
        raise ValueError(f"{file} has no numeric rows of steps" if names else f"{file} is empty")
    run = Run(zip(names.split(","), table.T))
    run["final_accuracy"] = run["eval_accuracy"]
    run["stage_time"] = np.nancumsum(run["t_total"]) / 60 + 0 * run["t_total"]  # NaN stays NaN
    about = {}
    with contextlib.suppress(OSError, ValueError):  # drawn without its config.json too
        about = json.loads((path / "config.json").read_text())
    run.settings = about.get("config", {})
    name = Path(about.get("script") or path.resolve().name.split("-")[0]).stem
    run.label = label or (name.upper() if name.upper() in ALGORITHMS else name)
    return run


def load_runs(arguments):
    """Runs of RUN or LABEL=RUN each. A folder of runs, met in `runs/*`, is left out, aloud."""
    named = [("", "", run) if Path(run).exists() else run.rpartition("=") for run in arguments]
    holders = [path for _, _, path in named if any(Path(path).glob("*/metrics.csv"))]
    if holders and len(holders) < len(named):
        print(f"left out, a folder of runs: {', '.join(holders)}", file=sys.stderr)
        named = [run for run in named if run[2] not in holders]
    runs = [load_run(path, label) for label, _, path in named]
    trained = [run for run in runs if run.settings.get("steps") != 0]
    if not trained:
        raise ValueError("only evaluated (--steps 0), nothing to draw")
    if len(trained) < len(runs):
        print(f"left out, evaluated only (--steps 0): {len(runs) - len(trained)}", file=sys.stderr)
    return trained


def group_runs(runs):
    """{label: its runs}, the known algorithms first."""
    labels = dict.fromkeys([*ALGORITHMS, *(run.label for run in runs)])
    groups = {label: [run for run in runs if run.label == label] for label in labels}
    return {label: seeds for label, seeds in groups.items() if seeds}


def styles(labels):
    """{label: its colour and marker}."""
    order = ALGORITHMS if set(labels) <= set(ALGORITHMS) else list(labels)
    return {label: dict(color=COLORS[place % 7], marker=MARKERS[place % 8])
            for place, label in enumerate(order) if label in labels}


def has_values(runs, column):
    """Does any of the runs hold a number in this column?"""
    return any(np.isfinite(run[column]).any() for run in runs)


def trailing_mean(values, window):
    """Mean of each value and the window - 1 before it (fewer at the start)."""
    sums = np.convolve(values, np.ones(window))[:len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def series(runs, column, smooth=1):
    """(steps, mean, low, high) over the seeds, at the steps that all of them have reached.

    Further on the mean would jump where a seed drops out. Low to high is the range; the Wilson
    95 % interval for a single run's held-out accuracy. Evaluations and bars are not smoothed.
    """
    runs = [run for run in runs if has_values([run], column)]
    if not runs:
        return np.empty((4, 0))
    seen = [np.isfinite(run[column]) for run in runs]
    steps = sorted(set.intersection(*(set(run["step"][s]) for run, s in zip(runs, seen))))
    window = 1 if column.startswith("eval") or column in BARS else smooth
    values = np.stack([trailing_mean(run[column][s], window)[np.isin(run["step"][s], steps)]
                       for run, s in zip(runs, seen)])  # (seeds, steps)
    low, high = values.min(0), values.max(0)
    if column in ("eval_accuracy", "final_accuracy") and len(runs) == 1:
        low, high = runs[0]["eval_low"][seen[0]], runs[0]["eval_high"][seen[0]]
    return np.stack([steps, values.mean(0), low, high])


def draw_panel(ax, groups, column, smooth=1):
    """Draw one column of {label: runs}: curves, or bars where a run has a single value."""
    title, unit = PANELS.get(column, (column, ""))
    if column in BARS:
        ax.set_yticks(range(len(groups)), [textwrap.fill(label, 14) for label in groups])
        spare = max(0, 3 - len(groups)) / 2  # a single bar does not fill the panel
        ax.set(title=title, xlabel=unit, ylim=(len(groups) - 0.5 + spare, -0.5 - spare))
        ax.grid(False, axis="y")
        return draw_stages(ax, groups) if column == "t_total" else draw_bars(ax, groups, column)
    ax.set(title=title, xlabel="step", ylabel=unit)
    for place, (label, style) in enumerate(styles(groups).items()):
        steps, mean, low, high = series(groups[label], column, smooth)
        every = max(1, len(steps) // 8)  # few markers, and not where another line has its own
        ax.plot(steps, mean, label=label, markevery=(place * every // len(groups), every),
                markeredgecolor="white", markeredgewidth=0.5, **style)
        ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if column == "eval_accuracy":
            ax.plot(*series(groups[label], "eval_sampled")[:2], "--", lw=1, color=style["color"])
    if unit.startswith("%"):
        ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}")
    if column == "clip_frac":  # linear below 1e-4, so that zero has a place
        ax.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
        ax.set_ylim(bottom=0)


def draw_bars(ax, groups, column):
    """Each label's last value, with the range over seeds or the Wilson interval."""
    for y, (label, runs) in enumerate(groups.items()):
        if (points := series(runs, column)).size:
            mean, low, high = points[1:, -1] * (100 if column == "final_accuracy" else 1)
            ax.barh(y, mean, 0.6, color=styles(groups)[label]["color"], alpha=0.6)
            if high > low:
                ax.plot([low, high], [y, y], "k|-", linewidth=1)
            ax.annotate(f"{mean:.3g} (step {points[0, -1]:.0f})", (np.nanmax([mean, high]), y),
                        (4, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set(xlim=(0, ax.get_xlim()[1] * 1.6), xticks=[])  # room for the numbers, which say it all


def draw_stages(ax, groups):
    """Seconds of a step by stage, stacked: mean over all steps and seeds."""
    left = np.zeros(len(groups))
    for stage, grey in STAGES.items():  # no colours: those mean labels
        cells = [np.concatenate([run[stage] for run in runs]) for runs in groups.values()]
        seconds = [np.nanmean(c) if np.isfinite(c).any() else 0 for c in cells]
        ax.barh(range(len(groups)), seconds, 0.6, left=left, label=stage[2:], color=grey,
                edgecolor="black", linewidth=0.5)
        left = left + seconds
    ax.set(xlim=(0, 1.05 * left.max() or 1), ylim=(ax.get_ylim()[0], ax.get_ylim()[1] - 0.7))
    ax.legend(ncols=4, loc="upper left", frameon=False, borderpad=0, borderaxespad=0.2,
              handlelength=0.8, handletextpad=0.3, columnspacing=0.8, fontsize=7)


def add_legend(fig, groups, panels, smooth):
    """One legend above all panels; below them what bands and smoothing mean."""
    handles = [Line2D([], [], label=label, **style) for label, style in styles(groups).items()]
    runs = sum(groups.values(), [])
    if "eval_accuracy" in panels and has_values(runs, "eval_sampled"):
        handles += [Line2D([], [], color="0.5", label="greedy"),
                    Line2D([], [], color="0.5", linestyle="--", label="sampled")]
    seeds = sorted({len(runs) for runs in groups.values()})
    tasks = sorted({"{model} on {data}".format(**run.settings) for run in runs
                    if {"model", "data"} <= run.settings.keys()})
    notes = {f"{', '.join(tasks)}.": tasks,
             f"Mean and range over {' or '.join(map(str, seeds))} seeds.": seeds[-1] > 1,
             "Single run's accuracy: Wilson 95 % interval.": 1 in seeds and "_acc" in str(panels),
             f"Curves of training: trailing mean over {smooth} steps.":
                 smooth > 1 and set(panels) - BARS - {"eval_accuracy"}}
    caption = " ".join(note for note, holds in notes.items() if holds)
    width, longest = fig.get_figwidth(), max(len(handle.get_label()) for handle in handles)
    fig.legend(handles=handles, loc="outside upper center", frameon=False, columnspacing=1.2,
               ncols=max(1, min(len(handles), int(width / (0.5 + 0.06 * longest)))))
    fig.supxlabel(textwrap.fill(caption, int(width * 18)), fontsize=7, color="0.3")


def make_figure(groups, panels, smooth=1, size=(3, 2.1)):
    """A picture of {label: runs}: a grid of panels, each `size` inches, under one legend."""
    columns, rows = min(3, len(panels)), -(-len(panels) // 3)
    fig = Figure((size[0] * columns, size[1] * rows + 0.6), dpi=150, layout="constrained")
    for place, panel in enumerate(panels, 1):
        draw_panel(fig.add_subplot(rows, columns, place), groups, panel, smooth)
    add_legend(fig, groups, panels, smooth)
    return fig


def choose_panels(runs, wanted):
    """The columns to draw: those wanted, less what is empty in every run."""
    unknown = sorted(set(wanted) - set(PANELS).union(*runs))
    panels = [column for column in wanted if has_values(runs, column)]
    if unknown or not panels:
        raise ValueError(f"no column {', '.join(unknown)}" if unknown else "every column is empty")
    return panels


def warn_of_unlike(groups, file=None):
    """Say which runs of one label are no seeds of each other: their mean would mislead."""
    for label, seeds in groups.items():
        keys = {key for run in seeds for key in run.settings} - {"seed", "out_dir", "resume"}
        differ = [key for key in keys if len({str(run.settings.get(key)) for run in seeds}) > 1]
        if differ:
            print(f"{label}: drawn as seeds, but the runs differ in {', '.join(sorted(differ))}",
                  file=file)


def main(argv=None):
    """Read the command line and write the pictures; a mistake is one line and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda problem: parser.exit(2, f"figures.py: {problem}\n")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or LABEL=folder")
    parser.add_argument("--out", type=Path, default="figures", help="folder for the pictures")
    parser.add_argument("--columns", nargs="+", default=list(PANELS), help="panels of curves.png")
    parser.add_argument("--smooth", type=int, default=0, help="trailing mean of N steps (0: none)")
    args = parser.parse_args(argv)
    try:
        runs = load_runs(args.runs)
        panels = choose_panels(runs, args.columns)
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as problem:
        parser.error(problem)
    groups = group_runs(runs)
    warn_of_unlike(groups)
    make_figure(groups, panels, max(1, args.smooth)).savefig(args.out / "curves.png")
    if "eval_accuracy" in panels:
        make_figure(groups, ["eval_accuracy"], size=(6, 2.6)).savefig(args.out / "accuracy.png")
    print(f"pictures in {args.out}")


if __name__ == "__main__":
    main()
