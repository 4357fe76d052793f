"""Bench: the tests in a fresh environment of chosen versions. Not collected by pytest.

    python tests/bench/versions.py lowest       every package at the lower bound of requirements.txt
    python tests/bench/versions.py newest       what `pip install -r requirements.txt` takes today
    python tests/bench/versions.py torch==2.7.1 transformers==5.9.0 -- -x -q tests/test_sampling.py

What follows `--` is for pytest (else: -q tests). The Python is the one that runs this file. Prints
what was installed, its seconds and size; the exit status is pytest's.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wanted(choice):
    """What pip is asked for: the lines of requirements.txt, with `choice` applied."""
    lines = (ROOT / "requirements.txt").read_text().split()
    if choice == ["lowest"]:
        return [re.sub(r">=([\d.]+).*", r"==\1", line) for line in lines]
    return lines if choice == ["newest"] else lines + choice


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", nargs="+", metavar="lowest|newest|NAME==VERSION")
    parser.add_argument("--folder", help="keep the environment there")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, tests = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :] or ["-q", "tests"]
    with tempfile.TemporaryDirectory() as scratch:
        folder, start = Path(args.folder or scratch).resolve(), time.time()
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted(args.choice)], check=True)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"installed in {time.time() - start:.0f} s, {size / 1e9:.1f} GB:", flush=True)
        subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True)
        return subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
