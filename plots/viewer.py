"""Look inside runs: one HTML file with their curves and their answers, token by token.

    python plots/viewer.py runs/grpo-1                      # writes runs/grpo-1/viewer.html
    python plots/viewer.py runs/* --out look.html --open

It reads metrics.csv, config.json and samples.jsonl. What the update saw of a token (log-probs, in
PPO values) was recorded; all that follows from it comes from the functions of the four scripts: of
the run's own script as the run had it set, of the others as they are by default. A loss is a sum of
weight x term, so a token's term is the derivative of `policy_loss` by its weight.
"""

import argparse
import base64
import hashlib
import importlib
import json
import math
import sys
import webbrowser
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import figures  # noqa: E402

import rewards  # noqa: E402

SCRIPTS = {name: importlib.import_module(name) for name in ("grpo", "dapo", "gspo", "ppo")}
PANELS = {  # column of metrics.csv: title, unit
    "eval_accuracy": ("Held-out accuracy", "greedy, share of questions"),
    "accuracy": ("Accuracy in training", "share of sampled answers"),
    "reward": ("Reward", "mean per answer"), "entropy": ("Entropy", "nats per token"),
    "response_len": ("Length of answers", "tokens"),
    "ref_kl": ("KL to the reference", "nats per token"),
    "approx_kl": ("KL of an update", "old to new, nats per token"),
    "clip_frac": ("Clipped", "share of tokens, GSPO: of answers")}
MOST_BYTES = 3_000_000  # of a page
LEAST_BYTES = 120  # of a token in the page
MOST_TEXT = 20_000  # characters of an answer without tokens, of a question
DIGITS = dict(ratio=8)  # significant ones, else 5: GSPO clips a ratio at 1.0004
FIELDS = dict(step=int, question=str, completion=str, reward=float, advantage=float)
ARRAYS = ("ids", "logp", "old_logp", "entropy", "ref_logp", "values", "token_rewards",
          "advantages")


# --- what a run recorded -------------------------------------------------------------------------


def read_samples(folder):
    """(rows, number of lines that are none) of a run's samples.jsonl; no file, no rows."""
    path, rows, bad = Path(folder) / "samples.jsonl", [], 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            rows.append(row | {name: kind(row[name]) for name, kind in FIELDS.items()})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            bad += 1  # a kill cut it short, or it is not ours
    return rows, bad


def has_tokens(row, script):
    """Does this row hold what the update of `script` saw of every token, whole and finite?"""
    tokens, update = row.get("tokens"), row.get("update")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(x, str) for x in tokens):
        return False
    needed = {"logp", "old_logp", "ids"} | ({"advantages"} if script == "ppo" else set())
    given = [row.get(name) for name in ARRAYS if name in row or name in needed]
    return is_numbers(update, 2) and all(is_numbers(x, len(tokens)) for x in given)


def is_numbers(x, length):
    """A list of so many finite numbers?"""
    return isinstance(x, list) and len(x) == length and all(map(is_number, x))


def is_number(x):
    """A finite number? True and False are none."""
    return type(x) in (int, float) and math.isfinite(x)


def groups_of(rows):
    """Lists of the rows that answer one question at one step, in the order of the file."""
    return [list(group) for _, group in groupby(
        rows, lambda row: (row["step"], str(row.get("group", "")), row["question"]))]


# --- what follows from it ------------------------------------------------------------------------


def stacked(group, name):
    """(G, T) float64 of a recorded array, 0 beyond an answer's end; None if it was not recorded."""
    if not all(name in row for row in group):
        return None
    width = max(len(row["tokens"]) for row in group)
    rows = [row[name] + [0.0] * (width - len(row["tokens"])) for row in group]
    return torch.tensor(rows, dtype=torch.float64)


def config_of(name, run):
    """The settings of a script: the run's, or its defaults at the run's size and length."""
    script = SCRIPTS[name]
    known = {field.name for field in fields(script.Config)}
    given = {key: value for key, value in run.settings.items() if key in known}
    if run.script == name:
        return script.Config(**given)
    shared = {key: given[key] for key in ("max_new_tokens", "reward") if key in given}
    builtin = run.settings.get("data") == "words"
    return script.Config(**(script.TINY if builtin else {}) | shared)


def shaping(group, mask, cfg):
    """(G,) what DAPO adds to a reward: 0 and 1 become -1 and 1, and long answers pay."""
    right = [math.nan if row.get("correct") is None else row["correct"] for row in group]
    right = torch.tensor(right).double()
    batch = SimpleNamespace(rewards=torch.zeros_like(right), correct=right, mask=mask)
    weight = rewards.parse_reward(cfg.reward).get("correct", 0)
    buffer = cfg.overlong_buffer if cfg.overlong_buffer <= cfg.max_new_tokens else 0
    return SCRIPTS["dapo"].shaped_rewards(batch, weight, cfg.max_new_tokens, buffer)


def advantages_under(name, cfg, group, mask, run):
    """(G,) or, in PPO, (G, T) advantages: recorded ones, or what another script would give."""
    if run.script == name == "ppo":
        return stacked(group, "advantages")
    if run.script == name:
        return torch.tensor([row["advantage"] for row in group]).double()
    scores = torch.tensor([row["reward"] for row in group]).double()
    if run.script == "dapo":
        scores = scores - shaping(group, mask, config_of("dapo", run))
    if name == "dapo":
        scores = scores + shaping(group, mask, cfg)
    if name != "ppo":
        return SCRIPTS[name].group_advantages(scores, len(group))
    ppo, old, ref = SCRIPTS["ppo"], stacked(group, "old_logp"), stacked(group, "ref_logp")
    token_rewards = ppo.token_rewards(scores, old, old if ref is None else ref, mask, cfg.kl_coef)
    zero = torch.zeros_like(mask)  # a critic's head starts at 0
    return ppo.whiten(ppo.gae(token_rewards, zero, mask, cfg.gamma, cfg.lam)[0], mask)


def weights_under(name, cfg, group, mask):
    """(G, T) weights; an answer's are those of the optimizer step that it was part of."""
    function, count = SCRIPTS[name].token_weights, 1 if name in ("ppo", "dapo") else 0
    if name == "dapo" and not cfg.token_mean:
        function, count = SCRIPTS["dapo"].answer_weights, 0
    parts = [function(mask[i : i + 1], row["update"][count]) for i, row in enumerate(group)]
    return torch.cat(parts)


def clips_of(cfg):
    """A script's clip ranges by the name of the flag."""
    names = ("clip_eps", "clip_low", "clip_high")
    return {key: getattr(cfg, key) for key in names if hasattr(cfg, key)}


def look(name, cfg, group, mask, advantages):
    """What `policy_loss` of script `name` makes of every token, (G, T) each, by its derivatives:

    `w` the weight, `A` the advantage, `ratio`, `term` (the loss is the sum of w x term), `clip`
    (the clipped branch is the larger), `push` (minus the slope of the loss by the log-prob).
    """
    script, clips = SCRIPTS[name], clips_of(cfg)
    new, old = stacked(group, "logp").requires_grad_(), stacked(group, "old_logp")
    w = weights_under(name, cfg, group, mask).requires_grad_()
    # Where A = -1 and nothing is clipped from below, max(-A r, -A clip(r)) is the ratio itself.
    wide, minus = dict.fromkeys(clips, 1.0), -torch.ones_like(advantages)
    ratio, = torch.autograd.grad(script.policy_loss(new, old, minus, mask, w, **wide)[0], w)
    kl = {}
    if name == "grpo" and cfg.beta > 0 and stacked(group, "ref_logp") is not None:
        kl = dict(ref_logp=stacked(group, "ref_logp"), beta=cfg.beta)
    loss, stats = script.policy_loss(new, old, advantages, mask, w, **clips, **kl)
    term, slope = torch.autograd.grad(loss, (w, new), retain_graph=True)
    clip, = torch.autograd.grad(stats["clip_frac"], w)
    w = w.detach()
    a = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(w)
    return dict(w=w, A=a, wA=w * a, ratio=ratio, term=term, clip=clip, push=-slope)


def shared_arrays(group, cfg, mask):
    """(G, T) each, of a token under any script: {name in the page: tensor}."""
    recorded = dict(old="old_logp", new="logp", ref="ref_logp", entropy="entropy", value="values")
    arrays = {key: stacked(group, name) for key, name in recorded.items()}
    if arrays["ref"] is not None:
        arrays["kl"] = SCRIPTS["grpo"].kl_k3(arrays["new"], arrays["ref"])
    reward, value = stacked(group, "token_rewards"), arrays["value"]
    if reward is not None and value is not None:  # at lambda 0, GAE is the TD error
        arrays["delta"] = SCRIPTS["ppo"].gae(reward, value, mask, cfg.gamma, 0.0)[0]
        arrays["R"] = reward
    return {key: x for key, x in arrays.items() if x is not None}


# --- the page's data -----------------------------------------------------------------------------


def number(x, digits=5):
    """A float with so many significant digits, None if it is not finite."""
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


def squeezed(name, values):
    """The numbers of an answer's tokens, or one number where they are all the same."""
    values = [number(x, DIGITS.get(name, 5)) for x in values]
    return values[0] if len(set(values)) == 1 else values


def text_row(row):
    """An answer without its tokens: all that a run recorded before, and what its table needs."""
    text, correct = row["completion"], row.get("correct")
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]} … and {len(text) - MOST_TEXT} more characters"
    return dict(text=text, reward=number(row["reward"]), advantage=number(row["advantage"]),
                correct=correct if is_number(correct) else None,
                truncated=bool(row.get("truncated")),
                length=len(row["tokens"]) if isinstance(row.get("tokens"), list) else None)


def text_group(group):
    """A group without its tokens."""
    paid = [row["reward"] for row in group]
    return dict(step=group[0]["step"], question=group[0]["question"][:MOST_TEXT],
                gold=str(group[0].get("gold", "")), tied=len(group) > 1 and len(set(paid)) == 1,
                rows=[text_row(row) for row in group], notes={}, sums={})


def token_group(group, run):
    """A group with the numbers of every token, under its own script and the others."""
    page = text_group(group)
    lengths = [len(row["tokens"]) for row in group]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()
    arrays = shared_arrays(group, config_of("ppo", run), mask)
    for i, (row, n) in enumerate(zip(group, lengths)):
        special = row["special"] if isinstance(row.get("special"), list) else []
        page["rows"][i] |= dict(tokens=row["tokens"], ids=row["ids"], by={}, text=None,
                                special=[t for t in range(n) if t in special])
        page["rows"][i] |= {key: squeezed(key, x[i, :n].tolist()) for key, x in arrays.items()}
    for name in SCRIPTS:
        cfg = config_of(name, run)
        if name != "ppo" and len(group) < 2:
            page["notes"][name] = "one answer a question: no group to compare it with"
            continue
        advantages = advantages_under(name, cfg, group, mask, run)
        seen = look(name, cfg, group, mask, advantages)
        page["sums"][name] = number((seen["w"] * seen["term"]).sum())
        page["notes"][name] = note(name, cfg, group, arrays, run)
        for i, n in enumerate(lengths):
            by = {key: squeezed(key, x[i, :n].tolist()) for key, x in seen.items()}
            by["clip"] = [t for t in range(n) if seen["clip"][i, t] > 0]
            by["sum"] = number((seen["w"][i] * seen["term"][i]).sum())
            page["rows"][i]["by"][name] = by
    return page


def note(name, cfg, group, arrays, run):
    """What must be said of a script's numbers for this group; often nothing."""
    if name == run.script:
        return "this run"
    if name == "ppo":
        return "as at its first step: a critic of zeros, whitened over this group alone"
    if name == "dapo" and cfg.dynamic_sampling:
        right = torch.tensor([[float(row.get("correct") or 0) for row in group]])
        if not SCRIPTS["dapo"].keep_group(right)[0]:
            return "drops this group: its answers are all right or all wrong"
    if name == "grpo" and cfg.beta > 0 and "ref" not in arrays:
        return "without its KL: no reference was recorded"
    return ""


def about(name, run):
    """The constants of a script's equation."""
    cfg = config_of(name, run)
    low, *rest = clips_of(cfg).values()
    high = rest[0] if rest else low
    return dict(low=round(1 - low, 6), high=round(1 + high, 6),
                beta=getattr(cfg, "beta", 0), gamma=getattr(cfg, "gamma", 1))


def load(path, label):
    """A run with `curves` (JSON) and `samples`, its groups; ValueError says what is wrong."""
    run = figures.load_run(path)
    run.script, run.path = run.label.lower(), Path(path)  # its script's name, from config.json
    run.label = label or run.path.resolve().name
    rows, bad = read_samples(path)
    if bad:
        print(f"{path}: {bad} lines of samples.jsonl are not answers, left out", file=sys.stderr)
    if rows and not run.settings:
        print(f"{path}: no settings in config.json, so the defaults'", file=sys.stderr)
    run.samples = groups_of(rows)
    return run


def spread(n):
    """0 .. n - 1, the last and the first first, then always the middle of the largest gap: any
    beginning of the list is spread evenly."""
    order, gaps = [n - 1, 0][:n], [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            order.append((low + high) // 2)
            gaps += [(low, order[-1]), (order[-1], high)]
    return order


def fitting(runs, room):
    """(groups of each run that fit into `room` bytes, [with tokens, as text, left out]).

    The first groups of steps that are spread over the run come first; one that is too large with
    its tokens is there as text."""
    queue, counts, kept = [], [0, 0, 0], [[] for _ in runs]
    for r, run in enumerate(runs):
        steps = [list(groups) for _, groups in groupby(run.samples, lambda g: g[0]["step"])]
        for turn, place in enumerate(spread(len(steps))):
            queue += [(k, turn, r, place, group) for k, group in enumerate(steps[place])]
    for k, _, r, place, group in sorted(queue, key=lambda x: x[:4]):
        whole = all(has_tokens(row, runs[r].script) for row in group)
        if whole:  # don't compute what can't fit
            whole = LEAST_BYTES * sum(len(row["tokens"]) for row in group) <= room
        pages = [token_group(group, runs[r]) if whole else None, text_group(group)]
        sizes = [len(as_json(page)) + 1 if page else math.inf for page in pages]
        choice = 0 if sizes[0] <= room else 1 if sizes[1] <= room else 2
        counts[choice] += 1
        if choice < 2:
            room -= sizes[choice]
            kept[r].append((place, k, pages[choice]))
    kept = [[page for _, _, page in sorted(pages, key=lambda x: x[:2])] for pages in kept]
    return kept, counts


def as_json(data):
    """JSON that may stand inside a <script>: ASCII, and no "<" that could end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c")


def run_data(run):
    """What the page needs of a run besides its groups."""
    curves = {name: [number(x) for x in run[name]] for name in PANELS}
    own = run.script if run.script in SCRIPTS else None
    return dict(label=run.label, script=own,
                steps=[int(x) for x in run["step"]], curves=curves,
                about={name: about(name, run) for name in SCRIPTS})


# --- the page ------------------------------------------------------------------------------------


def source_hash(template, tag):
    """The content-security policy's name for what stands between <tag> and </tag>."""
    inside = template.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
    digest = hashlib.sha256(inside.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def make_page(runs):
    """(the HTML, [groups with tokens, as text only, left out]) of loaded runs."""
    template = (ROOT / "plots" / "viewer.html").read_text(encoding="utf-8")
    data = dict(runs=[run_data(run) for run in runs], panels=PANELS, left_out=0)
    room = MOST_BYTES - len(template.encode()) - len(as_json(data)) - 1000
    kept, counts = fitting(runs, room)
    for run, groups in zip(data["runs"], kept):
        run["groups"] = groups
    data["left_out"] = counts[2]
    for tag in ("style", "script"):
        template = template.replace(f"{tag.upper()}_HASH", source_hash(template, tag))
    return template.replace("PAGE_DATA", as_json(data)), counts


def parse(argv):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or LABEL=RUN")
    parser.add_argument("--out", help="the file to write; default: viewer.html in the first RUN")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    return parser.parse_args(argv)


def main(argv=None):
    """Write the page; a mistake is one line and exit status 2."""
    args = parse(argv)
    try:
        named = [(None, x) if Path(x).exists() else x.rpartition("=")[::2] for x in args.runs]
        runs = [load(path, label or None) for label, path in named]
        page, (whole, text, out) = make_page(runs)
        path = Path(args.out) if args.out else runs[0].path / "viewer.html"
        path.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as problem:
        print(f"viewer.py: {problem}", file=sys.stderr)
        sys.exit(2)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {whole} groups with every token"
          + f", {text} as text" * bool(text) + f", {out} more did not fit" * bool(out))
    if args.open:
        webbrowser.open(path.resolve().as_uri())


if __name__ == "__main__":
    main()
