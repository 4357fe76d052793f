"""Tests: the command line: what is wrong is named in one line, with the remedy; nothing started.

A user who mistypes meets no traceback: exit status 2 and one line on stderr, which begins with
"error:". Most tests run in this process; a few start the script as a user would.
"""

import dataclasses
import gzip
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import transformers
from safetensors.torch import load_file, save_file

import common
import experiment
import dapo
import grpo
import gspo
import models
import ppo
import rewards

SCRIPTS = {"grpo": grpo, "dapo": dapo, "gspo": gspo, "ppo": ppo}
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())

GOOD = b'{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n'
ROWS = b"".join(GOOD.replace(b"1 + 1?", b"%d + 1?" % i) for i in range(20))  # no question twice
NO_GOLD = b'{"question": "What is love?"}\n'
LOOSE = b"".join(NO_GOLD.replace(b"love", b"love %d" % i) for i in range(20))

SHORT = ("--data rows.jsonl --cold_start 0 --steps 1 --prompts_per_step 2 --minibatches 1 "
         "--max_new_tokens 16 --eval_size 2").split()  # trains for one step on next to nothing


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Where the tiny models of these tests go, instead of the user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch, cache, signals):
    """Each test has a working folder of its own, which holds a sound data file."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(ROWS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def signals():
    """A command listens to Ctrl-C in its own way: give pytest its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def parse(script, *argv):
    """The settings that a command line gives."""
    return experiment.parse_args(script.Config, script.TINY, [str(a) for a in argv])


@pytest.fixture
def refused(capsys):
    """refused(script, *argv): the one line that the command ends with."""
    def refused(script, *argv):
        with pytest.raises(SystemExit) as stop:
            script.train(parse(script, *argv))
        assert stop.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, "\n".join(lines)
        assert lines[0].startswith("error: ")
        return lines[0]

    return refused


# --- the flags -----------------------------------------------------------------------------------

COMMON = """
    model data question_column answer_column skip_unusable out_dir seed resume steps
    prompts_per_step group_size max_prompt_len max_new_tokens
    temperature rollout_batch reward reward_model lr lr_warmup max_grad_norm minibatches epochs
    micro_tokens cold_start cold_batch cold_start_lr dtype device gradient_checkpointing eval_every
    eval_size test_size save_every keep samples wandb
""".split()
OWN = {
    "grpo": "clip_eps beta",
    "dapo": "clip_low clip_high dynamic_sampling max_gen_rounds token_mean overlong_buffer",
    "gspo": "clip_low clip_high",
    "ppo": "clip_eps kl_coef kl_target kl_horizon gamma lam bootstrap critic critic_lr value_clip "
           "entropy_coef",
}


def flags(script):
    """{name: field} of a script's Config."""
    return {field.name: field for field in dataclasses.fields(script.Config)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_are_the_common_ones_and_a_few_own(name):
    """Who knows one script knows the others: what is common comes in the same order, too."""
    names = list(flags(SCRIPTS[name]))
    assert [n for n in names if n in COMMON] == COMMON
    assert [n for n in names if n not in COMMON] == OWN[name].split()


@every_script
@pytest.mark.parametrize("name", COMMON)
def test_common_flags_mean_the_same(script, name):
    """Type, range and help; PPO alone has use for a single answer per question."""
    mine, theirs = flags(script)[name], flags(grpo)[name]
    assert mine.type == theirs.type
    if (script, name) != (ppo, "group_size"):
        assert mine.metadata == theirs.metadata


@every_script
def test_every_flag_says_what_it_is_for(script):
    for name, field in flags(script).items():
        assert len(field.metadata["help"]) > 10, name


@every_script
def test_every_number_has_a_range(script):
    for name, field in flags(script).items():
        if field.type in (int, float):
            bounds = field.metadata["metavar"]
            assert re.fullmatch("[<>]=? [0-9.]+(, [<>]=? [0-9.]+)?", bounds), name


@every_script
def test_every_tiny_override_is_a_flag(script):
    assert script.TINY.keys() <= flags(script).keys()


# --- values out of range -------------------------------------------------------------------------

def bounds(field):
    """"> 0, <= 1" -> [(">", 0.0), ("<=", 1.0)]"""
    pairs = (bound.split() for bound in field.metadata["metavar"].split(", "))
    return [(sign, float(limit)) for sign, limit in pairs]


def number(field, value):
    """As one would type it: an int flag does not take 1.0."""
    return str(int(value)) if field.type is int else str(value)


NUMBERS = [(name, flag) for name, script in SCRIPTS.items() for flag, field in flags(script).items()
           if field.type in (int, float)]


@pytest.mark.parametrize("name, flag", NUMBERS, ids=[f"{n}-{f}" for n, f in NUMBERS])
def test_numbers_out_of_range(refused, name, flag):
    """One step beyond each bound, words, and for fractions what is no number at all."""
    field = flags(SCRIPTS[name])[flag]
    bad = ["", "many", "1,5"] + (["0.5", "1e3"] if field.type is int else ["nan", "inf", "-inf"])
    for sign, limit in bounds(field):
        beyond = 1 if field.type is int else 1e-3
        away = -beyond if sign[0] == ">" else beyond
        bad += [number(field, limit + away)] + ([number(field, limit)] if len(sign) == 1 else [])
    for value in bad:
        line = refused(SCRIPTS[name], f"--{flag}={value}")
        assert re.search(rf"--{flag}\b", line), line


@pytest.mark.parametrize("name, flag", NUMBERS, ids=[f"{n}-{f}" for n, f in NUMBERS])
def test_numbers_on_a_closed_bound(name, flag):
    field = flags(SCRIPTS[name])[flag]
    for sign, limit in bounds(field):
        if sign in (">=", "<="):
            value = number(field, limit)
            others = ["--minibatches=1", *(["--overlong_buffer=2"] if name == "dapo" else [])]
            cfg = parse(SCRIPTS[name], *others, f"--{flag}={value}")
            assert getattr(cfg, flag) == limit


# --- wrong words ---------------------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("argv, culprit", [
    ("--stepz 3", "--stepz"),
    ("--step 3", "--step "),                                              # no abbreviations
    ("--max_new 3", "--max_new "),
    ("3", "3"),
    ("--steps", "--steps"),                                               # its value is missing
    ("--dtype float16", "--dtype"),
    ("--resume perhaps --out_dir x", "--resume"),
    ("--gradient_checkpointing 7", "--gradient_checkpointing"),
])
def test_unknown_words(refused, script, argv, culprit):
    assert culprit in refused(script, *argv.split())


@pytest.mark.parametrize("reward, culprit", [
    ("corect", "corect"),
    ("", "''"),
    ("correct+", "''"),
    ("correct,think_format", "correct,think_format"),
    ("2*correct+0.5*thinking", "thinking"),
    ("correct+correct", "twice"),
    ("x*correct", "'x'"),
    ("nan*correct", "'nan'"),
    ("1e999*correct", "'1e999'"),
])
def test_rewards_that_are_none(refused, reward, culprit):
    line = refused(grpo, "--reward", reward)
    assert culprit in line and "--reward" in line, line


# --- flags that contradict each other ------------------------------------------------------------

@every_script
@pytest.mark.parametrize("argv, words", [
    ("--reward model", "--reward_model"),
    ("--reward correct+0.5*model", "--reward_model"),
    ("--reward_model folder", "--reward model"),
    ("--minibatches 9 --prompts_per_step 2 --group_size 4", "--minibatches 9, --prompts_per_step"),
    ("--wandb project", "--wandb, pip install wandb"),
    ("--resume", "--resume, --out_dir"),
    ("--resume --out_dir nothing", "--resume, nothing"),
])
def test_combinations(refused, script, argv, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    line = refused(script, *SHORT, *argv.split())
    for word in words.split(", "):
        assert word in line, line


@pytest.mark.parametrize("data", ["words", "rows.jsonl"])
@pytest.mark.parametrize("cold_start", [0, 2])
def test_prompts_shorter_than_any_question(refused, data, cold_start):
    argv = ["--data", data, "--cold_start", cold_start, "--max_prompt_len", 1]
    line = refused(grpo, *SHORT, *argv)
    assert "--max_prompt_len 1" in line and data in line


def test_overlong_buffer_longer_than_an_answer(refused):
    line = refused(dapo, "--overlong_buffer", 9, "--max_new_tokens", 8)
    assert "--overlong_buffer" in line and "--max_new_tokens 8" in line


def test_overlong_buffer_as_long_as_an_answer():
    assert parse(dapo, "--overlong_buffer", 8, "--max_new_tokens", 8).overlong_buffer == 8


def test_kl_target_without_a_kl(refused):
    """The weight is steered by factors: from 0 it never moves."""
    line = refused(ppo, *SHORT, "--kl_coef", 0, "--kl_target", 0.1)
    assert "--kl_target" in line and "--kl_coef" in line


# --- data files ----------------------------------------------------------------------------------

@pytest.mark.parametrize("content, words", [
    (b"", "no rows"),
    (b"\n \n", "no rows"),
    (bytes(range(256)), ""),
    (b"\x1f\x8b\x08\x00" + bytes(20), ""),                                # gzip
    (GOOD.decode().encode("utf-16"), ""),
    (GOOD * 2 + b"{\n", "line 3"),
    (GOOD * 2 + b"question,answer\n", "line 3"),
    (GOOD + b"\n\n" + b"[]\n", "line 4"),                                 # blank lines count
    (GOOD + b"null\n", "line 2"),
    (GOOD + b'"question"\n', "line 2"),
    (GOOD + b'{"problem": "What is 1 + 1?", "answer": "2"}\n', "line 2, 'question'"),
    (GOOD + b'{"question": 7, "answer": "#### 7"}\n', "line 2, 'question'"),
    (GOOD + b"[" * 10**5, "line 2"),
    (GOOD + b'{"question": "How many?", "answer": ' + b"9" * 5000 + b"}", "line 2"),
    (GOOD + b'{"question": "\\ud800", "answer": "#### 1"}', "line 2"),    # half a character
    (GOOD, "nothing left"),                                               # one row is held out
    (GOOD * 2 + NO_GOLD, "line 3, --reward correct"),
    (GOOD * 2 + b'{"question": "Who?", "answer": "He\\nand she"}\n', "line 3, --reward correct"),
    (GOOD * 2 + b'{"question": "Who?", "answer": null}\n', "line 3, --reward correct"),
], ids=["empty", "blank", "bytes", "gzip", "utf16", "cut", "csv", "list", "null", "string",
        "other-field", "number", "nested", "digits", "surrogate", "one-row", "no-answer",
        "no-gold", "null-gold"])
def test_data_files(refused, content, words):
    """The file is named and, where one is to blame, the line."""
    Path("bad.jsonl").write_bytes(content)
    line = refused(grpo, *SHORT, "--data", "bad.jsonl")
    for word in ["bad.jsonl", *filter(None, words.split(", "))]:
        assert word in line, line


@pytest.mark.parametrize("data", ["", "missing.jsonl", "no/folder", "empty", "x" * 300])
def test_data_that_is_not_there(refused, data):
    Path("empty").mkdir()
    assert f"--data {data}" in refused(grpo, *SHORT, f"--data={data}")


def test_a_fault_in_the_test_part_of_a_folder(refused):
    """It is read at the end of a run, but a fault shows at once."""
    Path("data").mkdir()
    Path("data/train.jsonl").write_bytes(ROWS)
    Path("data/test.jsonl").write_bytes(GOOD + b"{\n")
    assert f"{Path('data/test.jsonl')} line 2" in refused(grpo, *SHORT, "--data", "data")


def test_a_question_that_comes_twice_is_used_once(capsys):
    """Else it could be held out and trained on; the answer that comes last counts."""
    Path("twice.jsonl").write_bytes(GOOD + ROWS + ROWS)
    cfg = parse(grpo, *SHORT, "--data", "twice.jsonl")
    data = experiment.load_questions(cfg)
    asked = [row.question for row in [*data.train, *data.heldout]]
    assert len(set(asked)) == len(asked) == 20
    grpo.train(cfg)
    assert "21 rows of --data twice.jsonl repeat a question" in capsys.readouterr().out


@pytest.mark.parametrize("content", [
    ROWS.replace(b"\n", b"\r\n"), b"\n\n" + ROWS, b"\xef\xbb\xbf" + ROWS,
    ROWS + '{"question": "¿1 + 1? \u2028", "answer": "2"}'.encode(),
], ids=["crlf", "blank-lines", "byte-order-mark", "unicode"])
def test_data_files_that_are_fine(content):
    Path("good.jsonl").write_bytes(content)
    grpo.train(parse(grpo, *SHORT, "--data", "good.jsonl"))


# --- files as people have them -------------------------------------------------------------------

def problem(i):
    """A row in the words of MATH; its gold is in the box."""
    return {"problem": f"What is {i} + 1?", "solution": f"One more\nis $\\boxed{{{i + 1}}}$."}


PROBLEMS = [problem(i) for i in range(20)]
COLUMNS = "--question_column problem --answer_column solution".split()


def write_as(form, rows, stem):
    """Write rows as a file of this form; its path."""
    path, lines = Path(stem + form), "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif form == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(lines)
    return path


FORMS = [".jsonl", ".jsonl.gz", ".parquet", ".json"]
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """load(data, *flags): what a run would train on."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    def load(data, *flags):
        return experiment.load_questions(parse(grpo, *SHORT, "--data", data, *flags))

    return load


@every_form
def test_other_columns_in_other_files(load, form):
    data = load(write_as(form, PROBLEMS, "math"), *COLUMNS)
    got = {q.question: (q.gold, q.answer) for q in [*data.train, *data.heldout]}
    assert got == {row["problem"]: (str(i + 1), row["solution"]) for i, row in enumerate(PROBLEMS)}
    assert not data.notices and not data.test


@every_form
def test_parts_of_a_folder(load, form):
    """Held-out questions come from the training file."""
    Path("folder").mkdir()
    write_as(form, PROBLEMS, "folder/train")
    write_as(form, [problem(77)], "folder/test")
    data = load("folder", *COLUMNS)
    assert [q.gold for q in data.test] == ["78"] and len(data.train + data.heldout) == 20


@pytest.mark.parametrize("flags, named", [
    ([], "--question_column"), (COLUMNS[:2], "--answer_column"), (COLUMNS[2:], "--question_column"),
])
@every_form
def test_a_column_that_is_not_there(load, refused, form, flags, named):
    """The line tells what there is and how to name it."""
    line = refused(grpo, *SHORT, "--data", write_as(form, PROBLEMS, "math"), *flags)
    assert f"math{form}" in line and named in line and "problem, solution" in line


@pytest.mark.parametrize("answer", [True, ["18"], {"value": 18}], ids=repr)
@every_form
def test_answers_that_are_no_text(load, refused, form, answer):
    """Their repr, "['18']", could never be right."""
    rows = [{"question": f"Q{i}?", "answer": answer} for i in range(3)]
    line = refused(grpo, *SHORT, "--data", write_as(form, rows, "odd"), "--reward", "marker_format")
    assert f"odd{form} " in line and "'answer' is no text" in line and "3 of 3 rows" in line


@pytest.mark.parametrize("question", [None, 7])
@every_form
def test_questions_that_are_no_text(load, refused, form, question):
    rows = [{"question": question, "answer": "#### 18"}] * 3
    assert "'question' holds no text" in refused(
        grpo, *SHORT, "--data", write_as(form, rows, "odd"), "--skip_unusable")


UNUSABLE = [{"question": f"Q{i}?", "answer": "No\nidea" if i % 5 == 3 else f"#### {i}"}
            for i in range(40)]


@every_form
def test_the_first_row_without_a_gold(load, refused, form):
    """In the file's order, and how many there are."""
    line = refused(grpo, *SHORT, "--data", write_as(form, UNUSABLE, "some"))
    where = "line 4" if form == ".jsonl" else "row 4"
    assert f"some{form} {where}: " in line and "8 of 40 rows" in line and "--skip_unusable" in line


@every_form
def test_rows_without_a_gold_can_be_left_out(load, form):
    data = load(write_as(form, UNUSABLE, "some"), "--skip_unusable")
    assert {q.gold for q in data.train + data.heldout} == {str(i) for i in range(40) if i % 5 != 3}
    (notice,) = data.notices
    assert "left out" in notice and "8 of 40 rows" in notice


def test_what_is_left_out_is_said(capsys):
    write_as(".jsonl", UNUSABLE, "some")
    grpo.train(parse(grpo, *SHORT, "--data", "some.jsonl", "--skip_unusable"))
    assert "notice: left out: some.jsonl line 4" in capsys.readouterr().out


@every_form
def test_a_test_file_of_training_questions(load, form):
    """Here all of them; what is reached at the end would be taken for new."""
    Path("folder").mkdir()
    for part in ("train", "test"):
        write_as(form, PROBLEMS, f"folder/{part}")
    (notice,) = load("folder", *COLUMNS).notices
    assert "20 of the 20 test questions are in the training file" in notice


@pytest.mark.parametrize("form, content", [
    (".parquet", b"PAR1"), (".jsonl.gz", b"question"), (".jsonl.gz", gzip.compress(GOOD + b"{\n")),
    (".json", b"[1, 2"), (".csv", b""),
])
def test_files_that_are_broken(load, refused, form, content):
    Path(f"bad{form}").write_bytes(content)
    assert f"--data bad{form}" in refused(grpo, *SHORT, "--data", f"bad{form}")


def test_a_folder_without_a_train_part(load, refused):
    Path("folder").mkdir()
    write_as(".parquet", PROBLEMS, "folder/test")
    line = refused(grpo, *SHORT, "--data", "folder", *COLUMNS)
    assert "--data folder" in line and "train" in line and "test" in line


def test_a_million_rows_take_no_time(load):
    """A minute for 1,000,000; a fiftieth of it here. In seconds of the processor: it is shared."""
    solution = "She makes 9 * 2 = $<<9*2=18>>18 every day at the market.\n" * 4
    question = "How much does she make? " * 10
    rows = [{"question": f"{i}. {question}", "answer": f"{solution}#### {i}"}
            for i in range(20_000)]
    path, start = write_as(".jsonl", rows, "many"), time.process_time()
    load(path)
    assert time.process_time() - start < 60 / 50


# --- rows that need no gold ----------------------------------------------------------------------

@pytest.mark.parametrize("script", [grpo, gspo, ppo])
def test_no_gold_is_needed_by_a_rule_about_form(script):
    Path("loose.jsonl").write_bytes(LOOSE)
    script.train(parse(script, *SHORT, "--data", "loose.jsonl", "--reward", "marker_format"))


def test_no_gold_is_needed_by_a_reward_model(reward_model):
    Path("loose.jsonl").write_bytes(LOOSE)
    ppo.train(parse(ppo, *SHORT, "--data", "loose.jsonl", "--reward", "model",
                    "--reward_model", reward_model))


def test_dynamic_sampling_needs_golds(refused):
    """It keeps the groups that are neither all right nor all wrong: without golds none is."""
    Path("loose.jsonl").write_bytes(LOOSE)
    argv = [*SHORT, "--data", "loose.jsonl", "--reward", "marker_format"]
    assert "--no_dynamic_sampling" in refused(dapo, *argv)
    dapo.train(parse(dapo, *argv, "--no_dynamic_sampling"))


def test_a_cold_start_needs_answers(refused):
    """Rows without one would teach to say nothing at all."""
    Path("loose.jsonl").write_bytes(LOOSE)
    line = refused(grpo, *SHORT, "--cold_start", 2, "--data", "loose.jsonl",
                   "--reward", "marker_format")
    assert "--cold_start" in line and "loose.jsonl" in line


# --- models --------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    """A sound model folder."""
    return Path(models.save_folder(tmp_path / "model"))


@pytest.fixture
def reward_model(tmp_path):
    """A folder of a model with one number as its output."""
    config_class, shape = models.FAMILIES["qwen3"]
    config = config_class(**shape, vocab_size=models.VOCAB, num_labels=1, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "scorer")
    models.tiny_tokenizer().save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


def test_a_folder_that_is_sound(folder):
    grpo.train(parse(grpo, *SHORT, "--model", folder))


def without(*patterns):
    """A fault: files of a model folder are missing."""
    def spoil(folder):
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()
    return spoil


def holding(name, content):
    """A fault: a file holds something else."""
    return lambda folder: (folder / name).write_bytes(content)


def cut_short(folder):
    """A fault: a download that broke off."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def changed(name, change):
    """A fault: a tensor is another one (None: missing)."""
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        tensors = {k: v for k, v in tensors.items() if v is not None}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return spoil


def holding_json(name, **values):
    """A fault: a file of settings has other ones."""
    def spoil(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return spoil


TURNS = b"{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
ENDLESS = b"{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"


def few_rows(folder):
    """A fault: the tokenizer has more tokens than the model."""
    models.save_folder(folder, models.tiny_model(vocab_size=2))


def no_end(folder):
    """A fault: a tokenizer without an end token."""
    models.tiny_tokenizer(eos_token=None).save_pretrained(folder)


BROKEN = {
    "nothing": without("*"),
    "no-config": without("config.json"),
    "config-not-json": holding("config.json", b"{"),
    "config-a-list": holding("config.json", b"[]"),
    "config-empty": holding("config.json", b"{}"),
    "config-of-tomorrow": holding("config.json", b'{"model_type": "gpt9"}'),
    "config-no-causal-lm": holding("config.json", b'{"model_type": "t5"}'),
    "no-weights": without("*.safetensors"),
    "weights-empty": holding("model.safetensors", b""),
    "weights-cut-short": cut_short,
    "a-tensor-missing": changed("model.layers.0.mlp.up_proj.weight", lambda x: None),
    "a-tensor-too-short": changed("model.norm.weight", lambda x: x[:7].clone()),
    "a-tensor-not-finite": changed("model.norm.weight", lambda x: x * float("nan")),
    "no-tokenizer": without("*token*", "*.jinja"),
    "tokenizer-broken": holding("tokenizer.json", b"{"),
    "tokenizer-too-large": few_rows,
    "no-end-token": no_end,
    "template-broken": holding("chat_template.jinja", b"{% for m in messages %}"),
    "template-refuses": holding("chat_template.jinja", b"{{ raise_exception('not me') }}"),
    "template-is-deaf": holding("chat_template.jinja", b"hello"),
    "template-type": holding("chat_template.jinja", b"{{ 1 + 'a' }}"),
    "template-zero": holding("chat_template.jinja", b"{{ 1 / 0 }}"),
    "template-range": holding("chat_template.jinja", b"{% for i in range(10**9) %}{% endfor %}"),
    "template-recursion": holding("chat_template.jinja",
                                  b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "template-endless": holding("chat_template.jinja", ENDLESS),
    "template-endless-prompt": holding("chat_template.jinja", TURNS + b"{% if add_generation_prompt"
                                       b" %}" + ENDLESS + b"{% endif %}"),
    "template-named": holding_json("tokenizer_config.json", chat_template=[
        {"name": "tools", "template": TURNS.decode()}]),
    "template-a-number": holding_json("tokenizer_config.json", chat_template=7),
    "template-of-parts": holding("chat_template.jinja", TURNS.replace(
        b"m.content", b"m.content[0]['text']")),
    "template-of-answers": holding("chat_template.jinja", b"{% for m in messages if m.role != "
                                   b"'user' %}{{ m.content }}{% endfor %}"),
    **{f"config-{key}-{value}"[:40]: holding_json("config.json", **{key: value}) for key, value in [
        ("hidden_size", "large"), ("num_hidden_layers", -1), ("num_attention_heads", 0),
        ("vocab_size", None), ("vocab_size", 1.5), ("max_position_embeddings", "many"),
        ("rope_parameters", [1]), ("rope_parameters", {"rope_type": "spiral"}),
        ("layer_types", ["full"]), ("hidden_act", "warp"), ("model_type", ["qwen3"]),
        ("dtype", "float7"), ("attn_implementation", "wormhole"), ("eos_token_id", "end"),
        ("quantization_config", {"quant_method": "none"}), ("quantization_config", 4),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("tie_word_embeddings", "no"), ("text_config", 3),
    ]},
    "generation-a-list": holding("generation_config.json", b"[]"),
    "generation-not-json": holding("generation_config.json", b"{"),
    **{f"generation-{key}-{value}": holding_json("generation_config.json", **{key: value})
       for key, value in [("eos_token_id", "end"), ("eos_token_id", [[1]]), ("eos_token_id", 1.5),
                          ("eos_token_id", 10**9)]},
}


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN.keys())
def test_broken_model_folders(refused, folder, fault, monkeypatch):
    """Above all a model must never be completed with random weights in silence."""
    monkeypatch.setattr(common, "TEMPLATE_SECONDS", 0.3)
    fault(folder)
    assert str(folder) in refused(grpo, *SHORT, "--model", folder)


def test_an_old_transformers_is_refused(refused, monkeypatch):
    monkeypatch.setattr(experiment.transformers, "__version__", "5.9.1")
    assert "transformers 5.9.1" in refused(grpo, *SHORT)


@pytest.mark.parametrize("attention", ["org/wormhole", {"": "org/a@main:f"}])
def test_code_on_the_hub_is_refused(refused, folder, reward_model, attention):
    """By us, not by the net's absence: with a net, transformers would fetch and run it."""
    for place, flags in (folder, ["--model"]), (reward_model, ["--reward=model", "--reward_model"]):
        holding_json("config.json", attn_implementation=attention)(place)
        assert "is code on the hub" in refused(grpo, *SHORT, *flags, place)
    assert "is code on the hub" in refused(ppo, *SHORT, "--critic", folder)
    assert os.environ["USE_HUB_KERNELS"] == "NO"  # the layers' own kernels


@pytest.mark.parametrize("file, remedy", [
    ("adapter_config.json", "merge_and_unload"), ("model.Q4_K_M.gguf", "it was made from"),
    ("model_index.json", "diffusion"), ("train.jsonl", "for --data"),
    ("snapshots/a1b2/config.json", f"{Path('it/snapshots/a1b2')}"),
    ("step-000020/config.json", f"{Path('it/step-000020')}"),
    ("model.safetensors", "copy config.json"), ("readme.txt", "holds no config.json"),
])
def test_folders_of_another_kind(refused, file, remedy):
    """The line says what to do with that kind of folder."""
    Path("it", file).parent.mkdir(parents=True)
    Path("it", file).write_text("{}")
    line = refused(grpo, *SHORT, "--model", "it")
    assert "--model it: " in line and remedy in line


@pytest.mark.parametrize("fault, remedy", [
    ("no-weights", "copy its safetensors files"), ("weights-cut-short", "damaged; copy them again"),
    ("a-tensor-missing", "copy all of its"), ("a-tensor-too-short", "of two models"),
    ("config-no-causal-lm", "not a decoder-only"), ("generation-not-json", "mend its generation_"),
    ("config-of-tomorrow", "transformers"), ("config-hidden_size-large", "mend its config.json"),
])
def test_the_remedy_fits_the_fault(refused, folder, fault, remedy):
    BROKEN[fault](folder)
    assert remedy in refused(grpo, *SHORT, "--model", folder)


def test_the_model_is_named_before_the_data(refused, monkeypatch):
    """Both are missing; the data has a default that nobody typed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused(grpo, "--model", "nobody/nothing")
    assert "nobody/nothing" in line and "gsm8k" not in line


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "a/b/c"])
def test_model_that_is_not_there(refused, name):
    assert f"--model {name}" in refused(grpo, *SHORT, "--model", name)


def test_a_run_is_not_its_model(refused, run_of_grpo):
    """Its folder has a config.json, too, of another kind; the model is in final/."""
    assert str(Path("final")) in refused(grpo, *SHORT, "--model", run_of_grpo)


def test_a_temperature_that_is_too_low_to_divide_by(refused):
    assert "--temperature" in refused(grpo, *SHORT, "--temperature", 1e-39)


def test_answers_longer_than_the_model_has_positions(refused, tmp_path):
    """GPT-2 has learned positions: beyond the last one it can't count."""
    models.save_folder(tmp_path / "gpt2", models.tiny_model("gpt2", n_positions=64))
    line = refused(grpo, *SHORT, "--model", "gpt2", "--max_new_tokens", 60)
    assert "--max_new_tokens" in line and "64" in line


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder"])
@pytest.mark.parametrize("script, flag, argv", [
    (grpo, "--reward_model", ["--reward", "model"]), (ppo, "--critic", []),
])
def test_other_models_that_are_not_there(refused, script, flag, argv, name):
    """The flag that is named is the one to mend, and the run's folder is still free."""
    line = refused(script, *SHORT, "--out_dir", "run", *argv, flag, name)
    assert f"{flag} {name}" in line
    script.train(parse(script, *SHORT, "--out_dir", "run"))


@pytest.mark.parametrize("fault", ["two-labels", "weights-empty", "no-tokenizer", "template-zero",
                                   "template-endless", "a-tensor-missing"])
def test_broken_reward_models(refused, reward_model, fault, monkeypatch):
    monkeypatch.setattr(common, "TEMPLATE_SECONDS", 0.3)
    if fault == "two-labels":
        config = transformers.AutoConfig.from_pretrained(reward_model, num_labels=2)
        other = transformers.AutoModelForSequenceClassification.from_config(config)
        other.save_pretrained(reward_model)
    else:
        BROKEN[fault](reward_model)
    line = refused(grpo, *SHORT, "--reward", "model", "--reward_model", reward_model)
    assert f"--reward_model {reward_model}" in line


def test_a_reward_model_with_too_few_positions(refused, reward_model):
    """Before the first step, not at the first long answer."""
    config = json.loads((reward_model / "config.json").read_text())
    (reward_model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    line = refused(grpo, *SHORT, "--reward", "model", "--reward_model", reward_model)
    assert f"--reward_model {reward_model}" in line and "40 positions" in line


def test_a_text_too_long_for_the_reward_model(refused, reward_model, monkeypatch):
    """Its tokenizer may need more tokens than the policy's."""
    def too_long(model, questions, texts):
        raise ValueError("99 tokens to score, the reward model has 64 positions")

    monkeypatch.setattr(rewards.RewardModel, "__call__", too_long)
    line = refused(grpo, *SHORT, "--reward", "model", "--reward_model", reward_model)
    assert "99 tokens" in line and "--max_new_tokens" in line


def test_a_step_without_a_group_is_said(folder, capsys):
    """At this temperature the answers of a group are one; the step trains on nothing."""
    dapo.train(parse(dapo, *SHORT, "--model", folder, "--temperature", 0.01, "--group_size", 2,
                     "--overlong_buffer", 0, "--max_gen_rounds", 1))
    assert "warning: step 1: no group was left to train on" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_no_number(refused, monkeypatch, value):
    """The reward is to blame, not --lr; the answer helps to mend it. In `think_format`'s place."""
    monkeypatch.setitem(rewards.REWARDS, "think_format", lambda *_: float(value))
    line = refused(grpo, *SHORT, "--reward", "correct+0.5*think_format", "--out_dir", "run")
    assert f"'think_format' gave {value} to the answer '" in line and "--lr" not in line


@pytest.mark.parametrize("answer", [None, ""])
def test_an_answer_that_is_none_is_not_taught(refused, answer):
    rows = [{"question": f"Q{i}", "answer": answer} for i in range(9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = refused(grpo, *SHORT, "--data", "rows.jsonl", "--reward", "marker_format",
                   "--cold_start", 1)
    assert "no answer to imitate" in line


def test_critic_with_another_tokenizer(refused, folder, tmp_path):
    """Its values would be of other texts."""
    tokenizer = models.tiny_tokenizer()
    tokenizer.add_tokens("another")
    other = models.save_folder(tmp_path / "critic", tokenizer=tokenizer)
    line = refused(ppo, *SHORT, "--model", folder, "--critic", other)
    assert f"--critic {other}" in line and "tokenizer" in line


# --- the folder of a run -------------------------------------------------------------------------

@pytest.fixture(scope="session")
def run_of_grpo(tmp_path_factory, cache):
    """A run that is over."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.chdir(out.parent)
        Path("rows.jsonl").write_bytes(ROWS)
        grpo.train(parse(grpo, *SHORT, "--out_dir", out))
    return out


@every_script
def test_a_run_is_not_overwritten(refused, script, run_of_grpo):
    before = (run_of_grpo / "metrics.csv").read_text()
    line = refused(script, *SHORT, "--out_dir", run_of_grpo)
    assert f"--out_dir {run_of_grpo}" in line and "--resume" in line
    assert (run_of_grpo / "metrics.csv").read_text() == before


@pytest.mark.parametrize("argv, culprit", [
    ("--lr 0.5", "--lr 0.5"),
    ("--seed 1", "--seed 1"),
    ("--beta 0.5", "--beta 0.5"),
    ("--model tiny-moe", "--model tiny-moe"),
    ("--prompts_per_step 3", "--prompts_per_step 3"),
])
def test_resume_with_other_settings(refused, run_of_grpo, argv, culprit):
    line = refused(grpo, "--resume", "--out_dir", run_of_grpo, *argv.split())
    assert culprit in line and "--resume" in line


def test_resume_with_the_same_settings(run_of_grpo):
    saved = json.loads((run_of_grpo / "config.json").read_text())["config"]
    cfg = parse(grpo, "--resume", "--out_dir", run_of_grpo, *SHORT)
    assert dataclasses.asdict(cfg) == saved | {"resume": True}


@pytest.mark.parametrize("script", [dapo, gspo, ppo])
def test_resume_with_another_script(refused, script, run_of_grpo):
    line = refused(script, "--resume", "--out_dir", run_of_grpo)
    assert str(run_of_grpo) in line and "grpo.py" in line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"config": 3}', b"\xff"])
def test_resume_with_a_damaged_config(refused, content):
    Path("run").mkdir()
    Path("run/config.json").write_bytes(content)
    assert "config.json" in refused(grpo, "--resume", "--out_dir", "run")


@pytest.mark.parametrize("out_dir", ["file", "file/run", "x" * 300, "/proc/run", "/proc"])
def test_out_dir_that_cannot_be_made(refused, out_dir):
    """/proc stands for a folder where nobody may write, not even root."""
    if out_dir.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    Path("file").touch()
    assert f"--out_dir {out_dir}" in refused(grpo, *SHORT, "--out_dir", out_dir)


def test_bad_input_leaves_nothing_behind(refused):
    """What can be checked before a run begins is: no folder is left for the next command to trip
    over, not even a numbered one."""
    refused(grpo, *SHORT, "--data", "missing.jsonl")
    refused(grpo, *SHORT, "--max_prompt_len", 1)
    refused(grpo, *SHORT, "--model", "./nothing")
    assert os.listdir() == ["rows.jsonl"]


# --- whose value counts --------------------------------------------------------------------------

@every_script
def test_a_flag_beats_tiny_which_beats_the_default(script):
    assert parse(script).steps == script.TINY["steps"] != script.Config.steps
    assert parse(script, "--steps", 7).steps == 7
    assert parse(script).keep == script.Config.keep
    assert parse(script, "--steps", script.Config.steps).steps == script.Config.steps


@every_script
@pytest.mark.parametrize("argv", [[], ["--model", "tiny"], ["--model=tiny-moe"]])
def test_tiny_settings_are_for_the_built_in_models(script, argv):
    cfg = dataclasses.asdict(parse(script, *argv))
    assert script.TINY.items() <= cfg.items()


@every_script
def test_tiny_settings_are_for_what_a_tiny_run_saved(script, run_of_grpo):
    """But the cold start was had: a second one would wipe out what was learned since."""
    cfg = dataclasses.asdict(parse(script, "--model", run_of_grpo / "final"))
    assert (script.TINY | {"cold_start": 0}).items() <= cfg.items()
    assert parse(script, "--model", run_of_grpo / "final", "--cold_start", 3).cold_start == 3


@every_script
@pytest.mark.parametrize("name", ["folder", "Qwen2.5-0.5B", "someone/tiny"])
def test_tiny_settings_are_for_no_other_model(script, name, folder):
    cfg = parse(script, "--model", folder if name == "folder" else name)
    default = script.Config(model=cfg.model)
    assert cfg == default


@every_script
def test_dashes_and_underscores(script):
    mixed = parse(script, "--max-new-tokens", 99, "--group_size", 4, "--eval-every=3")
    assert (mixed.max_new_tokens, mixed.group_size, mixed.eval_every) == (99, 4, 3)


@pytest.mark.parametrize("flag", ["--no_dynamic_sampling", "--no-dynamic-sampling",
                                  "--dynamic_sampling False", "--dynamic-sampling=no"])
def test_what_is_on_can_be_turned_off(flag):
    assert parse(dapo).dynamic_sampling
    assert not parse(dapo, *flag.split()).dynamic_sampling


@every_script
@pytest.mark.parametrize("model", ["tiny", "Qwen2.5-0.5B"])
def test_help_shows_the_defaults_that_apply(script, model, capsys, monkeypatch):
    """Every flag, what it is for, and the value it has if it is left out with this model."""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop:
        parse(script, "--model", model, "--help")
    assert not stop.value.code
    doc, _, rest = capsys.readouterr().out.partition("options:")
    assert script.__doc__.strip() in doc  # it opens with what the script is
    shown, cfg = " ".join(rest.split()), parse(script, "--model", model)
    headings = [line.strip(" #") for line in inspect.getsource(script.Config).splitlines()
                if line.startswith("    # ")]
    places = [shown.index(f" {heading}: --") for heading in headings]
    assert len(places) == 6 and places == sorted(places)
    for name, field in flags(script).items():
        dashed = name.replace("_", "-")
        assert dashed == name or f" --{dashed} " not in shown, name  # each is named once
        entry = shown.split(f" --{name} ", 1)[1]
        help, _, rest = entry.partition("(default: ")
        assert field.metadata["help"].replace("%%", "%") in help, name
        default = getattr(cfg, name) if name != "model" else script.Config.model
        assert rest.startswith(f"{default})"), name


# --- as a user would -----------------------------------------------------------------------------

def command(impl, cache, *argv):
    """Run a script in a process of its own, without a network."""
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache / "hub"),
                        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, impl / argv[0], *argv[1:]], env=env, timeout=300,
                          capture_output=True, text=True)


@pytest.mark.parametrize("argv, words", [
    ("grpo.py --step 3", "--step"),
    ("dapo.py --data words --model nobody/nothing", "nobody/nothing, offline, --model"),
    pytest.param("gspo.py --cold_start 0 --data gsm8k", "--data gsm8k, offline, .jsonl",
                 marks=pytest.mark.slow),
    ("ppo.py --data missing.jsonl", "missing.jsonl"),
])
def test_one_line_and_exit_status_2(impl, cache, argv, words):
    done = command(impl, cache, *argv.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words.split(", ")), done.stderr
