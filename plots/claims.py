"""What the articles and papers say, run and seen: each claim is a command.

    python plots/claims.py                       the claims and their statements
    python plots/claims.py clip-higher           run what is missing, draw it in runs/claims, judge
    python plots/claims.py all --jobs 2          two runs at a time; if stopped, call it again
    python plots/claims.py all --as_is --update  no runs; the pictures and plots/claims.json anew
    python plots/claims.py --table               the table of plots/README.md, from claims.json

A claim is split into statements, each of which can be true or false alone: a number per seed,
mostly the difference of two arms with the same cold start and questions, claimed to lie above
(below) a margin. Seeds are 0 to n - 1, or the next n after those of a pilot; n was written here
before the judged runs. We take the mean and its 95 % interval (Student's t). *Seen*: it lies on the
claimed side of the margin. *Not seen*: it lies short of the smallest effect that would matter,
`matters` (else the margin), be it negligible or of the other sign. Both are two-sided tests at 5 %,
corrected for all statements together (Holm). *Undecided*: neither; the seeds it would take are
told. *Depends*: a second setting says the other. *Exact*: arithmetic.
`accuracy` is of the answers sampled in the last ten training steps, 1,280 by default. RL asks no
question twice in these runs; the cold start has seen them with a pupil's answers.
What no metric of a run tells is measured in plots/measures.py; how it is run and judged: trials.py.
"""

import argparse
import json
import math
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import measures as m  # noqa: E402
import trials  # noqa: E402
from trials import Statement  # noqa: E402

RESULTS = ROOT / "plots" / "claims.json"
ORDER = ["seen", "not seen", "depends", "undecided", "not run yet"]
COLORS = {"seen": "#00734f", "not seen": "#b34700"}


@dataclass
class Claim:
    """What is claimed, where, and the statements that it takes."""

    headline: str
    source: str
    statements: list


# --- the claims, the likeliest to be decided first -----------------------------------------------

ACCURACY = m.late("accuracy")


def arm(script, **flags):
    return script, flags


COLD = dict(cold_start_lr=20 * 3e-4)  # the default, also where --lr is another: one cold start
SLOW, FAST = COLD | dict(lr=1e-4), COLD | dict(lr=1e-3)  # second settings; the default is 3e-4
LONG = dict(steps=80)  # longer than the scripts train by default
MOE = dict(model="tiny-moe")

GRPO, DAPO, PPO = arm("grpo"), arm("dapo"), arm("ppo")
SAME = COLD | dict(lr=3e-4)  # GRPO's rate for GSPO, too, not its own
GSPO = arm("gspo", **SAME)
EVERY = arm("dapo", dynamic_sampling=False)  # DAPO that trains on every group: as cheap as GRPO
NO_CRITIC = {"GRPO": GRPO, "PPO": PPO}
SEQUENCE = {"GRPO": GRPO, "GSPO": GSPO}
DYNAMIC = {"on": DAPO, "off": EVERY}
MEANS = {"token mean": EVERY,
         "answer mean": arm("dapo", dynamic_sampling=False, token_mean=False)}
ONE = {"GRPO": arm("grpo", minibatches=1, beta=0.0), "GSPO": arm("gspo", **SAME, minibatches=1)}
# Clipping needs ratios far from 1: 16 updates a rollout, as DAPO's paper has, not 4.
CLIP = {"clip 0.28": arm("dapo", dynamic_sampling=False, minibatches=16),
        "clip 0.2": arm("dapo", dynamic_sampling=False, minibatches=16, clip_high=0.2)}
GROUPS = {"16 x 8": GRPO, "16 x 2": arm("grpo", group_size=2),
          "64 x 2": arm("grpo", prompts_per_step=64, group_size=2),
          "4 x 32": arm("grpo", prompts_per_step=4, group_size=32)}
# With every group in it, the penalty also acts where all are wrong and only lengths differ.
OVERLONG = {"penalty": EVERY, "none": arm("dapo", dynamic_sampling=False, overlong_buffer=0)}
KL = {"beta 0": arm("grpo", beta=0.0), "beta 0.01": GRPO, "beta 0.1": arm("grpo", beta=0.1),
      "beta 1": arm("grpo", beta=1.0)}
# A short cold start: half of the answers have the format (after 100 steps 94 % of them have it),
# so paying it has something to teach.
MIX = {"correct": arm("grpo", cold_start=20),
       "mix": arm("grpo", cold_start=20, reward="correct+0.5*marker_format")}
START = {"cold start": GRPO, "none": arm("grpo", cold_start=0)}
# lambda 0.8: further back than 1 / (1 - 0.8) = 5 tokens the critic's word is all a token has.
CRITIC = dict(lam=0.8, prompts_per_step=64)
CRITICS = {"like the policy, 10 x": arm("ppo", **CRITIC, critic_lr=3e-3),
           "small, 10 x": arm("ppo", **CRITIC, critic_lr=3e-3, critic=m.small_critic),
           "like the policy, 1 x": arm("ppo", **CRITIC, critic_lr=3e-4)}
ROLLOUT, LENGTHS = {"rollout": m.clip_ranges}, {"gradient": m.length_bias}
GRADIENTS, MEMORY, DENSE = {"gradients": m.agreement}, {"7B": m.plan_7b}, {"dense": m.ratios}
EXPERTS = {"experts": m.ratios_moe, "dense": m.ratios_narrow}


def among(arms, *labels):
    """Some of the arms."""
    return {label: arms[label] for label in labels}


CLAIMS = {
    "no-critic": Claim("GRPO has no critic, and needs none", "articles 000, 001, 003, 004", [
        Statement("PPO holds a model more than GRPO", "models in memory, PPO - GRPO",
                  m.contrast("7B", "models, PPO", "models, GRPO"), MEMORY, above=0, seeds=1,
                  draw=("models, GRPO", "models, PPO")),
        Statement("A 7B PPO on 8 GPUs takes a tenth more memory than GRPO",
                  "GB per GPU, PPO / GRPO", m.times("7B", "GB, PPO", "GB, GRPO"), MEMORY,
                  above=1.1, seeds=1, draw=("GB, GRPO", "GB, PPO")),
        Statement("A step of PPO takes a tenth longer than GRPO's, for as many answers",
                  "CPU seconds of a step, PPO / GRPO", m.times("step", "PPO", "GRPO"),
                  {"step": m.step_seconds}, above=1.1, seeds=4, draw=("GRPO", "PPO")),
        Statement("GRPO is more accurate than PPO after as many answers", "accuracy, GRPO - PPO",
                  m.difference("GRPO", "PPO", ACCURACY), NO_CRITIC, above=0, matters=0.02,
                  draw="accuracy", again=LONG)]),
    "sequence-ratio": Claim("GSPO clips far more than GRPO, and still learns",
                            "GSPO; articles 003, 004", [
        Statement("GSPO clips thirty times as much as GRPO, or more", "clip fraction, GSPO / GRPO",
                  m.ratio_of("GSPO", "GRPO", m.over_all("clip_frac")), SEQUENCE, above=30,
                  draw="clip_frac", again=LONG, again_seeds=8),
        Statement("It learns all the same", "rise of sampled held-out accuracy, GSPO",
                  m.of("GSPO", m.gain), {"GSPO": GSPO}, above=0.2, draw="eval_sampled", again=LONG,
                  again_seeds=8),
        Statement("GSPO is more accurate than GRPO after as many answers", "accuracy, GSPO - GRPO",
                  m.difference("GSPO", "GRPO", ACCURACY), SEQUENCE, above=0, matters=0.02,
                  draw="accuracy", again=LONG, again_seeds=8),
        Statement("An answer's log ratio varies a tenth as much as a token's, or less",
                  "variance of log ratios, tokens / answers", m.measured("dense", "reduction"),
                  DENSE, above=10, again=MOE)]),
    "dynamic-sampling": Claim("Dynamic sampling removes groups without gradient, and it helps",
                              "DAPO; article 001 (arXiv 2512.07611: not always)", [
        Statement("It removes groups without gradient, a tenth of all or more",
                  "tied groups, off - on", m.difference("off", "on", m.late("tied_frac")), DYNAMIC,
                  above=0.1, draw="tied_frac", again=SLOW),
        Statement("It is more accurate after as many steps", "accuracy, on - off",
                  m.difference("on", "off", ACCURACY), DYNAMIC, above=0, matters=0.02,
                  draw="accuracy", again=SLOW),
        Statement("It is more accurate after as many tokens sampled",
                  "accuracy at equal tokens, on - off", m.at_equal_tokens("on", "off"), DYNAMIC,
                  above=0, matters=0.02, draw="by tokens", again=SLOW)]),
    "token-mean": Claim("A mean per answer favours short answers; per token, not",
                        "DAPO; articles 000, 001", [
        Statement("A mean per answer gives a short answer's tokens more gradient",
                  "|gradient| a token, shortest / longest quarter, answer mean over token mean",
                  m.measured("gradient", "short_over_long"), LENGTHS, above=1.1, again=MOE),
        Statement("The token mean pushes towards longer answers than the answer mean",
                  "push on the mean length, token - answer mean (tokens per unit step)",
                  m.contrast("gradient", "token mean", "answer mean"), LENGTHS, above=0,
                  draw=("answer mean", "token mean")),
        Statement("Trained with the token mean, answers are longer",
                  "length, token - answer mean (tokens)",
                  m.difference("token mean", "answer mean", m.late("response_len")), MEANS,
                  above=0, matters=0.2, draw="response_len", again=SLOW)]),
    "one-update": Claim("With one update per rollout nothing is clipped, and GSPO is GRPO",
                        "algorithms' equations; GSPO", [
        Statement("Clipping idles", "largest clip fraction", m.largest("clip_frac"), ONE,
                  below=1e-6, seeds=3, steps=10, draw="clip_frac", again=MOE),
        Statement("The update starts at the policy that sampled", "largest KL, old to new (nats)",
                  m.largest("approx_kl"), ONE, below=1e-6, seeds=3, steps=10, draw=None, again=MOE),
        Statement("The first gradients of GSPO and GRPO are as long",
                  "relative difference of the norms", m.first_gap("GSPO", "GRPO", "grad_norm"),
                  ONE, below=1e-4, seeds=3, steps=10, draw="grad_norm", again=MOE)]),
    "clip-higher": Claim("Clip-higher keeps entropy and exploration up",
                         "DAPO; articles 000, 001, 004", [
        Statement("On one rollout, unlikely good tokens gain more", "rise of log pi, 0.28 - 0.2",
                  m.contrast("rollout", "gain 0.28", "gain 0.2"), ROLLOUT, above=0, matters=0.01,
                  draw=("gain 0.2", "gain 0.28"), again=FAST),
        Statement("On one rollout, more entropy is left", "entropy, 0.28 - 0.2 (nats per token)",
                  m.contrast("rollout", "entropy 0.28", "entropy 0.2"), ROLLOUT, above=0,
                  matters=0.001, pilot=8, seeds=16, draw=("entropy 0.2", "entropy 0.28"),
                  again=FAST),
        Statement("Over training, more entropy is left", "entropy, 0.28 - 0.2 (nats per token)",
                  m.difference("clip 0.28", "clip 0.2", m.late("entropy")), CLIP, above=0,
                  matters=0.003, draw="entropy", again=FAST),
        Statement("Over training, fewer groups are all right or all wrong",
                  "tied groups, 0.28 - 0.2",
                  m.difference("clip 0.28", "clip 0.2", m.late("tied_frac")), CLIP, below=0,
                  matters=-0.02, draw="tied_frac", again=FAST)]),
    "group-size": Claim("Larger groups are steadier and more accurate, at equal samples too",
                        "articles 001, 004", [
        Statement("16 questions: gradients of 8 answers each agree better than of 2",
                  "mean cosine, G 8 - G 2", m.contrast("gradients", "16 x 8", "16 x 2"), GRADIENTS,
                  above=0, draw=("16 x 2", "16 x 8"), again=MOE),
        Statement("128 samples: gradients of groups of 8 agree better than of 2",
                  "mean cosine, 16 x 8 - 64 x 2", m.contrast("gradients", "16 x 8", "64 x 2"),
                  GRADIENTS, above=0, matters=0.02,
                  draw=("64 x 2", "32 x 4", "16 x 8", "8 x 16", "4 x 32")),
        Statement("16 questions: groups of 8 are more accurate than of 2", "accuracy, G 8 - G 2",
                  m.difference("16 x 8", "16 x 2", ACCURACY), among(GROUPS, "16 x 8", "16 x 2"),
                  above=0, matters=0.02, draw="accuracy", again=SLOW),
        Statement("128 samples: groups of 8 are more accurate than of 2",
                  "accuracy, 16 x 8 - 64 x 2", m.difference("16 x 8", "64 x 2", ACCURACY),
                  among(GROUPS, "16 x 8", "64 x 2"), above=0, matters=0.02, draw="accuracy",
                  again=SLOW),
        Statement("128 samples: groups of 32 are more accurate than of 8",
                  "accuracy, 4 x 32 - 16 x 8", m.difference("4 x 32", "16 x 8", ACCURACY),
                  among(GROUPS, "16 x 8", "4 x 32"), above=0, matters=0.02, draw="accuracy",
                  again=SLOW)]),
    "overlong": Claim("The overlong penalty lowers truncation without losing accuracy",
                      "DAPO; articles 000, 001", [
        Statement("Fewer answers are truncated", "truncated answers, with - without",
                  m.difference("penalty", "none", m.over_all("truncated_frac")), OVERLONG, below=0,
                  matters=-0.002, draw="truncated_frac", again=SLOW),
        Statement("It costs less than 0.02 of accuracy", "accuracy, with - without",
                  m.difference("penalty", "none", ACCURACY), OVERLONG, above=-0.02,
                  draw="accuracy", again=SLOW)]),
    "kl-weight": Claim("The best KL weight lies between none and much",
                       "article 001 (arXiv 2512.07611)", [
        Statement("A little KL is more accurate than none", "accuracy, beta 0.01 - 0",
                  m.difference("beta 0.01", "beta 0", ACCURACY),
                  among(KL, "beta 0", "beta 0.01"), above=0, matters=0.02, draw="accuracy",
                  again=FAST),
        Statement("A little KL is more accurate than much", "accuracy, beta 0.01 - 1",
                  m.difference("beta 0.01", "beta 1", ACCURACY),
                  among(KL, "beta 0.01", "beta 1"), above=0, matters=0.02, draw="accuracy",
                  again=SLOW),
        Statement("Ten times the weight halves the distance to the reference",
                  "KL to the reference, beta 0.01 / 0.1",
                  m.ratio_of("beta 0.01", "beta 0.1", m.late("ref_kl")),
                  among(KL, "beta 0.01", "beta 0.1"), above=2, draw="ref_kl", again=SLOW)]),
    "reward-design": Claim("A lax reward is hacked; format and correctness together help",
                           "article 004", [
        Statement("`gold in text` is hacked", "paid beyond right answers",
                  m.of("contains", m.hacked), {"contains": arm("grpo", reward="contains")},
                  above=0.1, seeds=4, draw="paid and right", again=SLOW),
        Statement("Paying the format alone is gamed", "paid beyond right answers",
                  m.of("format", m.hacked), {"format": arm("grpo", reward="marker_format")},
                  above=0.1, seeds=4, draw="paid and right", again=SLOW),
        Statement("Where the format is not yet learned, paying it too is more accurate",
                  "accuracy, mix - correct", m.difference("mix", "correct", ACCURACY), MIX,
                  above=0, matters=0.02, steps=40, draw="accuracy", again=SLOW)]),
    "cold-start": Claim("Without a cold start nothing starts", "article 004", [
        Statement("Without, not one answer in a hundred is right", "accuracy without",
                  m.of("none", m.over_all("accuracy")), among(START, "none"), below=0.01, seeds=4,
                  draw="accuracy", again=FAST),
        Statement("With it, most are", "accuracy, with - without",
                  m.difference("cold start", "none", ACCURACY), START, above=0.2, seeds=4,
                  draw="accuracy", again=FAST)]),
    "critic": Claim("A critic should be as large as the policy, and learn ten times faster",
                    "article 000", [
        Statement("A small critic explains less", "explained variance, small - like the policy",
                  m.difference("small, 10 x", "like the policy, 10 x", m.over_all("explained_var")),
                  among(CRITICS, "like the policy, 10 x", "small, 10 x"), below=0, matters=-0.02,
                  draw="explained_var", again=SLOW),
        Statement("A small critic costs accuracy", "accuracy, small - like the policy",
                  m.difference("small, 10 x", "like the policy, 10 x", ACCURACY),
                  among(CRITICS, "like the policy, 10 x", "small, 10 x"), below=0, matters=-0.02,
                  draw="accuracy"),
        Statement("At ten times the policy's learning rate a critic explains more",
                  "explained variance, 10 x - 1 x", m.difference(
                      "like the policy, 10 x", "like the policy, 1 x", m.over_all("explained_var")),
                  among(CRITICS, "like the policy, 10 x", "like the policy, 1 x"), above=0,
                  matters=0.02, draw="explained_var", again=SLOW),
        Statement("... and the policy is more accurate", "accuracy, 10 x - 1 x",
                  m.difference("like the policy, 10 x", "like the policy, 1 x", ACCURACY),
                  among(CRITICS, "like the policy, 10 x", "like the policy, 1 x"), above=0,
                  matters=0.02, draw="accuracy")]),
    "experts": Claim("GSPO's ratio helps a mixture of experts more", "GSPO; articles 003, 004", [
        Statement("Three updates send one token in a hundred to other experts",
                  "choices of experts changed", m.measured("experts", "rerouted"),
                  among(EXPERTS, "experts"), above=0.01),
        Statement("Log ratios gain more with experts than with as many active dense units",
                  "variance of log ratios, tokens / answers, log of experts over dense",
                  lambda arms: math.log(arms["experts"]["reduction"] / arms["dense"]["reduction"]),
                  EXPERTS, above=0, matters=0.1)]),
}

# --- judging and telling -------------------------------------------------------------------------


def examine(name, out, quick=False):
    """Judge a claim's statements from what has been run: (results, the evidence of each)."""
    results, seen = [], []
    for statement in CLAIMS[name].statements:
        found, seconds = trials.evidence(statement, out, quick=quick)
        result = dict(text=statement.text, effect=statement.effect, n=len(found),
                      seeds=statement.seeds, minutes=seconds / 60)
        if len(found) == statement.seeds or quick:
            result |= trials.judge(statement, [float(statement.value(arms)) for arms in found])
        again = trials.evidence(statement, out, statement.again)[0] if statement.again else []
        if len(again) == statement.again_seeds and not quick:
            setting = " ".join(f"{k} {v}" for k, v in statement.again.items() if k not in COLD)
            result["again"] = dict(setting=setting) | trials.judge(
                statement, [float(statement.value(arms)) for arms in again])
        results.append(result)
        seen.append(found)
    return results, seen


def effect(result):
    """Mean ± half the 95 % interval."""
    if "mean" not in result:
        return "–"
    half = "?" if result["half"] is None else f"{result['half']:.2g}"
    return f"{result['mean']:.3g}" + (f" ± {half}" if result["seeds"] > 1 else "")


def verdict(result):
    """In words: also how many seeds there are, or how many would tell."""
    if "verdict" not in result:
        return f"not run yet ({result['n']} of {result['seeds']} seeds)"
    if result["seeds"] == 1:
        return f"{result['verdict']}, exact"
    if result["verdict"] == "undecided" and result.get("needed"):
        return f"undecided (about {result['needed']} seeds would tell)"
    return result["verdict"]


def composed(results):
    """A headline's verdict: how many of its statements have which."""
    words = [result.get("verdict", "not run yet") for result in results]
    counts = [(words.count(word), word) for word in dict.fromkeys(sorted(words, key=ORDER.index))]
    return ", ".join(f"{count} {word}" for count, word in counts)


def repeated(result):
    """What the second setting said."""
    if "again" not in result:
        return ""
    again, word = result["again"], "open"
    if again["p"] < 0.05:  # for itself, not corrected
        word = again["side"]
    return f"{word}: {effect(result | again)} ({again['setting']}, n {len(again['values'])})"


def table(stored):
    """The table in plots/README.md: a claim's headline, then a row a statement."""
    lines = ["| claim, statements | effect ± half the 95 % interval | claimed | n | verdict "
             "| second setting | CPU minutes |", "|---|---|---|---|---|---|---|"]
    for name, results in stored.items():
        claim = CLAIMS[name]
        ran = any(r["n"] for r in results)
        headline = f"[{claim.headline}](claims-{name}.png)" if ran else claim.headline
        lines.append(f"| **{headline}** ({claim.source}) | | | | {composed(results)} | | |")
        for r in results:
            cost = f"{r['minutes']:.1f}" if r["minutes"] > 0 else ""
            cells = [r["text"], f"{r['effect']}: {effect(r)}", r.get("claimed", ""), str(r["n"]),
                     f"**{verdict(r)}**", repeated(r), cost]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def text(results):
    """A statement's verdict, effect, what was claimed, value per seed."""
    lines = []
    for r in results:
        values = ", ".join(f"{v:.3g}" for v in r.get("values", []))
        lines += [f"  {r['text']}: {verdict(r).upper()}",
                  f"      {r['effect']}: {effect(r)} (claimed {r.get('claimed', '?')}; {values})"]
    return "\n".join(lines)


def draw(claim, results, seen, file):
    """A panel a statement: its text, its verdict and effect, and the quantity that decides."""
    rows = zip(claim.statements, results, seen)
    shown = [(s, r, found) for s, r, found in rows if found and s.draw is not None]
    if not shown:
        return
    columns = len(shown) if len(shown) < 4 else 2 if len(shown) == 4 else 3
    rows = -(-len(shown) // columns)
    fig = Figure((3.6 * columns, 2.8 * rows), dpi=150, layout="constrained")
    for place, (statement, result, found) in enumerate(shown, 1):
        ax = fig.add_subplot(rows, columns, place)
        trials.draw_panel(ax, statement, found)
        ax.set_title(textwrap.fill(statement.text, 40), pad=15)
        word = result.get("verdict") or verdict(result)
        ax.text(0, 1.02, f"{word}: {effect(result)} (n {len(found)})", fontsize=8, weight="bold",
                color=COLORS.get(word, "0.35"), transform=ax.transAxes)
    fig.supxlabel("Effects with 95 % intervals. Curves: mean and range over n seeds.",
                  fontsize=7, color="0.3")
    fig.savefig(file)


def stored_results():
    """{claim: results of its statements} as last written."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def update(names, out, pictures, quick=False):
    """Judge and draw what has been run of these claims. Returns all results, old and new."""
    stored, seen = stored_results(), {}
    for name in names:
        results, seen[name] = examine(name, out, quick)
        fewer = sum(r["n"] for r in results) < sum(r["n"] for r in stored.get(name, []))
        if fewer and pictures == RESULTS.parent:
            common.fail(f"{out} holds fewer seeds of {name} than {RESULTS} tells of: run it first")
        stored[name] = results
    stored = {name: stored[name] for name in CLAIMS if name in stored}
    tested = sum(s.seeds > 1 for claim in CLAIMS.values() for s in claim.statements)
    trials.decide(sum(stored.values(), []), tested)
    for name in names:
        claim, picture = CLAIMS[name], pictures / f"claims-{name}.png"
        draw(claim, stored[name], seen[name], picture)
        print(f"{name}: {claim.headline} ({claim.source}): {composed(stored[name])}\n"
              f"{text(stored[name])}\n"
              f"  picture: {picture}", flush=True)
    return stored


def list_claims():
    """Every claim and its statements, a line each."""
    for name, claim in CLAIMS.items():
        print(f"{name:17} {claim.headline} [{claim.source}]")
        for statement in claim.statements:
            print(f"{'':17} - {statement.text}")


def main(argv=None):
    """List, run and judge, or tabulate; a mistake is one line and exit status 2."""
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
    if not args.names:
        return list_claims()
    names = list(CLAIMS) if "all" in args.names else args.names
    out = args.out.resolve() / "quick" if args.quick else args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.as_is:
        statements = [s for name in names for s in CLAIMS[name].statements]
        todo = [one for one in trials.jobs(statements, out, args.quick) if not one.done()]
        trials.run_all(todo, args.jobs)
    stored = update(names, out, RESULTS.parent if args.update else out, args.quick)
    if args.update:
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
