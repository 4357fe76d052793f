"""What surrounds the training: command line, questions, cold start, evaluation, the run's files.

No step needs any of it to be understood. In order: command line, questions, the built-in model and
the cold start, scoring and evaluation, model folders, the run (its folder and state), the log (its
numbers and words), and `set_up`, `begin` and `finish`, which the scripts call.
"""

import argparse
import copy
import csv
import hashlib
import inspect
import io
import itertools
import json
import math
import operator
import os
import random
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
import transformers
from filelock import FileLock, Timeout
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    HfArgumentParser,
)

import common
import rewards
from common import fail, rank, say

# --- command line --------------------------------------------------------------------------------

BUILTIN = ("tiny", "tiny-moe")
NO_JSON = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # damaged
MAY_CHANGE = {  # on --resume
    "out_dir", "resume", "steps", "save_every", "keep", "samples", "wandb", "device"}


def flag(default, help, allowed=""):
    """A dataclass field that is a command-line flag; `allowed` is its range, like "> 0, <= 1"."""
    metadata = {"help": help.replace("%", "%%")}
    return field(default=default, metadata=metadata | ({"metavar": allowed} if allowed else {}))


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action):  # --max_new_tokens, not --max-new-tokens too
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{action.option_strings[0]} {metavar}".strip()


class _Parser(HfArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the flags")

    def format_help(self):
        """The script's docstring, then its flags under the headings that Config gives them."""
        (config_class,) = self.dataclass_types
        self.description = sys.modules[config_class.__module__].__doc__
        actions, heading = {action.dest: action for action in self._actions}, None
        for line in inspect.getsource(config_class).splitlines():
            if line.startswith("    # "):
                heading = self.add_argument_group(line.strip(" #"))
            elif heading and line.strip().partition(":")[0] in actions:
                action = actions[line.strip().partition(":")[0]]
                heading._group_actions.append(action)
                self._optionals._group_actions.remove(action)
        return super().format_help()


def parse_args(config_class, tiny, argv=None):
    """Command line -> Config. A flag given by hand beats `tiny`, which beats the field's default.

    `tiny` holds the overrides of the built-in model: used when --model is tiny, tiny-moe or a
    folder that such a run saved. With --resume the run's own settings take the place of the
    defaults. Every value is checked against its field's range, then by `Config.check()`, which
    raises ValueError. Any fault ends the program with one line and exit status 2.
    """
    guard_output()
    if Version(transformers.__version__) < Version("5.24"):  # `cache=` had another name
        fail(f"transformers {transformers.__version__}: too old; pip install -r requirements.txt")
    parser = _Parser(
        config_class, allow_abbrev=False, usage="%(prog)s [--flag value ...]",
        formatter_class=_Help,
    )
    peek = _Parser(allow_abbrev=False, add_help=False)  # --model decides the defaults of --help
    peek.add_argument("--model", default=config_class.model)
    model = peek.parse_known_args(argv)[0].model
    if is_builtin(model):
        # A folder that a run saved has had its cold start.
        parser.set_defaults(**(tiny if model in BUILTIN else tiny | {"cold_start": 0}))
    cfg = config_class(**vars(parser.parse_args(argv)))
    if cfg.resume:
        parser.set_defaults(**dict.fromkeys(vars(cfg)))  # None: not given by hand
        given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
        cfg = _resumed(config_class, cfg, given)
    for f in fields(config_class):
        _check_range(f.name, getattr(cfg, f.name), f.metadata.get("metavar", ""))
    try:
        _check_common(cfg)
        cfg.check()
    except ValueError as error:
        fail(error)
    return cfg


def _check_range(name, value, allowed):
    tests = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
    if isinstance(value, float) and not math.isfinite(value):
        fail(f"--{name} {value}: must be a finite number")
    for bound in filter(None, allowed.split(", ")):
        sign, limit = bound.split()
        if not tests[sign](value, float(limit)):
            fail(f"--{name} {value}: must be {allowed}")


def _check_common(cfg):
    try:
        weights = rewards.parse_reward(cfg.reward)
    except ValueError as error:
        raise ValueError(f"--{error}")
    if ("model" in weights) != bool(cfg.reward_model):
        raise ValueError("--reward model and --reward_model NAME|DIR go together: give both")
    if cfg.out_dir and not cfg.resume and os.path.exists(Path(cfg.out_dir) / "config.json"):
        raise ValueError(f"--out_dir {cfg.out_dir} holds a run: add --resume or name another")
    for name, value in vars(cfg).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"--{name}: not UTF-8 in this locale; start with PYTHONUTF8=1 set, or "
                             "give it another name")
    if cfg.minibatches > cfg.prompts_per_step * cfg.group_size:
        raise ValueError(
            f"--minibatches {cfg.minibatches}: more than the {cfg.prompts_per_step} x "
            f"{cfg.group_size} answers of a step; lower it or raise --prompts_per_step"
        )
    if cfg.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise ValueError("--wandb needs a package: pip install wandb, or leave the flag out")


def _resumed(config_class, cfg, given):
    if not cfg.out_dir:
        fail("--resume needs --out_dir RUN: which run is to go on?")
    path = Path(cfg.out_dir) / "config.json"
    if not os.path.isfile(path):
        fail(f"--resume: {cfg.out_dir} holds no run (no config.json); start one without --resume")
    try:
        about = json.loads(path.read_bytes())
        script, saved = about["script"], dict(about["config"])
    except NO_JSON:
        fail(f"--resume: {path} is damaged; start a new run")
    if saved.keys() != {f.name for f in fields(config_class)}:
        fail(f"--resume: {cfg.out_dir} is a run of {script}.py, with other flags: resume it there")
    for f in fields(config_class):
        value, kind = saved[f.name], type(f.default)
        choices = get_args(f.type) or (value,)
        if type(value) not in ({int, float} if kind is float else {kind}) or value not in choices:
            fail(f"--resume: {path} is damaged: {f.name} is {value!r}; start a new run")
    for name, value in given.items():
        if name not in MAY_CHANGE and saved.get(name) != value:
            fail(f"--resume with --{name} {value}, but the run has {saved.get(name)}: leave it out")
    return config_class(**saved | {k: v for k, v in given.items() if k in MAY_CHANGE})


class _Output:
    """A stream whose reader may die (head, a closed ssh session, a full disk): the rest goes
    nowhere, and the run goes on."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, action, *text):
        try:
            action(*text)
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())


def guard_output():
    """From now on a terminal that dies, or was closed before the start, stops nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # None: closed by `>&-`
        if not isinstance(stream, _Output):
            setattr(sys, name, _Output(stream))


NO_MODEL = {  # what a folder without a config.json may hold, and what to do then
    "adapter_config.json": "merge the adapter into its base model (peft's merge_and_unload)",
    "model_index.json": "a diffusion pipeline, no language model",
    "*.gguf": "give the folder that it was made from",
    "*.jsonl": "data is for --data",
    "snapshots/*/config.json": "give that folder",  # in the hub's cache
    "*/config.json": "give that folder",
    "*.safetensors": "copy config.json and the tokenizer's files there, too",
}


def find_model(name, flag="model"):
    """--model -> what `from_pretrained` takes: a folder, or a hub name with its owner."""
    if os.path.isdir(name):
        if not (Path(name) / "config.json").is_file():
            for pattern, remedy in NO_MODEL.items():
                for found in sorted(Path(name).glob(pattern))[:1]:
                    fail(f"--{flag} {name}: no config.json there, but {found}: {remedy}")
            fail(f"--{flag} {name}: the folder holds no config.json, so no Hugging Face model")
        if (Path(name) / "metrics.csv").is_file():
            fail(f"--{flag} {name}: that is a run; its model is {Path(name) / 'final'}")
        for index in Path(name).glob("*.safetensors.index.json"):
            with suppress(*NO_JSON):  # from_pretrained will say what is wrong
                files = json.loads(index.read_bytes())["weight_map"].values()
                if any(Path(file).name != file for file in files):
                    fail(f"--{flag} {name}: {index.name} names files outside the folder")
        return name
    if name in BUILTIN:
        fail(f"--{flag} {name}: only --model may be built in; name a folder or a hub model")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        fail(f"--{flag} {name}: no such folder")
    return name if "/" in name else f"Qwen/{name}"


def is_builtin(name):
    """True for tiny, tiny-moe and folders that their runs saved (config.json says so)."""
    path = Path(name) / "config.json"
    if name in BUILTIN or not os.path.isfile(path):
        return name in BUILTIN
    try:
        return json.loads(path.read_bytes()).get("nanopo") in BUILTIN
    except NO_JSON:
        fail(f"--model {name}: config.json is not a JSON object")


# --- questions -----------------------------------------------------------------------------------

INSTRUCTION = "Reason step by step, then give the answer on a last line as: #### <number>"


@dataclass
class Question:
    """A row of data."""

    question: str
    answer: str  # the worked solution, "" without one
    gold: str = None  # its last number or LaTeX value; None: nothing can be right or wrong
    prompt_ids: list = None  # token ids of the whole prompt, set by `encode`
    opened: str = ""  # "<think>" where the prompt ends with it: the answer's first word


@dataclass
class Data:
    """The questions of a run. No question is in two of the three, unless a notice says so."""

    train: list
    heldout: list  # from the training file: what curves are drawn on
    test: list  # read once, at the end
    notices: list  # what of the files is not used, and other surprises, in words


def load_questions(cfg, needs_gold=""):
    """--data -> `Data`. Of a question that the training file repeats the last is used.

    needs_gold: what goes by right and wrong, so that every row must have a gold answer.
    """
    if rewards.NEEDS_GOLD & set(rewards.parse_reward(cfg.reward)):
        needs_gold = f"--reward {cfg.reward}"
    notices = []
    if cfg.data == "words":
        parts = [[(f"--data {cfg.data}", row) for row in part] for part in rewards.words_split()]
        train, heldout, test = (_usable(part, cfg, needs_gold, notices) for part in parts)
    else:
        rows, test = (_usable(part, cfg, needs_gold, notices) for part in _read_data(cfg.data))
        train = list({q.question: q for q in rows}.values())  # each question once
        if len(train) < len(rows):
            notices.append(f"{len(rows) - len(train)} rows of --data {cfg.data} repeat a question "
                           "and are left out")
        random.Random(0).shuffle(train)  # the same questions are held out for every seed
        size = min(cfg.eval_size, len(train) // 10 or 1)
        heldout, train = train[:size], train[size:]
    if not train:
        fail(f"--data {cfg.data}: nothing left to train on after holding out {len(heldout)} rows")
    known = {q.question for q in train + heldout}
    seen = sum(q.question in known for q in test)
    if seen:
        notices.append(f"{seen} of the {len(test)} test questions are in the training file, too: "
                       "what is reached on them at the end says little of new ones")
    return Data(train, heldout[: cfg.eval_size], test, notices)


def _usable(rows, cfg, needs_gold, notices):
    """(where, row) pairs in the order of their file -> `Question`s. Rows that no reward can check
    stop the program; with --skip_unusable they are left out, and `notices` says so."""
    questions, faults = [], []
    for where, row in rows:
        text, answer = row.get(cfg.question_column), row.get(cfg.answer_column)
        if not isinstance(text, str):
            fail(f"{where}: {cfg.question_column!r} holds no text; --question_column names another "
                 f"column of {', '.join(row)[:200]}")
        gold = rewards.gold_answer({"answer": answer})
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            found = type(answer).__name__
            faults.append(f"{where}: {cfg.answer_column!r} is no text or number, but a {found}")
        elif gold is None and needs_gold:
            faults.append(f"{where}: {cfg.answer_column!r} doesn't say what is right ('#### 18'), "
                          f"which {needs_gold} goes by; --answer_column names another column of "
                          f"{', '.join(row)[:200]}")
        else:
            questions.append(Question(text, "" if answer is None else str(answer), gold))
    if faults:
        told = f"{faults[0]} ({len(faults)} of {len(rows)} rows are so)"
        if not cfg.skip_unusable:
            fail(f"{told}; --skip_unusable leaves them out")
        notices.append(f"left out: {told}")
    return questions


def _read_data(name):
    """(training rows, test rows) of `gsm8k`, a file or a folder: (where, row) pairs, in order."""
    path = Path(name)
    if os.path.isfile(path):
        return _read_file(path), []
    if os.path.isdir(path) and (path / "train.jsonl").is_file():
        test = path / "test.jsonl"
        return _read_file(path / "train.jsonl"), _read_file(test) if test.is_file() else []
    if name != "gsm8k" and not os.path.isdir(path):
        fail(f"--data {name}: no such file or folder (built in: words, gsm8k)")
    parts = _load_dataset(name)
    if "train" not in parts:
        fail(f"--data {name}: has no part called train, only {', '.join(parts)}; name a file of it")
    return parts["train"], parts.get("test", [])


def _load_dataset(name):
    """{part: (where, row) pairs}, by `datasets`, of a folder, the hub, or one of the TABLES."""
    import datasets  # 1 s of imports, for these only

    datasets.disable_progress_bars()
    kind, file = "openai/gsm8k" if name == "gsm8k" else name, None
    if os.path.isfile(name):
        kind, file = TABLES[Path(name).suffix], name
    try:
        main = not file and "main" in datasets.get_dataset_config_names(kind)  # as GSM8K calls it
        parts = datasets.load_dataset(kind, "main" if main else None, data_files=file)
        parts = {part: list(enumerate(rows.to_list(), 1)) for part, rows in parts.items()}
    except Exception as error:  # a foreign file can make it raise anything
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        remedy = "" if file else "; offline, give a .jsonl file or a folder with train.jsonl"
        fail(f"--data {name}: can't be loaded{remedy} [{reason[:300]}]")
    return {part: [(f"{name if file else name + ' ' + part} row {number}", row)
                   for number, row in rows] for part, rows in parts.items()}


TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json"} | dict.fromkeys(
    (".gz", ".bz2", ".xz", ".zst"), "json")  # for `datasets`; what is compressed holds JSON lines


def _read_file(path):
    """(where, row) pairs of JSON lines, where a bad line stops the program, or of a table."""
    if path.suffix in TABLES:
        return _load_dataset(str(path))["train"]
    rows = []
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    rows.append((where, _json_row(line, where)))
    except (UnicodeDecodeError, OSError) as error:
        fail(f"{path}: not a readable text file ({error})")
    if not rows:
        fail(f"{path}: holds no rows; wants one JSON object a line with 'question' and 'answer'")
    return rows


def _json_row(line, where):
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError) as error:
        fail(f"{where}: not JSON ({str(error)[:100]})")
    if not isinstance(row, dict):
        fail(f"{where}: wants a JSON object with 'question' and 'answer', not {str(row)[:50]}")
    return row


def encode(tokenizer, rows, cfg, name="questions"):
    """Set each row's `prompt_ids` and what these have `opened`; drop (and count) the rows longer
    than --max_prompt_len."""
    builtin = cfg.data == "words" and is_builtin(cfg.model)
    instruction = "" if builtin else f"\n{INSTRUCTION}"
    for start in range(0, len(rows), 1000):
        part = rows[start : start + 1000]
        try:
            texts, ids = common.prompts(tokenizer, [row.question + instruction for row in part])
        except Exception as error:  # whatever a chat template meets in a question
            fail(f"--model {cfg.model}: its chat template fails at one of questions {start + 1} to "
                 f"{start + len(part)} ({error})")
        for row, text, prompt_ids in zip(part, texts, ids):
            row.prompt_ids = prompt_ids
            row.opened = "<think>" if text.rstrip().endswith("<think>") else ""
    kept = [row for row in rows if len(row.prompt_ids) <= cfg.max_prompt_len]
    if name and len(kept) < len(rows):
        say(f"notice: {len(rows) - len(kept)} of {len(rows)} {name} dropped, longer than "
            f"--max_prompt_len {cfg.max_prompt_len}")
    if rows and not kept:
        fail(f"--max_prompt_len {cfg.max_prompt_len}: no question of {cfg.data} is that short")
    return kept


def questions_at(rows, cursor, count, seed):
    """`count` rows from place `cursor` of an endless walk: each epoch shuffled anew, no repeats."""
    picked = []
    for place in range(cursor, cursor + count):
        epoch, i = divmod(place, len(rows))
        if not picked or i == 0:
            order = list(range(len(rows)))
            random.Random(f"{seed} {epoch}").shuffle(order)
        picked.append(rows[order[i]])
    return picked


# --- the built-in model and the cold start -------------------------------------------------------


def builtin_folder(cfg, train):
    """The folder of the tiny model after its cold start: made on first use, then cached.

    Called before the processes join: the first one to take the lock builds, the others find it.
    """
    # The key holds the code, too: the model that a bug in it has made must not outlive the bug.
    code = [Path(module.__file__).read_bytes() for module in (common, rewards)]
    code.append(Path(__file__).read_bytes())
    settings = [cfg.model, cfg.data, cfg.seed, cfg.cold_start, cfg.cold_batch,
                cfg.cold_start_lr or 20 * cfg.lr]
    made_by = [settings, cfg.eval_size, cfg.max_prompt_len, cfg.micro_tokens, code]
    if cfg.data != "words":  # those are made by the code
        made_by.append(train)
    text = repr([made_by, torch.__version__, transformers.__version__])
    folder = _cache_home() / f"{cfg.model}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with FileLock(f"{folder}.lock"):
        wrong = damage(folder)
        if wrong and folder.exists():
            say(f"warning: {folder} is not as it was written ({wrong}): made again")
        if wrong:
            say(f"making the {cfg.model} model and its cold start, once: {folder}")
            tokenizer = _tiny_tokenizer()
            common.seed_all(cfg.seed, "init")
            config = _tiny_config(cfg.model, tokenizer)
            model = AutoModelForCausalLM.from_config(config).to(common.device())
            lessons = cold_start_lessons(encode(tokenizer, train, cfg, ""), cfg)
            cold_start(model, tokenizer, lessons, cfg)
            check_law(common.Sampler(model, tokenizer, cfg))
            try:
                with whole_folder(folder) as temporary:
                    model.save_pretrained(temporary)
                    tokenizer.save_pretrained(temporary)
            except OSError as error:
                fail(f"{folder} can't be written: {error}; make room, or set XDG_CACHE_HOME")
    return str(folder)


def _tiny_config(name, tokenizer):
    shape = dict(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, intermediate_size=256, max_position_embeddings=2048,
        initializer_range=0.08,  # the usual 0.02 learns far slower at this size
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, nanopo=name,
    )
    if name == "tiny":  # not Qwen2: AutoTokenizer forces Qwen2's own tokenizer on that model type
        return transformers.Qwen3Config(**shape)
    return transformers.Qwen3MoeConfig(
        **shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )


def _tiny_tokenizer():
    """Words, runs of # and single symbols of the built-in questions and answers: 69 pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|#+|[\s\S]"), "isolated")
    corpus = [common.PLAIN_PROMPT.format("") + " wait\nwait 0123456789+-*=."]
    corpus += [f"Question: {r['question']}{r['answer']}" for r in sum(rewards.words_split(), [])]
    pieces = sorted({piece for text in corpus for piece, _ in split.pre_tokenize_str(text)})
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<eos>", "<unk>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _cache_home():
    """The user's cache folder, or a temporary one where that can't be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanopo"
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
        str(home).encode()  # or the locale can't spell it
    except (OSError, UnicodeEncodeError):
        say(f"notice: {home} can't be written to, using the temporary folder")
        home = Path(tempfile.gettempdir()) / f"nanopo-cache-{os.getuid()}"
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
        about = home.lstat()  # anyone may have made it, or a link: whose models would we load?
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            fail(f"{home} is not a folder of yours alone: remove it, or set XDG_CACHE_HOME")
    return home


def cold_start_lessons(rows, cfg):
    """Rows with an answer to imitate, in training order: the pupil's on the built-in problems
    (see `rewards.sloppy_pupil`), elsewhere the file's own worked solutions."""
    # A model that can count needs the form only, and a way to try again; a tiny one learns to
    # count from the same answers, and would be too sure of itself.
    faults = {} if is_builtin(cfg.model) else {"gives_up": 0.0, "again": 0.2}
    lessons = []
    for k, row in enumerate(questions_at(rows, 0, cfg.cold_start * cfg.cold_batch, cfg.seed)):
        if cfg.data == "words":
            rng = random.Random(f"pupil {cfg.seed} {k}")
            problem = {"question": row.question, "answer": row.answer}
            answer = rewards.sloppy_pupil(problem, rng, **faults)
        else:
            answer = rewards.without_annotations(row.answer)
            if not answer.strip():
                fail(f"--cold_start {cfg.cold_start}: a row of {cfg.data} has no answer to imitate")
        lessons.append(Question(row.question, answer, row.gold, row.prompt_ids))
    return lessons


def cold_start(model, tokenizer, lessons, cfg):
    """Supervised steps on `lessons`: token-mean cross-entropy, at most 20 steps of warm-up, then
    linear to a tenth of the learning rate. Without a right answer there is nothing to reinforce."""
    top = cfg.cold_start_lr or 20 * cfg.lr
    # beta2 0.99: with 0.999 the second moment still remembers the first steps at the end, and the
    # arithmetic is half learned, on some processors more and on some less.
    optimizer = common.make_optimizer(model, top, beta2=0.99)
    warmup = min(20, max(1, cfg.cold_start // 7))
    end, pad, quiet = turn_end(tokenizer), tokenizer.pad_token_id, rank() > 0 or None
    bar = tqdm(range(cfg.cold_start), "cold start", unit="step", disable=quiet, leave=False)
    spoke = time.perf_counter()
    for step in bar:
        if bar.disable and time.perf_counter() - spoke > 15:  # as in `Log.add`
            spoke = time.perf_counter()
            say(f"cold start: {step} of {cfg.cold_start} steps")
        rows = lessons[step * cfg.cold_batch :][: cfg.cold_batch]
        prompts, texts = [row.prompt_ids for row in rows], [row.answer for row in rows]
        answers = [[*tokenizer(t, add_special_tokens=False).input_ids, end] for t in texts]
        left, right = common.padded(prompts, pad), common.padded(answers, pad, left=False)
        batch = common.Batch(rows, texts, *left, *right)
        (minibatch,) = common.cut(batch, 1, cfg.micro_tokens)
        for micro in minibatch.micros:
            logp, _ = common.micro_logps(model, batch, micro, temperature=1.0, entropy="off")
            loss = -(logp * micro.mask).sum() / minibatch.tokens
            (loss * common.world()).backward()
        lr = top * min((step + 1) / warmup, 1 - 0.9 * step / cfg.cold_start)
        common.optimizer_step(model, optimizer, lr, max_grad_norm=0)  # clipping was seen to ruin it


def turn_end(tokenizer):
    """The token id that ends a lesson: the chat template's end of turn, else the end of text."""
    eos = tokenizer.eos_token_id
    return next((i for i in common.stop_ids(tokenizer, GenerationConfig()) if i != eos), eos)


# --- scoring and evaluation ----------------------------------------------------------------------


class Scorer:
    """--reward as a function: batch -> (rewards, correct), each (N,) float32.

    `correct` is 1 or 0, NaN where there is no gold answer. Rule rewards are computed by every rank
    for the whole batch; a reward model scores each rank's share, which is then gathered.
    """

    def __init__(self, cfg):
        self.weights, self.model = rewards.parse_reward(cfg.reward), None
        if cfg.reward_model:
            path = find_model(cfg.reward_model, "reward_model")
            dtype = common.compute_dtype(cfg.dtype)
            try:
                self.model = rewards.RewardModel(path, common.device(), dtype)
                with common.time_limit(common.TEMPLATE_SECONDS):
                    self.model.encode("question", "answer")  # its template may fail, or never end
            except Exception as error:  # a foreign folder can raise anything
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                fail(f"--reward_model {cfg.reward_model}: {reason}")
            limit = getattr(self.model.model.config, "max_position_embeddings", None)
            if limit and cfg.max_prompt_len + cfg.max_new_tokens > limit:
                fail(f"--reward_model {cfg.reward_model} has {limit} positions, fewer than "
                     f"--max_prompt_len {cfg.max_prompt_len} + --max_new_tokens "
                     f"{cfg.max_new_tokens}: lower them")

    def __call__(self, batch):
        golds, scores = [q.gold for q in batch.questions], None
        if self.model:
            questions = [q.question for q in common.my_share(batch.questions)]
            try:
                part = self.model(questions, common.my_share(batch.texts))
            except ValueError as error:
                fail(f"--reward_model: {error}; lower --max_new_tokens")
            scores = list(itertools.chain(*common.from_all_ranks(part)))
        turns = [q.opened + text for q, text in zip(batch.questions, batch.texts)]
        try:
            total = rewards.score(turns, golds, self.weights, scores)
        except ValueError as error:
            fail(f"{error}: nothing can be learned from that; mend the reward")
        right = []
        for text, gold in zip(batch.texts, golds):
            right.append(math.nan if gold is None else float(rewards.is_correct(text, gold)))
        where = common.device()
        return torch.tensor(total, device=where), torch.tensor(right, device=where)


def evaluate(sampler, questions, seed):
    """Answers to questions that have a gold: greedy, and one sample at the training temperature.

    Returns `eval_accuracy` (greedy, strict) with its Wilson interval `eval_low`, `eval_high`,
    `eval_lenient` (greedy, the last number counts) and `eval_sampled`; {} without any gold.
    """
    questions = [q for q in questions if q.gold is not None]
    if not questions:
        return {}
    common.seed_all(seed, "evaluate", rank())
    counts = torch.zeros(3, device=common.device())
    mine = common.my_share(questions)
    for greedy in (True, False) if mine else ():
        tokens, _ = sampler.generate(*sampler.encode(mine), greedy=greedy)
        texts = sampler.decode(tokens, common.response_mask(tokens, sampler.stop_ids))
        strict = sum(rewards.is_correct(t, q.gold) for t, q in zip(texts, mine))
        lenient = sum(rewards.is_correct(t, q.gold, lenient=True) for t, q in zip(texts, mine))
        counts += counts.new_tensor([strict, lenient, 0] if greedy else [0, 0, strict])
    n = len(questions)
    strict, lenient, sampled = common.sum_over_ranks(counts).tolist()
    low, high = wilson(strict, n)
    return {
        "eval_accuracy": strict / n, "eval_low": low, "eval_high": high,
        "eval_sampled": sampled / n, "eval_lenient": lenient / n,
    }


def wilson(right, n, z=1.96):
    """(low, high): Wilson's 95 % interval of a share of `right` out of `n`."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = right / n, z * z / n
    middle, half = p + z2 / 2, z * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    return (middle - half) / (1 + z2), (middle + half) / (1 + z2)


@torch.no_grad()
def expert_entropy(model, batch):
    """How evenly the experts are used: entropy of the share of tokens per expert over its maximum,
    in [0, 1], mean over layers, on the batch's first rows; None where no layer shows its choice."""
    first = common.micro_of(batch, torch.arange(min(8, len(batch)), device=batch.tokens.device))
    ids, mask = common.micro_input(batch, first)
    real, evenness = mask.reshape(-1).bool(), []

    def count(experts, args, kwargs):  # what the router chose, not the largest of its logits
        for chosen in [*args, *kwargs.values()]:
            if torch.is_tensor(chosen) and chosen.dtype == torch.int64 and len(chosen) == len(real):
                n = experts.num_experts
                share = torch.bincount(chosen[real].flatten(), minlength=n) / chosen[real].numel()
                evenness.append(torch.special.entr(share).sum() / math.log(n))

    hooks = [module.register_forward_pre_hook(count, with_kwargs=True)
             for name, module in model.named_modules()
             if name.endswith(".experts") and getattr(module, "num_experts", 1) > 1]
    if hooks:
        model(input_ids=ids, attention_mask=mask, position_ids=common.positions(mask),
              use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(evenness).mean().item() if evenness else None


# --- model folders -------------------------------------------------------------------------------


def save_model(sampler, model, folder, final=False):
    """Write `model`'s whole weights in Hugging Face form, with the tokenizer; rank 0 writes.

    float32, or, for the `final` policy, the dtype that it came in. The policy's generation_config
    is the one that it came with, not the sampler's clean one.
    """
    dtype = getattr(torch, model.config.loaded_dtype) if final else torch.float32
    once = {key for key, _ in [*model.named_parameters(), *model.named_buffers()]}  # tied: one name
    tensors = {}
    for key, value in model.state_dict().items():
        if key in once:  # one at a time; gathering is a collective
            value = common.full(value.to(dtype) if value.is_floating_point() else value)
            if rank() == 0:
                tensors[key] = value.cpu().contiguous()
    if rank() > 0:
        return
    model.save_pretrained(folder, state_dict=tensors)
    if model is sampler.policy:
        sampler.loaded_generation_config.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.dtype = dtype  # save_pretrained() notes the float32 of the master weights
    if final:
        del config.loaded_dtype  # which is for a resumed run
    config.save_pretrained(folder)
    sampler.tokenizer.save_pretrained(folder)


MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


def save_optimizer(model, optimizer, folder, name):
    """Write AdamW's state as whole tensors, a file a moment: rank 0, which writes, never holds two.
    """
    for moment in MOMENTS:
        tensors = {}
        for key, parameter in model.named_parameters():
            if parameter in optimizer.state:  # not before its first step
                value = common.full(optimizer.state[parameter][moment])  # a collective
                if rank() == 0:
                    tensors[key] = value.cpu().contiguous()
        if rank() == 0:
            save_file(tensors, folder / f"{name}.{moment}.safetensors")


def load_optimizer(model, optimizer, folder, name):
    """The reverse of `save_optimizer`, for any number of processes: each takes its part of one
    tensor after the other."""
    for moment in MOMENTS:
        with safe_open(folder / f"{name}.{moment}.safetensors", "pt") as file:
            saved = set(file.keys())  # none if nothing was trained on so far
            for key, parameter in model.named_parameters():
                if key in saved:
                    value = file.get_tensor(key)
                    value = value if moment == "step" else common.share_like(value, parameter)
                    optimizer.state[parameter][moment] = value


@contextmanager
def whole_folder(folder):
    """Write a folder under a temporary name, renamed when complete and on the disk: it is never
    half there, also after a power cut. Its manifest.json lets `damage` tell what changes later.

    Every rank may enter; rank 0 makes and renames, and the others leave after it.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    try:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
            temporary.mkdir(parents=True)
        yield temporary
        if rank() == 0:
            _seal(temporary, folder)
    except Exception as error:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        if "(os error " in str(error):  # libraries in Rust have no better class for it
            raise OSError(str(error)) from error
        raise
    if common.world() > 1:
        dist.barrier()


def _seal(temporary, folder):
    paths = list(temporary.rglob("*"))
    files = {str(path.relative_to(temporary)): [path.stat().st_size, _digest(path)]
             for path in paths if path.is_file()}
    manifest = temporary / "manifest.json"
    manifest.write_text(json.dumps({"folder": folder.name, "files": files}, indent=1))
    for path in [*paths, manifest, temporary]:
        _to_disk(path)
    old = folder.with_name(f".tmp-old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    _to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def save_whole(sampler, folder, final=False):
    """`save_model` of the policy, as a `whole_folder`."""
    with whole_folder(folder) as temporary:
        save_model(sampler, sampler.policy, temporary, final)


def damage(folder):
    """What is not as `whole_folder` wrote it, in a few words; "" if all is. More files may lie
    beside its own."""
    if not folder.is_dir():
        return "no such folder"
    try:
        about = json.loads((folder / "manifest.json").read_bytes())
        if about["folder"] != folder.name:
            return f"it is a copy of {about['folder']}"
        for name, (size, digest) in about["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _digest(path) != digest:
                return f"{name} has changed"
    except NO_JSON:
        return "its manifest.json can't be read"
    return ""


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path):
    """Return when a file, or a folder's list of names, would survive a power cut."""
    if os.name == "nt":  # has no such call for folders
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def replace_file(path, data):
    """Write a file of these bytes: the old or the new one is there, whole, at any time."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(data)
    _to_disk(temporary)
    os.replace(temporary, path)
    _to_disk(path.parent)


def append(path, text):
    """Append a text whole or not at all: a full disk would cut it anywhere."""
    data = text.encode()
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise


def set_aside(path):
    """Give what can't be read another name, NAME.bak, so that nothing is lost; returns it."""
    aside = path.with_name(f"{path.name}.bak")
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}.bak")
    return path.rename(aside)


def checkpoints(folder):
    """A run's checkpoints, the oldest first; whatever else lies beside them is none."""
    found = [path for path in (folder / "checkpoints").glob("step-*")
             if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


# --- the run: its folder and its state -----------------------------------------------------------


HOLD_SECONDS = 30  # between two tries to write to a full disk
STOPPING = b"\nstopping: this step is finished and saved first; once more stops at once\n"


class Run:
    """A run's folder, and what its next step depends on besides weights and optimizers: `step` and
    `updates` done, the place in the questions (`cursor`), and `kept`, a dictionary for the rest.
    All of it is saved with every checkpoint."""

    def __init__(self, cfg, script):
        self.cfg, self.script = cfg, script
        self.optimizers, self.signals = {}, []
        self.evaluates_only = cfg.steps == 0 and not cfg.out_dir  # leaves nothing behind
        self.checkpoint = None
        self.step = self.updates = self.cursor = 0
        self.kept, self.logs = {}, {}
        if cfg.resume:
            self.folder = Path(cfg.out_dir)
            if rank() == 0:
                self._lock()
                self._find_checkpoint()
            self.checkpoint = common.from_all_ranks(self.checkpoint)[0]
        if self.checkpoint:
            self.kept = json.loads((self.checkpoint / "state.json").read_text())
            self.step, self.cursor = self.kept.pop("step"), self.kept.pop("cursor")
            self.updates, self.logs = self.kept.pop("updates"), self.kept.pop("logs")
        self.saved_step = self.step
        if self.step > cfg.steps:
            fail(f"--steps {cfg.steps}: {self.folder} has done {self.step}; name a larger number")

    def open(self):
        """Claim a folder, unless the run is resumed and has its own: --out_dir, or the first of
        runs/grpo-1, ... that is free. Until `begin` nothing in it makes it a run."""
        if self.cfg.resume:
            return
        made = self._make_folder() if rank() == 0 else None
        self.folder = Path(common.from_all_ranks(made)[0])
        if rank() == 0:
            self._lock()
            if (self.folder / "config.json").exists():  # since the command line was read
                fail(f"--out_dir {self.folder} holds a run: add --resume or name another")

    def advance(self):
        """A rollout step is done."""
        self.step += 1

    def due(self, every):
        """True each `every` steps and on the last one."""
        return self.step % every == 0 or self.step == self.cfg.steps

    def next_questions(self, questions):
        """The next P questions of an endless walk over the training questions."""
        count = self.cfg.prompts_per_step
        self.cursor += count
        return questions_at(questions, self.cursor - count, count, self.cfg.seed)

    def optimizer(self, model, lr, name="optimizer"):
        """An AdamW for `model`, in its checkpointed state when the run is resumed."""
        optimizer = common.make_optimizer(model, lr)
        self.optimizers[name] = (model, optimizer)
        if self.checkpoint:
            load_optimizer(model, optimizer, self.checkpoint, name)
        return optimizer

    def save(self, sampler):
        """Write checkpoints/step-N: models in Hugging Face form, optimizers, state.

        Collective: rank 0 gathers and writes. The folder is complete or absent, never half there.
        """
        folder = self.folder / "checkpoints" / f"step-{self.step:06d}"
        self.hold(lambda: self._write(folder, sampler), folder)
        if rank() == 0:
            for old in checkpoints(self.folder)[: -self.cfg.keep]:
                gone = old.rename(old.with_name(f".tmp-{old.name}"))  # never half there
                shutil.rmtree(gone, ignore_errors=True)  # what stays, the next --resume sweeps up
        self.saved_step = self.step

    def _write(self, folder, sampler):
        with whole_folder(folder) as temporary:
            for name, (model, optimizer) in self.optimizers.items():
                critic = model is not sampler.policy
                save_model(sampler, model, temporary / "critic" if critic else temporary)
                save_optimizer(model, optimizer, temporary, name)
            if rank() == 0:
                logs = {name: _length_and_digest((self.folder / name).read_bytes())
                        for name in LOGS if (self.folder / name).exists()}
                state = {"step": self.step, "cursor": self.cursor, "updates": self.updates,
                         "logs": logs}
                (temporary / "state.json").write_text(json.dumps(state | self.kept))

    def hold(self, write, path):
        """Call `write` until it works: a full disk holds the run, in memory, until there is room
        or a signal to stop. Several processes can't wait for one another: they stop."""
        for attempt in itertools.count():
            try:
                return write()
            except OSError as error:
                reason = error.strerror or error
                free = shutil.disk_usage(self.folder).free / 1e6
                text = f"{path} can't be written: {reason} ({free:,.0f} MB free)"
            if self.signals or common.world() > 1:
                fail(f"{text}; --resume goes on from step {self.saved_step}")
            if attempt == 0:
                say(f"warning: {text}; make room: it is tried until it works, or Ctrl-C")
            until = time.time() + HOLD_SECONDS
            while time.time() < until and not self.signals:
                time.sleep(1)

    def check_room(self, models):
        """Stop now if the disk can't hold what the run will write: a parameter takes 4 bytes in
        each checkpoint, AdamW's state of it 8, and `final` is as large as the weights."""
        sizes = [12 * sum(p.numel() for p in model.parameters()) for model in models]
        saves = -(-(self.cfg.steps - self.step) // self.cfg.save_every)  # rounded up
        saves = max(0, min(saves, self.cfg.keep + 1 - len(checkpoints(self.folder))))
        need, disk = saves * sum(sizes) + sizes[0] // 3, shutil.disk_usage(self.folder)
        if disk.total and disk.free < need:  # some file systems don't say
            fail(f"--out_dir {self.folder}: {disk.free / 1e6:,.1f} MB free, {saves} checkpoints "
                 f"and the model take {need / 1e6:,.1f} MB: make room, lower --keep, or move it")

    def stopping(self):
        """True on all ranks as soon as one of them was told to stop (a collective)."""
        told = torch.tensor(float(len(self.signals)), device=common.device())
        return bool(common.sum_over_ranks(told))

    def listen(self):
        """From now on Ctrl-C, SIGTERM and SIGHUP (a closed terminal) finish the step and save
        first; a second one does not."""
        self.saved = False
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has two of them
            if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        if self.saved:  # nothing is left to lose
            self.saved = False
            raise KeyboardInterrupt
        # torchrun passes a Ctrl-C on a second time within moments: that still counts as one.
        if self.signals and time.time() - self.signals[0] > 2:
            os._exit(128 + number)
        if rank() == 0 and not self.signals:
            with suppress(OSError):  # not print(), which this may have interrupted
                os.write(sys.stderr.fileno(), STOPPING)
        self.signals.append(time.time())

    def _make_folder(self):
        """--out_dir, or runs/grpo-1, or the first number that is free."""
        name = self.cfg.out_dir or "runs"
        try:
            if self.evaluates_only:
                return tempfile.mkdtemp(prefix="nanopo-")  # and gone at the end
            os.makedirs(name, exist_ok=True)
            for number in itertools.count(1):
                if self.cfg.out_dir:
                    return name
                with suppress(FileExistsError):
                    os.mkdir(f"runs/{self.script}-{number}")
                    return f"runs/{self.script}-{number}"
        except OSError as error:
            reason = "a link that leads nowhere" if os.path.islink(name) else error.strerror
            fail(f"--out_dir {name}: can't be made ({reason})")

    def _lock(self):
        """Be the folder's only writer until this process ends, however it ends."""
        holder = self.folder / ".locked-by"
        self.lock = FileLock(self.folder / ".lock", is_singleton=True)  # one for each process
        try:
            self.lock.acquire(timeout=0)
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            name = holder.read_text(errors="replace") if holder.exists() else "another process"
            fail(f"--out_dir {self.folder}: {name} is writing to it; let it end, or name another")
        except (OSError, NotImplementedError) as error:  # some network folders have no locks
            reason = getattr(error, "strerror", None) or error
            fail(f"--out_dir {self.folder}: can't be written to ({reason})")

    def _find_checkpoint(self):
        """The newest that is whole, aloud if a newer one is not; and check the reference."""
        broken = {}
        for path in reversed(checkpoints(self.folder)):
            wrong = damage(path)
            if not wrong:
                self.checkpoint = path
                break
            broken[path] = wrong
        if broken and not self.checkpoint:
            text = ", ".join(f"{path.name}: {wrong}" for path, wrong in broken.items())
            fail(f"--resume: no checkpoint of {self.folder} is whole ({text}); mend one, or remove "
                 f"{self.folder / 'checkpoints'} to start over")
        for path, wrong in broken.items():
            say(f"warning: {path} is damaged ({wrong}): it is kept as {set_aside(path)}, its steps "
                "are done again")
        begun = self.cfg.cold_start and (self.checkpoint or (self.folder / "start").exists())
        wrong = begun and damage(self.folder / "start")
        if wrong:
            fail(f"--resume: {self.folder / 'start'}, the model after the cold start, is damaged "
                 f"({wrong}): the run can't go on without its reference")

    def tidy(self):
        """Write config.json (when resumed, --steps may be another one), and remove what came after
        the checkpoint: a resumed run logs those steps again."""
        if rank() > 0:
            return
        if self.cfg.resume:
            say(f"going on from {self.checkpoint or 'the start: there is no checkpoint'}")
        about = {
            "script": self.script, "config": asdict(self.cfg), "command": shlex.join(sys.argv),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "world": common.world(),
        }
        try:
            replace_file(self.folder / "config.json", json.dumps(about, indent=2).encode())
            for path in [*self.folder.glob(".tmp-*"), *self.folder.glob("checkpoints/.tmp-*")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()  # of a run that was killed
            for name in LOGS:
                self._trim(name)
        except OSError as error:
            fail(f"--out_dir {self.folder}: can't be written to ({error.strerror})")

    def _trim(self, name):
        """Cut a log to what it was at the checkpoint. If someone has changed it, keep that beside,
        and of its lines those that can be read."""
        path, header = self.folder / name, LOGS[name]
        data = path.read_bytes() if path.is_file() else b""
        length, digest = self.logs.get(name, [0, ""])
        if not self.checkpoint:
            data = header
        elif _length_and_digest(data[:length]) == [length, digest]:
            data = data[:length]
        else:
            lines = data.splitlines(keepends=True)
            good = [line for line in lines if 0 <= _step_of(name, line) <= self.step]
            aside = f"kept as {set_aside(path)}" if os.path.lexists(path) else "gone"
            say(f"warning: {path} is not what the run wrote: {aside}, {len(good)} lines go on")
            data = header + b"".join(good)
        replace_file(path, data)


def _length_and_digest(data):
    return [len(data), hashlib.sha256(data).hexdigest()]


def _step_of(name, line):
    """The step of a line of a log, -1 if it is no such line, or not a whole one."""
    if not line.endswith(b"\n"):
        return -1
    with suppress(*NO_JSON, OverflowError):
        if name == "samples.jsonl":
            return int(json.loads(line.decode())["step"])  # of bytes it would read UTF-16, too
        if line.count(b",") == len(COLUMNS) - 1:
            return int(line.split(b",")[0])
    return -1


# --- the log: its numbers and its words ----------------------------------------------------------

COLUMNS = (
    "step reward accuracy eval_accuracy eval_low eval_high eval_sampled eval_lenient pg_loss "
    "value_loss entropy ref_kl approx_kl clip_frac grad_norm lr response_len truncated_frac "
    "tied_frac kl_coef explained_var gen_rounds groups_dropped expert_entropy sampler_gap samples "
    "tokens t_sample t_logp t_update t_total mem_gb"
).split()
LOGS = {"metrics.csv": ",".join(COLUMNS).encode() + b"\n", "samples.jsonl": b""}  # and its header
SAMPLES_BYTES = 20e6  # of samples.jsonl with tokens; at a step, the share of the run so far


class Log:
    """metrics.csv and samples.jsonl, the clock, the progress bar and all that is said of a step.

    `kept` (see `Run`) holds what it must remember: the first and the last evaluation ("before",
    "last"), and whether any answer was ever "right". `hold` is the run's way to write a file.
    """

    def __init__(self, folder, kept, sampler, cfg, hold=lambda write, path: write()):
        self.folder, self.kept, self.cfg, self.hold = folder, kept, cfg, hold
        self.model, self.tokenizer = sampler.model, sampler.tokenizer
        self.laps, self.bar, self.seen, self.spoke = {}, None, [], 0.0
        self.sick, self.warned = {}, set()  # message -> steps in a row; what has been said

    def lap(self, column=None):
        """End of a stage: the seconds since the last lap go to `column`."""
        if common.device().type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if column:
            self.laps[column] = now - self.last
        self.last = now

    def add(self, step, batch, advantages, meter, evaluation, sampled=None, **values):
        """A row of metrics.csv, the bar, warnings; at an evaluation some answers. Collective.

        batch, advantages (N,): what was trained on; `sampled`: all that was sampled, if that is
        more; `values` are further columns, None for an empty cell.
        """
        stats, sampled = meter.result(), sampled or batch
        before = self.kept.get("right", False)
        row = means_of(stats) | describe(sampled) | self.laps | values | evaluation
        row |= {"step": step, "t_total": sum(self.laps.values()), "mem_gb": peak_memory_gb(),
                "expert_entropy": expert_entropy(self.model, sampled)}
        for name, value in row.items():
            if isinstance(value, float) and math.isnan(value):
                row[name] = None
        self.kept["right"] = before or (row["accuracy"] or 0) > 0
        first_kl = stats.get("approx_kl", [0.0])[0]
        self._warn(step, unhealthy(row, first_kl, self.kept["right"]))
        self.write(row)
        shown = {k: f"{row[k]:.2f}" for k in ("reward", "accuracy") if row[k] is not None}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        if self.bar.disable and time.perf_counter() - self.spoke > 15:  # a Slurm log, a notebook
            told = ", ".join(f"{name} {value}" for name, value in shown.items())
            say(f"step {step} of {self.cfg.steps}: {told}, {row['t_total']:.1f} s a step")
            self.spoke = time.perf_counter()
        self.say_accuracy(step, "held-out", evaluation)
        self.kept["last"] = evaluation or self.kept.get("last")
        if evaluation:
            self._show(step, batch, advantages)
        self.seen = []

    def _warn(self, step, sick):
        """Say once what has been wrong for as many steps in a row as its patience."""
        lasted = {}
        for message, patience in sick:
            lasted[message] = self.sick.get(message, 0) + 1
            if lasted[message] >= patience and message not in self.warned:
                self.warned.add(message)
                say(f"warning: step {step}: {message}")
        self.sick = lasted

    def write(self, row):
        """Append a row to metrics.csv; `row` may lack columns."""
        if rank() > 0:
            return
        path, line = self.folder / "metrics.csv", io.StringIO()
        writer = csv.DictWriter(line, COLUMNS, lineterminator="\n")
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        self.hold(lambda: append(path, line.getvalue()), path)
        if self.cfg.wandb:
            import wandb

            if wandb.run is None:
                about = asdict(self.cfg)
                wandb.init(project=self.cfg.wandb, name=self.folder.name, config=about)
            wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])

    def close(self):
        """End the Weights & Biases run: where a process group exists, no exit handler will."""
        if self.cfg.wandb and rank() == 0:
            import wandb

            wandb.finish()

    def note(self, minibatch, micro, **arrays):
        """Remember what the update sees of each token, (n, T) or None each, for samples.jsonl."""
        if self.cfg.samples:
            kept = {name: x.detach() for name, x in arrays.items() if x is not None}
            self.seen.append((minibatch, micro, kept))

    def _show(self, step, batch, advantages):
        """Print the first answer; append groups to samples.jsonl, a line an answer. Collective.

        They are the batch's last groups: an update sees these when earlier ones have moved the
        policy. What `note` was given of each token goes with them while there is room for it.
        """
        arrays = self._gathered(batch)
        if rank() > 0 or len(batch) == 0:
            return
        answer = " | ".join(batch.texts[0].strip().splitlines())[:300]
        say(f"  question: {batch.questions[0].question}\n  answer:   {answer}\n"
            f"  gold {batch.questions[0].gold}, reward {batch.rewards[0]:.2f}, "
            f"advantage {advantages[0]:+.2f}")
        updates = {row: [len(minibatch.rows), minibatch.tokens]
                   for minibatch, *_ in self.seen for row in minibatch.rows.tolist()}
        path, text = self.folder / "samples.jsonl", ""
        size = path.stat().st_size if path.exists() else 0
        room = SAMPLES_BYTES * step / self.cfg.steps - size
        for group in pick_groups(batch.rewards, batch.group_size, self.cfg.samples):
            rows = range(group * batch.group_size, (group + 1) * batch.group_size)
            plain = [_sample(step, group, batch, row, advantages) for row in rows]
            tokens = [_tokens(self.tokenizer, batch, row, arrays, updates) for row in rows]
            lines = [json.dumps(a | b) + "\n" for a, b in zip(plain, tokens)]
            if len(text) + sum(map(len, lines)) > room:
                lines = [json.dumps(a) + "\n" for a in plain]
            text += "".join(lines)
        self.hold(lambda: append(path, text), path)

    def _gathered(self, batch):
        """{name: (N, T)} of all that `note` was given, from all ranks; of epochs the last."""
        whole = {}
        for _, micro, arrays in self.seen:
            for name, x in arrays.items():
                out = whole.setdefault(name, x.new_zeros(batch.mask.shape))
                kept = torch.where(micro.mask.bool(), x, micro.take(out))  # a dummy changes nothing
                out[micro.rows, : micro.response_len] = kept
        whole = {name: common.sum_over_ranks(x) for name, x in whole.items()}
        return whole if batch.ref_logp is None else whole | {"ref_logp": batch.ref_logp}

    def say_accuracy(self, step, name, result):
        """Print what `evaluate` returned, if it did."""
        if result:
            text = "{eval_accuracy:.3f} [{eval_low:.3f}, {eval_high:.3f}] greedy, " \
                "{eval_sampled:.3f} sampled, {eval_lenient:.3f} lenient"
            say(f"step {step}: {name} accuracy {text.format(**result)}")


def pick_groups(rewards, group_size, count):
    """Numbers of a batch's last `count` groups, one of unequal rewards among them if there is."""
    by_group = rewards.view(-1, group_size)
    picked = list(range(len(by_group)))[-count:] if count else []
    mixed = (by_group.amax(1) > by_group.amin(1)).nonzero()[:, 0].tolist()
    if picked and mixed and not set(picked) & set(mixed):
        picked[0] = mixed[-1]
    return picked


def token_texts(tokenizer, ids):
    """Each token's own text; after a digit, since alone some would lose the space before them."""
    first = tokenizer("1", add_special_tokens=False).input_ids[-1:]
    pairs = [first + [token] for token in ids]
    prefix, *texts = tokenizer.batch_decode([first, *pairs], clean_up_tokenization_spaces=False)
    return [text.removeprefix(prefix) for text in texts]


def _sample(step, group, batch, row, advantages):
    correct = batch.correct[row].item()
    return {
        "step": step, "group": group, "question": batch.questions[row].question,
        "gold": batch.questions[row].gold, "completion": batch.texts[row],
        "reward": batch.rewards[row].item(), "advantage": advantages[row].item(),
        "correct": None if math.isnan(correct) else correct,
        "truncated": bool(batch.truncated[row]),
    }


def _tokens(tokenizer, batch, row, arrays, updates):
    """The tokens of an answer and what the update saw of each; `update` counts the answers and the
    tokens of its optimizer step."""
    length = int(batch.mask[row].sum())
    ids = batch.tokens[row, :length].tolist()
    special = [place for place, token in enumerate(ids) if token in tokenizer.all_special_ids]
    numbers = {name: [round(value, 6) for value in x[row, :length].tolist()]
               for name, x in arrays.items()}
    return {"ids": ids, "tokens": token_texts(tokenizer, ids), "special": special,
            "update": updates.get(row)} | numbers


def means_of(stats):
    """The meter's lists, one number per optimizer step, as columns: their means; the last `lr`."""
    row = {name: sum(values) / len(values) for name, values in stats.items()}
    if "lr" in stats:
        row["lr"] = stats["lr"][-1]
    return row


def describe(batch):
    """Columns that tell what was sampled."""
    return {
        "reward": batch.rewards.mean().item(),
        "accuracy": batch.correct.nanmean().item(),  # NaN: no gold answers
        "truncated_frac": batch.truncated.mean().item(),
        "response_len": batch.mask.sum(-1).float().mean().item(),
        "samples": len(batch),
        "tokens": int(batch.mask.sum()),
    }


def unhealthy(row, first_kl, ever_right):
    """What is wrong with a step and which flag to change: a list of (message, patience), patience
    being how many steps in a row it must be so before it means something.

    row: a row of metrics.csv; first_kl: `approx_kl` of its first update; ever_right: whether any
    answer of the run was."""
    never = not ever_right and row["accuracy"] == 0 and row["reward"] <= 0
    solved = row["accuracy"] is not None and row["accuracy"] > 0.8  # then ties are no sickness
    checks = [
        (row["truncated_frac"] > 0.5, 3, "most answers are truncated: raise --max_new_tokens"),
        (row.get("tied_frac") == 1 and not solved, 3,
         "every group had equal rewards, so nothing is learned: raise --group_size, or "
         "--cold_start if nothing is ever right"),
        (row.get("pg_loss") is None, 1,
         "no group was left to train on, all were all right or all wrong: raise --group_size or "
         "--temperature"),
        (row.get("entropy", 1.0) < 0.005 and not solved, 3,
         "entropy has collapsed, answers no longer differ: lower --lr or raise --temperature"),
        (first_kl > 1e-6, 1, "the ratio was not 1 before the first update: report this model"),
        ((row.get("ref_kl") or 0) > 1, 3,
         "far from the reference: lower --lr or raise the KL weight"),
        (row.get("sampler_gap", 0.0) > 0.5, 1,
         "sampler and trainer disagree on log-probs: it trains another law than it samples"),
        (never, 3, "no answer was ever right: raise --cold_start, or check --reward and the data"),
    ]
    return [(message, patience) for bad, patience, message in checks if bad]


def peak_memory_gb():
    """Peak memory of this process so far, GB: on a GPU that has its own, else resident."""
    if common.device().type not in ("cpu", "mps"):
        return torch.accelerator.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)


# --- what the scripts call -----------------------------------------------------------------------


def set_up(cfg, file, needs_gold=""):
    """Everything before the first step: (run, log, data, policy, sampler).

    `file` is the script's __file__; its stem names the run. needs_gold: see `load_questions`.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the run has begun, just stop
    set_up_torch(cfg)
    for name in ("reward_model", "critic"):
        if getattr(cfg, name, ""):
            find_model(getattr(cfg, name), name)
    kept = Path(cfg.out_dir) / "start"  # weights after a cold start
    begun = bool(cfg.resume and cfg.cold_start and (kept.exists() or checkpoints(kept.parent)))
    start = str(kept)
    if not begun and cfg.model not in BUILTIN:
        start = find_model(cfg.model)
        common.from_pretrained(AutoConfig, start)  # a wrong name is said before a missing file
    data = load_questions(cfg, needs_gold)
    if not begun and cfg.model in BUILTIN:
        start = builtin_folder(cfg, data.train)
    start_processes(cfg.dtype, cfg.prompts_per_step)
    # By rank 0: over a network the others may not see the newest files yet.
    start, begun = common.from_all_ranks((start, begun))[0]
    run = Run(cfg, Path(file).stem)
    tokenizer = common.load_tokenizer(start)
    for notice in data.notices:
        say(f"notice: {notice}")
    data.train = encode(tokenizer, data.train, cfg, "train questions")
    data.heldout = encode(tokenizer, data.heldout, cfg, "heldout questions")
    data.test = encode(tokenizer, data.test, cfg, "test questions")
    policy = common.load_policy(run.checkpoint or start, cfg.dtype, cfg.gradient_checkpointing)
    sampler = common.Sampler(policy, tokenizer, cfg)
    check_fit(sampler, data, cfg)
    check_law(sampler)
    if hasattr(cfg, "critic"):
        check_critic(find_model(cfg.critic, "critic") if cfg.critic else start)
    run.open()  # from here on files are written
    run.check_room([policy])
    run.start = start
    if cfg.cold_start and not begun:
        if cfg.model not in BUILTIN:
            cold_start(policy, tokenizer, cold_start_lessons(data.train, cfg), cfg)
            sampler.refresh()
        run.start = str(run.folder / "start")
        run.hold(lambda: save_whole(sampler, Path(run.start)), run.start)
    return run, Log(run.folder, run.kept, sampler, cfg, run.hold), data, policy, sampler


def set_up_torch(cfg):
    """Device, threads, and the same bits for the same command."""
    common.use_device(cfg.device, cfg.dtype)
    if is_builtin(cfg.model) and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        torch.set_num_threads(1)  # more of them only wait for each other at this size
    if common.device().type == "cpu":
        # The gradient of indexing adds with atomics in two threads, in whatever order comes.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it costs; tests do it


def start_processes(dtype, prompts_per_step):
    """Join the process group under torchrun; alone, make one only if weights are to be sharded."""
    backend, here = "gloo", common.device().type
    if here not in ("cpu", "mps"):
        torch.accelerator.set_device_index(common.device().index)
        if dtype == "auto" and common.compute_dtype(dtype) == torch.float32:
            say("notice: this GPU has no native bfloat16, computing in float32")
        # Gradients go from GPU to GPU by nccl, Python objects (the rollout) between hosts by gloo.
        backend = f"cpu:gloo,{here}:{dist.get_default_backend_for_device(here)}"
    elif here == "cpu" and torch.backends.mps.is_available():
        say("notice: this runs on the CPU; --device mps uses the Apple GPU")
    if "RANK" in os.environ:
        # Two hours: the others wait while rank 0 saves a large model.
        dist.init_process_group(backend, timeout=timedelta(hours=2))
        sys.excepthook = _die
        if prompts_per_step < common.world():
            fail(f"--prompts_per_step {prompts_per_step}: {common.world()} processes want one each")
    elif common.compute_dtype(dtype) != torch.float32:
        # A group of one: FSDP is what keeps float32 master weights behind a bfloat16 forward.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _die(kind, error, trace):
    # One rank's exception ends the job: an orderly exit would wait for collectives of the others.
    time.sleep(2 * (rank() > 0))  # as in fail()
    print(f"rank {rank()} failed:", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


def end_processes(together=True):
    """Leave together. gloo's threads can abort an ordinary interpreter exit, so skip it."""
    if common.in_group():
        if together:
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def check_fit(sampler, data, cfg):
    """Stop unless the model has a row for every token and, if it counts them, the positions."""
    prompts = [row.prompt_ids for row in [*data.train, *data.heldout, *data.test]]
    model = sampler.model
    rows = len(model.get_input_embeddings().weight)
    if max(*map(max, prompts), sampler.pad, *sampler.stop_ids) >= rows:
        fail(f"--model {cfg.model}: its tokenizer has more tokens (its pad and end token among "
             f"them) than the model's {rows} embedding rows; they belong to two models")
    text, longest = model.config.get_text_config(), max(map(len, prompts))
    limit = getattr(text, "max_position_embeddings", None) or 0
    if 0 < limit < longest + cfg.max_new_tokens:
        fail(f"--max_new_tokens {cfg.max_new_tokens} after prompts of up to {longest} tokens: "
             f"{cfg.model} has {limit} positions; lower it or --max_prompt_len")
    limit = changing_rope(text)
    if limit is not None and longest + cfg.max_new_tokens > limit:
        fail(f"--max_new_tokens {cfg.max_new_tokens} after prompts of up to {longest} tokens: "
             f"beyond {limit} the rope of {cfg.model} changes with the longest row of a batch; "
             "lower it or --max_prompt_len")


def check_critic(path):
    """Stop unless a model with a number at every token can be made of this folder. Where its family
    has no class for that, transformers is given one."""
    config = common.from_pretrained(AutoConfig, path, num_labels=1)
    try:
        if type(config) not in AutoModelForTokenClassification._model_mapping:
            head = _token_head(type(config))
            AutoModelForTokenClassification.register(type(config), head, exist_ok=True)
        with torch.device("meta"):
            AutoModelForTokenClassification.from_config(config)
    except Exception as error:  # whatever a foreign architecture raises, here rather than later
        fail(f"--critic: none can be made of a {config.model_type} [{str(error)[:200]}]: give "
             "--critic a model of another family with the same tokenizer, or use grpo.py, which "
             "needs none")


def _token_head(kind):
    """The class of a family's own body under a linear head; kind: its config's class."""
    from transformers.modeling_layers import GenericForTokenClassification  # 2 s, for these only
    from transformers.modeling_outputs import TokenClassifierOutput

    bodies = AutoModel._model_mapping[kind].__mro__
    family = next(base for base in bodies if base.__name__.endswith("PreTrainedModel"))

    class ForTokenClassification(GenericForTokenClassification, family):
        config_class, base_model_prefix = kind, family.base_model_prefix
        __module__ = family.__module__  # else loading leaves buffers uninitialised

        def forward(self, input_ids, **more):
            states = self.base_model(input_ids=input_ids, **more).last_hidden_state
            return TokenClassifierOutput(logits=self.score(states))

    return ForTokenClassification


def changing_rope(config):
    """The length in tokens beyond which the rope depends on the batch (dynamic, longrope), the
    smallest of all layers'; None: it never does."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for part in [rope, *rope.values()]:  # one for all layers, or one for each kind of layer
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
            here = config.max_position_embeddings
            limits.append(part.get("original_max_position_embeddings") or here)
    return min(limits, default=None)


@torch.no_grad()
def check_law(sampler):
    """Stop unless all short cuts give what the plain model gives, row by row, and it samples from
    softmax(logits / T): left padding, one prompt for several answers, rows that leave, train mode.
    """
    model, training, tokens = sampler.model, sampler.model.training, sampler.max_new_tokens
    common.seed_all("check")
    sampler.max_new_tokens = min(tokens, common.CHUNK + 2)
    try:
        fault = _law_fault(sampler, model)
    except Exception as error:  # whatever a foreign architecture raises, here rather than later
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        fault = f"a {type(model).__name__} can't be run as these scripts run models [{reason}]"
    if fault:
        fail(f"--model {sampler.name}: {fault}")
    model.train(training)
    sampler.max_new_tokens = tokens


def _law_fault(sampler, model):
    """What is wrong, in words, or None."""
    prompts = _check_rows(sampler, [3, 7])
    answers = _check_rows(sampler, [5, 3, 4, 5])
    left = common.padded([p for p in prompts for _ in range(2)], sampler.pad)
    right = common.padded(answers, sampler.pad, left=False)
    ids, mask = torch.cat([left[0], right[0]], 1), torch.cat([left[1], right[1]], 1)
    groups, cells = torch.tensor([0, 0, 1, 1], device=ids.device), right[1].bool()
    model.eval()
    want, size, finite = _plain_logps(model, ids, mask, cells)
    if not finite:
        return "its logits are not finite; are its weights damaged?"
    tolerance = 1e-3
    if model.dtype != torch.float32:
        tolerance = max(0.2, 2 * torch.finfo(model.dtype).eps * size)

    def off(got, want):
        gap = (got - want).abs()
        # In 16 bits the mean: an expert that is chosen by a hair may be another one.
        return not (gap.max() if model.dtype == torch.float32 else gap.mean()) <= tolerance

    def logps(ids, mask, cells, groups=None):
        return common.token_logps(model, ids, mask, cells.shape[1], 1.0, "off", groups)[0][cells]

    row = ids[3:], mask[3:], cells[3:]  # has no padding
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if capped or off(logps(*row), want[-5:]):
        return ("its logits are not its output head's alone (soft-capped or scaled, like "
                "Gemma-2's, or transformed), which these scripts don't support; name another model")
    if off(logps(ids, mask, cells), want):
        return (f"padding on the left changes the log-probs of a {type(model).__name__}, which "
                "takes no position_ids or no mask; name another model")
    shared = logps(ids, mask, cells, groups)
    if off(shared, want) or off(_leaving_logps(model, ids, mask, cells), want):
        return (f"a {type(model).__name__} gives other log-probs when answers share the cache of "
                "a prompt; name another model")
    model.train()
    if off(logps(ids, mask, cells), want) or off(logps(ids, mask, cells, groups), want):
        return (f"a {type(model).__name__} gives other log-probs in train mode, so something in "
                "it is random: look for noise in its config.json, or name another model")
    model.eval()
    return _sampling_fault(sampler, model, left, off)


def _sampling_fault(sampler, model, left, off):
    """What is wrong with `generate`, in words, or None. left: ids and mask of the prompts, each
    twice; off(got, want): whether these log-probs differ."""
    config = sampler.config(2)
    config.update(output_scores=True, output_logits=True, return_dict_in_generate=True)
    out = model.generate(left[0], attention_mask=left[1], generation_config=config)
    for scores, raw in zip(out.scores, out.logits):
        if not torch.allclose(scores, raw / sampler.temperature):
            return "generate() changes the logits before sampling"
    one = left[0][::2], left[1][::2]
    tokens, seen = sampler.generate(*one, group_size=2, record=4)
    cells = common.response_mask(tokens, sampler.stop_ids).bool() & ~seen.isnan()
    ids, mask = torch.cat([left[0], tokens], 1), torch.cat([left[1], cells.long()], 1)
    want, *_ = _plain_logps(model, ids, mask, cells, sampler.temperature)
    if cells.any() and off(seen[cells], want):
        return f"a {type(model).__name__} does not sample from the law of its forward pass"
    return None


def _check_rows(sampler, lengths):
    """Token ids of random rows, ordinary tokens only: an image's would want an image."""
    known = range(min(len(sampler.tokenizer), len(sampler.model.get_input_embeddings().weight)))
    banned = {*sampler.tokenizer.added_tokens_decoder, *sampler.stop_ids, sampler.pad}
    words = [i for i in known if i not in banned] or [sampler.stop_ids[0]]
    return [[words[i] for i in torch.randint(len(words), (n,)).tolist()] for n in lengths]


def _plain_logps(model, ids, mask, cells, temperature=1.0):
    """(log-probs of the answers' tokens (cells.sum(),), the largest logit, whether all are finite):
    the plain forward pass, each row alone, without padding."""
    logps, size, finite = [], 0.0, True
    for row, real, answer in zip(ids, mask.bool(), cells):
        row, length = row[real], int(answer.sum())
        logits = model(input_ids=row[None], use_cache=False).logits[0].float()
        size, finite = max(size, logits.abs().max().item()), finite and logits.isfinite().all()
        start = len(row) - length
        law = (logits[start - 1 : -1] / temperature).log_softmax(-1)
        logps.append(law.gather(1, row[start:, None])[:, 0])
    return torch.cat(logps), size, finite


def _leaving_logps(model, ids, mask, cells):
    """Log-probs as `Sampler` makes them: a prompt once, its cache repeated, a row leaves after two
    tokens. Of the row that leaves the rest is as if it had stayed."""
    width, place = ids.shape[1] - cells.shape[1], common.positions(mask)
    cache = common.DynamicCache(config=model.config)
    plain, _ = common.token_logps(model, ids, mask, cells.shape[1], 1.0, "off")
    if not common.repeatable(cache):
        return plain[cells]

    def states(rows, columns):
        return model.base_model(
            input_ids=ids[rows, columns], attention_mask=mask[rows, : columns.stop],
            position_ids=place[rows, columns], use_cache=True, cache=cache,
        ).last_hidden_state

    every, stay = slice(None), torch.tensor([0, 2, 3], device=ids.device)
    states(slice(None, None, 2), slice(0, width - 1))
    cache.batch_repeat_interleave(2)
    states(every, slice(width - 1, width + 2))
    cache.batch_select_indices(stay)
    rest = states(stay, slice(width + 2, ids.shape[1]))[:, :-1].flatten(0, 1)
    logp, _ = common.head_logps(
        model.get_output_embeddings(), rest, ids[stay, width + 3 :].flatten(), 1.0, "off")
    plain[stay, 3:] = logp.view(len(stay), -1)
    return plain[cells]


def begin(run, log, sampler, data):
    """Listen to signals, measure where the run starts, show the bar, start the clock."""
    run.listen()
    run.check_room([model for model, _ in run.optimizers.values()])
    run.tidy()
    where = "no run folder (--steps 0)" if run.evaluates_only else f"run: {run.folder}"
    test = len(data.test[: run.cfg.test_size or None])
    say(f"{where}; up to {sampler.rows_at_once} answers at once\n"
        f"questions: {len(data.train)} to train on, {len(data.heldout)} held out, "
        f"{test} for a test\naccuracy: greedy is the likeliest answer [with its 95 % "
        "interval], sampled one draw at\nthe training temperature; lenient also counts a last "
        "number without ####")
    quiet = rank() > 0 or None  # None: no bar off a terminal
    log.bar = tqdm(total=run.cfg.steps, initial=run.step, unit="step", disable=quiet)
    if run.step == 0:
        run.kept["before"] = evaluate(sampler, data.heldout, run.cfg.seed)
        log.write({"step": 0} | run.kept["before"])
        log.say_accuracy(0, "held-out", run.kept["before"])
    log.lap()


def finish(run, log, sampler, data):
    """Save, read the test questions once, write final/, say what was reached; leave."""
    if run.step > run.saved_step:
        run.save(sampler)
    log.bar.close()
    stopped = interrupted = False
    try:
        run.saved = True  # from here on a signal interrupts
        stopped = run.stopping() or run.step < run.cfg.steps
        if not stopped:
            test = data.test[: run.cfg.test_size or None]
            log.say_accuracy(run.step, "test", evaluate(sampler, test, run.cfg.seed))
        if not stopped and not run.evaluates_only:
            final = run.folder / "final"
            run.hold(lambda: save_whole(sampler, final, final=True), final)
            _conclude(run, final)
    except KeyboardInterrupt:
        interrupted = True
    if (stopped or interrupted) and not run.evaluates_only:
        say(f"stopped after step {run.step}; go on with:\n"
            f"  python {run.script}.py --resume --out_dir {shlex.quote(str(run.folder))}")
    log.close()
    if rank() == 0:
        run.lock.release(force=True)
        if run.evaluates_only:
            shutil.rmtree(run.folder)
    end_processes(together=not interrupted)


def _conclude(run, final):
    """The last lines: what was reached, where it is, what to type next."""
    say(f"done: step {run.step} of {run.cfg.steps}")
    before, after = run.kept.get("before"), run.kept.get("last")
    if before and after:
        pairs = [x[key] for key in ("eval_accuracy", "eval_sampled") for x in (before, after)]
        text = "  held-out accuracy: greedy {:.3f} -> {:.3f}, sampled {:.3f} -> {:.3f}"
        say(text.format(*pairs))
    say(f"  {run.folder}/ holds metrics.csv, samples.jsonl, checkpoints and final/, the model")
    folder, final, data = (shlex.quote(str(x)) for x in (run.folder, final, run.cfg.data))
    say(f"next:\n  python plots/figures.py {folder}\n"
        f"  python {run.script}.py --model {final} --data {data} --steps 0\n"
        f"  python {run.script}.py --resume --out_dir {folder} "
        f"--steps {2 * max(1, run.cfg.steps)}")
