"""How plots/claims.py puts a statement to the test: runs, verdict, a panel of a picture.

A job is an arm and a seed: a run of a script, or a measuring function of plots/measures.py. Jobs
are shared between statements, done in processes of their own, and never done twice.
"""

import importlib
import json
import math
import multiprocessing
import os
import shlex
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import experiment  # noqa: E402
import figures  # noqa: E402

STEPS = 20  # the learning rate is constant, so the first 20 steps of a longer run are those of 20
QUICK = dict(steps=2, eval_every=2, eval_size=16, test_size=16, cold_start=20)
FREE = {"out_dir", "resume", "steps", "save_every", "keep", "eval_every", "test_size", "samples",
        "wandb", "critic"}  # may differ in a run that is found
COLUMNS = {"accuracy": "accuracy, sampled answers",
           "eval_sampled": "held-out accuracy, sampled",
           "explained_var": "explained variance, share"}  # those that figures.py has no words for


@dataclass
class Statement:
    """One number per seed, `value({arm: run or measurement})`, claimed to be above (below) this."""

    text: str
    effect: str  # what the number is, with its unit
    value: callable
    arms: dict  # {label: (script, flags) or a measuring function}
    above: float = None
    below: float = None
    matters: float = None  # the smallest effect that would matter; None: the margin
    seeds: int = 8  # 1: exact
    pilot: int = 0  # so many seeds came before, undecided: they gave the spread, and are not judged
    steps: int = STEPS
    draw: str | tuple = ""  # a column, or measured numbers; "": each seed's value; None: nothing
    again: dict = None  # flags of a second setting
    again_seeds: int = 4


# --- running -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """An arm and seed, and where its evidence lies: a run's folder, or a file of numbers."""

    script: object  # its name, or a measuring function
    flags: dict
    seed: int
    steps: int
    path: Path
    quick: bool = False

    @property
    def measures(self):
        return callable(self.script)

    def config(self):
        """The Config of a run: the tiny defaults, those of a trial, the arm's flags, the seed. A
        flag that is a function gives its value once what it makes is needed: see `work`."""
        module = importlib.import_module(self.script)
        trial = dict(eval_every=20, test_size=16, steps=self.steps, seed=self.seed)
        return module.Config(**module.TINY | trial | (QUICK if self.quick else {}) | self.flags)

    def done(self):
        """Is it there? A run must be finished, as long, and of the same settings."""
        if self.measures:
            return self.path.is_file()
        if not (self.path / "final" / "config.json").is_file():
            return False
        saved = json.loads((self.path / "config.json").read_text())["config"]
        wanted = asdict(self.config())
        differ = [k for k, v in wanted.items() if k not in FREE and saved.get(k) != v]
        if differ:
            common.fail(f"{self.path} holds a run of other {', '.join(differ)}: move it away")
        return saved["steps"] >= wanted["steps"]

    def load(self, label):
        """Its evidence, a run cut to its steps, and the CPU seconds that it took (NaN: unknown)."""
        if self.measures:
            numbers = json.loads(self.path.read_text())
            return numbers, numbers["cpu_seconds"]
        run, cost = figures.load_run(self.path, label), self.path / "cpu_seconds"
        share = min(1, self.config().steps / run["step"].max())
        keep = run["step"] <= self.config().steps
        for column in run:
            run[column] = run[column][keep]
        return run, float(cost.read_text()) * share if cost.is_file() else math.nan


def job(arm, seed, steps, out, again=None, quick=False):
    """The Job of an arm; `again`: flags of a second setting, unless the arm has its own."""
    script, flags = (arm, {}) if callable(arm) else arm
    flags = (again or {}) | flags
    words = [f"{k}-{getattr(v, '__name__', v)}" for k, v in flags.items()]
    name = "-".join([getattr(script, "__name__", script), *words, f"s{seed}"])
    path = out / (f"{name}.json" if callable(script) else name)
    return Job(script, flags, seed, steps, path, quick)


def seeds_of(statement, again=None, quick=False):
    """The seeds that are judged, in order."""
    if quick:
        return range(1)
    if again:
        return range(statement.again_seeds)
    return range(statement.pilot, statement.pilot + statement.seeds)


def jobs(statements, out, quick=False):
    """Every job of the statements once, with its most steps; the second settings come last."""
    trials = [(s, None) for s in statements]
    trials += [(s, s.again) for s in statements if s.again and not quick]
    found = {}
    for statement, again in trials:
        for seed in seeds_of(statement, again, quick):
            for arm in statement.arms.values():
                new = job(arm, seed, statement.steps, out, again, quick)
                old = found.get(new.path, new)
                found[new.path] = new if new.steps > old.steps else old
    return list(found.values())


def command(script, cfg):
    """The flags that make this Config, without what the tiny defaults say already."""
    module, words = importlib.import_module(script), []
    for name, value in asdict(cfg).items():
        if value != getattr(module.Config(**module.TINY), name):
            words += [f"--no_{name}"] if value is False else [f"--{name}", str(value)]
    return words


def work(todo):
    """In a process of its own: do a job as its command line would, and note its CPU seconds."""
    log = os.open(f"{todo.path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    extra = dict(cold_start=QUICK["cold_start"]) if todo.quick else {}
    if todo.measures:
        numbers = todo.script(todo.seed, todo.path.parent, **extra | todo.flags)
        unfinished = todo.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(numbers | dict(cpu_seconds=time.process_time())))
        unfinished.replace(todo.path)
        return
    module, cfg = importlib.import_module(todo.script), todo.config()
    for name, value in todo.flags.items():
        if callable(value):
            setattr(cfg, name, value(todo.seed, todo.path.parent, **extra))
    words = [*command(todo.script, cfg), "--out_dir", str(todo.path)]
    words += ["--resume"] * (todo.path / "config.json").is_file()
    print(shlex.join(["python", f"{todo.script}.py", *words]), flush=True)
    module.train(experiment.parse_args(module.Config, module.TINY, words))
    (todo.path / "cpu_seconds").write_text(f"{time.process_time()}")


def run_all(todo, workers):
    """Do the jobs, `workers` at a time. What is begun and stopped goes on in the next call."""
    server = multiprocessing.get_context("forkserver")  # imports once, for all of them
    server.set_forkserver_preload(["trials", "measures", "grpo", "dapo", "gspo", "ppo", "memory",
                                   "transformers.models.qwen3.modeling_qwen3"])
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                   "PYTHONPATH": f"{ROOT}:{ROOT / 'plots'}"}
    with ProcessPoolExecutor(workers, server, max_tasks_per_child=1) as pool, tqdm(
            total=len(todo), unit="run") as bar:
        running = {pool.submit(work, one): one for one in todo}
        for future in as_completed(running):
            problem, path = future.exception(), running[future].path
            if problem:
                pool.shutdown(wait=False, cancel_futures=True)
                common.fail(f"{path} failed: {problem!r}; see {path}.log")
            bar.set_postfix_str(path.name)
            bar.update()


def evidence(statement, out, again=None, quick=False):
    """[{arm's label: its run or numbers}] of its seeds, up to one that is not there yet; and the
    CPU seconds that they took."""
    found, seconds = [], 0
    for seed in seeds_of(statement, again, quick):
        todo = {label: job(arm, seed, statement.steps, out, again, quick)
                for label, arm in statement.arms.items()}
        if not all(one.done() for one in todo.values()):
            break
        loaded = {label: one.load(label) for label, one in todo.items()}
        found.append({label: numbers for label, (numbers, _) in loaded.items()})
        seconds += sum(cost for _, cost in loaded.values())
    return found, seconds


# --- judging -------------------------------------------------------------------------------------


def p_value(t, df):
    """Two-sided, of Student's t, by its density in theta = atan(t / sqrt(df))."""
    theta = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(theta) ** (df - 1)
    return float(density[theta >= math.atan(abs(t) / math.sqrt(df))].sum() / density.sum())


def quantile(df):
    """Student's t with 2.5 % above it, by bisection."""
    low, high = 1.9, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, df) > 0.05 else (low, middle)
    return low


def judge(statement, values):
    """Mean, half the 95 % interval, the side that the data are on, how sure that is (`clear`: in
    standard deviations between seeds) and its p-value before Holm's correction."""
    sign, margin = (1, statement.above) if statement.below is None else (-1, statement.below)
    matters = margin if statement.matters is None else statement.matters
    mean, n = float(np.mean(values)), len(values)
    claimed = f"{'>' if sign > 0 else '<'} {margin:g}"
    beyond, short = sign * (mean - margin), sign * (matters - mean)  # distances to be sure of
    result = dict(values=values, mean=mean, half=None, claimed=claimed, p=1.0, clear=0.0)
    if statement.seeds == 1:
        return result | dict(half=0.0, p=0.0, side="seen" if beyond > 0 else "not seen")
    if n < 2:
        return result | dict(side="undecided")
    spread = float(np.std(values, ddof=1))
    half = quantile(n - 1) * spread / math.sqrt(n)
    # An effect that is there but too small to matter is not what was claimed.
    unseen = short > half or short >= beyond
    result |= dict(half=half, side="not seen" if unseen else "seen")
    if spread == 0:
        return result | dict(p=0.0)
    clear = max(0.0, short if unseen else beyond) / spread
    return result | dict(clear=clear, p=p_value(clear * math.sqrt(n), n - 1))


def decide(results, tested):
    """Give each result its verdict: Holm's procedure over all `tested` statements of the table,
    those that have not been run included. What a second setting turns around "depends". `needed`:
    the seeds at which what is undecided would pass it with the same effect and spread; None for a
    thousand and more."""
    judged = sorted((r for r in results if "side" in r), key=lambda r: r["p"])
    holds, left = True, tested
    for result in judged:
        if result["seeds"] == 1:
            result["verdict"] = result["side"]
            continue
        holds = holds and result["p"] <= 0.05 / left
        result["verdict"] = result["side"] if holds else "undecided"
        again = result.get("again", {"p": 1})
        if holds and again["p"] < 0.05 and again["side"] != result["side"]:
            result["verdict"] = "depends"
        if not holds and result["clear"] > 0:
            enough = (n for n in range(result["seeds"] + 1, 1000)
                      if p_value(result["clear"] * math.sqrt(n), n - 1) <= 0.05 / left)
            result["needed"] = next(enough, None)
        left -= holds


# --- drawing -------------------------------------------------------------------------------------


def draw_panel(ax, statement, found):
    """A column's curves, measured numbers side by side, or the value of each seed."""
    groups = {label: [arms[label] for arms in found] for label in statement.arms}
    if isinstance(statement.draw, tuple):
        names = statement.draw
        rows = [[next(iter(arms.values()))[name] for name in names] for arms in found]
        if statement.seeds == 1:
            ax.bar(names, rows[0], 0.5, color="0.5")
        else:  # a grey line for each seed, a black one for their mean
            ax.plot(names, np.transpose(rows), "o-", color="0.65", lw=0.8, ms=3)
            ax.plot(names, np.mean(rows, 0), "ks-")
        return ax.set(ylabel=statement.effect.partition(",")[0], xlim=(-0.4, len(names) - 0.6))
    if statement.draw == "paid and right":
        (runs,) = groups.values()
        for column, style in figures.styles(("reward", "accuracy")).items():
            steps, mean, low, high = figures.series(runs, column, smooth=3)
            ax.plot(steps, mean, label=column, markevery=4, **style)
            ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ax.set(xlabel="step", ylabel="mean of the sampled answers", ylim=(0, None))
    elif statement.draw == "by tokens":
        for label, style in figures.styles(groups).items():
            spent = np.mean([np.cumsum(run["tokens"][1:]) for run in groups[label]], 0) / 1000
            curves = [figures.trailing_mean(run["accuracy"][1:], 10) for run in groups[label]]
            ax.plot(spent, np.mean(curves, 0), label=label, markevery=4, **style)
        ax.set(xlabel="thousand tokens sampled", ylabel="accuracy, share of answers")
    elif statement.draw:
        figures.draw_panel(ax, groups, statement.draw, smooth=3)
        if statement.draw in COLUMNS:
            ax.set(ylabel=COLUMNS[statement.draw])
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        ax.plot([float(statement.value(arms)) for arms in found], "ko", ms=4, label="a seed")
        margin = statement.above if statement.below is None else statement.below
        ax.axhline(margin, color="#D55E00", ls="--", lw=1, label=f"claimed: beyond {margin:g}")
        ax.set(xlabel="seed", ylabel=textwrap.fill(statement.effect, 40), xticks=range(len(found)))
    ax.legend(fontsize=6.5, frameon=False)
