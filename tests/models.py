"""Tests: tiny models of many families, made in code, with what surrounds one: a tokenizer, a
folder, a ragged batch, the settings that the rooms read, and log-probs computed slowly.
"""

import weakref
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common

WORDS = 60  # ids that the tokenizer knows, its pad (0) and eos (1) among them
VOCAB = 64  # rows of the embedding: some more, as in real checkpoints

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)  # learned positions, dropout 0.1
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, SHAPE),
    "qwen3": (transformers.Qwen3Config, SHAPE | dict(head_dim=8)),
    "llama": (transformers.LlamaConfig, SHAPE),
    "mistral": (transformers.MistralConfig, SHAPE | dict(sliding_window=4)),
    "gpt2": (transformers.GPT2Config, GPT2),
    "qwen2_moe": (transformers.Qwen2MoeConfig,
                  SHAPE | EXPERTS | dict(shared_expert_intermediate_size=16)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, SHAPE | EXPERTS | dict(head_dim=8)),
}
# AutoTokenizer gives every qwen2 folder Qwen2's own tokenizer: ours would be lost.
FOLDERS = [family for family in FAMILIES if family != "qwen2"]
REFUSED = {  # their logits are not what their output head gives
    "gemma2": (transformers.Gemma2Config, SHAPE | dict(head_dim=8)),  # soft-capped
    "granite": (transformers.GraniteConfig, SHAPE | dict(logits_scaling=4.0)),
}


def tiny_model(family="qwen3", **changes):
    """A model with random weights, always the same ones, large enough to make its mind up."""
    config_class, shape = (FAMILIES | REFUSED)[family]
    ids = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config = config_class(**dict(vocab_size=VOCAB, initializer_range=0.25) | shape | ids | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


def tiny_tokenizer(unk="<unk>", size=WORDS, **special):
    """Splits at spaces: <pad>, <eos>, <unk>, w3, w4, ... w59, each at its own id."""
    words = ["<pad>", "<eos>", unk, *(f"w{i}" for i in range(3, size))]
    rust = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=unk))
    rust.pre_tokenizer, rust.decoder = WhitespaceSplit(), WordPiece(cleanup=False)
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token=unk) | special
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **special)


def save_folder(folder, model=None, tokenizer=None, **generation):
    """A Hugging Face folder of `model`; `generation` goes into its generation_config.json."""
    model, tokenizer = model or tiny_model(), tokenizer or tiny_tokenizer()
    model.generation_config = transformers.GenerationConfig(**dict(eos_token_id=1) | generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def settings(**changes):
    """What the rooms read of a script's Config."""
    return SimpleNamespace(**dict(
        model="the model under test", data="a file", max_prompt_len=64, max_new_tokens=8,
        temperature=1.0, rollout_batch=64, dtype="float32", gradient_checkpointing=False,
        critic="") | changes)


def ragged_batch(rng, rows=8, prompt=6, answer=9):
    """Prompts and answers of random lengths, one of each kind as short as can be; under the masks
    lie random tokens, which must not matter."""
    def lengths(longest):
        return torch.tensor([1, longest, *rng.integers(1, longest + 1, size=rows - 2)])[:, None]

    def ids(width):
        return torch.tensor(rng.integers(2, WORDS, size=(rows, width)))

    return common.Batch(
        questions=[f"question {i}" for i in range(rows)],
        texts=[f"answer {i}" for i in range(rows)],
        prompt_ids=ids(prompt), tokens=ids(answer),
        prompt_mask=(torch.arange(prompt).flip(0) < lengths(prompt).flip(0)).long(),
        mask=(torch.arange(answer) < lengths(answer)).long())


def plain_logps(model, batch, temperature=1.0):
    """(logp, entropy), each (N, T): one answer at a time, no padding, no chunks; 0 outside."""
    columns = batch.tokens.shape[1]
    logp, entropy = [], []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        answer = batch.tokens[row][batch.mask[row].bool()]
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1:-1]
        every = (logits / temperature).log_softmax(-1)
        beyond = (0, columns - len(answer))
        logp.append(F.pad(every[range(len(answer)), answer], beyond))
        entropy.append(F.pad(-(every.exp() * every).sum(-1), beyond))
    return torch.stack(logp), torch.stack(entropy)


def gradient(model):
    """The gradients of all parameters as one vector, cleared afterwards."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([part.flatten() for part in parts])


def assert_near(actual, expected, relative):
    """The distance of two vectors as a share of the length of the expected one."""
    error = (actual - expected).norm() / expected.norm()
    assert error <= relative, f"off by {error:.1e} of its length"


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors made inside it: `peak` is the most that lived at once. The
    parameters of `model` and their gradients are not counted."""

    def __init__(self, model):
        super().__init__()
        own = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        self.live, self.peak = 0, 0
        self.known = weakref.WeakSet(x.untyped_storage() for x in own)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                weakref.finalize(storage, self._freed, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return out

    def _freed(self, size):
        self.live -= size
