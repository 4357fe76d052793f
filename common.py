"""What a training step touches, in a step's order; the loops in `grpo.py` and its siblings use it.

Processes, the tokenizer and the models, sampling, batches and how they are cut, log-probs, the
optimizer, the meter. What no step needs (command line, questions, files) is in `experiment.py`.

N answers, P questions, G answers to each; L positions of a prompt, T of an answer.
"""

import hashlib
import itertools
import math
import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.initialization import no_init_weights

if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    # Micro-batches differ in size: fixed blocks of a GPU's memory would leave gaps. torch reads
    # this when the GPU is first used.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Else transformers (from 5.25) swaps layers on a GPU for code that it fetches from the hub, other
# code for train() than for eval(): nothing is run here that isn't installed.
os.environ["USE_HUB_KERNELS"] = "NO"
huggingface_hub.utils.logging.set_verbosity_error()
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# --- processes -----------------------------------------------------------------------------------


def in_group():
    """Whether a process group exists. It does under torchrun and for bfloat16: then trained weights
    are sharded over it, and the sampler has its own plain copy of them."""
    return dist.is_initialized()


def rank():
    """This process's number, 0 to `world() - 1`."""
    return dist.get_rank() if in_group() else 0


def world():
    """How many processes work on this run."""
    return dist.get_world_size() if in_group() else 1


def fail(message):
    """Stop with one clear line and exit status 2. The message names the culprit and the remedy."""
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(2)  # rank 0 usually meets the same error: let it speak alone
    print(f"error: {message}", file=sys.stderr, flush=True)
    if in_group():
        os._exit(2)  # an ordinary exit would wait for the other ranks
    raise SystemExit(2)


def say(message):
    """Print once, on rank 0, without tearing the progress bar."""
    if rank() == 0:
        encoding = sys.stdout.encoding or "utf-8"  # a console may lack a character
        tqdm.write(message.encode(encoding, "replace").decode(encoding))


_device = "auto"  # --device, see use_device


def use_device(name, dtype):
    """--device: compute there from now on. auto: on this process's GPU, of any kind that torch
    knows, but on an Apple one only if it is named; else on the CPU."""
    global _device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = found.type if found else "cpu"
    if name not in ("auto", "cpu", here):
        fail(f"--device {name}: torch finds no such device here, but {here}; leave it out")
    _device = name
    if device().type == "mps" and ("RANK" in os.environ or compute_dtype(dtype) != torch.float32):
        fail("--device mps: one process, in float32, is what works there; leave out torchrun and "
             "--dtype, or --device")
    count = torch.accelerator.device_count()
    if (device().index or 0) >= count > 0:
        fail(f"process {device().index + 1} of this host finds {count} GPUs: start as many with "
             "torchrun --nproc_per_node")


def device():
    """Where this process computes, see `use_device`."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or _device == "cpu" or (found.type == "mps" and _device != "mps"):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("mps") if found.type == "mps" else torch.device(found.type, index)


def compute_dtype(name):
    """--dtype -> the dtype of every forward pass. Master weights and optimizer state are float32
    always: at lr 1e-6, ten steps of AdamW move 2 % of bfloat16 weights and all float32 ones."""
    if name != "auto":
        return getattr(torch, name)
    if device().type in ("cpu", "mps"):
        return torch.float32
    gpu = torch.get_device_module(device())
    native = gpu.is_bf16_supported(including_emulation=False)  # not on a T4
    return torch.bfloat16 if native else torch.float32


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


def share_like(tensor, parameter):
    """The reverse of `full`: this rank's part of a whole tensor, sharded as `parameter` is."""
    tensor = tensor.to(parameter.device, copy=True)  # not the file's own memory
    if not hasattr(parameter, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # as in shard

    mesh, places = parameter.device_mesh, parameter.placements
    # No communication: every rank has the whole. The clone lets go of the rest.
    return distribute_tensor(tensor, mesh, places, src_data_rank=None).clone()


def seed_all(*numbers):
    """Seed torch from integers such as (seed, step, rank), so that any step can be replayed."""
    # Hashed, because seeds that are near each other (1, 2, 3) may give streams that are alike.
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


# --- tokenizer and models ------------------------------------------------------------------------


def from_pretrained(auto_class, path, dtype=None, **changes):
    """`auto_class.from_pretrained(path)`: safetensors only, no remote code, nothing random.

    Dropout would make the ratio differ from 1 before the first update (GPT-2's 0.1: up to 245).
    dtype None: of master weights. `changes` are to the config. Stops with one line on any fault.
    """
    try:
        if auto_class is AutoTokenizer:
            return auto_class.from_pretrained(path, trust_remote_code=False)
        if auto_class is AutoConfig:
            return _load_config(path, changes)
        model = _load_model(auto_class, path, dtype, changes)
    except Exception as error:  # a foreign folder can make transformers raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        kinds = {"Unrecognized config": "not a decoder-only language model; name one",
                 "mismatched_sizes": "weights and config.json are of two models; copy it again",
                 "quant": "its weights are quantised; give the folder they were made from",
                 "lacks": "copy all of its safetensors files there",
                 "no file named": "copy its safetensors files there (.bin may hold code: convert)",
                 "header": "its safetensors files are damaged; copy them again",
                 "generation_config": "mend its generation_config.json, or remove it",
                 "attn_implementation": "remove that setting from its config.json",
                 "does not recognize": "name a model that transformers has, or update transformers"}
        hint = next((text for word, text in kinds.items() if word in str(error)),
                    "mend its config.json and tokenizer files, or copy the whole folder again")
        hint = hint if Path(path).is_dir() else (
            "no such model, or the hub is out of reach; offline, download it elsewhere and "
            "give --model FOLDER (or --model tiny, which needs nothing)"
        )
        fail(f"cannot load {auto_class.__name__} from {path}: {hint} [{reason}]")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _load_model(auto_class, path, dtype, changes):
    config = _load_config(path, changes)
    came_in = str(config.dtype or torch.float32).removeprefix("torch.")
    config.loaded_dtype = getattr(config, "loaded_dtype", came_in)  # our checkpoints' own
    # When sharded, keep the checkpoint's dtype: each layer becomes float32 on its own (see shard).
    master = "auto" if in_group() else torch.float32
    model, report = auto_class.from_pretrained(
        path, config=config, dtype=dtype or master, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True,
    )
    if (Path(path) / "generation_config.json").is_file():
        # Raises for a broken file, where the model's own from_pretrained() goes on without it.
        ends = GenerationConfig.from_pretrained(path).eos_token_id or []
        if not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends])):
            raise ValueError(f"eos_token_id of its generation_config.json is {ends}, no token id")
    new = ("score.", "classifier.")  # a value head, which is set to zero where it is made
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(new))
    if missing:  # transformers makes up random ones and goes on
        raise ValueError(f"it lacks weights: {', '.join(missing)[:200]}")
    return model


def _load_config(path, changes):
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **changes)
    _make_plain(config)
    return config


def _make_plain(config):
    """Set dropout and router noise to 0 and extra outputs to off, in nested configs, too; raise
    ValueError for attention that is fetched from the hub, which USE_HUB_KERNELS doesn't stop."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _make_plain(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif name in ("output_router_logits", "_output_attentions", "output_hidden_states"):
            setattr(config, name, False)
        elif name == "_attn_implementation_internal" and "/" in str(value):
            raise ValueError(f"its attn_implementation {value} is code on the hub")


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
        with time_limit(TEMPLATE_SECONDS):
            stop_ids(tokenizer, GenerationConfig())
            if "QUESTION" not in prompts(tokenizer, ["QUESTION"])[0][0]:
                raise ValueError("it leaves the question out")
    except Exception as error:  # a template is a program: it can raise anything, or go on for ever
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        fail(f"{path}: its chat template does not take a question and an answer ({reason}); mend "
             "or remove it")
    return tokenizer


TEMPLATE_SECONDS = 5  # for one question and its answer


@contextmanager
def time_limit(seconds):
    """TimeoutError in what takes longer (where the system has such a clock: not on Windows)."""
    def ring(*_):
        raise TimeoutError(f"it takes more than {seconds} s")

    clock = hasattr(signal, "setitimer")
    if clock:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


PLAIN_PROMPT = "Question: {}\nAnswer:\n"  # for a tokenizer without a template


def prompts(tokenizer, questions):
    """Questions -> (texts, token ids) of the prompts that ask for an answer: in the words of the
    chat template, if there is one."""
    if not tokenizer.chat_template:
        texts = [PLAIN_PROMPT.format(question) for question in questions]
        rows = tokenizer(texts).input_ids
        ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
        for row in rows:
            while row and row[-1] in ends:  # some tokenizers append it, and the text goes on
                row.pop()
        return texts, rows
    turns = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return texts, tokenizer(texts, add_special_tokens=False).input_ids


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


def special_ids(tokenizer):
    """The set of ids that no answer holds. The unknown token is some word; <think> and </think> are
    part of an answer, whatever the tokenizer calls them."""
    added = tokenizer.added_tokens_decoder.items()
    ids = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    think = {i for i, token in added if token.content in ("<think>", "</think>")}
    return ids - think - {tokenizer.unk_token_id}


def load_policy(path, dtype, gradient_checkpointing=False):
    """The trained model: float32 master weights, sharded unless one float32 process runs."""
    model = from_pretrained(AutoModelForCausalLM, path)
    return trainable(model, dtype, gradient_checkpointing)


def load_frozen(path, dtype):
    """A plain copy in the compute dtype, never trained: the reference, or the sampler's weights."""
    model = from_pretrained(AutoModelForCausalLM, path, compute_dtype(dtype))
    return model.to(device()).eval().requires_grad_(False)


def trainable(model, dtype, gradient_checkpointing):
    """A loaded model, made ready for updates: in train mode (dropout is 0), sharded in a group."""
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = shard(model, compute_dtype(dtype)) if in_group() else model.float().to(device())
    return model.train()


def shard(model, dtype):
    """FSDP2: every rank keeps 1/world of each parameter in float32 and gathers it in `dtype`.

    Layer by layer, so that no GPU ever holds a whole float32 copy of the model.
    """
    from torch.distributed.device_mesh import init_device_mesh  # 2 s of imports, for N > 1 only
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method

    # FSDP2 warns of outputs that are views, in case of in-place changes: there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh(device().type, (world(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for layer in [*layers, model]:
        for parameter in layer.parameters():
            if not isinstance(parameter, torch.distributed.tensor.DTensor):
                # Moved first: the checkpoint's bfloat16 is half as much to move.
                parameter.data = parameter.data.to(device()).float()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # token_logps calls the body and the head, not forward(): FSDP gathers the weights that belong
    # to no layer (embedding, head) for forward() and for methods registered with it, only.
    model.token_logps = MethodType(token_logps, model)
    register_fsdp_forward_method(model, "token_logps")
    return model


def empty_copy(model, dtype):
    """A plain, frozen model like the sharded `model`, which fills its weights (`Sampler.refresh`):
    no file is read for it, which after a resume would be the float32 one once more."""
    with torch.device(device()), no_init_weights():
        copy = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=dtype)
    copy.tie_weights()
    for mine, theirs in zip(copy.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)
    copy.generation_config = model.generation_config
    return copy.eval().requires_grad_(False)


# --- sampling ------------------------------------------------------------------------------------

CHUNK = 16  # tokens between two looks at which rows have finished
CPU_ROWS = 128  # --rollout_batch 0 on a CPU, where more at once gain nothing


def rows_that_fit(memory, cache, vocabulary):
    """How many answers a quarter of a GPU's `memory` (bytes) holds at once: each takes `cache`
    bytes for keys and values at full length, and 18 bytes for each token of the vocabulary: logits
    in the compute dtype, in float32 and copied, their softmax, the noise. Of the total memory, not
    what is free: the same for every run on that kind of GPU, so that a seed stays a seed."""
    return max(1, int(memory / 4 // (cache + 18 * vocabulary)))


class Sampler:
    """Draws answers with Hugging Face `generate` from exactly the law that is trained.

    `model` is the policy itself where it is an ordinary float32 module, else a plain copy per rank
    in the compute dtype, which `refresh` brings up to date after each update: generating from
    sharded weights is 2-5 times slower and hangs when ranks finish at different lengths.
    """

    def __init__(self, policy, tokenizer, cfg):
        self.policy, self.tokenizer, self.name = policy, tokenizer, cfg.model
        self.temperature, self.max_new_tokens = cfg.temperature, cfg.max_new_tokens
        self.pad = tokenizer.pad_token_id
        self.model = empty_copy(policy, compute_dtype(cfg.dtype)) if in_group() else policy
        self.refresh()
        self.rows_at_once = cfg.rollout_batch or self._rows_that_fit(
            cfg.max_prompt_len + cfg.max_new_tokens)
        self.stop_ids = stop_ids(tokenizer, self.model.generation_config)
        self.special_ids = special_ids(tokenizer)
        self.loaded_generation_config = self.model.generation_config
        # A checkpoint's own top_k, top_p and penalties leak into every call, even beside a config
        # of ours, unless they are replaced.
        self.model.generation_config = self.config(1)

    def _rows_that_fit(self, row_tokens):
        """--rollout_batch 0: `rows_that_fit` this GPU; CPU_ROWS on a CPU."""
        if device().type == "cpu":
            return CPU_ROWS
        config = self.model.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        token = config.num_hidden_layers * kv * self.model.dtype.itemsize
        gpu = torch.get_device_module(device())
        if device().type == "mps":  # the system's memory, of which it recommends a part
            memory = gpu.recommended_max_memory()
        else:
            memory = gpu.get_device_properties(device()).total_memory
        return rows_that_fit(memory, row_tokens * token, config.vocab_size)

    def config(self, new_tokens, greedy=False):
        """What `generate` is told: softmax(logits / T), whole, or its largest value."""
        # All explicit: unset, top_k would be 50.
        return GenerationConfig(
            do_sample=not greedy, temperature=None if greedy else self.temperature,
            top_k=None if greedy else 0, top_p=None if greedy else 1.0, repetition_penalty=1.0,
            max_new_tokens=new_tokens, eos_token_id=self.stop_ids, pad_token_id=self.pad,
        )

    def refresh(self):
        """Copy the policy's weights into the sampler's model (nothing to do if they are one)."""
        if self.model is self.policy:
            return
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(full(theirs.detach().to(mine.dtype)))  # cast first: gather half as much

    def encode(self, questions):
        """Questions -> (prompt_ids, prompt_mask), each (P, longest) int64, padded on the left, so
        that every answer begins in the same column."""
        return padded([q.prompt_ids for q in questions], self.pad)

    def decode(self, tokens, mask):
        """(N, T) tokens -> N texts, each up to its first special token: there a turn ends, and what
        stood on both sides of it must not grow together. Ids beyond the tokenizer become ''."""
        rows = []
        for row, length in zip(tokens.tolist(), mask.sum(-1).tolist()):
            ends = (i for i in range(length) if row[i] in self.special_ids)
            rows.append(row[: next(ends, length)])
        return self.tokenizer.batch_decode(rows)

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
        prompts = max(1, self.rows_at_once // group_size)
        parts, recorder = [], _Recorder(record, self.temperature)
        for ids, mask in zip(prompt_ids.split(prompts), prompt_mask.split(prompts)):
            width = int(mask.sum(-1).max())  # padding that only another part's prompts needed goes
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
        one_go = not repeatable(cache)  # then each row runs its own prompt, and none leaves
        if ids.shape[1] > 1 and not one_go:
            # The prompt runs once, and its keys and values serve G answers.
            # All but its last token: generate() feeds that one itself, to get the first logits.
            self.model.base_model(
                input_ids=ids[:, :-1], attention_mask=mask[:, :-1],
                position_ids=positions(mask[:, :-1]), use_cache=True, cache=cache,
            )
            cache.batch_repeat_interleave(group_size)
        ids, mask = ids.repeat_interleave(group_size, 0), mask.repeat_interleave(group_size, 0)
        tokens = ids.new_full((len(ids), self.max_new_tokens), self.pad)
        alive, done = torch.arange(len(ids), device=ids.device), 0  # rows still going, columns done
        while len(alive) and done < self.max_new_tokens:
            left = self.max_new_tokens - done
            config = self.config(left if one_go else min(CHUNK, left), greedy)
            try:
                new = self.model.generate(
                    ids, attention_mask=mask, generation_config=config,
                    logits_processor=None if done else watch, cache=cache,
                )[:, ids.shape[1] :]
            except RuntimeError as error:
                if not any(x in str(error) for x in ("probability tensor", "device-side assert")):
                    raise  # the CPU's words, CUDA's words
                fail("the model's logits are not finite, it can't be sampled from: go on from the "
                     "last checkpoint with --resume, or start again with a lower --lr")
            tokens[alive, done : done + new.shape[1]] = new
            done += new.shape[1]
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
            if one_go:
                break
            # A row that has ended would go on costing a forward pass a token until the last one
            # ends. To take rows out copies the cache, so not at every token: each CHUNK of them.
            going = self.truncated(new).nonzero()[:, 0]
            if len(going) < len(alive):
                ids, mask, alive = ids[going], mask[going], alive[going]
                cache.batch_select_indices(going)
        return tokens[:, :done]


class _Recorder:
    """Notes the log-probs that `generate` gave to the tokens of its first rows, for one chunk.

    A logits processor sees the model's logits of the next token and the tokens so far: what it was
    given last time belongs to the newest token. It comes before top-k and the like, which must be
    off; that they are is tested (tests/test_sampling.py), and so is the law when a model is loaded.
    """

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


def repeatable(cache):
    """Whether a prompt's cache can be repeated and rows taken out: not linear attention's state."""
    return not any(isinstance(x, LinearAttentionCacheLayerMixin) for x in cache.layers)


def response_mask(tokens, stop_ids):
    """(N, T) int64: 1 up to and including the first of `stop_ids` in each row, 0 after it.

    tokens: (N, T) int64. Never built from `tokens != pad`, which would unmask the end token of
    every model whose pad token is its end token.
    """
    stops = torch.isin(tokens, torch.as_tensor(stop_ids, device=tokens.device)).long()
    return (stops.cumsum(-1) - stops == 0).long()  # no stop token *before* this one


def positions(attention_mask):
    """(N, L) position ids that start at 0 on the first real token: padding must not shift them.

    forward() would count from the left edge; only generate() derives them from the mask itself.
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_cat(parts, value, left=False):
    """Stack (n_i, L_i) tensors into (sum n_i, max L_i), padded with `value` on the right (left)."""
    width = max(part.shape[1] for part in parts)
    wide = []
    for part in parts:
        missing = width - part.shape[1]
        wide.append(F.pad(part, (missing, 0) if left else (0, missing), value=value))
    return torch.cat(wide)


def padded(rows, pad, left=True):
    """Lists of token ids -> (ids, mask), each (N, longest) int64 on this rank's device."""
    rows = [torch.tensor(row, device=device())[None] for row in rows]
    return pad_cat(rows, pad, left), pad_cat([torch.ones_like(row) for row in rows], 0, left)


# --- batches -------------------------------------------------------------------------------------


@dataclass
class Batch:
    """N answers, rows of one prompt consecutive, the same on every rank once gathered."""

    questions: list  # N: the question of each answer, with its gold
    texts: list  # N decoded answers
    prompt_ids: torch.Tensor  # (N, L) int64, padded on the left
    prompt_mask: torch.Tensor  # (N, L) int64
    tokens: torch.Tensor  # (N, T) int64, padded on the right
    mask: torch.Tensor  # (N, T) int64, 1 up to and including the stop token
    rewards: torch.Tensor = None  # (N,) float32
    correct: torch.Tensor = None  # (N,) float32: 1 right, 0 wrong, NaN without a gold answer
    truncated: torch.Tensor = None  # (N,) float32: 1 where no stop token came
    sampler_logp: torch.Tensor = None  # (N, T) float32, NaN where not recorded
    ref_logp: torch.Tensor = None  # (N, T) float32, where there is a reference
    group_size: int = 1  # G: so many consecutive rows answer one prompt

    def __len__(self):
        return len(self.texts)

    @classmethod
    def cat(cls, batches, pad):
        """One batch from several, padded to the widest."""
        fills = dict(prompt_ids=pad, prompt_mask=0, tokens=pad, mask=0, sampler_logp=math.nan)
        whole = {}
        for name, first in vars(batches[0]).items():
            parts = [getattr(batch, name) for batch in batches]
            if isinstance(first, list):
                whole[name] = list(itertools.chain(*parts))
            elif name in fills and first is not None:
                whole[name] = pad_cat(parts, fills[name], left=name.startswith("prompt"))
            else:
                whole[name] = torch.cat(parts) if torch.is_tensor(first) else first
        return cls(**whole)

    def select(self, rows):
        """The rows with these indices, (n,) int64: whole groups of them."""
        picked = dict(vars(self))
        for name, value in picked.items():
            if isinstance(value, list):
                picked[name] = [value[i] for i in rows.tolist()]
            elif torch.is_tensor(value):
                picked[name] = value[rows]
        return Batch(**picked)

    def to(self, where):
        """The same batch with its tensors on another device."""
        moved = dict(vars(self))
        for name, value in moved.items():
            if torch.is_tensor(value):
                moved[name] = value.to(where)
        return Batch(**moved)


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


@dataclass
class Minibatch:
    """What one optimizer step learns from."""

    rows: torch.Tensor  # (n,) int64, indices into the batch, on all ranks
    tokens: int  # how many response tokens they hold
    micros: list  # this rank's share of them, cut into `Micro`s


def cut(batch, minibatches, micro_tokens):
    """A rollout step's `Minibatch`es (an optimizer step each), cut once for all its log-probs.

    Within a minibatch rows are sorted by length and dealt out to the ranks like cards, so that all
    have like work; then cut so that a padded micro-batch holds at most `micro_tokens`. Old,
    reference and new log-probs use the same cut: in bfloat16 another padding moves a log-prob by up
    to 8e-3, 27 times GSPO's clip range, and the first ratio must be exactly 1.
    """
    lengths = batch.prompt_mask.sum(-1) + batch.mask.sum(-1)
    everyone, cuts = torch.arange(len(batch), device=lengths.device), []
    for rows in everyone.tensor_split(minibatches):
        if len(rows) == 0:
            continue  # fewer answers than minibatches
        by_length = rows[lengths[rows].argsort(descending=True, stable=True)]
        shares = [_micros(batch, by_length[r :: world()], micro_tokens) for r in range(world())]
        # Every forward and backward pass is a collective: a rank with fewer micro-batches than the
        # others runs its shortest row once more, with mask and so weight 0.
        dummy = micro_of(batch, by_length[-1:])
        dummy.mask = torch.zeros_like(dummy.mask)
        turns = list(itertools.zip_longest(*shares, fillvalue=dummy))  # a micro of each rank
        for turn in turns:  # run prompts once on all ranks or on none: FSDP would hang
            if any(micro.groups is None for micro in turn):
                for micro in turn:
                    micro.groups = None
        mine = [turn[rank()] for turn in turns]
        cuts.append(Minibatch(rows, tokens=int(batch.mask[rows].sum()), micros=mine))
    return cuts


def _micros(batch, rows, micro_tokens):
    """Greedy cut of length-sorted rows under the token budget (one row at least), and before a row
    that is not half as long as its micro-batch: it would be mostly padding."""
    if len(rows) == 0:
        return []
    micros, start, prompt, answer = [], 0, 0, 0
    prompts, answers = batch.prompt_mask.sum(-1).tolist(), batch.mask.sum(-1).tolist()
    for end, row in enumerate(rows.tolist()):
        short = prompts[row] + answers[row] < (prompt + answer) / 2
        prompt, answer = max(prompt, prompts[row]), max(answer, answers[row])
        if end > start and (short or (prompt + answer) * (end + 1 - start) > micro_tokens):
            micros.append(micro_of(batch, rows[start:end]))
            start, prompt, answer = end, prompts[row], answers[row]
    micros.append(micro_of(batch, rows[start:]))
    return micros


def micro_of(batch, rows):
    """The `Micro` of these rows of the batch, as wide as their longest prompt and answer."""
    prompt_len = int(batch.prompt_mask[rows].sum(-1).max())
    response_len = int(batch.mask[rows].sum(-1).max())
    groups = rows // batch.group_size  # the rollout keeps the answers to a prompt together
    if response_len == 1 or len(groups.unique()) == len(rows):  # nothing to gain
        groups = None
    return Micro(rows, prompt_len, response_len, batch.mask[rows, :response_len], groups)


def micro_input(batch, micro):
    """(input_ids, attention_mask) of a micro-batch, each (n, prompt_len + response_len) int64."""
    prompt = slice(batch.prompt_ids.shape[1] - micro.prompt_len, None)
    ids = torch.cat([batch.prompt_ids[micro.rows, prompt], micro.take(batch.tokens)], 1)
    return ids, torch.cat([batch.prompt_mask[micro.rows, prompt], micro.take(batch.mask)], 1)


# --- log-probs -----------------------------------------------------------------------------------


def micro_logps(model, batch, micro, temperature, entropy="value"):
    """`token_logps` of a micro-batch's answers: (logp, entropy), each (n, micro.response_len)."""
    ids, mask = micro_input(batch, micro)
    if hasattr(model, "token_logps"):  # sharded: its weights are gathered first, see shard()
        return model.token_logps(
            ids, mask, micro.response_len, temperature, entropy, micro.groups)
    return token_logps(model, ids, mask, micro.response_len, temperature, entropy, micro.groups)


@torch.no_grad()
def whole(function, model, batch, cuts, **settings):
    """`function(model, batch, micro, **settings)`, (n, t) each, of all micro-batches, put together
    as (N, T) on every rank. Masked cells are 0. None of an empty batch."""
    out = None
    for minibatch in cuts:
        for micro in minibatch.micros:  # each rank fills the rows that it owns
            values = function(model, batch, micro, **settings)
            out = values.new_zeros(batch.mask.shape) if out is None else out
            # += and not =: a dummy's row is another rank's, or comes a second time, as zeros.
            out[micro.rows, : micro.response_len] += values.masked_fill(micro.mask == 0, 0.0)
    return None if out is None else sum_over_ranks(out)


def whole_logps(model, batch, cuts, temperature):
    """(N, T) log-probs of the whole batch under `model`, computed in the cut of the update."""
    def logps(model, batch, micro):
        return micro_logps(model, batch, micro, temperature, entropy="off")[0]
    return whole(logps, model, batch, cuts)


HEAD_FLOATS = 2**27  # logits kept whole: 0.5 GB, that is 883 tokens of a 152k vocabulary


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
    shape = (len(input_ids), response_len)
    hidden = response_states(model, input_ids, attention_mask, response_len, groups).flatten(0, 1)
    targets = input_ids[:, -response_len:].flatten()
    head = model.get_output_embeddings()
    most = HEAD_FLOATS // head.weight.shape[0]  # tokens
    if len(targets) <= most:
        logp, entropies = head_logps(head, hidden, targets, temperature, entropy)
        return logp.view(shape), None if entropy == "off" else entropies.view(shape)
    logps, entropies, size = [], [], max(1, most // 4)
    for states, tokens in zip(hidden.split(size), targets.split(size)):
        logp, spread = checkpoint(
            head_logps, head, states, tokens, temperature, entropy, use_reentrant=False)
        logps.append(logp)
        entropies.append(spread)
    return torch.cat(logps).view(shape), None if entropy == "off" else (
        torch.cat(entropies).view(shape))


def head_logps(head, hidden, targets, temperature, entropy):
    """log pi: hidden states (M, hidden) and the tokens they predict, (M,) -> (logp, entropy)."""
    logits = head(hidden)  # (M, vocabulary)
    # In bfloat16 a log-softmax alone is off by 0.05 nats.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logp = log_probs.gather(-1, targets[:, None])[:, 0]
    if entropy == "off":
        return logp, None
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return logp, -(log_probs.exp() * log_probs).sum(-1)


def response_states(model, input_ids, attention_mask, response_len, groups):
    """(N, response_len, hidden): the last hidden states, each one place before what it predicts."""
    place, width = positions(attention_mask), input_ids.shape[1] - response_len
    body, ids, mask = model.base_model, input_ids, attention_mask
    cache = None if groups is None else DynamicCache(config=model.config)
    # Gradient checkpointing runs layers a second time, which would append to the cache again.
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    twice = cache and model.training and checkpointed
    if cache is None or twice or not repeatable(cache):
        out = body(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False)
        return out.last_hidden_state[:, width - 1 : -1]  # the state before a token predicts it
    numbers, group = groups.unique(return_inverse=True)
    one = torch.empty_like(numbers)  # a row of each group
    one[group] = torch.arange(len(group), device=group.device)
    prompt = (one, slice(width))
    last = body(  # of a prompt: the state that predicts the first token of each answer
        input_ids=ids[prompt], attention_mask=mask[prompt], position_ids=place[prompt],
        use_cache=True, cache=cache,
    ).last_hidden_state[group, -1:]
    if response_len == 1:
        return last
    cache.batch_select_indices(group)  # each answer gets the keys and values of its prompt
    rest = body(  # all answers but their last tokens, which predict nothing
        input_ids=ids[:, width:-1], attention_mask=mask[:, :-1], position_ids=place[:, width:-1],
        use_cache=True, cache=cache,
    ).last_hidden_state
    return torch.cat([last, rest], 1)


# --- optimizer and meter -------------------------------------------------------------------------


def make_optimizer(model, lr, beta2=0.999):
    """AdamW without weight decay: only the reward moves the weights."""
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, beta2), weight_decay=0.0)


def optimizer_step(model, optimizer, lr, max_grad_norm):
    """Clip (0: never), check, step at learning rate `lr`, clear.

    Returns the gradient norm over all ranks before clipping.
    """
    norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
    if not torch.isfinite(norm):
        fail("the loss or its gradient is not finite: stopped before it reached the weights. Go on "
             "from the last checkpoint with --resume, or start again with a lower --lr")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


class Meter:
    """Statistics of a rollout step: sums over micro-batches and ranks, one per optimizer step."""

    def __init__(self):
        self.sums, self.values = [], []  # a dict for each optimizer step so far
        self.now, self.largest_gap = {}, 0.0  # of the one that is under way

    def add(self, **stats):
        """Add a micro-batch's 0-d tensors (weighted like the loss, so that they sum to a mean)."""
        wide = torch.float32 if device().type == "mps" else torch.float64  # Apple GPUs have none
        for name, value in stats.items():
            self.now[name] = self.now.get(name, 0.0) + value.detach().to(wide)

    def gap(self, sampler_logp, logp, mask):
        """Note the largest |sampler - trainer| log-prob, where the sampler's was recorded."""
        gap = torch.where(mask.bool(), sampler_logp - logp, 0.0).abs().nan_to_num(0.0).max()
        self.largest_gap = max(self.largest_gap, gap)

    def step(self, **values):
        """End of an optimizer step; `values` are floats that are the same on all ranks."""
        self.sums.append(self.now)
        self.values.append(values)
        self.now = {}

    def result(self):
        """Name -> list of floats, one per optimizer step, over all ranks (a collective)."""
        if not self.sums:  # nothing was trained on
            return {}
        names, rows = list(self.sums[0]), []
        for sums in self.sums:
            rows.append(torch.stack([sums[name] for name in names]))
        table = sum_over_ranks(torch.stack(rows))  # (optimizer steps, names)
        lists = dict(zip(names, table.T.tolist()))
        for name in self.values[0]:
            lists[name] = [values[name] for values in self.values]
        gap = torch.as_tensor(self.largest_gap, device=device())
        if world() > 1:
            dist.all_reduce(gap, dist.ReduceOp.MAX)
        return lists | {"sampler_gap": [gap.item()]}
