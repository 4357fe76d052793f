"""Tests: the READMEs' links point at the lines that they speak of.

A link into a script carries the code it means as its title: [text](grpo.py#L93 "groups.std(").
After an edit, `python tests/test_readme.py` moves the numbers to where the code is now.
"""

import importlib
import re
import shlex
import signal
from pathlib import Path

import pytest

import experiment

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "plots" / "README.md")
COMMAND = re.compile(r"(?:python|torchrun [^`\n]*?) ?\b(ppo|grpo|dapo|gspo)\.py((?:\\\n|[^`\n#])*)")
LINK = re.compile(r'\]\(((?:\.\./)?)([\w/]+\.py)#L(\d+) "([^"]+)"\)')


def line_of(file, code):
    """The number of the only line of `file` that holds `code`."""
    lines = (ROOT / file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if code in line]
    assert len(found) == 1, f"{file}: {code!r} is on {len(found)} lines, wanted one"
    return found[0]


def relinked(text):
    """README text with every line number set anew."""
    return LINK.sub(lambda m: f']({m[1]}{m[2]}#L{line_of(m[2], m[4])} "{m[4]}")', text)


@pytest.mark.parametrize(
    "link", [link for page in PAGES for link in LINK.findall(page.read_text())],
    ids=lambda link: link[3][:40])
def test_a_link_points_at_its_code(link):
    _, file, number, code = link
    assert code in (ROOT / file).read_text().splitlines()[int(number) - 1]


def test_every_cell_of_the_difference_table_is_a_link():
    """10 dimensions and 4 algorithms: what a cell claims can be looked up."""
    table = README.read_text().split("<!-- differences -->")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
    assert len(rows) >= 10 and len(cells) == 4 * len(rows)
    assert all(LINK.search(cell) or cell.strip() == "none" for cell in cells)


def test_files_and_pictures_exist():
    """Nothing that the README shows or names is missing."""
    for page in PAGES:
        text = page.read_text()
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
        for path in pictures + re.findall(r"\]\(((?:[\w.]+/)*[\w.-]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / path).exists(), path


def test_the_columns_are_those_of_metrics_csv():
    """Each is explained, and none that isn't there."""
    table = README.read_text().split("| column | healthy |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(
        r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(named) == sorted(experiment.COLUMNS)


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200


def test_flags_exist():
    """Every --flag that the README names is one of ours."""
    known = "".join(p.read_text() for p in [*ROOT.glob("*.py"), *ROOT.glob("plots/*.py"),
                                           *ROOT.glob("tests/**/*.py")])
    theirs = {"nproc_per_node", "nnodes", "rdzv_endpoint", "shutdown", "index"}
    named = re.findall(r"--([a-z_]+)", "".join(page.read_text() for page in PAGES))
    for flag in set(named) - theirs:
        name = flag.removeprefix("no_")
        assert re.search(rf"\b{name}: |--{flag}\b|\"--{flag}", known), f"--{flag}"


@pytest.mark.parametrize("command", [
    command for page in (*PAGES, ROOT / "tests/course/README.md")
    for command in COMMAND.findall(page.read_text())], ids=" ".join)
def test_commands_are_taken(command, tmp_path, monkeypatch):
    """Every command line of a script that a README shows is one that it accepts."""
    experiment = importlib.import_module("experiment")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    script, argv = importlib.import_module(command[0]), shlex.split(command[1].replace("\\\n", " "))
    if "--help" not in argv:
        experiment.parse_args(script.Config, script.TINY, argv)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(relinked(page.read_text()))
