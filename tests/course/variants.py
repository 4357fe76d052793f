"""The algorithms that came after: each is a patch of a few lines on one of the four scripts.

    python tests/course/variants.py                     what there is, one line each
    python tests/course/variants.py cispo --show        the paper, the equation, the diff
    python tests/course/variants.py cispo               writes cispo.py beside the four
    python tests/course/variants.py cispo --to DIR      ... into another folder
    python tests/course/variants.py cispo --blank       ... with the changed functions left out
    python tests/course/variants.py cispo --save FILE   makes the diff anew from an edited script
    python tests/course/variants.py all --refresh       rebases the diffs on the edited four
    python tests/course/variants.py all --train         trains each, draws a picture and a table

variants/README.md orders them as a family tree.
"""

import argparse
import ast
import csv
import difflib
import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = HERE / "variants"
PARENTS = ("ppo", "grpo", "dapo", "gspo")
HEADER = ("Paper", "Idea", "Equation", "Why", "Setting", "Here", "Base")
HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")

# --- a variant -----------------------------------------------------------------------------------


@dataclass
class Variant:
    """One file of variants/: a header of `Key: text`, then a unified diff."""

    name: str
    parent: str  # the script it is a patch on, without .py
    header: dict  # HEADER's keys -> text; Base is the git blob of the parent that was patched
    diff: str  # from its first "@@" on


def names():
    """All variants, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.diff"))


def read(name):
    """The variant of that name. ValueError where there is none or a part of it is missing."""
    path = FOLDER / f"{name}.diff"
    if not path.is_file():
        raise ValueError(f"no variant {name!r}, there are: {', '.join(names())}")
    head, _, diff = path.read_text().partition("\n--- ")
    parent = diff.partition("\n")[0].removesuffix(".py")
    hunks = diff[diff.find("\n@@") + 1 :] if "\n@@" in diff else ""
    header = {}
    for line in head.splitlines():
        if line.startswith("    ") and header:  # the text above goes on
            header[key] += " " + line.strip()
        elif line.strip():
            key, _, text = line.partition(": ")
            header[key] = text
    missing = [key for key in HEADER if key not in header]
    if missing or parent not in PARENTS:
        raise ValueError(f"{path.name}: no {', '.join(missing) or 'known script in its --- line'}")
    return Variant(name, parent, header, hunks)


def write(variant):
    """Variant -> its file."""
    lines = []
    for key in HEADER:
        text = f"{key}: {variant.header[key]}"
        lines += textwrap.wrap(text, 100, subsequent_indent="    ", break_on_hyphens=False)
    files = f"--- {variant.parent}.py\n+++ {variant.name}.py\n"
    text = "\n".join(lines) + "\n\n" + files + variant.diff
    (FOLDER / f"{variant.name}.diff").write_text(text)


def script(name):
    """The text of one of the four scripts."""
    return (ROOT / f"{name}.py").read_text()


def patched(name):
    """The text of the variant's script, from today's parent. ValueError where a hunk drifted."""
    variant = read(name)
    try:
        return apply(script(variant.parent), variant.diff)
    except ValueError as error:
        raise ValueError(f"{name}.diff does not fit today's {variant.parent}.py, {error}: "
                         f"python tests/course/variants.py {name} --refresh") from None


# --- diffs ---------------------------------------------------------------------------------------


def make_diff(old, new):
    """Two texts -> the hunks of a unified diff, without its two lines of file names."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="")
    return "\n".join(list(lines)[2:]) + "\n"


def apply(old, diff):
    """A text and the hunks made from it -> the new text. No fuzz and no offset: what the diff does
    not change must be there, to the letter and at its line. ValueError where it is not."""
    old, new, at = old.splitlines(), [], 0
    for line in diff.splitlines():
        hunk, mark, text = HUNK.match(line), line[:1] or " ", line[1:]
        if hunk:
            start = int(hunk[1]) - 1
            new, at = new + old[at:start], start
        elif mark == "+":
            new.append(text)
        elif mark not in " -":
            raise ValueError(f"not a line of a diff: {line!r}")
        elif old[at : at + 1] != [text]:
            raise ValueError(f"line {at + 1} is not {text.strip()!r}")
        else:
            new, at = new + [text] * (mark == " "), at + 1
    return "\n".join(new + old[at:]) + "\n"


def changed_lines(old, new):
    """(code, all): how many lines of the Python text `new` are new or edited. Blank lines, comments
    and docstrings count in `all` only; what was only taken away counts in neither."""
    lines, code, counts = (old.splitlines(), new.splitlines()), code_lines(new), [0, 0]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag != "equal":
            counts[0] += len(code.intersection(range(start, end)))
            counts[1] += end - start
    return tuple(counts)


def code_lines(source):
    """Indices of the lines that are neither blank, nor a comment, nor of a docstring."""
    lines = source.splitlines()
    code = {i for i, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            code -= set(range(node.body[0].lineno - 1, node.body[0].end_lineno))
    return code


def functions(source):
    """Name -> text of every top-level function."""
    return {node.name: ast.get_source_segment(source, node)
            for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def changed_functions(name):
    """The functions, other than the loop's, that a variant writes or changes."""
    old, new = functions(script(read(name).parent)), functions(patched(name))
    return [f for f in new if f not in ("train", "rollout") and new[f] != old.get(f)]


# --- keeping the diffs ---------------------------------------------------------------------------


def git(*args, text=None, may_fail=False):
    """Standard output of a git command in the repository. ValueError if there is no git, or if it
    fails; with `may_fail` (exit status, output)."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], input=text, capture_output=True,
                              text=True)
    except FileNotFoundError:
        raise ValueError("this needs git, which is not installed") from None
    if may_fail:
        return done.returncode, done.stdout
    if done.returncode:
        raise ValueError(f"git {args[0]}: {done.stderr.strip()}")
    return done.stdout


def save(name, new):
    """Make the variant's diff anew: from today's parent to the text `new`."""
    variant = read(name)
    old = script(variant.parent)
    # Kept in git's store, so that a later --refresh has the common ancestor even if this state of
    # the parent was never committed.
    variant.header["Base"] = git("hash-object", "-w", "--stdin", text=old).strip()
    variant.diff = make_diff(old, new)
    write(variant)


def blob_id(text):
    """What `git hash-object` says, without git."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def refresh(name):
    """Rebase a diff on today's parent by a three-way merge with the parent it was made from.

    Returns what was done, in words. ValueError on a conflict: the merged script, with conflict
    markers, is left beside the four, to be mended and saved.
    """
    variant = read(name)
    new_parent = script(variant.parent)
    if variant.header["Base"] == blob_id(new_parent):
        return "up to date"
    old_parent = git("cat-file", "blob", variant.header["Base"])
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for title, text in ((f"{name}.py", apply(old_parent, variant.diff)),
                            (f"{variant.parent}.py then", old_parent),
                            (f"{variant.parent}.py now", new_parent)):
            files.append(Path(folder, title))
            files[-1].write_text(text)
        status, merged = git("merge-file", "-p", *map(str, files), may_fail=True)
    if status:
        left = ROOT / f"{name}.py"
        left.write_text(merged)
        raise ValueError(f"{name}: {status} conflicts with today's {variant.parent}.py, marked in "
                         f"{left.name}: mend it, then variants.py {name} --save {left.name}")
    save(name, merged)
    return "rebased"


# --- as a lesson ---------------------------------------------------------------------------------


def blanked(name):
    """The variant's script with the bodies of the functions that make it left out: signature and
    docstring stay, the paper's words are the hint."""
    source, left_out = patched(name), changed_functions(name)
    lines, header = source.splitlines(), read(name).header
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name in left_out:
            hint = textwrap.wrap(f"{header['Idea']} {header['Why']}", 92)
            body = [*(f"    # {line}" for line in hint), "    raise NotImplementedError"]
            lines[node.body[0].end_lineno : node.end_lineno] = body
    return "\n".join(lines) + "\n"


def problems():
    """One dict a variant, for a handout and a grader: its script, the functions left out, what the
    paper says, and the check (`pytest` arguments; `--impl DIR` grades the script in DIR)."""
    return [dict(
        name=f"variants.{name}", file=f"{name}.py", functions=changed_functions(name),
        sentence=read(name).header["Idea"], equation=read(name).header["Equation"],
        check=["tests/course/test_variants.py", "-k", name],
    ) for name in names()]


# --- training them all ---------------------------------------------------------------------------


def train_all(chosen, seeds, steps, out):
    """Run the variants and their parents on the built-in task, one after the other.

    A run that is complete in `out` is not repeated, one that was cut goes on from its last
    checkpoint, so the same command resumes. ValueError where a run fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    parents = [p for p in PARENTS if any(read(name).parent == p for name in chosen)]
    for name in (*parents, *chosen):
        if name not in parents:
            (out / f"{name}.py").write_text(patched(name))
        place = ROOT if name in parents else out
        for seed in seeds:
            train_one(place / f"{name}.py", out / f"{name}-{seed}", seed, steps)
    return parents


def train_one(file, folder, seed, steps):
    """One run in its folder, unless it is there already."""
    if (folder / "final").is_dir() and int(metrics(folder)[-1]["step"]) >= steps:
        return
    if any(folder.glob("checkpoints/step-*")):
        more = ["--resume"]
    else:  # a run killed before its first checkpoint begins again
        shutil.rmtree(folder, ignore_errors=True)
        more = ["--seed", str(seed)]
    command = [sys.executable, str(file), "--out_dir", str(folder), "--steps", str(steps), *more]
    print(shlex.join(command), flush=True)
    # The scripts import their rooms from the repository, wherever the patched file lies.
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"{file.stem}, seed {seed}, ended with status {done.returncode}; "
                         "the same command goes on from its last checkpoint")


def metrics(folder):
    """The rows of a run's metrics.csv; [] if there is none."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def results(names_, seeds, out):
    """One row a script: means over seeds of the end of each run, and the spread of its accuracy."""
    rows = []
    for name in names_:
        runs = [metrics(out / f"{name}-{seed}") for seed in seeds]
        ends = [[r for r in run if r["eval_sampled"]][-1] for run in runs]
        sampled = [float(end["eval_sampled"]) for end in ends]
        rows.append(dict(
            name=name, sampled=mean(sampled), low=min(sampled), high=max(sampled),
            greedy=mean(float(end["eval_accuracy"]) for end in ends),
            entropy=mean(mean_of(run[-10:], "entropy") for run in runs),
            clip=mean(mean_of(run, "clip_frac") for run in runs),
            seconds=mean(sum(float(row["t_total"]) for row in run if row["t_total"])
                         for run in runs),
            runs=runs,
        ))
    return rows


def mean_of(rows, column):
    """Mean of a column, NaN where it is empty."""
    values = [float(row[column]) for row in rows if row[column]]
    return mean(values) if values else math.nan


def table(rows, seeds, steps):
    """The results as markdown."""
    lines = ["| | held-out sampled (range) | greedy | entropy, last 10 steps | clip fraction | "
             "steps, s |",
             "|---|---|---|---|---|---|"]
    for r in rows:
        clip = "" if math.isnan(r["clip"]) else f"{r['clip']:.4f}"
        lines.append(f"| {r['name']} | {r['sampled']:.3f} ({r['low']:.3f} to {r['high']:.3f}) "
                     f"| {r['greedy']:.3f} | {r['entropy']:.3f} | {clip} | {r['seconds']:.0f} |")
    lines += ["", f"Seeds {', '.join(map(str, seeds))}; {steps} steps. The scripts that were "
              "patched stand first. This is one small task (0.2M parameters, word problems): it "
              "shows that each runs, not which is better."]
    return "\n".join(lines) + "\n"


def picture(rows, file):
    """A panel a variant: accuracy of one sample over steps, a line a seed, its parent in grey."""
    import matplotlib  # noqa: PLC0415  only this needs it, and it takes a second
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    by_name = {row["name"]: row for row in rows}
    shown = [row for row in rows if row["name"] not in PARENTS]
    columns = min(4, len(shown))
    figure, axes = plt.subplots(-(-len(shown) // columns), columns, sharex=True, sharey=True,
                                figsize=(2.6 * columns, 2.1 * -(-len(shown) // columns)),
                                squeeze=False, layout="constrained")
    for axis in axes.flat[len(shown):]:
        axis.axis("off")
    for axis, row in zip(axes.flat, shown):
        parent = read(row["name"]).parent
        for runs, colour in ((by_name[parent]["runs"], "0.7"), (row["runs"], "C0")):
            for run in runs:
                points = [(int(r["step"]), float(r["eval_sampled"])) for r in run
                          if r["eval_sampled"]]
                axis.plot(*zip(*points), color=colour, linewidth=1)
        axis.set_title(f"{row['name']} ({parent} in grey)", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out accuracy, one sample", fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


# --- command line --------------------------------------------------------------------------------


def listing():
    """What there is, under the script each is a patch on."""
    lines = []
    for parent in PARENTS:
        mine = [v for v in map(read, names()) if v.parent == parent]
        lines += [f"on {parent}.py"] * bool(mine)
        lines += [f"  {v.name:22} {v.header['Idea']}" for v in mine]
    return "\n".join(lines)


def write_script(name, folder, text):
    """The script in its folder. ValueError if it is there already. Says how to run it."""
    file = folder / f"{name}.py"
    if not folder.is_dir():
        raise ValueError(f"--to {folder}: no such folder")
    if file.exists():
        raise ValueError(f"{file} exists: move it away, or write to another folder with --to")
    file.write_text(text)
    path = "" if folder.resolve() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))} "
    print(f"{path}python {shlex.quote(str(file))}")


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    parser.add_argument("name", nargs="?", help="a variant; all, with --refresh or --train")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print the diff with its header")
    what.add_argument("--blank", action="store_true", help="leave its functions to the reader")
    what.add_argument("--save", type=Path, metavar="FILE", help="make the diff anew from a script")
    what.add_argument("--refresh", action="store_true", help="rebase the diff on today's script")
    what.add_argument("--train", action="store_true", help="runs in --out, picture and table")
    parser.add_argument("--to", type=Path, default=ROOT, metavar="DIR",
                        help="where the script goes; default: beside the four")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "variants", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="with all: these variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    chosen = (args.only or names()) if args.name == "all" else [args.name]
    if args.name is None:
        print(listing())
    elif args.refresh:
        for name in chosen:
            print(f"{name}: {refresh(name)}")
    elif args.train:
        parents = train_all(chosen, args.seeds, args.steps, args.out)
        rows = results([*parents, *chosen], args.seeds, args.out)
        (args.out / "variants.md").write_text(table(rows, args.seeds, args.steps))
        picture(rows, args.out / "variants.png")
        print((args.out / "variants.md").read_text())
    elif args.name == "all":
        raise ValueError("all goes with --refresh or --train")
    elif args.show:
        read(args.name)
        print((FOLDER / f"{args.name}.diff").read_text(), end="")
    elif args.save:
        save(args.name, args.save.read_text())
    else:
        text = blanked(args.name) if args.blank else patched(args.name)
        write_script(args.name, args.to, text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"variants.py: {error}", file=sys.stderr)
        sys.exit(2)
