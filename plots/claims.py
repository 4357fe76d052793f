"""What the articles and papers say, run and seen: each claim is a command.

    python plots/claims.py                       the claims
    python plots/claims.py clip-higher           run it, draw it in runs/claims, judge
    python plots/claims.py all [--quick]         finished runs are not run again; quick: no evidence
    python plots/claims.py all --update          the pictures and plots/claims.json anew
    python plots/claims.py --table               the table of plots/README.md, from claims.json

A part of a claim is a number per seed, mostly the difference of two arms on the same seed, and a
margin. Over seeds we take its mean and 90 % interval (Student's t). *Seen*: the interval lies on
the claimed side of the margin; *not seen*: on the other; *undecided*: astride, or a single seed. A
claim is seen if all its parts are, not seen if one is not. `accuracy` is of the answers sampled in
the last ten training steps (1,280 by default). In 40 steps RL asks no question twice (PPO: in 31);
the cold start, the same in all arms but its own claim's, has seen them with a pupil's answers.
What no metric of a run tells is measured in plots/measures.py.
"""

import argparse
import importlib
import json
import math
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import figures  # noqa: E402
import measures as m  # noqa: E402

STEPS = 40  # the learning rate is constant, so the first 40 steps of a longer run are those of 40
QUICK = dict(steps=2, eval_every=2, eval_size=16, test_size=16, cold_start=20)
RESULTS = ROOT / "plots" / "claims.json"
TITLES = {"accuracy": ("Accuracy, sampled answers", "share of answers"),
          "tokens": ("Tokens sampled", "per step"), "value_loss": ("Value loss", "mean of a step"),
          "explained_var": ("Explained variance of the critic", "share")}
T90 = [math.inf, math.inf, 6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83]  # by seeds
FREE = {"out_dir", "resume", "steps", "save_every", "keep", "wandb", "critic"}  # in a reused run


@dataclass
class Part:
    """One number per seed, `value({arm: run or measurement})`, claimed to be above (below) this."""

    label: str
    value: callable
    above: float = None
    below: float = None

    def judge(self, values):
        """{label, values, mean, spread, verdict}; spread: half the 90 % interval, None for one."""
        mean, n = float(np.mean(values)), len(values)
        error = np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.inf
        half = float(T90[min(n, 10)] * error)
        side = mean - self.above if self.below is None else self.below - mean
        verdict = "seen" if side - half > 0 else "not seen" if side + half <= 0 else "undecided"
        return dict(label=self.label, values=values, mean=mean, verdict=verdict,
                    spread=half if math.isfinite(half) else None,
                    claimed=f"> {self.above:g}" if self.below is None else f"< {self.below:g}")


@dataclass
class Claim:
    """Arms (a script and its flags, or a measuring function) that put a statement to the test."""

    statement: str
    source: str
    arms: dict
    parts: list
    panels: tuple = ("accuracy", "eval_accuracy", "entropy")
    steps: int = STEPS


# --- the claims ----------------------------------------------------------------------------------

ACCURACY, LENGTH = m.late("accuracy"), m.late("response_len")
GRPO, DAPO, GSPO, PPO = (("grpo", {}), ("dapo", {}), ("gspo", {}), ("ppo", {}))  # defaults, shared

CLAIMS = {
    "no-critic": Claim(
        "GRPO has no critic: fewer models, less memory, faster steps than PPO of as many answers",
        "articles 000, 001, 003, 004",
        {"GRPO": GRPO, "PPO": PPO, "7B": m.plan_7b},
        [Part("models in memory, PPO - GRPO", m.measured("7B", "models"), above=0),
         Part("GB per GPU (7B, 8 GPUs), PPO / GRPO", m.measured("7B", "memory_ratio"), above=1.1),
         Part("seconds per step, PPO / GRPO", m.ratio_of("PPO", "GRPO", m.over_all("t_total")),
              above=1.1)],
        ("t_total", "accuracy", "mem_gb")),
    "clip-higher": Claim(
        "Clip-higher keeps entropy and exploration up", "DAPO; articles 000, 001, 004",
        {"clip 0.28": DAPO, "clip 0.2": ("dapo", dict(clip_high=0.2))},
        [Part("entropy, 0.28 - 0.2",
              m.difference("clip 0.28", "clip 0.2", m.late("entropy")), above=0),
         Part("groups of mixed answers, 0.28 - 0.2",
              m.difference("clip 0.28", "clip 0.2", m.mixed_groups), above=0)],
        ("entropy", "accuracy", "clip_frac")),
    "dynamic-sampling": Claim(
        "Dynamic sampling removes groups without gradient, and it helps",
        "DAPO; article 001 (arXiv 2512.07611: not always)",
        {"on": DAPO, "off": ("dapo", dict(dynamic_sampling=False))},
        [Part("tied groups, off - on", m.difference("off", "on", m.late("tied_frac")), above=0.1),
         Part("accuracy at equal steps, on - off", m.difference("on", "off", ACCURACY), above=0),
         Part("accuracy at equal tokens, on - off", m.at_equal_tokens("on", "off"), above=0)],
        ("accuracy", "tied_frac", "tokens")),
    "token-mean": Claim(
        "A mean per answer gives short answers' tokens more weight and shortens; per token, not",
        "DAPO; articles 000, 001",
        {"token mean": DAPO, "answer mean": ("dapo", dict(token_mean=False)),
         "gradient": m.length_bias},
        [Part("|gradient| a token, shortest / longest quarter, answer mean over token mean",
              m.measured("gradient", "short_over_long"), above=1.1),
         Part("push on length by the gradient, token - answer mean, tokens",
              m.measured("gradient", "length_push"), above=0),
         Part("response length, token - answer mean, tokens",
              m.difference("token mean", "answer mean", LENGTH), above=0)],
        ("response_len", "accuracy", "entropy")),
    "overlong": Claim(
        "The overlong penalty lowers truncation without losing accuracy", "DAPO; articles 000, 001",
        {"buffer 16": DAPO, "none": ("dapo", dict(overlong_buffer=0))},
        [Part("truncated answers, 16 - none",
              m.difference("buffer 16", "none", m.over_all("truncated_frac")), below=0),
         Part("accuracy, 16 - none", m.difference("buffer 16", "none", ACCURACY), above=-0.02)],
        ("truncated_frac", "response_len", "accuracy")),
    "group-size": Claim(
        "Larger groups are steadier and more accurate, at equal samples too", "articles 001, 004",
        {"G 2": ("grpo", dict(group_size=2)), "G 16": ("grpo", dict(group_size=16)),
         "64 x G 2": ("grpo", dict(prompts_per_step=64, group_size=2)),
         "8 x G 16": ("grpo", dict(prompts_per_step=8, group_size=16))},
        [Part("accuracy, G 16 - 2", m.difference("G 16", "G 2", ACCURACY), above=0),
         Part("unsteadiness, G 16 - 2", m.difference("G 16", "G 2", m.unsteadiness), below=0),
         Part("accuracy at 128 samples, G 16 - 2", m.difference("8 x G 16", "64 x G 2", ACCURACY),
              above=0),
         Part("unsteadiness at 128 samples, G 16 - 2",
              m.difference("8 x G 16", "64 x G 2", m.unsteadiness), below=0)],
        ("accuracy", "grad_norm", "tied_frac")),
    "kl-weight": Claim(
        "The best KL weight lies between none and much", "article 001 (arXiv 2512.07611)",
        {"beta 0": ("grpo", dict(beta=0.0)), "beta 0.01": GRPO,
         "beta 0.1": ("grpo", dict(beta=0.1)), "beta 1": ("grpo", dict(beta=1.0))},
        [Part("accuracy, 0.01 - 0", m.difference("beta 0.01", "beta 0", ACCURACY), above=0),
         Part("accuracy, 0.01 - 1", m.difference("beta 0.01", "beta 1", ACCURACY), above=0)],
        ("accuracy", "ref_kl", "entropy")),
    "sequence-ratio": Claim(
        "GSPO clips two orders of magnitude more than GRPO and still learns; its ratio varies "
        "less than the tokens', the more so with experts", "GSPO; articles 003, 004",
        {"GRPO": GRPO, "GSPO": GSPO, "dense": m.ratios, "experts": m.ratios_moe},
        [Part("clip fraction, GSPO / GRPO", m.ratio_of("GSPO", "GRPO", m.over_all("clip_frac")),
              above=30),
         Part("rise of held-out accuracy, GSPO", m.of("GSPO", m.gain), above=0.2),
         Part("variance of log ratios, token / answer", m.measured("dense", "reduction"), above=1),
         Part("the same, experts / dense",
              lambda arms: arms["experts"]["reduction"] / arms["dense"]["reduction"], above=1),
         Part("expert choices changed by 3 updates", m.measured("experts", "rerouted"), above=0)],
        ("clip_frac", "accuracy", "approx_kl")),
    "cold-start": Claim(
        "Without a cold start nothing starts", "article 004",
        {"cold start": GRPO, "none": ("grpo", dict(cold_start=0))},
        [Part("accuracy without", m.of("none", m.over_all("accuracy")), below=0.01),
         Part("accuracy, with - without", m.difference("cold start", "none", ACCURACY), above=0.2)],
        ("accuracy", "eval_accuracy", "tied_frac")),
    "critic": Claim(
        "A small critic explains less and costs accuracy; a critic should learn ten times faster",
        "article 000",
        {"like the policy": PPO, "small": ("ppo", dict(critic=m.small_critic)),
         "lr 1 x": ("ppo", dict(critic_lr=3e-4)), "lr 10 x": ("ppo", dict(critic_lr=3e-3))},
        [Part("explained variance, small - like",
              m.difference("small", "like the policy", m.late("explained_var")), below=0),
         Part("accuracy, small - like",
              m.difference("small", "like the policy", ACCURACY), below=0),
         Part("explained variance, lr 10 x - 1 x",
              m.difference("lr 10 x", "lr 1 x", m.late("explained_var")), above=0),
         Part("accuracy, lr 10 x - 1 x", m.difference("lr 10 x", "lr 1 x", ACCURACY), above=0)],
        ("accuracy", "explained_var", "value_loss")),
    "reward-design": Claim(
        "`gold in text` is hacked, the format alone is gamed, the mix helps", "article 004",
        {"correct": GRPO, "contains": ("grpo", dict(reward="contains")),
         "format": ("grpo", dict(reward="marker_format")),
         "mix": ("grpo", dict(reward="correct+0.5*marker_format"))},
        [Part("paid beyond right answers, contains", m.of("contains", m.hacked), above=0.1),
         Part("paid beyond right answers, format", m.of("format", m.hacked), above=0.1),
         Part("accuracy, mix - correct", m.difference("mix", "correct", ACCURACY), above=0)],
        ("reward", "accuracy", "response_len")),
    "one-update": Claim(
        "With one update per rollout the ratio is 1, clipping idles, and GSPO is GRPO",
        "algorithms.md; GSPO",
        {"GRPO": ("grpo", dict(minibatches=1, beta=0.0)), "GSPO": ("gspo", dict(minibatches=1))},
        [Part("largest clip fraction", m.largest("clip_frac"), below=1e-6),
         Part("largest KL old to new", m.largest("approx_kl"), below=1e-6),
         Part("gradient norm of step 1, relative gap", m.first_gap("GSPO", "GRPO", "grad_norm"),
              below=1e-4)],
        ("accuracy", "clip_frac", "grad_norm"), 20),
}

# --- running -------------------------------------------------------------------------------------


def settings(arm, seed, steps, quick, out):
    """An arm's Config: the tiny defaults, its flags, the seed, the steps, those of --quick."""
    script, flags = arm
    module = importlib.import_module(script)
    changes = dict(seed=seed, steps=steps) | (QUICK if quick else {}) | flags
    changes = {k: v(seed, quick, out) if callable(v) else v for k, v in changes.items()}
    return module.Config(**module.TINY | changes)


def command(script, cfg):
    """The command line that makes this Config, without what the tiny defaults say already."""
    module, words = importlib.import_module(script), []
    for name, value in asdict(cfg).items():
        if value != getattr(module.Config(**module.TINY), name):
            words += [f"--no_{name}"] if value is False else [f"--{name}", str(value)]
    return [sys.executable, str(ROOT / f"{script}.py"), *words]


def run_arm(arm, seed, steps, quick, out):
    """The run of an arm and seed: found finished, resumed, or run now. Returns its folder."""
    script, flags = arm
    names = [f"{k}-{getattr(v, '__name__', v)}" for k, v in flags.items()]
    folder = out / "-".join([script, *names, f"s{seed}"])
    cfg = settings(arm, seed, steps, quick, out)
    about = folder / "config.json"
    if about.is_file():
        saved = json.loads(about.read_text())["config"]
        differ = [k for k, v in asdict(cfg).items() if k not in FREE and saved.get(k) != v]
        if differ:
            common.fail(f"{folder} holds a run of other {', '.join(differ)}: move it away")
        if saved["steps"] >= cfg.steps and (folder / "final" / "config.json").is_file():
            return folder
    line = command(script, cfg) + ["--out_dir", str(folder)] + ["--resume"] * about.is_file()
    print("  " + shlex.join(["python", Path(line[1]).name, *line[2:]]), flush=True)
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        common.fail(f"{folder}: " + (done.stderr.strip().splitlines() or ["no message"])[-1])
    return folder


def load_arm(label, arm, seed, steps, quick, out):
    """An arm's evidence for a seed: its run, cut to the steps; or what its function measured."""
    if callable(arm):
        file = out / f"measure-{arm.__name__}-s{seed}.json"
        if not file.is_file():
            print(f"  measuring {arm.__name__}, seed {seed}", flush=True)
            file.write_text(json.dumps(arm(seed, quick, out)))
        return json.loads(file.read_text())
    run = figures.load_run(run_arm(arm, seed, steps, quick, out), label)
    keep = run["step"] <= steps
    for column in run:
        run[column] = run[column][keep]
    return run


def judge(claim, evidence):
    """The parts' results and the verdict on the claim; evidence: a {arm: numbers} per seed."""
    parts = [part.judge([float(part.value(arms)) for arms in evidence]) for part in claim.parts]
    worst = min((part["verdict"] for part in parts), key=["not seen", "undecided", "seen"].index)
    return dict(verdict=worst, parts=parts)


def examine(name, seeds, quick, out, update):
    """Run a claim's arms, draw them, print the verdict; `update`: into the repository's results."""
    claim, evidence, steps = CLAIMS[name], [], QUICK["steps"] if quick else CLAIMS[name].steps
    print(f"{name}: {claim.statement} ({claim.source})", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        evidence.append({label: load_arm(label, arm, seed, steps, quick, out)
                         for label, arm in claim.arms.items()})
    result = judge(claim, evidence) | dict(seeds=seeds, steps=steps)
    picture = (RESULTS.parent if update else out) / f"claims-{name}.png"
    draw(claim, evidence, picture)
    print(text(result) + f"\n  picture: {picture}", flush=True)
    if update:
        stored = stored_results() | {name: result}
        ordered = {key: stored[key] for key in CLAIMS if key in stored}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return result


def stored_results():
    """{claim: result} of all claims that were examined in full."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def draw(claim, evidence, file):
    """The claim's columns, a line per arm: mean and range over seeds."""
    groups = {label: [arms[label] for arms in evidence]
              for label, arm in claim.arms.items() if not callable(arm)}
    panels = figures.choose_panels(sum(groups.values(), []), claim.panels)
    fig = figures.make_figure(groups, panels, smooth=5)
    for ax in fig.axes:
        if (title := ax.get_title("left")) in TITLES:  # a column that figures.py has no name for
            ax.set(title=TITLES[title][0], ylabel=TITLES[title][1])
    fig.savefig(file)


def effect(part):
    """Mean ± half the 90 % interval."""
    return f"{part['mean']:.3g} ± " + ("?" if part["spread"] is None else f"{part['spread']:.2g}")


def text(result):
    """The verdict, a line a part: effect, what was claimed, value per seed."""
    lines = [f"  {part['verdict']:9}  {part['label']}: {effect(part)} (claimed {part['claimed']}; "
             f"seeds {', '.join(f'{v:.3g}' for v in part['values'])})" for part in result["parts"]]
    return "\n".join([*lines, f"  verdict: {result['verdict'].upper()}"])


def table(stored):
    """The table in plots/README.md, from what `examine` has stored."""
    lines = ["| Claim | Source | Verdict | Effect ± half the 90 % interval | Picture |",
             "|---|---|---|---|---|"]
    for name, result in stored.items():
        claim = CLAIMS[name]
        effects = "<br>".join(f"{part['label']}: {effect(part)} ({part['verdict']})"
                              for part in result["parts"]).replace("|", "\\|")
        lines.append(f"| {claim.statement} | {claim.source} | **{result['verdict']}** | {effects} "
                     f"| [{name}](claims-{name}.png) |")
    return "\n".join(lines)


def main(argv=None):
    """List, examine or tabulate; a mistake is one line and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda problem: common.fail(f"claims.py: {problem}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims, or all")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--out", type=Path, default="runs/claims", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: no evidence")
    parser.add_argument("--table", action="store_true", help="print the table of plots/README.md")
    parser.add_argument("--update", action="store_true",
                        help="overwrite plots/claims.json and the repository's pictures")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in {*CLAIMS, "all"}]
    if unknown:
        parser.error(f"no claim {unknown[0]}; the claims are {', '.join(CLAIMS)}")
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be at least 1")
    if args.update and args.quick:
        parser.error("--quick is no evidence, so nothing to --update with")
    if args.table:
        return print(table(stored_results()))
    names = list(CLAIMS) if "all" in args.names else args.names
    if not names:
        print("\n".join(f"{k:17} {c.statement} [{c.source}]" for k, c in CLAIMS.items()))
    out = args.out.resolve() / "quick" if args.quick else args.out.resolve()
    for name in names:
        examine(name, 1 if args.quick else args.seeds, args.quick, out, args.update)


if __name__ == "__main__":
    main()
