"""What the articles and papers say, run and seen: each claim is a command.

    python plots/claims.py                       the claims and their statements
    python plots/claims.py clip-higher           run what is missing, draw it in runs/claims, judge
    python plots/claims.py all --jobs 2          two runs at a time; stopped, it goes on where it was
    python plots/claims.py all --as_is --update  run nothing; the pictures and plots/claims.json anew
    python plots/claims.py --table               the table of plots/README.md, from claims.json

A claim is split into statements, each of which can be true or false alone: a number per seed, mostly
the difference of two arms with the same cold start and questions, claimed to lie above (or below) a
margin. Seeds are 0 to n - 1, and n was fixed from a pilot before the judged runs. We take the mean
and its 95 % interval (Student's t). *Seen*: it lies on the claimed side of the margin. *Not seen*: it
lies below the smallest effect that would matter, `matters` (the margin, where none is given), be it
negligible or of the other sign. Both are two-sided tests at 5 %, corrected for all statements
together (Holm). *Undecided*: neither; the seeds it would take are told. *Exact*: arithmetic.
`accuracy` is of the answers sampled in the last ten training steps, about 1,280. RL asks no question
twice in these runs; the cold start has seen them with a pupil's answers.
What no metric of a run tells is measured in plots/measures.py.
"""

import argparse
import contextlib
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
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import experiment  # noqa: E402
import figures  # noqa: E402
import measures as m  # noqa: E402

STEPS = 20  # the learning rate is constant, so the first 20 steps of a longer run are those of 20
QUICK = dict(steps=2, eval_every=2, eval_size=16, test_size=16, cold_start=20)
RESULTS = ROOT / "plots" / "claims.json"
FREE = {"out_dir", "resume", "steps", "save_every", "keep", "eval_every", "test_size", "samples",
        "wandb", "critic"}  # may differ in a run that is found
VERDICTS = {"seen": "#009E73", "not seen": "#D55E00", "undecided": "0.4", "not run yet": "0.4"}


@dataclass
class Statement:
    """One number per seed, `value({arm: run or measurement})`, claimed to be above (below) this."""

    text: str
    effect: str  # what the number is, with its unit
    value: callable
    arms: dict  # {label: (script, flags) or a measuring function}
    above: float = None
    below: float = None
    matters: float = None  # the smallest effect that would matter
    seeds: int = 8  # 1: exact
    steps: int = STEPS
    draw: str | tuple = ""  # a column, or names of measured numbers; "": the value of each seed
    again: dict = None  # flags of a second setting
    again_seeds: int = 4


@dataclass
class Claim:
    """What is claimed, where, and the statements that it takes."""

    headline: str
    source: str
    statements: list


# --- the claims, those of whose experiments we expect most first -----------------------------------

ACCURACY, LENGTH = m.late("accuracy"), m.late("response_len")
GRPO, DAPO, GSPO, PPO = (("grpo", {}), ("dapo", {}), ("gspo", {}), ("ppo", {}))  # defaults, shared
SLOW = dict(lr=1e-4, cold_start_lr=6e-3)  # a third of the default, after the same cold start


def arm(script, **flags):
    return script, flags


EVERY = arm("dapo", dynamic_sampling=False)  # DAPO that trains on every group, as cheap as GRPO
CLIPS = dict(dynamic_sampling=False, minibatches=16, lr=1e-3, cold_start_lr=6e-3)
CRITIC = dict(lam=0.8, prompts_per_step=64)  # beyond 1 / (1 - 0.8) tokens the critic is all it has
ONE = {"GRPO": arm("grpo", minibatches=1, beta=0.0), "GSPO": arm("gspo", minibatches=1)}
EXPERTS = {"experts": m.ratios_moe, "dense": m.ratios_narrow}


def two(quantity, one, other, **arms):
    """For Statement: the value `one` - `other` of two arms, and these."""
    return dict(value=m.difference(one, other, quantity), arms=arms)


CLAIMS = {
    "no-critic": Claim("GRPO has no critic, and needs none", "articles 000, 001, 003, 004", [
        Statement("PPO holds a model more than GRPO", "models in memory, PPO - GRPO",
                  m.measured("7B", "models"), {"7B": m.plan_7b}, above=0, seeds=1),
        Statement("A 7B PPO on 8 GPUs takes a tenth more memory than GRPO",
                  "GB per GPU, PPO / GRPO", m.measured("7B", "memory_ratio"), {"7B": m.plan_7b},
                  above=1.1, seeds=1, draw=("grpo", "ppo")),
        Statement("A step of PPO takes a tenth longer than GRPO's, for as many answers",
                  "median seconds of a step, PPO / GRPO",
                  m.ratio_of("PPO", "GRPO", m.typical("t_total")), {"GRPO": GRPO, "PPO": PPO},
                  above=1.1, draw="t_total"),
        Statement("GRPO is more accurate than PPO after as many answers",
                  "accuracy, GRPO - PPO", **two(ACCURACY, "GRPO", "PPO", GRPO=GRPO, PPO=PPO),
                  above=0, matters=0.02, draw="accuracy", again=SLOW)]),
    "sequence-ratio": Claim("GSPO clips answers, far more of them, and still learns",
                            "GSPO; articles 003, 004", [
        Statement("GSPO clips two orders of magnitude more than GRPO", "clip fraction, GSPO / GRPO",
                  m.ratio_of("GSPO", "GRPO", m.over_all("clip_frac")),
                  {"GRPO": GRPO, "GSPO": GSPO}, above=30, draw="clip_frac", again=SLOW),
        Statement("It learns all the same", "rise of sampled held-out accuracy, GSPO",
                  m.of("GSPO", m.gain), {"GSPO": GSPO}, above=0.2, draw="eval_accuracy"),
        Statement("GSPO is more accurate than GRPO after as many answers", "accuracy, GSPO - GRPO",
                  **two(ACCURACY, "GSPO", "GRPO", GRPO=GRPO, GSPO=GSPO), above=0, matters=0.02,
                  draw="accuracy", again=SLOW),
        Statement("An answer's ratio varies a tenth as much as its tokens'",
                  "variance of log ratios, tokens / answers", m.measured("dense", "reduction"),
                  {"dense": m.ratios}, above=10, draw=("answers", "tokens"),
                  again=dict(model="tiny-moe"))]),
    "dynamic-sampling": Claim("Dynamic sampling removes groups without gradient, and it helps",
                              "DAPO; article 001 (arXiv 2512.07611: not always)", [
        Statement("It removes a tenth of the groups and more, those without gradient",
                  "tied groups, off - on",
                  **two(m.late("tied_frac"), "off", "on", on=DAPO, off=EVERY), above=0.1,
                  draw="tied_frac"),
        Statement("It is more accurate after as many steps", "accuracy, on - off",
                  **two(ACCURACY, "on", "off", on=DAPO, off=EVERY), above=0, matters=0.02,
                  draw="accuracy", again=SLOW),
        Statement("It is more accurate after as many tokens sampled",
                  "accuracy at equal tokens, on - off", m.at_equal_tokens("on", "off"),
                  dict(on=DAPO, off=EVERY), above=0, matters=0.02, draw="by tokens", again=SLOW)]),
    "token-mean": Claim("A mean per answer favours short answers; per token, not",
                        "DAPO; articles 000, 001", [
        Statement("A mean per answer gives a short answer's tokens more gradient",
                  "|gradient| a token, shortest / longest quarter, answer mean over token mean",
                  m.measured("gradient", "short_over_long"), {"gradient": m.length_bias},
                  above=1.1),
        Statement("The token mean pushes towards longer answers than the answer mean",
                  "push on the mean length, token - answer mean (tokens per unit step)",
                  lambda arms: arms["gradient"]["token mean"] - arms["gradient"]["answer mean"],
                  {"gradient": m.length_bias}, above=0, draw=("answer mean", "token mean")),
        Statement("Trained with the token mean, answers are longer",
                  "length, token - answer mean (tokens)",
                  **two(LENGTH, "token mean", "answer mean", **{
                      "token mean": EVERY,
                      "answer mean": arm("dapo", dynamic_sampling=False, token_mean=False)}),
                  above=0, matters=0.2, draw="response_len", again=SLOW)]),
    "one-update": Claim("With one update per rollout nothing is clipped, and GSPO is GRPO",
                        "algorithms' equations; GSPO", [
        Statement("Clipping idles", "largest clip fraction", m.largest("clip_frac"), ONE,
                  below=1e-6, seeds=3, steps=10, draw="clip_frac"),
        Statement("The update starts at the policy that sampled", "largest KL, old to new (nats)",
                  m.largest("approx_kl"), ONE, below=1e-6, seeds=3, steps=10),
        Statement("The first gradients of GSPO and GRPO are as long",
                  "relative difference of the norms", m.first_gap("GSPO", "GRPO", "grad_norm"),
                  ONE, below=1e-4, seeds=3, steps=10, draw="grad_norm")]),
    "clip-higher": Claim("Clip-higher keeps entropy and exploration up",
                         "DAPO; articles 000, 001, 004", [
        Statement("On one rollout, unlikely good tokens gain more", "rise of log pi, 0.28 - 0.2",
                  lambda arms: arms["rollout"]["gain 0.28"] - arms["rollout"]["gain 0.2"],
                  {"rollout": m.clip_ranges}, above=0, draw=("gain 0.2", "gain 0.28"),
                  again=SLOW),
        Statement("On one rollout, more entropy is left", "entropy, 0.28 - 0.2 (nats per token)",
                  lambda arms: arms["rollout"]["entropy 0.28"] - arms["rollout"]["entropy 0.2"],
                  {"rollout": m.clip_ranges}, above=0, matters=0.001,
                  draw=("entropy 0.2", "entropy 0.28"), again=SLOW),
        *[Statement(text, effect, **two(quantity, "clip 0.28", "clip 0.2", **{
              "clip 0.28": arm("dapo", **CLIPS), "clip 0.2": arm("dapo", **CLIPS, clip_high=0.2)}),
              above=0, matters=matters, draw=column) for text, effect, quantity, matters, column in (
              ("Over training, more entropy is left", "entropy, 0.28 - 0.2 (nats per token)",
               m.late("entropy"), 0.003, "entropy"),
              ("More groups keep right and wrong answers", "mixed groups, 0.28 - 0.2",
               lambda run: -m.late("tied_frac")(run), 0.02, "tied_frac"))]]),
    "group-size": Claim("Larger groups are steadier and more accurate, at equal samples too",
                        "articles 001, 004", [
        Statement("With 16 questions, gradients of 8 answers agree better than of 2",
                  "mean cosine, G 8 - G 2",
                  lambda arms: arms["gradients"]["16 x 8"] - arms["gradients"]["16 x 2"],
                  {"gradients": m.agreement}, above=0, draw=("16 x 2", "16 x 8")),
        Statement("At 128 samples, gradients of larger groups agree better",
                  "mean cosine, 16 x 8 - 64 x 2",
                  lambda arms: arms["gradients"]["16 x 8"] - arms["gradients"]["64 x 2"],
                  {"gradients": m.agreement}, above=0, matters=0.02,
                  draw=("64 x 2", "32 x 4", "16 x 8", "8 x 16", "4 x 32")),
        Statement("16 questions: 8 answers each are more accurate than 2", "accuracy, G 8 - G 2",
                  **two(ACCURACY, "16 x 8", "16 x 2", **{
                      "16 x 8": GRPO, "16 x 2": arm("grpo", group_size=2)}),
                  above=0, matters=0.02, draw="accuracy", again=SLOW),
        Statement("128 samples: groups of 8 are more accurate than of 2",
                  "accuracy, 16 x 8 - 64 x 2", **two(ACCURACY, "16 x 8", "64 x 2", **{
                      "16 x 8": GRPO, "64 x 2": arm("grpo", prompts_per_step=64, group_size=2)}),
                  above=0, matters=0.02, draw="accuracy", again=SLOW),
        Statement("128 samples: groups of 32 are more accurate than of 8",
                  "accuracy, 4 x 32 - 16 x 8", **two(ACCURACY, "4 x 32", "16 x 8", **{
                      "16 x 8": GRPO, "4 x 32": arm("grpo", prompts_per_step=4, group_size=32)}),
                  above=0, matters=0.02, draw="accuracy", again=SLOW)]),
    "overlong": Claim("The overlong penalty lowers truncation without losing accuracy",
                      "DAPO; articles 000, 001", [
        Statement(text, effect, **two(quantity, "penalty", "none", penalty=EVERY, none=arm(
            "dapo", dynamic_sampling=False, overlong_buffer=0)), **bound, draw=column, again=SLOW)
        for text, effect, quantity, bound, column in (
            ("Fewer answers are truncated", "truncated answers, with - without",
             m.over_all("truncated_frac"), dict(below=0, matters=-0.002), "truncated_frac"),
            ("It costs at most 0.02 of accuracy", "accuracy, with - without", ACCURACY,
             dict(above=-0.02), "accuracy"))]),
    "kl-weight": Claim("The best KL weight lies between none and much",
                       "article 001 (arXiv 2512.07611)", [
        Statement("A little KL is more accurate than none", "accuracy, beta 0.01 - 0",
                  **two(ACCURACY, "0.01", "0", **{"0": arm("grpo", beta=0.0), "0.01": GRPO}),
                  above=0, matters=0.02, draw="accuracy", again=dict(lr=1e-3, cold_start_lr=6e-3)),
        Statement("... and than much", "accuracy, beta 0.01 - 1",
                  **two(ACCURACY, "0.01", "1", **{"0.01": GRPO, "1": arm("grpo", beta=1.0)}),
                  above=0, matters=0.02, draw="accuracy", again=SLOW),
        Statement("Ten times the weight halves the distance to the reference",
                  "KL to the reference, beta 0.01 / 0.1",
                  m.ratio_of("0.01", "0.1", m.late("ref_kl")),
                  {"0.01": GRPO, "0.1": arm("grpo", beta=0.1)}, above=2, draw="ref_kl",
                  again=SLOW)]),
    "reward-design": Claim("A lax reward is hacked; format and correctness together help",
                           "article 004", [
        Statement("`gold in text` is hacked", "paid beyond right answers",
                  m.of("contains", m.hacked), {"contains": arm("grpo", reward="contains")},
                  above=0.1, seeds=4, draw="reward", again=SLOW),
        Statement("Paying the format alone is gamed", "paid beyond right answers",
                  m.of("format", m.hacked), {"format": arm("grpo", reward="marker_format")},
                  above=0.1, seeds=4, draw="reward", again=SLOW),
        Statement("Where the format is not yet learned, paying it too is more accurate",
                  "accuracy, mix - correct", **two(ACCURACY, "mix", "correct", **{
                      "correct": arm("grpo", cold_start=100),
                      "mix": arm("grpo", cold_start=100, reward="correct+0.5*marker_format")}),
                  above=0, matters=0.02, draw="accuracy", again=SLOW)]),
    "cold-start": Claim("Without a cold start nothing starts", "article 004", [
        Statement("Without, hardly an answer in a hundred is right", "accuracy without",
                  m.of("none", m.over_all("accuracy")), {"none": arm("grpo", cold_start=0)},
                  below=0.01, seeds=4, draw="accuracy", again=dict(lr=1e-3)),
        Statement("With it, most are", "accuracy, with - without", **two(
            ACCURACY, "with", "without", **{"with": GRPO, "without": arm("grpo", cold_start=0)}),
                  above=0.2, seeds=4, draw="accuracy", again=dict(lr=1e-3, cold_start_lr=6e-3))]),
    "critic": Claim("A critic should be as large as the policy, and learn ten times faster",
                    "article 000", [
        Statement(text, effect, **two(quantity, one, "like the policy, lr 10 x", **{
            "like the policy, lr 10 x": arm("ppo", **CRITIC, critic_lr=3e-3),
            one: arm("ppo", **CRITIC, **flags)}), below=0, matters=matters, draw=column)
        for one, flags in (("small", dict(critic=m.small_critic, critic_lr=3e-3)),
                           ("lr 1 x", dict(critic_lr=3e-4)))
        for text, effect, quantity, matters, column in (
            (f"A critic that is {one} explains less", f"explained variance, {one} - the other",
             m.over_all("explained_var"), -0.02, "explained_var"),
            (f"A critic that is {one} costs accuracy", f"accuracy, {one} - the other", ACCURACY,
             -0.02, "accuracy"))]),
    "experts": Claim("The more so with a mixture of experts", "GSPO; articles 003, 004", [
        Statement("Three updates send one token in a hundred to other experts",
                  "choices of experts changed", m.measured("experts", "rerouted"),
                  {"experts": m.ratios_moe}, above=0.01, again=SLOW),
        Statement("The answers' ratios gain more with experts than with as many dense units",
                  "log of the variances' ratio, experts - dense",
                  lambda arms: math.log(arms["experts"]["reduction"] / arms["dense"]["reduction"]),
                  EXPERTS, above=0, matters=0.1)]),
}

# --- running -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """An arm and seed, and where its evidence lies: a run's folder, or a file of numbers."""

    arm: tuple
    seed: int
    steps: int
    path: Path

    def config(self, quick=False):
        """The Config of a run: the tiny defaults, the arm's flags, the seed, those of --quick."""
        script, flags = self.arm
        module = importlib.import_module(script)
        changes = dict(seed=self.seed, steps=self.steps, eval_every=20, test_size=16)
        changes |= (QUICK if quick else {}) | flags
        extra = dict(cold_start=QUICK["cold_start"]) if quick else {}
        return module.Config(**module.TINY | {
            k: v(self.seed, self.path.parent, **extra) if callable(v) else v
            for k, v in changes.items()})

    def done(self, quick=False):
        """Is it there? A run must be finished, as long, and of the same settings."""
        if callable(self.arm[0]):
            return self.path.is_file()
        about = self.path / "config.json"
        if not (self.path / "final" / "config.json").is_file():
            return False
        saved, script, flags = json.loads(about.read_text())["config"], *self.arm
        plain = {k: v for k, v in flags.items() if not callable(v)}
        wanted = asdict(Job((script, plain), self.seed, self.steps, self.path).config(quick))
        differ = [k for k, v in wanted.items() if k not in FREE and saved.get(k) != v]
        if differ:
            common.fail(f"{self.path} holds a run of other {', '.join(differ)}: move it away")
        return saved["steps"] >= wanted["steps"]


def job(arm, seed, steps, out, again):
    """The Job of an arm; `again`: flags of a second setting, unless the arm has its own."""
    name, flags = (arm, {}) if callable(arm) else arm
    flags = (again or {}) | flags
    words = [getattr(name, "__name__", name),
             *(f"{k}-{getattr(v, '__name__', v)}" for k, v in flags.items()), f"s{seed}"]
    return Job((name, flags), seed, steps, out / ("-".join(words) + ".json" * callable(name)))


def jobs(names, quick, out):
    """Every job of the claims once, with its most steps; the second settings come last."""
    found = {}
    for again in (False,) if quick else (False, True):
        for statement in [s for name in names for s in CLAIMS[name].statements]:
            if again and not statement.again:
                continue
            seeds = statement.again_seeds if again else min(statement.seeds, 1 if quick else 99)
            for seed in range(seeds):
                for arm in statement.arms.values():
                    new = job(arm, seed, statement.steps, out, statement.again if again else None)
                    old = found.get(new.path)
                    found[new.path] = new if not old or new.steps > old.steps else old
    return list(found.values())


def command(script, cfg):
    """The flags that make this Config, without what the tiny defaults say already."""
    module, words = importlib.import_module(script), []
    for name, value in asdict(cfg).items():
        if value != getattr(module.Config(**module.TINY), name):
            words += [f"--no_{name}"] if value is False else [f"--{name}", str(value)]
    return words


def work(todo, quick):
    """In a process of its own: do a job as its command line would, and note its CPU seconds."""
    script, flags = todo.arm
    log = open(todo.path.with_suffix(".log") if callable(script) else f"{todo.path}.log", "w")
    os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    if callable(script):
        extra = dict(cold_start=QUICK["cold_start"]) if quick else {}
        numbers = script(todo.seed, todo.path.parent, **extra | flags)
        text = json.dumps(numbers | dict(cpu_seconds=time.process_time()))
        todo.path.with_suffix(".tmp").write_text(text)
        return todo.path.with_suffix(".tmp").replace(todo.path)
    module, words = importlib.import_module(script), command(script, todo.config(quick))
    words += ["--out_dir", str(todo.path)]
    words += ["--resume"] * (todo.path / "config.json").is_file()
    print(shlex.join(["python", f"{script}.py", *words]), flush=True)
    module.train(experiment.parse_args(module.Config, module.TINY, words))
    (todo.path / "cpu_seconds").write_text(f"{time.process_time()}")


def run_all(todo, quick, workers):
    """Do the jobs, `workers` at a time. What is begun and stopped goes on in the next call."""
    server = multiprocessing.get_context("forkserver")  # imports once, for all of them
    server.set_forkserver_preload(["claims", "grpo", "dapo", "gspo", "ppo", "memory",
                                   "transformers.models.qwen3.modeling_qwen3"])
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                   "PYTHONPATH": f"{ROOT}:{ROOT / 'plots'}"}
    with ProcessPoolExecutor(workers, server, max_tasks_per_child=1) as pool, tqdm(
            total=len(todo), unit="run") as bar:
        running = {pool.submit(work, one, quick): one for one in todo}
        for future in as_completed(running):
            bar.set_postfix_str(running[future].path.name)
            bar.update()
            try:
                future.result()
            except (Exception, SystemExit, BrokenProcessPool) as problem:
                pool.shutdown(wait=False, cancel_futures=True)
                common.fail(f"{running[future].path}.log: {problem!r}")


def evidence(statement, out, again=None, quick=False):
    """[{arm's label: its run or numbers}] of the first seeds, up to one that is not there yet;
    and the CPU seconds that they took."""
    found, seconds = [], 0
    for seed in range(statement.again_seeds if again else statement.seeds):
        arms = {}
        for label, arm in statement.arms.items():
            one = job(arm, seed, statement.steps, out, again)
            if not one.done(quick):
                return found, seconds
            arms[label], cost = load(one, label, quick)
            seconds += cost
        found.append(arms)
    return found, seconds


def load(one, label, quick):
    """A job's evidence, a run cut to its steps, and its CPU seconds."""
    if callable(one.arm[0]):
        numbers = json.loads(one.path.read_text())
        return numbers, numbers["cpu_seconds"]
    run = figures.load_run(one.path, label)
    steps, cost = QUICK["steps"] if quick else one.steps, one.path / "cpu_seconds"
    share = min(1, steps / run["step"].max())
    keep = run["step"] <= steps
    for column in run:
        run[column] = run[column][keep]
    return run, float(cost.read_text()) * share if cost.is_file() else math.nan


# --- judging -------------------------------------------------------------------------------------


def student(t, df):
    """Two-sided p-value of Student's t, by its density in theta = atan(t / sqrt(df))."""
    theta = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(theta) ** (df - 1)
    tail = np.where(theta >= math.atan(abs(t) / math.sqrt(df)), density, 0)
    return float(tail.sum() / density.sum())


def quantile(df):
    """Student's t with 2.5 % above it, by bisection."""
    low, high = 1.9, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, df) > 0.05 else (low, middle)
    return low


def judge(statement, values):
    """Mean, half the 95 % interval, the side that the data are on, its p-value before Holm's
    correction, and the seeds it would take to tell at 95 %."""
    sign, margin = (1, statement.above) if statement.below is None else (-1, statement.below)
    matters = margin if statement.matters is None else statement.matters
    mean, n = float(np.mean(values)), len(values)
    over, under = sign * (mean - margin), sign * (matters - mean)  # distances to be sure of
    result = dict(values=values, mean=mean, claimed=f"{'>' if sign > 0 else '<'} {margin:g}")
    if statement.seeds == 1:
        return result | dict(half=0.0, p=0.0, side="seen" if over > 0 else "not seen")
    if n < 2:
        return result | dict(half=None, p=1.0, side="undecided", needed=None)
    spread = float(np.std(values, ddof=1))
    half = quantile(n - 1) * spread / math.sqrt(n)
    side, distance = ("not seen", under) if under >= over or under > half else ("seen", over)
    p = float(distance <= 0)
    if spread > 0 and distance > 0:
        p = student(distance / (spread / math.sqrt(n)), n - 1)
    needed = 2 + math.ceil((1.96 * spread / distance) ** 2) if distance > 0 else None
    return result | dict(half=half, p=p, side=side, needed=needed)


def decide(stored):
    """Write each result's verdict, by Holm's procedure over all statements of the table."""
    results = [r for claim in stored.values() for r in claim if "side" in r]
    tested = sum(s.seeds > 1 for claim in CLAIMS.values() for s in claim.statements)
    holds, order = True, sorted((r for r in results if r["n"] > 1), key=lambda r: r["p"])
    for place, result in enumerate(order):
        holds = holds and result["p"] <= 0.05 / (tested - place)
        result["verdict"] = result["side"] if holds else "undecided"
    for result in results:
        result.setdefault("verdict", result["side"])


def examine(name, quick, out):
    """Judge a claim's statements from what has been run. Returns the results, and their evidence
    for the picture."""
    results, seen = [], []
    for statement in CLAIMS[name].statements:
        found, seconds = evidence(statement, out, quick=quick)
        result, wanted = dict(text=statement.text, effect=statement.effect), statement.seeds
        result |= dict(n=len(found), seeds=wanted, minutes=seconds / 60)
        if len(found) == wanted or quick:
            result |= judge(statement, [float(statement.value(arms)) for arms in found])
            if statement.again and not quick:
                again, _ = evidence(statement, out, statement.again)
                if len(again) == statement.again_seeds:
                    values = [float(statement.value(arms)) for arms in again]
                    setting = " ".join(f"{k} {v}" for k, v in statement.again.items()
                                       if k != "cold_start_lr")
                    result["again"] = judge(statement, values) | dict(setting=setting)
        results.append(result)
        seen.append(found)
    return results, seen


# --- telling -------------------------------------------------------------------------------------


def effect(result):
    """Mean ± half the 95 % interval."""
    if "mean" not in result:
        return "–"
    half = "?" if result["half"] is None else f"{result['half']:.2g}"
    return f"{result['mean']:.3g}" + (f" ± {half}" if result["seeds"] > 1 else "")


def verdict(result):
    """The verdict in words: how many seeds are there, or would be needed."""
    if "verdict" not in result:
        return f"not run yet ({result['n']} of {result['seeds']})"
    if result["seeds"] == 1:
        return f"{result['verdict']}, exact"
    more = f" (about {result['needed']} seeds would tell)" if result["verdict"] == "undecided" \
        and result["needed"] else ""
    return result["verdict"] + more


def repeated(result):
    """What a second setting said."""
    if "again" not in result:
        return ""
    again = result["again"]
    sure = again["half"] is not None and again["p"] < 0.05
    word = "open" if not sure else "held" if again["side"] == result["side"] else "turned round"
    return f"{word}: {again['mean']:.3g} ± {again['half']:.2g} ({again['setting']})"


def table(stored):
    """The table in plots/README.md: a claim's headline, then a row a statement."""
    lines = ["| | effect ± half the 95 % interval | claimed | n | verdict | second setting "
             "| CPU minutes |", "|---|---|---|---|---|---|---|"]
    for name, results in stored.items():
        claim = CLAIMS[name]
        lines.append(f"| **[{claim.headline}](claims-{name}.png)** ({claim.source}) | | | | | | |")
        for r in results:
            cost = "" if math.isnan(r["minutes"]) else f"{r['minutes']:.1f}"
            cells = [r["text"], f"{r['effect'].replace('|', chr(92) + '|')}: {effect(r)}",
                     r.get("claimed", ""), str(r["n"]), f"**{verdict(r)}**", repeated(r), cost]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(claim, results, seen, file):
    """A panel a statement: its text, its verdict and effect, and the quantity that decides."""
    shown = [(s, r, e) for s, r, e in zip(claim.statements, results, seen) if e]
    if not shown:
        return
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    fig = Figure((3.6 * columns, 2.9 * rows), dpi=150, layout="constrained")
    for place, (statement, result, found) in enumerate(shown, 1):
        ax = fig.add_subplot(rows, columns, place)
        draw_statement(ax, statement, result, found)
        ax.set_title(textwrap.fill(statement.text, 46), pad=15)
        word = result.get("verdict", "not run yet")
        ax.text(0, 1.02, f"{verdict(result)}: {effect(result)}   n = {result['n']}", fontsize=7.5,
                color=VERDICTS[word], weight="bold", transform=ax.transAxes)
    fig.savefig(file)


def draw_statement(ax, statement, result, found):
    """Curves of a column (mean and range over seeds), measured numbers side by side, or values."""
    groups = {label: [arms[label] for arms in found] for label in statement.arms}
    if isinstance(statement.draw, tuple):
        names = statement.draw
        for arms in found:
            numbers = next(iter(arms.values()))
            ax.plot(names, [numbers[name] for name in names], "o-", color="0.6", lw=0.8, ms=3)
        rows = [next(iter(arms.values())) for arms in found]
        ax.plot(names, [np.mean([r[name] for r in rows]) for name in names], "ks-", ms=5)
        return ax.set(ylabel=statement.effect.partition(",")[0], xlim=(-0.4, len(names) - 0.6))
    if statement.draw == "by tokens":
        for label, style in figures.styles(groups).items():
            spent = np.mean([np.cumsum(run["tokens"][1:]) for run in groups[label]], 0) / 1000
            mean = np.mean([figures.trailing_mean(run["accuracy"][1:], 10)
                            for run in groups[label]], 0)
            ax.plot(spent, mean, label=label, **style)
        ax.set(xlabel="thousand tokens sampled", ylabel="share of answers")
    elif statement.draw:
        figures.draw_panel(ax, groups, statement.draw, smooth=3)
        if statement.draw in ("accuracy", "explained_var"):
            ax.set(ylabel="share of answers" if statement.draw == "accuracy" else "share")
    else:
        values = [float(statement.value(arms)) for arms in found]
        ax.plot(range(len(values)), values, "ko", ms=4, label="a seed")
        for bound, line in ((statement.above, "--"), (statement.below, "--"),
                            (statement.matters, ":")):
            if bound is not None:
                ax.axhline(bound, color="#D55E00", ls=line, lw=1,
                           label="claimed beyond" if line == "--" else "smallest that matters")
        ax.set(xlabel="seed", ylabel=textwrap.fill(statement.effect, 40))
    ax.legend(fontsize=6.5, frameon=False)


def text(results):
    """A line a statement: verdict, effect, what was claimed, value per seed."""
    return "\n".join(
        f"  {verdict(r):9}  {r['text']}\n             {r['effect']}: {effect(r)} (claimed "
        f"{r.get('claimed', '?')}; seeds {', '.join(f'{v:.3g}' for v in r.get('values', []))})"
        for r in results)


def stored_results():
    """{claim: results of its statements} as last written."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def main(argv=None):
    """List, run and examine, or tabulate; a mistake is one line and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda problem: common.fail(f"claims.py: {problem}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims, or all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--out", type=Path, default="runs/claims", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: no evidence")
    parser.add_argument("--as_is", action="store_true", help="run nothing, judge what is there")
    parser.add_argument("--table", action="store_true", help="print the table of plots/README.md")
    parser.add_argument("--update", action="store_true",
                        help="overwrite plots/claims.json and the repository's pictures")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in {*CLAIMS, "all"}]
    if unknown:
        parser.error(f"no claim {unknown[0]}; the claims are {', '.join(CLAIMS)}")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    if args.update and args.quick:
        parser.error("--quick is no evidence, so nothing to --update with")
    if args.table:
        return print(table(stored_results()))
    names = list(CLAIMS) if "all" in args.names else args.names
    if not names:
        return print("\n".join(
            "\n".join([f"{k:17} {c.headline} [{c.source}]", *(f"  - {s.text}" for s in c.statements)])
            for k, c in CLAIMS.items()))
    out = args.out.resolve() / "quick" if args.quick else args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.as_is:
        todo = [one for one in jobs(names, args.quick, out) if not one.done(args.quick)]
        run_all(todo, args.quick, args.jobs)
    stored, found = stored_results(), {}
    for name in names:
        stored[name], found[name] = examine(name, args.quick, out)
    stored = {name: stored[name] for name in CLAIMS if name in stored}
    decide(stored)
    for name in names:
        picture = (RESULTS.parent if args.update else out) / f"claims-{name}.png"
        draw(CLAIMS[name], stored[name], found[name], picture)
        print(f"{name}: {CLAIMS[name].headline} ({CLAIMS[name].source})\n{text(stored[name])}\n"
              f"  picture: {picture}", flush=True)
    if args.update:
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
