"""What the four scripts share: command line, processes, models, data, sampling, files.

Nothing here knows an algorithm. Read a script first (`grpo.py`) and come here for a name. In order:
command line, processes, models, the built-in model, questions, log-probs, sampling, batches,
optimizer and cold start, scoring and evaluation, the run and its files.
"""

import copy
import csv
import hashlib
import itertools
import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from types import MethodType, SimpleNamespace

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from filelock import FileLock
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    HfArgumentParser,
)

import rewards

huggingface_hub.utils.logging.set_verbosity_error()
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# --- command line --------------------------------------------------------------------------------

BUILTIN = ("tiny", "tiny-moe")
MAY_CHANGE = {"out_dir", "resume", "steps", "save_every", "keep", "wandb"}  # on --resume


def fail(message):
    """Stop with one clear line and exit status 2. The message names the culprit and the remedy."""
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(2)  # rank 0 usually meets the same error: let it speak alone
    print(f"error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        os._exit(2)  # an ordinary exit would wait for the other ranks
    raise SystemExit(2)


def say(message):
    """Print once, on rank 0, without tearing the progress bar."""
    if rank() == 0:
        encoding = sys.stdout.encoding or "utf-8"  # a console may lack a character
        tqdm.write(message.encode(encoding, "replace").decode(encoding))


def flag(default, help, allowed=""):
    """A dataclass field that is a command-line flag; `allowed` is its range, like "> 0, <= 1"."""
    metadata = {"help": help.replace("%", "%%")}
    return field(default=default, metadata=metadata | ({"metavar": allowed} if allowed else {}))


class _Parser(HfArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the flags")


def parse_args(config_class, tiny, argv=None):
    """Command line -> Config. A flag given by hand beats `tiny`, which beats the field's default.

    `tiny` holds the overrides of the built-in model: used when --model is tiny, tiny-moe or a
    folder that such a run saved. With --resume the run's own settings take the place of the
    defaults. Every value is checked against its field's range, then by `Config.check()`, which
    raises ValueError. Any fault ends the program with one line and exit status 2.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the run has begun, just stop
    parser = _Parser(config_class, allow_abbrev=False, usage="%(prog)s [--flag value ...]")
    peek = _Parser(allow_abbrev=False, add_help=False)  # --model decides the defaults of --help
    peek.add_argument("--model", default=config_class.model)
    model = peek.parse_known_args(argv)[0].model
    if is_builtin(model):
        # A folder that a run saved has had its cold start.
        parser.set_defaults(**(tiny if model in BUILTIN else tiny | {"cold_start": 0}))
    cfg = config_class(**vars(parser.parse_args(argv)))
    if cfg.resume:
        parser.set_defaults(**dict.fromkeys(vars(cfg)))
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
    tests = {">=": float.__ge__, "<=": float.__le__, ">": float.__gt__, "<": float.__lt__}
    if isinstance(value, float) and not math.isfinite(value):
        fail(f"--{name} {value}: must be a finite number")
    for bound in filter(None, allowed.split(", ")):
        sign, limit = bound.split()
        if not tests[sign](float(value), float(limit)):
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
        about = json.loads(path.read_text())
        script, saved = about["script"], dict(about["config"])
    except (ValueError, KeyError, TypeError):
        fail(f"--resume: {path} is damaged; start a new run")
    if saved.keys() != {f.name for f in fields(config_class)}:
        fail(f"--resume: {cfg.out_dir} is a run of {script}.py, with other flags: resume it there")
    for name, value in given.items():
        if name not in MAY_CHANGE and saved.get(name) != value:
            fail(f"--resume with --{name} {value}, but the run has {saved.get(name)}: leave it out")
    return config_class(**saved | {k: v for k, v in given.items() if k in MAY_CHANGE})


# --- processes -----------------------------------------------------------------------------------


def rank():
    """This process's number, 0 to `world() - 1`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    """How many processes work on this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device():
    """This process's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def compute_dtype(cfg):
    """The dtype of every forward pass. Master weights and optimizer state are float32 always."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype)
    if device().type == "cpu":
        return torch.float32
    native = torch.cuda.is_bf16_supported(including_emulation=False)  # not on a T4
    return torch.bfloat16 if native else torch.float32


def start_processes(cfg):
    """Join the process group under torchrun; alone, make one only if weights are to be sharded."""
    if device().type == "cuda":
        torch.cuda.set_device(device())
        if cfg.dtype == "auto" and compute_dtype(cfg) == torch.float32:
            say("notice: this GPU has no native bfloat16, computing in float32")
    elif torch.backends.mps.is_available():
        say("notice: Apple GPUs are not used, this runs on the CPU")
    backend = "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"
    if "RANK" in os.environ:
        # Two hours: the others wait while rank 0 saves a large model.
        dist.init_process_group(backend, timeout=timedelta(hours=2))
        sys.excepthook = _die
        if cfg.prompts_per_step < world():
            fail(f"--prompts_per_step {cfg.prompts_per_step}: {world()} processes want one each")
    elif compute_dtype(cfg) != torch.float32:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _die(kind, error, trace):
    # One rank's exception ends the job: an orderly exit would wait for collectives of the others.
    time.sleep(2 * (rank() > 0))  # as in fail()
    print(f"rank {rank()} failed:", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


def end_processes():
    """Leave together. gloo's threads can abort an ordinary interpreter exit, so skip it."""
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def sum_over_ranks(x):
    """All-reduce a tensor in place (sum) and return it."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def from_all_ranks(value):
    """Every rank's value of a Python object, as a list in rank order, on every rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def my_share(items):
    """This rank's consecutive part of a list; stacked in rank order the parts are the list."""
    n = len(items)
    return items[n * rank() // world() : n * (rank() + 1) // world()]


def full(tensor):
    """The whole tensor behind a sharded one (a collective: every rank calls it)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seed_all(*numbers):
    """Seed torch from integers such as (seed, step, rank), so that any step can be replayed."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


def peak_memory_gb():
    """Peak memory of this process so far, GB: on the GPU if there is one, else resident."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)


# --- models: load and save -----------------------------------------------------------------------


def find_model(name, flag="model"):
    """--model -> what `from_pretrained` takes: a folder, or a hub name with its owner."""
    if os.path.isdir(name):
        if not (Path(name) / "config.json").is_file():
            fail(f"--{flag} {name}: the folder holds no config.json, so no Hugging Face model")
        if (Path(name) / "metrics.csv").is_file():
            fail(f"--{flag} {name}: that is a run; its model is {Path(name) / 'final'}")
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
        return json.loads(path.read_text()).get("nanopo") in BUILTIN
    except (ValueError, AttributeError):
        fail(f"--model {name}: config.json is not a JSON object")


def from_pretrained(auto_class, path, dtype=None, **changes):
    """`auto_class.from_pretrained(path)`: safetensors only, no remote code, no dropout.

    Dropout would make the ratio differ from 1 before the first update (GPT-2's 0.1: up to 245).
    dtype None: of master weights. `changes` are to the config.
    """
    # When sharded, keep the checkpoint's dtype: each layer becomes float32 on its own (see shard).
    dtype = dtype or ("auto" if dist.is_initialized() else torch.float32)
    try:
        if auto_class is AutoTokenizer:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **changes)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        came_in = str(config.dtype or torch.float32).removeprefix("torch.")
        config.loaded_dtype = getattr(config, "loaded_dtype", came_in)  # our checkpoints' own
        model, report = auto_class.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True,
        )
        new = ("score.", "classifier.")  # a critic's head: load_critic() sets it to zero
        missing = sorted(key for key in report["missing_keys"] if not key.startswith(new))
        if missing:  # transformers makes up random ones and goes on
            raise ValueError(f"it lacks weights: {', '.join(missing)[:200]}")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        hint = "give a folder that holds it" if Path(path).is_dir() else (
            "no such model, or the hub is out of reach; offline, download it elsewhere and "
            "give --model FOLDER (or --model tiny, which needs nothing)"
        )
        fail(f"cannot load {auto_class.__name__} from {path}: {hint} [{reason}]")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def load_tokenizer(path):
    """The tokenizer, with a pad token (its end token if it has none; masks never look at it)."""
    tokenizer = from_pretrained(AutoTokenizer, path)
    if tokenizer.eos_token_id is None:
        fail(f"{path}: the tokenizer has no end-of-text token, so no answer could ever stop")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer("1 + 1 = 2").input_ids:  # what AutoTokenizer makes of a folder without one
        fail(f"{path}: holds no tokenizer; copy the tokenizer files of the model there")
    try:
        stop_ids(tokenizer, GenerationConfig())
    except (TemplateError, IndexError) as error:
        fail(f"{path}: its chat template does not take a question and an answer ({error}); mend or "
             "remove it")
    return tokenizer


def stop_ids(tokenizer, generation_config):
    """The set of token ids that end an answer, as a sorted list.

    Generation config, tokenizer and chat template can each name another one: a Qwen2.5 base
    checkpoint lists <|endoftext|> alone while its template ends turns with <|im_end|>.
    """
    eos = generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])} - {None}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        end = tokenizer.apply_chat_template(turns, tokenize=False).rsplit("ANSWER", 1)[1]
        first = tokenizer(end.lstrip(), add_special_tokens=False).input_ids[:1]
        ids |= {i for i in first if i in tokenizer.added_tokens_decoder}
    return sorted(ids)


def turn_end(tokenizer):
    """The token id that ends a lesson: the chat template's end of turn, else the end of text."""
    eos = tokenizer.eos_token_id
    return next((i for i in stop_ids(tokenizer, GenerationConfig()) if i != eos), eos)


def load_policy(path, cfg):
    """The trained model: float32 master weights, sharded unless one float32 process runs."""
    return _trainable(from_pretrained(AutoModelForCausalLM, path), cfg)


def load_critic(run, sampler, cfg):
    """A value model of its own size: one number per position, (N, L, 1), zero at the start.

    The folder is the checkpoint's, else --critic, else where the policy started.
    """
    path = find_model(cfg.critic, "critic") if cfg.critic else run.start
    if load_tokenizer(path).get_vocab() != sampler.tokenizer.get_vocab():
        fail(f"--critic {cfg.critic}: its tokenizer is not the policy's; name one of its family")
    fresh = run.checkpoint is None
    path = path if fresh else run.checkpoint / "critic"
    critic = from_pretrained(AutoModelForTokenClassification, path, num_labels=1)
    if fresh:
        for parameter in (getattr(critic, "score", None) or critic.classifier).parameters():
            torch.nn.init.zeros_(parameter)
    return _trainable(critic, cfg)


def load_frozen(path, cfg):
    """A plain copy in the compute dtype, never trained: the reference, or the sampler's weights."""
    model = from_pretrained(AutoModelForCausalLM, path, compute_dtype(cfg))
    return model.to(device()).eval().requires_grad_(False)


def _trainable(model, cfg):
    if cfg.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return (shard(model, cfg) if dist.is_initialized() else model.float().to(device())).train()


def shard(model, cfg):
    """FSDP2: every rank keeps 1/world of each parameter in float32 and gathers it in `cfg.dtype`.

    Layer by layer, so that no GPU ever holds a whole float32 copy of the model.
    """
    from torch.distributed.device_mesh import init_device_mesh  # 2 s of imports, for N > 1 only
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method

    # FSDP2 warns of outputs that are views, in case of in-place changes: there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh(device().type, (world(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(cfg), reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for layer in [*layers, model]:
        for parameter in layer.parameters():
            if not isinstance(parameter, torch.distributed.tensor.DTensor):
                parameter.data = parameter.data.float()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model.response_logps = MethodType(_response_logps, model)
    register_fsdp_forward_method(model, "response_logps")
    return model


def save_model(sampler, model, folder, final=False):
    """Write `model`'s whole weights in Hugging Face form, with the tokenizer; rank 0 writes.

    float32, or, for the `final` policy, the dtype that it came in. The policy's generation_config
    is the one that it came with, not the sampler's clean one.
    """
    dtype = getattr(torch, model.config.loaded_dtype) if final else torch.float32
    once = {key for key, _ in [*model.named_parameters(), *model.named_buffers()]}  # tied: one name
    tensors = gathered(
        (key, value.to(dtype) if value.is_floating_point() else value)
        for key, value in model.state_dict().items() if key in once
    )
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


def save_optimizer(model, optimizer, path):
    """Write an optimizer's state as whole tensors."""
    tensors = gathered(
        (f"{part}.{key}", value) for key, parameter in model.named_parameters()
        for part, value in optimizer.state[parameter].items()
    )
    if rank() == 0:
        save_file(tensors, path)


def gathered(named):
    """(name, maybe sharded tensor) pairs -> {name: whole CPU tensor} on rank 0, {} elsewhere."""
    tensors = {}
    for name, tensor in named:  # one at a time; a collective
        tensor = full(tensor)
        if rank() == 0:
            tensors[name] = tensor.cpu().contiguous()
    return tensors


@contextmanager
def whole_folder(folder):
    """Write a folder under a temporary name, renamed when complete: it is never half there.

    Every rank may enter; rank 0 makes and renames, and the others leave after it.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    if rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        temporary.mkdir(parents=True)
    yield temporary
    if rank() == 0:
        os.replace(temporary, folder)
    if world() > 1:
        dist.barrier()


# --- the built-in model --------------------------------------------------------------------------


def builtin_folder(cfg):
    """The folder of the tiny model after its cold start: made on first use, then cached.

    Called before the processes join: the first one to take the lock builds, the others find it.
    """
    tokenizer = _tiny_tokenizer()
    config = _tiny_config(cfg.model, tokenizer)
    lessons = cold_start_lessons(encode(tokenizer, load_questions(cfg).train, cfg, ""), cfg)
    pieces = sorted(tokenizer.get_vocab().items())
    recipe = [config.to_dict(), pieces, cfg.seed, cfg.cold_start, cfg.cold_start_lr or 20 * cfg.lr]
    taught = [(lesson.question, lesson.answer) for lesson in lessons]
    text = repr([recipe, taught, torch.__version__])
    folder = _cache_home() / f"{cfg.model}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            say(f"making the {cfg.model} model and its cold start, once: {folder}")
            seed_all(cfg.seed, "init")
            model = AutoModelForCausalLM.from_config(config).to(device())
            cold_start(model, tokenizer, lessons, cfg)
            with whole_folder(folder) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
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
    corpus = [PLAIN_PROMPT.format(question="", instruction="") + " wait\nwait 0123456789+-*=."]
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
    except OSError:
        home = Path(tempfile.gettempdir()) / f"nanopo-cache-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        say(f"notice: the user's cache folder is read-only, using {home}")
    return home


# --- questions -----------------------------------------------------------------------------------

INSTRUCTION = "Reason step by step, then give the answer on a last line as: #### <number>"
PLAIN_PROMPT = "Question: {question}{instruction}\nAnswer:\n"  # for a tokenizer without a template


def load_questions(cfg):
    """--data -> namespace of row lists `train`, `heldout` (from the training file) and `test`.

    A row has `question`, `answer` (the worked solution) and `gold` (its last number, or None).
    Of a question that the training file repeats the last is used; `repeats` counts the others.
    """
    if cfg.data == "words":
        train, heldout, test = rewards.words_split()
        repeats = 0
    else:
        rows, test = _read_data(cfg.data)
        train = list({row["question"]: row for row in rows}.values())  # each question once
        repeats = len(rows) - len(train)
        random.Random(0).shuffle(train)  # the same questions are held out for every seed
        size = min(cfg.eval_size, len(train) // 10 or 1)
        heldout, train = train[:size], train[size:]
    splits = {"train": train, "heldout": heldout[: cfg.eval_size], "test": test}
    needs_gold = rewards.NEEDS_GOLD & set(rewards.parse_reward(cfg.reward))
    filters = getattr(cfg, "dynamic_sampling", False)  # goes by right and wrong
    for name, rows in splits.items():
        for i, row in enumerate(rows):
            gold = rewards.gold_answer(row)
            where = row.get("where", f"--data {cfg.data}")
            if needs_gold and gold is None:
                fail(f"{where}: no answer that --reward {cfg.reward} could check (want '#### 18')")
            if filters and gold is None:
                fail(f"{where}: without a gold answer nothing is right or wrong, which dynamic "
                     "sampling goes by; add --no_dynamic_sampling")
            rows[i] = SimpleNamespace(
                question=row["question"], gold=gold,
                answer="" if row.get("answer") is None else str(row["answer"]),
            )
    if not train:
        fail(f"--data {cfg.data}: nothing left to train on after holding out {len(heldout)} rows")
    return SimpleNamespace(**splits, repeats=repeats)


def _read_data(name):
    """(training rows, test rows) of `gsm8k`, a .jsonl file or a folder with train.jsonl."""
    path = Path(name)
    if os.path.isfile(path):
        return _read_jsonl(path), []
    if os.path.isdir(path) and (path / "train.jsonl").is_file():
        test = path / "test.jsonl"
        return _read_jsonl(path / "train.jsonl"), _read_jsonl(test) if test.is_file() else []
    if name != "gsm8k" and not os.path.isdir(path):
        fail(f"--data {name}: no such file or folder (built in: words, gsm8k)")
    import datasets  # 1 s of imports, for the hub only

    hub = "openai/gsm8k" if name == "gsm8k" else name
    try:
        parts = datasets.load_dataset(hub, "main")
        return parts["train"].to_list(), parts["test"].to_list()
    except (OSError, ValueError, LookupError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        fail(f"--data {name}: can't be loaded; offline, give a .jsonl file or a folder with "
             f"train.jsonl [{reason}]")


def _read_jsonl(path):
    """Rows of a JSON-lines file; a bad line stops the program with its number."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        fail(f"{path}: not a readable text file ({error})")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # half a character is no text
            except (ValueError, RecursionError) as error:
                fail(f"{path} line {number}: not JSON ({str(error)[:100]})")
            if not isinstance(row, dict) or not isinstance(row.get("question"), str):
                fail(f"{path} line {number}: wants an object with a text field 'question'")
            rows.append(row | {"where": f"{path} line {number}"})
    if not rows:
        fail(f"{path}: holds no rows; wants one JSON object a line with 'question' and 'answer'")
    return rows


def encode(tokenizer, rows, cfg, name="questions"):
    """Set each row's `prompt_ids`; drop (and count) the rows longer than --max_prompt_len."""
    builtin = cfg.data == "words" and is_builtin(cfg.model)
    instruction = "" if builtin else f"\n{INSTRUCTION}"
    for row in rows:
        if tokenizer.chat_template:
            row.prompt_ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": row.question + instruction}],
                add_generation_prompt=True, return_dict=False,
            )
        else:
            text = PLAIN_PROMPT.format(question=row.question, instruction=instruction)
            row.prompt_ids = tokenizer(text).input_ids
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


# --- log-probs -----------------------------------------------------------------------------------

HEAD_FLOATS = 2**27  # logits kept whole: 0.5 GB, that is 883 tokens of a 152k vocabulary


def response_mask(tokens, stop_ids):
    """(N, T) int64: 1 up to and including the first of `stop_ids` in each row, 0 after it.

    tokens: (N, T) int64. Never built from `tokens != pad`, which would unmask the end token of
    every model whose pad token is its end token.
    """
    stops = torch.isin(tokens, torch.as_tensor(stop_ids, device=tokens.device)).long()
    return (stops.cumsum(-1) - stops == 0).long()


def positions(attention_mask):
    """(N, L) position ids that start at 0 on the first real token: padding must not shift them."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def token_logps(
    model, input_ids, attention_mask, response_len, temperature=1.0, entropy="value", groups=None
):
    """Log-probs of the last `response_len` tokens under softmax(logits / temperature).

    input_ids, attention_mask: (N, L) int64, prompts padded on the left, responses on the right.
    Returns (logp, entropy), each (N, response_len), float32 or wider; nats. `entropy` is that of
    the whole vocabulary: "value" (no gradient), "grad", or "off" (None is returned).
    groups: (N,) int64, equal where rows have the same prompt: it then runs once and lends its keys
    and values to each of them (but not with gradient checkpointing). None: each row runs its own.
    Cells whose attention_mask is 0 hold garbage. Where the logits would be more than HEAD_FLOATS,
    the output head runs on chunks of tokens which are computed again in backward: the whole
    (N, L, vocabulary) tensor, 8 GB for a 0.5B model's modest batch, never exists.
    """
    # A sharded model gathers its weights in registered methods only: see shard().
    run = getattr(model, "response_logps", MethodType(_response_logps, model))
    logp, entropies = run(input_ids, attention_mask, response_len, temperature, entropy, groups)
    shape = (len(input_ids), response_len)
    return logp.view(shape), None if entropy == "off" else entropies.view(shape)


def _response_logps(model, input_ids, attention_mask, response_len, temperature, entropy, groups):
    hidden = _response_states(model, input_ids, attention_mask, response_len, groups)
    hidden, targets = hidden.flatten(0, 1), input_ids[:, -response_len:].flatten()
    head = model.get_output_embeddings()
    most = HEAD_FLOATS // head.weight.shape[0]  # tokens
    if len(targets) <= most:
        return _head_logps(head, hidden, targets, temperature, entropy)
    size = max(1, most // 4)
    logps, entropies = zip(*(
        checkpoint(_head_logps, head, *chunk, temperature, entropy, use_reentrant=False)
        for chunk in zip(hidden.split(size), targets.split(size))
    ))
    return torch.cat(logps), None if entropy == "off" else torch.cat(entropies)


def _response_states(model, input_ids, attention_mask, response_len, groups):
    """(N, response_len, hidden): the last hidden states, each one place before what it predicts."""
    place, width = positions(attention_mask), input_ids.shape[1] - response_len
    run, ids, mask = model.base_model, input_ids, attention_mask
    if groups is None or (model.training and model.is_activation_checkpointing):  # no cache there
        out = run(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False)
        return out.last_hidden_state[:, width - 1 : -1]  # the state before a token predicts it
    numbers, group = groups.unique(return_inverse=True)
    one = torch.empty_like(numbers)  # a row of each group
    one[group] = torch.arange(len(group), device=group.device)
    cache, prompt = DynamicCache(config=model.config), (one, slice(width))
    last = run(  # of a prompt: the state that predicts the first token of each answer
        input_ids=ids[prompt], attention_mask=mask[prompt], position_ids=place[prompt],
        cache=cache, use_cache=True,
    ).last_hidden_state[group, -1:]
    if response_len == 1:
        return last
    cache.batch_select_indices(group)
    rest = run(
        input_ids=ids[:, width:-1], attention_mask=mask[:, :-1], position_ids=place[:, width:-1],
        cache=cache, use_cache=True,
    ).last_hidden_state
    return torch.cat([last, rest], 1)


def _head_logps(head, hidden, targets, temperature, entropy):
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logp = log_probs.gather(-1, targets[:, None])[:, 0]
    if entropy == "off":
        return logp, None
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return logp, -(log_probs.exp() * log_probs).sum(-1)


# --- sampling ------------------------------------------------------------------------------------

CHUNK = 16  # tokens between two looks at which rows have finished


class Sampler:
    """Draws answers with Hugging Face `generate` from exactly the law that is trained.

    `model` is the policy itself where it is an ordinary float32 module, else a plain copy per rank
    in the compute dtype, which `refresh` brings up to date after each update: generating from
    sharded weights is 2-5 times slower and hangs when ranks finish at different lengths.
    """

    def __init__(self, policy, path, tokenizer, cfg):
        self.policy, self.tokenizer, self.cfg = policy, tokenizer, cfg
        self.pad = tokenizer.pad_token_id
        self.model = load_frozen(path, cfg) if dist.is_initialized() else policy
        self.stop_ids = stop_ids(tokenizer, self.model.generation_config)
        self.loaded_generation_config = self.model.generation_config
        # A checkpoint's own top_k, top_p, penalties leak into every call unless they are replaced;
        # unset, top_k would be 50.
        self.model.generation_config = self._config(1)
        self.check()

    def _config(self, new_tokens, greedy=False):
        return GenerationConfig(
            do_sample=not greedy, temperature=None if greedy else self.cfg.temperature,
            top_k=None if greedy else 0, top_p=None if greedy else 1.0, repetition_penalty=1.0,
            max_new_tokens=new_tokens, eos_token_id=self.stop_ids, pad_token_id=self.pad,
        )

    @torch.no_grad()
    def check(self):
        """Stop unless the model samples from softmax(logits / T) and its parts make its logits."""
        ids = torch.tensor([[self.stop_ids[0]] * 3], device=device())
        training = self.model.training
        self.model.eval()
        logits = self.model(input_ids=ids).logits
        if not torch.isfinite(logits).all():
            fail(f"--model {self.cfg.model}: its logits are not finite; are its weights damaged?")
        config = self._config(2)
        config.update(output_scores=True, output_logits=True, return_dict_in_generate=True)
        seed_all("check")
        ones = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=ones, generation_config=config)
        for scores, raw in zip(out.scores, out.logits):
            if not torch.allclose(scores, raw / self.cfg.temperature):
                fail(f"--model {self.cfg.model}: generate() changes the logits before sampling")
        logp, _ = token_logps(self.model, ids, ones, 2, entropy="off")
        whole = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        rounding = 1e-4 if logits.dtype == torch.float32 else 0.2
        capped = getattr(self.model.config, "final_logit_softcapping", None)
        if capped or not torch.allclose(logp, whole, atol=rounding):
            fail(f"--model {self.cfg.model}: its logits are more than its output head's "
                 "(soft-capped or scaled, like Gemma-2's), which these scripts don't support")
        self.model.train(training)

    def refresh(self):
        """Copy the policy's weights into the sampler's model (nothing to do if they are one)."""
        if self.model is self.policy:
            return
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(full(theirs.detach().to(mine.dtype)))  # cast first: gather half as much

    def encode(self, questions):
        """Questions -> (prompt_ids, prompt_mask), each (P, longest) int64, padded on the left."""
        return padded([q.prompt_ids for q in questions], self.pad)

    def decode(self, tokens, mask):
        """(N, T) tokens -> N texts without special tokens. Ids beyond the tokenizer become ''."""
        rows = [row[:n] for row, n in zip(tokens.tolist(), mask.sum(-1).tolist())]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def truncated(self, tokens):
        """(N,) float32: 1 where no stop token came. (Not "as long as the limit": an answer may
        end exactly there.)"""
        stops = torch.tensor(self.stop_ids, device=tokens.device)
        return (~torch.isin(tokens, stops).any(1)).float()

    @torch.no_grad()
    def generate(self, prompt_ids, prompt_mask, group_size=1, greedy=False, record=0):
        """`group_size` answers to each of P left-padded prompts, (P, L) int64 and its mask.

        Returns tokens (P * group_size, T) int64, answers of one prompt in consecutive rows, padded
        on the right, T the longest answer; and the sampler's own log-probs, (rows, T) float32, of
        the first `record` rows' first tokens, NaN where none were recorded.
        """
        training = self.model.training
        self.model.eval()
        prompts = max(1, self.cfg.rollout_batch // group_size)
        parts, recorder = [], _Recorder(record, self.cfg.temperature)
        for ids, mask in zip(prompt_ids.split(prompts), prompt_mask.split(prompts)):
            width = int(mask.sum(-1).max())
            ids, mask = ids[:, -width:], mask[:, -width:]
            watch = [recorder] if record and not parts else None
            parts.append(self._generate(ids, mask, group_size, greedy, watch))
        self.model.train(training)
        tokens = pad_cat(parts, self.pad)
        return tokens, recorder.result(tokens.shape)

    def _generate(self, ids, mask, group_size, greedy, watch):
        """One prefill per prompt, then chunks of tokens; rows that have finished leave. `watch`:
        logits processors of the first chunk."""
        cache = DynamicCache(config=self.model.config)
        if ids.shape[1] > 1:  # all but the last prompt token, which generate() feeds itself
            self.model.base_model(
                input_ids=ids[:, :-1], attention_mask=mask[:, :-1],
                position_ids=positions(mask[:, :-1]), cache=cache, use_cache=True,
            )
            cache.batch_repeat_interleave(group_size)
        ids, mask = ids.repeat_interleave(group_size, 0), mask.repeat_interleave(group_size, 0)
        tokens = ids.new_full((len(ids), self.cfg.max_new_tokens), self.pad)
        alive, done = torch.arange(len(ids), device=ids.device), 0
        while len(alive) and done < self.cfg.max_new_tokens:
            config = self._config(min(CHUNK, self.cfg.max_new_tokens - done), greedy)
            try:
                new = self.model.generate(
                    ids, attention_mask=mask, cache=cache, generation_config=config,
                    logits_processor=None if done else watch,
                )[:, ids.shape[1] :]
            except RuntimeError as error:
                if "probability tensor" not in str(error):
                    raise
                fail("the model's logits are not finite, it can't be sampled from: go on from the "
                     "last checkpoint with --resume, or start again with a lower --lr")
            tokens[alive, done : done + new.shape[1]] = new
            done += new.shape[1]
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
            going = self.truncated(new).nonzero()[:, 0]
            if len(going) < len(alive):
                ids, mask, alive = ids[going], mask[going], alive[going]
                cache.batch_select_indices(going)
        return tokens[:, :done]


class _Recorder:
    """Notes the log-probs that `generate` gave to the tokens of its first rows, for one chunk."""

    def __init__(self, rows, temperature):
        self.rows, self.temperature, self.logps, self.previous = rows, temperature, [], None

    def __call__(self, input_ids, logits):
        if self.previous is not None:
            self.logps.append(self.previous.gather(1, input_ids[: self.rows, -1:]))
        self.previous = (logits[: self.rows].float() / self.temperature).log_softmax(-1)
        return logits

    def result(self, shape):
        out = torch.full(shape, math.nan, device=device())
        if self.logps:
            seen = torch.cat(self.logps, 1)
            out[: len(seen), : seen.shape[1]] = seen
        return out


def pad_cat(parts, value, left=False):
    """Stack (n_i, L_i) tensors into (sum n_i, max L_i), padded with `value` on the right (left)."""
    width = max(p.shape[1] for p in parts)
    pads = [width - p.shape[1] for p in parts]
    parts = [F.pad(p, (n, 0) if left else (0, n), value=value) for p, n in zip(parts, pads)]
    return torch.cat(parts)


def padded(rows, pad, left=True):
    """Lists of token ids -> (ids, mask), each (N, longest) int64 on this rank's device."""
    rows = [torch.tensor(row, device=device())[None] for row in rows]
    return pad_cat(rows, pad, left), pad_cat([torch.ones_like(row) for row in rows], 0, left)


# --- batches -------------------------------------------------------------------------------------


@dataclass
class Batch:
    """N answers, rows of one prompt consecutive, the same on every rank once gathered."""

    questions: list  # N namespaces: question, gold, ... of each answer
    texts: list  # N decoded answers
    prompt_ids: torch.Tensor  # (N, L) int64, padded on the left
    prompt_mask: torch.Tensor  # (N, L) int64
    tokens: torch.Tensor  # (N, T) int64, padded on the right
    mask: torch.Tensor  # (N, T) int64, 1 up to and including the stop token
    rewards: torch.Tensor = None  # (N,) float32
    correct: torch.Tensor = None  # (N,) float32: 1 right, 0 wrong, NaN without a gold answer
    truncated: torch.Tensor = None  # (N,) float32: 1 where no stop token came
    sampler_logp: torch.Tensor = None  # (N, T) float32, NaN where not recorded

    def __len__(self):
        return len(self.texts)

    def each(self, function):
        """A batch of `function(name, value)` of every field that is set."""
        return Batch(**{k: v if v is None else function(k, v) for k, v in vars(self).items()})

    @classmethod
    def cat(cls, batches, pad):
        """One batch from several, padded to the widest."""
        fills = dict(prompt_ids=pad, prompt_mask=0, tokens=pad, mask=0, sampler_logp=math.nan)

        def join(name, first):
            parts = [getattr(batch, name) for batch in batches]
            if name in fills:
                return pad_cat(parts, fills[name], left=name.startswith("prompt"))
            return sum(parts, []) if isinstance(first, list) else torch.cat(parts)

        return batches[0].each(join)

    def select(self, keep):
        """The rows where `keep` (N,) is true."""
        rows = keep.nonzero()[:, 0]
        picked = rows.tolist()
        return self.each(lambda _, x: [x[i] for i in picked] if isinstance(x, list) else x[rows])

    def head(self, n):
        """The first `n` rows."""
        return self.select(torch.arange(len(self)) < n)

    def to(self, where):
        """The same batch with its tensors on another device."""
        return self.each(lambda _, x: x if isinstance(x, list) else x.to(where))


def gather(batch, pad):
    """Every rank's batch, stacked in rank order, on every rank: totals, group statistics, filters
    and decisions are plain local arithmetic from here on, and the ranks can't disagree."""
    if world() == 1:
        return batch
    return Batch.cat(from_all_ranks(batch.to("cpu")), pad).to(device())


@dataclass
class Micro:
    """Rows that go through the model together, trimmed to their own longest prompt and answer."""

    rows: torch.Tensor  # (n,) int64, indices into the batch
    prompt_len: int
    response_len: int
    mask: torch.Tensor  # (n, response_len) int64; all 0 in a dummy, which only keeps ranks in step
    groups: torch.Tensor = None  # (n,) int64: equal where prompts are; None: each row has its own

    def take(self, x):
        """These rows of a per-sequence (N,) or per-token (N, T) tensor of the batch (or None)."""
        if x is None:
            return None
        return x[self.rows, : self.response_len] if x.dim() == 2 else x[self.rows]


def cut(batch, cfg):
    """Minibatches (one optimizer step each) of micro-batches, cut once for a whole rollout step.

    A minibatch has `rows`, the (n,) indices of its sequences, `tokens`, how many response tokens
    they hold, and `micros`, this rank's share. Rows are sorted by length and dealt out like cards,
    so all ranks have like work; then cut so that a padded micro-batch holds at most
    `cfg.micro_tokens`. Old, reference and new log-probs use the same cut: in bfloat16 another
    padding moves a log-prob by up to 8e-3, and the first ratio must be exactly 1.
    """
    lengths = batch.prompt_mask.sum(-1) + batch.mask.sum(-1)
    minibatches = []
    for rows in torch.arange(len(batch), device=lengths.device).tensor_split(cfg.minibatches):
        if not len(rows):
            continue  # fewer answers than minibatches
        by_length = rows[lengths[rows].argsort(descending=True, stable=True)]
        shares = [_micros(batch, by_length[r :: world()], cfg.micro_tokens) for r in range(world())]
        dummy = _micro(batch, by_length[-1:])
        dummy.mask = torch.zeros_like(dummy.mask)
        turns = list(itertools.zip_longest(*shares, fillvalue=dummy))  # a micro of each rank
        for turn in turns:  # run prompts once on all ranks or on none: FSDP would hang
            if any(micro.groups is None for micro in turn):
                for micro in turn:
                    micro.groups = None
        tokens, micros = int(batch.mask[rows].sum()), [turn[rank()] for turn in turns]
        minibatches.append(SimpleNamespace(rows=rows, tokens=tokens, micros=micros))
    return minibatches


def _micros(batch, rows, micro_tokens):
    """Greedy cut of length-sorted rows under the token budget (one row at least), and before a row
    that is not half as long as its micro-batch: it would be mostly padding."""
    micros, start, prompt, answer = [], 0, 0, 0
    prompts, answers = batch.prompt_mask.sum(-1).tolist(), batch.mask.sum(-1).tolist()
    for end, row in enumerate(rows.tolist()):
        short = prompts[row] + answers[row] < (prompt + answer) / 2
        prompt, answer = max(prompt, prompts[row]), max(answer, answers[row])
        if end > start and (short or (prompt + answer) * (end + 1 - start) > micro_tokens):
            micros.append(_micro(batch, rows[start:end]))
            start, prompt, answer = end, prompts[row], answers[row]
    return [*micros, _micro(batch, rows[start:])] if len(rows) else []


def _micro(batch, rows):
    prompt_len = int(batch.prompt_mask[rows].sum(-1).max())
    response_len = int(batch.mask[rows].sum(-1).max())
    prompts = torch.where(batch.prompt_mask[rows].bool(), batch.prompt_ids[rows], -1)
    groups = prompts.unique(dim=0, return_inverse=True)[1]
    if response_len == 1 or int(groups.max()) + 1 == len(rows):  # nothing to gain
        groups = None
    return Micro(rows, prompt_len, response_len, batch.mask[rows, :response_len], groups)


def micro_input(batch, micro):
    """(input_ids, attention_mask) of a micro-batch, each (n, prompt_len + response_len) int64."""
    prompt = slice(batch.prompt_ids.shape[1] - micro.prompt_len, None)
    ids = torch.cat([batch.prompt_ids[micro.rows, prompt], micro.take(batch.tokens)], 1)
    return ids, torch.cat([batch.prompt_mask[micro.rows, prompt], micro.take(batch.mask)], 1)


def micro_logps(model, batch, micro, cfg, entropy="value"):
    """`token_logps` of a micro-batch: (logp, entropy), each (n, micro.response_len)."""
    inputs = micro_input(batch, micro)
    return token_logps(model, *inputs, micro.response_len, cfg.temperature, entropy, micro.groups)


def micro_values(critic, batch, micro, after=False):
    """(n, micro.response_len) values of the states before (or `after`) each response token.

    V_t is read where token t is predicted, one position to the left of the token itself.
    """
    ids, mask = micro_input(batch, micro)
    known = len(critic.get_input_embeddings().weight)  # a policy of its family may have more rows
    ids = ids.clamp(max=known - 1)
    out = critic(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
    end = out.logits.shape[1] - (not after)
    values = out.logits[:, end - micro.response_len : end, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


@torch.no_grad()
def whole(cuts, shape, function):
    """`function(micro) -> (n, t)` over all micro-batches, put together as (N, T) on every rank.

    Each rank fills the rows it owns; masked cells are 0. None of an empty batch.
    """
    out = None
    for micro in (m for minibatch in cuts for m in minibatch.micros):
        values = function(micro)
        out = values.new_zeros(shape) if out is None else out
        out[micro.rows, : micro.response_len] += torch.where(micro.mask.bool(), values, 0.0)
    return None if out is None else sum_over_ranks(out)


def whole_logps(model, batch, cuts, cfg):
    """(N, T) log-probs of the whole batch under `model`, computed in the cut of the update."""
    return whole(cuts, batch.mask.shape, lambda m: micro_logps(model, batch, m, cfg, "off")[0])


def whole_values(critic, batch, cuts, after=False):
    """(N, T) values of the whole batch, computed in the cut of the update; see `micro_values`."""
    return whole(cuts, batch.mask.shape, lambda m: micro_values(critic, batch, m, after))


class Meter:
    """Statistics of a rollout step: sums over micro-batches and ranks, one per optimizer step."""

    def __init__(self):
        self.steps, self.now, self.largest_gap = [], {}, 0.0

    def add(self, **stats):
        """Add a micro-batch's 0-d tensors (weighted like the loss, so that they sum to a mean)."""
        for name, value in stats.items():
            self.now[name] = self.now.get(name, 0.0) + value.detach().double()

    def gap(self, sampler_logp, logp, mask):
        """Note the largest |sampler - trainer| log-prob, where the sampler's was recorded."""
        gap = torch.where(mask.bool(), sampler_logp - logp, 0.0).abs().nan_to_num(0.0).max()
        self.largest_gap = max(self.largest_gap, gap)

    def step(self, **values):
        """End of an optimizer step; `values` are floats that are the same on all ranks."""
        self.steps.append((self.now, values))
        self.now = {}

    def result(self):
        """Name -> list of floats, one per optimizer step, over all ranks (a collective)."""
        if not self.steps:  # nothing was trained on
            return {}
        sums, local = zip(*self.steps)
        table = torch.stack([torch.stack([s[n] for n in sums[0]]) for s in sums])
        lists = dict(zip(sums[0], sum_over_ranks(table).T.tolist()))
        gap = torch.as_tensor(self.largest_gap, device=device())
        if world() > 1:
            dist.all_reduce(gap, dist.ReduceOp.MAX)
        lists["sampler_gap"] = [gap.item()]
        return lists | {n: [v[n] for v in local] for n in local[0]}


# --- optimizer and cold start --------------------------------------------------------------------


def make_optimizer(model, lr):
    """AdamW without weight decay: only the reward moves the weights."""
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.999), weight_decay=0.0)


def optimizer_step(model, optimizer, max_grad_norm, scale):
    """Clip (0: never), check, step at `scale` times the learning rate, clear.

    Returns the gradient norm over all ranks before clipping.
    """
    norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
    if not torch.isfinite(norm):
        fail("the loss or its gradient is not finite: stopped before it reached the weights. Go on "
             "from the last checkpoint with --resume, or start again with a lower --lr")
    (group,) = optimizer.param_groups
    group["lr"] = optimizer.defaults["lr"] * scale
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def warmup(optimizer, steps):
    """Share of the learning rate at an optimizer's next step: linear over `steps`, then 1."""
    first = optimizer.param_groups[0]["params"][0]
    return min(1.0, (int(optimizer.state[first].get("step", 0)) + 1) / max(1, steps))


COLD_BATCH = 32  # answers per cold-start step


def cold_start_lessons(rows, cfg):
    """Rows with an answer to imitate, in training order: the pupil's on the built-in problems
    (see `rewards.sloppy_pupil`), elsewhere the file's own worked solutions."""
    lessons = []
    for k, row in enumerate(questions_at(rows, 0, cfg.cold_start * COLD_BATCH, cfg.seed)):
        if cfg.data == "words":
            rng = random.Random(f"pupil {cfg.seed} {k}")
            answer = rewards.sloppy_pupil({"question": row.question, "answer": row.answer}, rng)
        else:
            answer = rewards.without_annotations(row.answer)
            if not answer.strip():
                fail(f"--cold_start {cfg.cold_start}: a row of {cfg.data} has no answer to imitate")
        lessons.append(SimpleNamespace(**vars(row) | {"answer": answer}))
    return lessons


def cold_start(model, tokenizer, lessons, cfg):
    """Supervised steps on `lessons`: token-mean cross-entropy, 20 steps of warm-up, then linear
    to a tenth of the learning rate. Without some right answers there is nothing to reinforce."""
    optimizer = make_optimizer(model, cfg.cold_start_lr or 20 * cfg.lr)
    end, pad, quiet = turn_end(tokenizer), tokenizer.pad_token_id, rank() > 0 or None
    for step in tqdm(range(cfg.cold_start), "cold start", unit="step", disable=quiet, leave=False):
        rows = lessons[step * COLD_BATCH :][:COLD_BATCH]
        prompts, texts = [row.prompt_ids for row in rows], [row.answer for row in rows]
        answers = [[*tokenizer(t, add_special_tokens=False).input_ids, end] for t in texts]
        batch = Batch(rows, texts, *padded(prompts, pad), *padded(answers, pad, left=False))
        (minibatch,) = cut(batch, SimpleNamespace(minibatches=1, micro_tokens=cfg.micro_tokens))
        for micro in minibatch.micros:
            inputs = micro_input(batch, micro)
            logp, _ = token_logps(model, *inputs, micro.response_len, entropy="off")
            loss = -(logp * micro.mask).sum() / minibatch.tokens
            (loss * world()).backward()
        scale = min((step + 1) / 20, 1 - 0.9 * step / cfg.cold_start)
        optimizer_step(model, optimizer, 0, scale)  # clipping here was seen to ruin it


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
            try:
                self.model = rewards.RewardModel(path, device(), compute_dtype(cfg))
            except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
                reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
                fail(f"--reward_model {cfg.reward_model}: {reason}")
            limit = getattr(self.model.model.config, "max_position_embeddings", None)
            if limit and cfg.max_prompt_len + cfg.max_new_tokens > limit:
                fail(f"--reward_model {cfg.reward_model} has {limit} positions, fewer than "
                     f"--max_prompt_len {cfg.max_prompt_len} + --max_new_tokens "
                     f"{cfg.max_new_tokens}: lower them")

    def __call__(self, batch):
        golds = [q.gold for q in batch.questions]
        scores = None
        if self.model:
            questions = [q.question for q in my_share(batch.questions)]
            try:
                part = self.model(questions, my_share(batch.texts))
            except ValueError as error:
                fail(f"--reward_model: {error}; lower --max_new_tokens")
            scores = sum(from_all_ranks(part), [])
        total = rewards.score(batch.texts, golds, self.weights, scores)
        right = [
            math.nan if g is None else float(rewards.is_correct(t, g))
            for t, g in zip(batch.texts, golds)
        ]
        return torch.tensor(total, device=device()), torch.tensor(right, device=device())


def evaluate(sampler, questions, cfg):
    """Answers to questions that have a gold: greedy, and one sample at the training temperature.

    Returns `eval_accuracy` (greedy, strict) with its Wilson interval `eval_low`, `eval_high`,
    `eval_lenient` (greedy, the last number counts) and `eval_sampled`; {} without any gold.
    """
    questions = [q for q in questions if q.gold is not None]
    if not questions:
        return {}
    seed_all(cfg.seed, "evaluate", rank())
    counts = torch.zeros(3, device=device())
    mine = my_share(questions)
    for greedy in (True, False) if mine else ():
        tokens, _ = sampler.generate(*sampler.encode(mine), greedy=greedy)
        texts = sampler.decode(tokens, response_mask(tokens, sampler.stop_ids))
        strict = sum(rewards.is_correct(t, q.gold) for t, q in zip(texts, mine))
        lenient = sum(rewards.is_correct(t, q.gold, lenient=True) for t, q in zip(texts, mine))
        counts += counts.new_tensor([strict, lenient, 0] if greedy else [0, 0, strict])
    n = len(questions)
    strict, lenient, sampled = sum_over_ranks(counts).tolist()
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
    in [0, 1], mean over layers, on the batch's first rows; None for a model without experts."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return None
    first = _micro(batch, torch.arange(min(8, len(batch)), device=batch.tokens.device))
    ids, mask = micro_input(batch, first)
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False,
        output_router_logits=True,
    )
    real, evenness = mask.reshape(-1).bool(), []
    for logits in out.router_logits:  # one (n * L, experts) per layer
        chosen = logits[real].topk(model.config.num_experts_per_tok, -1).indices
        share = torch.bincount(chosen.reshape(-1), minlength=logits.shape[-1]) / chosen.numel()
        evenness.append(torch.special.entr(share).sum() / math.log(logits.shape[-1]))
    return torch.stack(evenness).mean().item()


# --- the run and its files -----------------------------------------------------------------------


def set_up(cfg, file):
    """Everything before the first step: (run, questions by split, policy, sampler).

    `file` is the script's __file__; its stem names the run.
    """
    for name in ("reward_model", "critic"):
        if getattr(cfg, name, ""):
            find_model(getattr(cfg, name), name)
    start = os.path.join(cfg.out_dir, "start")  # weights after a cold start
    if not (cfg.resume and os.path.isdir(start)):
        start = builtin_folder(cfg) if cfg.model in BUILTIN else find_model(cfg.model)
    data = load_questions(cfg)
    start_processes(cfg)
    tokenizer = load_tokenizer(start)
    if data.repeats:
        say(f"notice: {data.repeats} rows of --data {cfg.data} repeat a question and are left out")
    for name in ("train", "heldout", "test"):
        setattr(data, name, encode(tokenizer, getattr(data, name), cfg, f"{name} questions"))
    run = Run(cfg, Path(file).stem)
    policy = load_policy(run.checkpoint or start, cfg)
    _check_fit(policy.config, policy.get_input_embeddings(), data, cfg)
    sampler = Sampler(policy, run.checkpoint or start, tokenizer, cfg)
    kept = run.folder / "start"
    if cfg.cold_start and not run.checkpoint and not kept.is_dir():
        if cfg.model not in BUILTIN:
            cold_start(policy, tokenizer, cold_start_lessons(data.train, cfg), cfg)
            sampler.refresh()
        with whole_folder(kept) as temporary:
            save_model(sampler, policy, temporary)
    run.start = str(kept) if kept.is_dir() else start
    return run, data, policy, sampler


def _check_fit(config, embeddings, data, cfg):
    """Stop unless the model has a row for every token and, if it counts them, the positions."""
    prompts = [row.prompt_ids for row in [*data.train, *data.heldout, *data.test]]
    if max(map(max, prompts)) >= len(embeddings.weight):
        fail(f"--model {cfg.model}: its tokenizer has more tokens than the model's "
             f"{len(embeddings.weight)} embedding rows; they belong to two models")
    limit, longest = getattr(config, "max_position_embeddings", None), max(map(len, prompts))
    if limit and longest + cfg.max_new_tokens > limit:
        fail(f"--max_new_tokens {cfg.max_new_tokens} after prompts of up to {longest} tokens: "
             f"{cfg.model} has {limit} positions; lower it or --max_prompt_len")


COLUMNS = (
    "step reward accuracy eval_accuracy eval_low eval_high eval_sampled eval_lenient pg_loss "
    "value_loss entropy ref_kl approx_kl clip_frac grad_norm lr response_len truncated_frac "
    "tied_frac kl_coef explained_var gen_rounds groups_dropped expert_entropy sampler_gap samples "
    "tokens t_sample t_logp t_update t_total mem_gb"
).split()


class Run:
    """A run's folder: settings, metrics, checkpoints; also its progress bar, clock and signals.

    `state` is what the next step depends on besides weights and optimizers: the step, the place in
    the questions, and whatever else a script puts there. It is saved with every checkpoint.
    """

    def __init__(self, cfg, script):
        self.cfg, self.script = cfg, script
        self.optimizers, self.laps, self.warned, self.signals = {}, {}, set(), []
        self.folder = Path(from_all_ranks(self._make_folder() if rank() == 0 else None)[0])
        saves = sorted((self.folder / "checkpoints").glob("step-*"))
        self.checkpoint = saves[-1] if saves else None
        self.state = {"step": 0, "cursor": 0}
        if self.checkpoint:
            self.state = json.loads((self.checkpoint / "state.json").read_text())
        self.saved_step = self.step
        if self.step > cfg.steps:
            fail(f"--steps {cfg.steps}: {self.folder} has done {self.step}; name a larger number")
        if rank() == 0:
            self._write_config()  # again when resumed: --steps may be another one
            for path in [*self.folder.glob(".tmp-*"), *self.folder.glob("checkpoints/.tmp-*")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()  # of a run that was killed
            first = lambda line: line.split(",")[0] if line.count(",") == len(COLUMNS) - 1 else ""
            self._trim("metrics.csv", first, [",".join(COLUMNS)])
            self._trim("samples.jsonl", lambda line: json.loads(line)["step"], [])

    @property
    def step(self):
        """Rollout steps done."""
        return self.state["step"]

    def optimizer(self, model, lr, name="optimizer"):
        """An AdamW for `model`, in its checkpointed state when the run is resumed."""
        optimizer = make_optimizer(model, lr)
        self.optimizers[name] = (model, optimizer)
        if self.checkpoint:
            with safe_open(self.checkpoint / f"{name}.safetensors", "pt") as file:
                saved = set(file.keys())  # none if nothing was trained on so far
                for key, parameter in model.named_parameters():
                    if f"step.{key}" in saved:
                        optimizer.state[parameter] = {
                            part: _like(file.get_tensor(f"{part}.{key}"), parameter)
                            for part in ("step", "exp_avg", "exp_avg_sq")
                        }
        return optimizer

    def begin(self, sampler, data):
        """Listen to signals, measure where the run starts, show the bar, start the clock."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        say(f"run: {self.folder}; questions: {len(data.train)} to train on, "
            f"{len(data.heldout)} held out, {len(data.test)} for a test")
        quiet = rank() > 0 or None  # None: no bar off a terminal
        self.bar = tqdm(total=self.cfg.steps, initial=self.step, unit="step", disable=quiet)
        if self.step == 0:
            self.state["before"] = evaluate(sampler, data.heldout, self.cfg)
            self._write({"step": 0} | self.state["before"])
            self._say_accuracy("held-out", self.state["before"])
        self.lap()

    def stopping(self):
        """True on all ranks as soon as one of them was told to stop (a collective)."""
        return bool(sum_over_ranks(torch.tensor(float(len(self.signals)), device=device())))

    def next_questions(self, questions):
        """The next P questions of an endless walk over the training questions."""
        count = self.cfg.prompts_per_step
        self.state["cursor"] += count
        return questions_at(questions, self.state["cursor"] - count, count, self.cfg.seed)

    def lap(self, column=None):
        """End of a stage: the seconds since the last lap go to `column`."""
        if device().type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if column:
            self.laps[column] = now - self.last
        self.last = now

    def due(self, every):
        """True each `every` steps and on the last one."""
        return self.step % every == 0 or self.step == self.cfg.steps

    def log(self, batch, advantages, meter, result, sampler, sampled=None, **values):
        """One row of metrics.csv, the bar, a printed rollout at an evaluation, health warnings.

        Collective. `sampled` is all that was sampled, if that is more than the `batch` trained on;
        `values` are further columns; None leaves a cell empty.
        """
        stats = meter.result()
        row = {name: sum(v) / len(v) for name, v in stats.items()}
        sampled = sampled or batch
        self.state["right"] = self.state.get("right") or bool(sampled.correct.nansum() > 0)
        row |= {
            "step": self.step,
            "reward": sampled.rewards.mean().item(),
            "accuracy": sampled.correct.nanmean().item(),
            "truncated_frac": sampled.truncated.mean().item(),
            "response_len": sampled.mask.sum(-1).float().mean().item(),
            "samples": len(sampled), "tokens": int(sampled.mask.sum()),
            "expert_entropy": expert_entropy(sampler.model, sampled),
            "lr": self.optimizers["optimizer"][1].param_groups[0]["lr"],
        }
        row |= self.laps | {"t_total": sum(self.laps.values()), "mem_gb": peak_memory_gb()}
        row |= values | result
        row = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        self._health(row, stats.get("approx_kl", [0.0])[0])
        self._write(row)
        shown = {k: f"{row[k]:.2f}" for k in ("reward", "accuracy") if row[k] is not None}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self._say_accuracy("held-out", result)
        if result and len(batch):
            self._show(batch, advantages if advantages.dim() == 1 else
                       (advantages * batch.mask).sum(1) / batch.mask.sum(1))
        self.state["last"] = result or self.state.get("last")
        self.lap()

    def save(self, sampler):
        """Write checkpoints/step-N: models in Hugging Face form, optimizers, state.

        Collective: rank 0 gathers and writes. The folder is complete or absent, never half there.
        """
        folder = self.folder / "checkpoints" / f"step-{self.step:06d}"
        with whole_folder(folder) as temporary:
            for name, (model, optimizer) in self.optimizers.items():
                critic = model is not sampler.policy
                save_model(sampler, model, temporary / "critic" if critic else temporary)
                save_optimizer(model, optimizer, temporary / f"{name}.safetensors")
            if rank() == 0:
                (temporary / "state.json").write_text(json.dumps(self.state))
        if rank() == 0:
            for old in sorted(folder.parent.glob("step-*"))[: -self.cfg.keep]:
                shutil.rmtree(old.rename(old.with_name(f".tmp-{old.name}")))  # never half there
        self.saved_step = self.step

    def finish(self, sampler, data):
        """Save, read the test questions once, write final/, say what was reached; leave."""
        stopped = self.stopping() or self.step < self.cfg.steps
        if self.step > self.saved_step:
            self.save(sampler)
        self.bar.close()
        if stopped:
            say(f"stopped after step {self.step}; go on with:\n"
                f"  python {self.script}.py --resume --out_dir {shlex.quote(str(self.folder))}")
        else:
            self._conclude(sampler, data)
        end_processes()

    def _make_folder(self):
        """--out_dir, or runs/grpo-1, or the first number that is free."""
        try:
            if self.cfg.out_dir:
                os.makedirs(self.cfg.out_dir, exist_ok=True)
                return self.cfg.out_dir
            for number in itertools.count(1):
                with suppress(FileExistsError):
                    os.makedirs(f"runs/{self.script}-{number}")
                    return f"runs/{self.script}-{number}"
        except OSError as error:
            fail(f"--out_dir {self.cfg.out_dir or 'runs'}: can't be made ({error.strerror})")

    def _write_config(self):
        about = {
            "script": self.script, "config": asdict(self.cfg), "command": shlex.join(sys.argv),
            "torch": torch.__version__, "transformers": transformers.__version__, "world": world(),
        }
        temporary = self.folder / ".tmp-config.json"
        try:
            temporary.write_text(json.dumps(about, indent=2) + "\n")
            os.replace(temporary, self.folder / "config.json")
        except OSError as error:
            fail(f"--out_dir {self.folder}: can't be written to ({error.strerror})")

    def _trim(self, name, step_of, lines):
        """Drop what was logged after the checkpoint: a resumed run logs those steps again."""
        path = self.folder / name
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                if int(step_of(line)) <= self.step and self.checkpoint:
                    lines.append(line)
            except ValueError:
                continue  # the header, or a line that a kill cut short
        temporary = path.with_name(f".tmp-{name}")
        temporary.write_text("".join(f"{line}\n" for line in lines))
        os.replace(temporary, path)

    def _on_signal(self, number, frame):
        # torchrun passes a Ctrl-C on a second time within moments: that still counts as one.
        if self.signals and time.time() - self.signals[0] > 2:
            os._exit(128 + number)
        if not self.signals:
            say("stopping: this step is finished and saved first; once more stops at once")
        self.signals.append(time.time())

    def _write(self, row):
        if rank() > 0:
            return
        with open(self.folder / "metrics.csv", "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        if self.cfg.wandb:
            import wandb

            if wandb.run is None:
                about = asdict(self.cfg)
                wandb.init(project=self.cfg.wandb, name=self.folder.name, config=about)
            wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])

    def _say_accuracy(self, name, result):
        if result:
            text = "{eval_accuracy:.3f} [{eval_low:.3f}, {eval_high:.3f}] greedy, " \
                "{eval_sampled:.3f} sampled, {eval_lenient:.3f} lenient"
            say(f"step {self.step}: {name} accuracy {text.format(**result)}")

    def _show(self, batch, advantages):
        if rank() > 0:
            return
        with open(self.folder / "samples.jsonl", "a") as file:
            for i in range(0, len(batch), max(1, len(batch) // 4)):
                sample = {
                    "step": self.step, "question": batch.questions[i].question,
                    "gold": batch.questions[i].gold, "completion": batch.texts[i],
                    "reward": batch.rewards[i].item(), "advantage": advantages[i].item(),
                }
                file.write(json.dumps(sample) + "\n")
        answer = " | ".join(batch.texts[0].strip().splitlines())[:300]
        say(f"  question: {batch.questions[0].question}\n  answer:   {answer}\n"
            f"  reward {batch.rewards[0]:.2f}, advantage {advantages[0]:+.2f}")

    def _health(self, row, first_kl):
        """Say once, in plain words, what is wrong with a run and which flag to change."""
        unhealthy = {
            "most answers are truncated: raise --max_new_tokens": row["truncated_frac"] > 0.5,
            "every group of this step had equal rewards, so it taught nothing: raise --group_size, "
            "or --cold_start if nothing is ever right": row.get("tied_frac") == 1,
            "entropy has collapsed, answers no longer differ: lower --lr or raise --temperature":
                row.get("entropy", 1.0) < 0.005,
            "the ratio was not 1 before the first update: give --dtype float32 and report it":
                first_kl > 1e-6,
            "far from the reference: lower --lr or raise the KL weight":
                (row.get("ref_kl") or 0) > 1,
            "sampler and trainer disagree on log-probs: give --dtype float32":
                row.get("sampler_gap", 0.0) > 0.5,
            "no answer was ever right: raise --cold_start, or check --reward and the data":
                not self.state["right"] and row["accuracy"] == 0 and row["reward"] <= 0
                and self.step >= 3,
        }
        for message in [m for m, bad in unhealthy.items() if bad and m not in self.warned]:
            self.warned.add(message)
            say(f"warning: step {self.step}: {message}")

    def _conclude(self, sampler, data):
        test = evaluate(sampler, data.test[: self.cfg.test_size or None], self.cfg)
        self._say_accuracy("test", test)
        final = self.folder / "final"
        if rank() == 0 and final.exists():
            shutil.rmtree(final)
        with whole_folder(final) as temporary:
            save_model(sampler, sampler.policy, temporary, final=True)
        before, after = self.state.get("before"), self.state.get("last")
        say(f"done: step {self.step} of {self.cfg.steps}")
        if before and after:
            pairs = [x[key] for key in ("eval_accuracy", "eval_sampled") for x in (before, after)]
            text = "  held-out accuracy: greedy {:.3f} -> {:.3f}, sampled {:.3f} -> {:.3f}"
            say(text.format(*pairs))
        say(f"  {self.folder}/ holds metrics.csv, samples.jsonl, checkpoints and final/, the model")
        folder, final, data = (shlex.quote(str(x)) for x in (self.folder, final, self.cfg.data))
        say(f"next:\n  python plots/figures.py {folder}\n"
            f"  python {self.script}.py --model {final} --data {data} --steps 0\n"
            f"  python {self.script}.py --resume --out_dir {folder} "
            f"--steps {2 * max(1, self.cfg.steps)}")


def _like(tensor, parameter):
    """A loaded optimizer tensor in the form of its parameter: on its device, sharded as it is."""
    if tensor.dim() == 0:
        return tensor
    if not hasattr(parameter, "device_mesh"):
        return tensor.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return dist.tensor.distribute_tensor(tensor.to(device()), mesh, placements, src_data_rank=None)
