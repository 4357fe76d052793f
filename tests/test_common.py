"""Tests: the functions of common.py. One of them: pytest tests/test_common.py -k cut

How text is sampled is in test_sampling.py.
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers

import common
import dapo
import experiment
import grpo
import gspo
import ppo
from models import (FAMILIES, FOLDERS, VOCAB, Memory, assert_near, gradient, plain_logps,
                    ragged_batch, save_folder, settings, tiny_model, tiny_tokenizer)
from oracles import check, normal

@pytest.fixture
def play(monkeypatch):
    """play(rank, world): common believes to be that process."""
    def play(rank, world):
        monkeypatch.setattr(common, "rank", lambda: rank)
        monkeypatch.setattr(common, "world", lambda: world)
    return play


def cut(batch, minibatches=1, micro_tokens=10**6):
    """`common.cut`, into a whole unless told otherwise."""
    return common.cut(batch, minibatches, micro_tokens)


def refused(capsys, *words):
    """The one line that `common.fail` left, which must hold these words."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines


# --- response_mask -------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens, stops, expected", [
    ([7, 9, 2, 2], [2], [1, 1, 1, 0]),      # pad is the end token: its first one still counts
    ([7, 9, 2, 5], [2], [1, 1, 1, 0]),      # whatever follows the end
    ([7, 0, 9, 2], [2], [1, 1, 1, 1]),      # a pad id inside an answer is a token like any other
    ([7, 9, 5, 2], [2], [1, 1, 1, 1]),      # ended exactly at the limit
    ([7, 9, 5, 6], [2], [1, 1, 1, 1]),      # cut at the limit
    ([2, 7, 9, 2], [2], [1, 0, 0, 0]),      # nothing but the end
    ([7, 3, 9, 2], [2, 3], [1, 1, 0, 0]),   # the first of a set (Phi-3.5 has three, trl #7039)
    ([7, 2, 9, 3], [3, 2], [1, 1, 0, 0]),
])
def test_response_mask(tokens, stops, expected):
    """A mask made of `tokens != pad` loses the end token where pad is the end token, so that
    stopping is never reinforced (trl #4970, reasoning-from-scratch #185)."""
    ended = [any(t in stops for t in tokens[:i + 1]) for i in range(len(tokens))]
    check(common.response_mask(torch.tensor([tokens]), stops), [expected], {
        "tokens != pad": [[t not in stops for t in tokens]],
        "the end token itself left out": [[not e for e in ended]],
        "nothing is ever masked": [[1] * len(tokens)]})


@pytest.mark.parametrize("ids, eos, expected", [  # verl's get_response_mask
    ([[7, 9, 2, 0, 0, 0], [7, 2, 5, 2, 0, 0], [2, 0, 0, 0, 0, 0], [7, 9, 5, 6, 8, 4],
      [7, 9, 5, 6, 8, 2], [3, 9, 2, 0, 0, 0], [7, 0, 9, 2, 0, 0]], [2, 3],
     [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1],
      [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]),
    ([[7, 9, 2, 2, 2, 2], [7, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2], [7, 9, 5, 6, 8, 4]], [2],
     [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])])
def test_response_mask_peers(ids, eos, expected):
    check(common.response_mask(torch.tensor(ids), eos), expected)


# --- token_logps ---------------------------------------------------------------------------------

class Parrot(torch.nn.Module):
    """A model whose hidden states, and so whose logits, are given."""

    def __init__(self, logits):
        super().__init__()
        size = logits.shape[-1]
        self.head = torch.nn.Linear(size, size, bias=False, dtype=logits.dtype)
        self.head.weight.data = torch.eye(size, dtype=logits.dtype)
        self.logits = F.pad(logits, (0, 0, 0, 1))  # the last token predicts nothing

    def base_model(self, **inputs):
        return SimpleNamespace(last_hidden_state=self.logits)

    def get_output_embeddings(self):
        return self.head


def parrot_logps(logits, labels, temperature):
    labels = torch.tensor(labels)
    ids = F.pad(labels, (1, 0))  # a prompt of one token
    model = Parrot(torch.tensor(logits, dtype=torch.float64))
    return common.token_logps(model, ids, torch.ones_like(ids), labels.shape[1], temperature)


def test_token_logps_by_hand():
    """Logits 2, 0 at T = 0.5 are 4, 0: log-prob -log(1 + e**-4) = -0.0181 (trl #3029: -0.1269)."""
    logp, _ = parrot_logps([[[2.0, 0.0]]], [[0]], 0.5)
    check(logp, [[-math.log1p(math.exp(-4))]], {"temperature forgotten": [[-0.126928011]],
                                                "times the temperature": [[-0.313261688]]})


@pytest.mark.parametrize("temperature, logps, entropies", [
    (1.0, [-3.4966917580, -5.5307358660], [1.0485029477, 1.3373152018]),
    (0.7, [-4.6557465019, -7.4321236492], [0.5230756695, 0.8139815901])])
def test_token_logps_peers(temperature, logps, entropies):
    """verl's logprobs_from_logits_v2 and entropy_from_logits, of logits / temperature."""
    logits = [[-1.6377282, 3.6201561, 1.5272399, 0.4494497, -1.1889708, -1.1490262, 1.6142842,
               -3.0486785, -0.1723455, 0.3235162, -2.2276358],
              [0.9419544, -1.8359762, 0.5580966, -1.8649778, 2.6918067, -0.5613061, -3.0423632,
               0.3464773, 0.8663299, -2.2640817, -2.3529132]]
    logp, entropy = parrot_logps([logits], [[3, 10]], temperature)
    check(logp, [logps], atol=1e-6)
    check(entropy, [entropies], atol=1e-6)


def whole_input(batch):
    """(input_ids, attention_mask, response_len) of a batch with all its padding."""
    return (torch.cat([batch.prompt_ids, batch.tokens], 1),
            torch.cat([batch.prompt_mask, batch.mask], 1), batch.tokens.shape[1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_token_logps_against_one_answer_at_a_time(rng, family, temperature):
    """Neither the padding on the left (which shifts GPT-2's positions unless they are given: 6.5
    nats, OpenRLHF #217) nor the garbage on the right may matter."""
    model, batch = tiny_model(family).eval(), ragged_batch(rng)
    logp, entropy = common.token_logps(model, *whole_input(batch), temperature)
    right = plain_logps(model, batch, temperature)
    off = torch.roll(logp, 1, 1) * batch.mask
    check(logp * batch.mask, right[0], {
        "temperature forgotten": plain_logps(model, batch)[0],
        "divided twice by the temperature": plain_logps(model, batch, temperature**2)[0],
        "read one place off": off}, atol=2e-5)
    check(entropy * batch.mask, right[1], {
        "temperature forgotten": plain_logps(model, batch)[1], "the sign": -right[1]}, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_logps_gradients_of_all_parameters(rng, family):
    """Of a random sum of log-probs and entropies."""
    model, batch = tiny_model(family).eval(), ragged_batch(rng)
    a, b = normal(rng, *batch.mask.shape), normal(rng, *batch.mask.shape)

    def loss(logp, entropy):
        return ((a * logp + b * entropy) * batch.mask).sum()

    loss(*plain_logps(model, batch, 0.7)).backward()
    right = gradient(model)
    loss(*common.token_logps(model, *whole_input(batch), 0.7, entropy="grad")).backward()
    assert_near(gradient(model), right, 1e-5)


@pytest.mark.parametrize("answer", [1, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_runs_once_and_counts_for_all(rng, family, answer):
    """The log-probs of each row and the gradients are those of rows that have their own copy."""
    model, batch = tiny_model(family).eval(), ragged_batch(rng, answer=answer)
    asker = torch.tensor([0, 1, 1, 1, 5, 0, 6, 6])  # whose prompt each row has, in any order
    ids, mask, length = whole_input(replace(
        batch, prompt_ids=batch.prompt_ids[asker], prompt_mask=batch.prompt_mask[asker]))
    a, seen = normal(rng, *batch.mask.shape), []
    with mock.patch.object(model.base_model, "forward", wraps=model.base_model.forward) as forward:
        for groups in (None, asker):
            logp, entropy = common.token_logps(model, ids, mask, length, 0.7, "grad", groups)
            ((a * logp + entropy) * batch.mask).sum().backward()
            seen.append((logp.detach() * batch.mask, entropy.detach() * batch.mask,
                         gradient(model)))
    for alone, together in zip(*seen):
        assert_near(together, alone, 1e-5)
    tokens = [call.kwargs["input_ids"].numel() for call in forward.call_args_list]
    width = ids.shape[1] - length
    assert tokens == [8 * ids.shape[1], 4 * width, 8 * (length - 1)][: 2 + (length > 1)]


def test_the_prompts_of_a_batch_run_once_a_group(rng):
    """Its rows are in groups of two, which the cut sorts by length and splits as it likes."""
    model, batch = tiny_model().eval(), ragged_batch(rng)
    asker = torch.arange(8) // 2 * 2  # whose prompt each row has
    batch = replace(batch, prompt_ids=batch.prompt_ids[asker],
                    prompt_mask=batch.prompt_mask[asker], group_size=2)
    for micro_tokens in (10**6, 40):
        cuts = cut(batch, micro_tokens=micro_tokens)
        assert any(micro.groups is not None for micro in cuts[0].micros)
        logp = common.whole_logps(model, batch, cuts, 1.0)
        check(logp, plain_logps(model, batch)[0].detach(), {}, atol=2e-5)


@pytest.mark.parametrize("entropy", ["off", "value", "grad"])
def test_entropy_costs_only_what_is_asked_for(rng, entropy):
    logp, value = common.token_logps(tiny_model(), *whole_input(ragged_batch(rng)), entropy=entropy)
    assert logp.requires_grad
    assert (value is None) if entropy == "off" else (value.requires_grad == (entropy == "grad"))


@pytest.mark.parametrize("entropy", ["off", "value", "grad"])
@pytest.mark.parametrize("tokens", [1, 20, 71])
def test_chunks_of_the_output_head_change_nothing(rng, monkeypatch, tokens, entropy):
    """72 places in chunks of 1, 5 and 17 tokens: the last chunk is as short as it likes."""
    model, batch = tiny_model(), ragged_batch(rng)

    def values():
        results = common.token_logps(model, *whole_input(batch), 0.7, entropy)
        sum((x * batch.mask).sum() for x in results if x is not None and x.requires_grad).backward()
        return *[x for x in results if x is not None], gradient(model)

    unchunked = values()
    monkeypatch.setattr(common, "HEAD_FLOATS", tokens * VOCAB)
    for chunked, whole in zip(values(), unchunked, strict=True):
        assert_near(chunked, whole, 1e-6)


@pytest.mark.parametrize("dtype, expected", [
    (torch.float64, torch.float64), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32)])
def test_log_probs_are_at_least_float32(rng, dtype, expected):
    """A log-softmax in bfloat16 alone is off by 0.045 nat, GSPO clips at 3e-4."""
    model = tiny_model().to(dtype)
    for x in common.token_logps(model, *whole_input(ragged_batch(rng))):
        assert x.dtype == expected
        assert dtype != torch.bfloat16 or not torch.equal(x, x.bfloat16().float()), "rounded before"


def test_memory_of_log_probs_is_a_third_of_the_plain_way():
    """Forward and backward at the widths of Qwen2.5-0.5B, 8 x (64 + 512) tokens, above parameters
    and gradients, layers checkpointed (so two of them will do): 7.6 GB the plain way. On the
    "meta" device, where nothing is really computed."""
    shape = dict(vocab_size=151_936, hidden_size=896, num_hidden_layers=2, num_attention_heads=14,
                 num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**shape), attn_implementation="eager").train()
        ids = torch.ones(8, 576, dtype=torch.long)
    model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def plain():
        logits = model(input_ids=ids, attention_mask=ids, use_cache=False).logits[:, -513:-1]
        return logits.log_softmax(-1).gather(-1, ids[:, -512:, None])

    def peak(function):
        with Memory(model) as memory:
            function().sum().backward()
        return memory.peak

    assert peak(lambda: common.token_logps(model, ids, ids, 512)[0]) <= peak(plain) / 3


@pytest.mark.parametrize("mask, expected", [
    ([1, 1, 1, 1], [0, 1, 2, 3]), ([0, 0, 1, 1], [0, 0, 0, 1]), ([0, 1, 1, 0], [0, 0, 1, 1])])
def test_positions_start_at_the_first_real_token(mask, expected):
    check(common.positions(torch.tensor([mask])), [expected], {"0, 1, 2, ...": [[0, 1, 2, 3]]})


# --- one gradient, however the step is cut -------------------------------------------------------

SCRIPTS = [grpo, dapo, gspo, ppo]
script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


class Step:
    """An optimizer step: a batch and all that a policy loss wants besides the new log-probs."""

    def __init__(self, rng, model):
        self.model, self.batch = model, ragged_batch(rng)
        logp = plain_logps(model, self.batch)[0].detach()
        self.mask = self.batch.mask
        # A spread, so that some ratios are clipped; an answer at 1, so that GSPO's are not all.
        self.old_logp = logp + 0.3 * normal(rng, *logp.shape).to(logp)
        self.old_logp[0] = logp[0]
        self.ref_logp = logp + 0.3 * normal(rng, *logp.shape).to(logp)
        self.advantages = normal(rng, len(logp)).to(logp)
        self.token_advantages = normal(rng, *logp.shape).to(logp)

    def loss(self, script, logp, take=lambda x: x, mask=None):
        """The script's loss of some rows, whose weights count the whole step."""
        mask = self.mask if mask is None else mask
        total = int(self.mask.sum()) if script in (dapo, ppo) else len(self.mask)
        advantages = self.token_advantages if script is ppo else self.advantages
        kl = dict(ref_logp=take(self.ref_logp), beta=0.5) if script is grpo else {}
        weights = script.token_weights(mask, total=total)
        return script.policy_loss(
            logp, take(self.old_logp), take(advantages), mask, weights, **kl)[0]

    def right(self, script):
        """The gradient of one batch, through log-probs of one answer at a time."""
        self.loss(script, plain_logps(self.model, self.batch)[0]).backward()
        return gradient(self.model)

    def cut(self, script, micro_tokens):
        """The gradient as the scripts compute it, of this process's micro-batches."""
        (minibatch,) = common.cut(self.batch, 1, micro_tokens)
        for micro in minibatch.micros:
            logp, _ = common.micro_logps(self.model, self.batch, micro, temperature=1.0)
            self.loss(script, logp, micro.take, micro.mask).backward()
        return gradient(self.model)

    def change(self, function):
        """Apply `function` to all tensors, the batch's too."""
        for name in ("mask", "old_logp", "ref_logp", "advantages", "token_advantages"):
            setattr(self, name, function(name, getattr(self, name)))
        for name, x in vars(self.batch).items():
            if torch.is_tensor(x):
                setattr(self.batch, name, function(name, x))


@pytest.fixture
def step(rng):
    return Step(rng, tiny_model("llama", initializer_range=0.1))


@pytest.fixture
def double_step(rng):
    """Everything in float64. GPT-2, whose norms do not fall back to float32 as others' do."""
    torch.set_default_dtype(torch.float64)
    yield Step(rng, tiny_model("gpt2").double().eval())
    torch.set_default_dtype(torch.float32)


@script
@pytest.mark.parametrize("micro_tokens", [1, 20, 40, 10**6])
def test_gradient_of_any_cut(step, script, micro_tokens):
    """A token-mean taken per micro-batch and then averaged is another objective (verl #5625)."""
    assert_near(step.cut(script, micro_tokens=micro_tokens), step.right(script), 1e-6)


@script
@pytest.mark.parametrize("micro_tokens", [1, 20, 40, 10**6])
def test_gradient_of_any_cut_in_float64(double_step, script, micro_tokens):
    right = double_step.right(script)
    assert right.dtype == torch.float64
    assert_near(double_step.cut(script, micro_tokens=micro_tokens), right, 1e-12)


@script
@pytest.mark.parametrize("world", [2, 3])
def test_gradient_is_summed_over_ranks(step, play, script, world):
    """Ranks with too few micro-batches fill up with dummies, which must add nothing."""
    total = 0
    for rank in range(world):
        play(rank, world)
        total = total + step.cut(script, micro_tokens=20)
    assert_near(total, step.right(script), 1e-6)


@script
def test_gradient_of_any_order_of_rows(rng, step, script):
    right = step.right(script)
    order = torch.tensor(rng.permutation(len(step.mask)))
    step.change(lambda name, x: x[order])
    assert_near(step.cut(script, micro_tokens=40), right, 1e-6)


@script
def test_gradient_of_any_padding(step, script):
    """Wider by three places on the outer side of prompts and answers, filled with an odd token."""
    right = step.right(script)

    def widen(name, x):
        filler = 5 if name in ("prompt_ids", "tokens") else 0
        pad = (3, 0) if name.startswith("prompt") else (0, 3)
        return F.pad(x, pad, value=filler) if x.dim() == 2 else x

    step.change(widen)
    assert_near(step.cut(script, micro_tokens=40), right, 1e-6)


@script
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_gradient_under_garbage(step, script, garbage):
    """0 x NaN is NaN: what lies under the mask has to be replaced, not multiplied away."""
    right, hidden = step.right(script), step.mask == 0
    step.change(lambda name, x: x.masked_fill(hidden, garbage)
                if x.is_floating_point() and x.dim() == 2 else x)
    assert_near(step.cut(script, micro_tokens=40), right, 1e-6)


# --- the ratio before the first update -----------------------------------------------------------

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """family -> a folder of such a model in which every dropout is 0.1, GPT-2's and every
    classifier's by default."""
    @cache
    def folder(family):
        dropout = {} if family == "gpt2" else dict(attention_dropout=0.1)
        return save_folder(tmp_path_factory.mktemp(family), tiny_model(family, **dropout))
    return folder


@pytest.mark.parametrize("head_floats", [common.HEAD_FLOATS, 5 * VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_is_exactly_1_before_the_first_update(
    rng, monkeypatch, folder, family, dtype, head_floats
):
    """In training mode and with gradients, not nearly 1: GSPO clips at 3e-4. GPT-2's dropout alone
    gives ratios up to 245; cutting old and new log-probs differently, 8e-3 in bfloat16."""
    monkeypatch.setattr(common, "HEAD_FLOATS", head_floats)
    model, batch = common.load_policy(folder(family), "float32").to(dtype), ragged_batch(rng)
    assert model.training
    cuts = cut(batch, minibatches=2, micro_tokens=40)
    old_logp = common.whole_logps(model, batch, cuts, 0.7)
    for micro in [micro for minibatch in cuts for micro in minibatch.micros]:
        logp, _ = common.micro_logps(model, batch, micro, 0.7)
        assert logp.requires_grad
        assert torch.equal(torch.where(micro.mask.bool(), logp, 0.0), micro.take(old_logp))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_memory_only(rng, folder, family):
    """And it does work: it silently does not in eval mode (trl #1066)."""
    batch, gradients = ragged_batch(rng), []
    for checkpointing in (False, True):
        model, calls = common.load_policy(folder(family), "float32", checkpointing), []
        next(m for m in model.modules() if type(m).__name__.endswith("Attention")) \
            .register_forward_hook(lambda *_: calls.append(1))
        (minibatch,) = cut(batch)
        logp, _ = common.micro_logps(model, batch, minibatch.micros[0], temperature=1.0)
        (logp * minibatch.micros[0].mask).sum().backward()
        assert len(calls) == (2 if checkpointing else 1)
        gradients.append(gradient(model))
    assert_near(gradients[1], gradients[0], 1e-6)


@pytest.mark.parametrize("auto_class", [
    transformers.AutoModelForCausalLM, transformers.AutoModelForTokenClassification])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_dropout_anywhere(folder, family, auto_class):
    """Some are modules, some only numbers in the config that a forward pass reads."""
    model = common.from_pretrained(auto_class, folder(family)).train()
    ids = torch.arange(2, 40)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p]


# --- batches -------------------------------------------------------------------------------------

def contents(batch):
    """What a batch says, whatever its padding."""
    tokens = zip(batch.prompt_ids, batch.prompt_mask, batch.tokens, batch.mask)
    rows = [(p[pm.bool()].tolist(), t[tm.bool()].tolist()) for p, pm, t, tm in tokens]
    return list(zip(batch.questions, batch.texts, rows, batch.rewards.tolist()))


def scored(rng, **shape):
    batch = ragged_batch(rng, **shape)
    batch.rewards = normal(rng, len(batch)).float()
    return batch


def test_batch_cat_keeps_every_row(rng):
    """Prompts are padded on the left and answers on the right, to the widest of all."""
    parts = [scored(rng), scored(rng, rows=3, prompt=9, answer=4), scored(rng, rows=2, answer=12)]
    batch = common.Batch.cat(parts, pad=0)
    assert contents(batch) == sum(map(contents, parts), [])
    assert batch.prompt_ids.shape == (13, 9) and batch.mask.shape == (13, 12)
    assert batch.prompt_mask[:, -1].all() and batch.mask[:, 0].all(), "prompt and answer must meet"
    assert batch.truncated is None, "a field that no part has"


def test_batch_cat_pads_unrecorded_log_probs_with_nan(rng):
    parts = [scored(rng, answer=4), scored(rng, answer=6)]
    for part in parts:
        part.sampler_logp = torch.zeros(part.tokens.shape)
    recorded = common.Batch.cat(parts, pad=0).sampler_logp
    assert recorded[:8, 4:].isnan().all() and not recorded[:8, :4].any() and not recorded[8:].any()


@pytest.mark.parametrize("picked", [[0, 3, 4, 7], [5, 2], []])
def test_batch_select(rng, picked):
    batch = scored(rng)
    chosen = batch.select(torch.tensor(picked, dtype=torch.long))
    assert contents(chosen) == [contents(batch)[i] for i in picked]
    assert chosen.correct is None, "a field that is not set"


def test_batch_to_moves_all_tensors(rng):
    moved = scored(rng).to("meta")
    assert {x.device.type for x in vars(moved).values() if torch.is_tensor(x)} == {"meta"}
    assert moved.correct is None and len(moved) == 8


@pytest.mark.parametrize("left, expected", [
    (False, [[1, 2, 3], [4, 9, 9]]), (True, [[1, 2, 3], [9, 9, 4]])])
def test_pad_cat(left, expected):
    parts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
    check(common.pad_cat(parts, 9, left=left), expected)


def test_padded():
    ids, mask = common.padded([[5, 6, 7], [8]], 0)
    check(ids, [[5, 6, 7], [0, 0, 8]])
    check(mask, [[1, 1, 1], [0, 0, 1]])


@pytest.mark.parametrize("count", [0, 1, 7, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_my_share(play, world, count):
    """In rank order the shares are the list, and none is more than one item longer."""
    items, shares = list(range(count)), []
    for rank in range(world):
        play(rank, world)
        shares.append(common.my_share(items))
    assert sum(shares, []) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- the walk over the questions -----------------------------------------------------------------

def test_each_epoch_is_another_order_of_all_questions():
    rows = list(range(10))
    walk = experiment.questions_at(rows, 0, 30, seed=0)
    epochs = [walk[:10], walk[10:20], walk[20:]]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_the_walk_goes_on_from_any_place(count):
    """A resumed run asks what the uninterrupted one would have, on an epoch's edge too."""
    rows, walk = list(range(10)), experiment.questions_at(list(range(10)), 0, 60, seed=3)
    for cursor in range(31):
        assert experiment.questions_at(rows, cursor, count, 3) == walk[cursor : cursor + count]


def test_seeds_walk_differently():
    rows = list(range(10))
    first, second = (experiment.questions_at(rows, 0, 10, seed) for seed in (0, 1))
    assert first != second


# --- cut -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("minibatches, micro_tokens", [(1, 10**6), (1, 1), (2, 40), (3, 25)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_cut(rng, play, world, minibatches, micro_tokens):
    batch, ranks = ragged_batch(rng, rows=11), []
    for rank in range(world):
        play(rank, world)
        ranks.append(common.cut(batch, minibatches, micro_tokens))
    lengths = batch.prompt_mask.sum(1) + batch.mask.sum(1)
    check(torch.cat([m.rows for m in ranks[0]]), range(11))
    for minibatch in zip(*ranks):  # the same one on every rank
        micros = [[m for m in part.micros if m.mask.any()] for part in minibatch]
        for part in minibatch:
            assert torch.equal(part.rows, minibatch[0].rows)
            assert part.tokens == batch.mask[part.rows].sum()
            assert len(part.micros) == len(minibatch[0].micros), "ranks out of step: FSDP hangs"
        owned = torch.cat([m.rows for mine in micros for m in mine])
        assert owned.sort().values.tolist() == minibatch[0].rows.tolist(), "not every row once"
        for m in sum(micros, []):
            assert torch.equal(m.mask, batch.mask[m.rows, : m.response_len])
            assert m.mask.sum() == batch.mask[m.rows].sum(), "tokens cut off"
            size = (m.prompt_len + m.response_len) * len(m.rows)
            assert size <= micro_tokens or len(m.rows) == 1
        work = [sum(int(lengths[m.rows].sum()) for m in mine) for mine in micros]
        assert max(work) - min(work) <= lengths.max(), "ranks with unlike work"


@pytest.mark.parametrize("lengths, micro_tokens, expected", [
    ([4, 4, 4, 4], 24, [4]), ([4, 4, 4, 4], 23, [3, 1]),  # 2 of prompt come to each
    ([8, 4, 3], 99, [3]), ([8, 4, 2], 99, [2, 1]), ([8, 2, 2, 1], 99, [1, 3]),
], ids=["fits", "one too many", "half as long", "less than half", "twice"])
def test_cut_fills_the_budget(lengths, micro_tokens, expected):
    """With room for all, one forward pass; but none pads a row to more than twice its length."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    prompt, n = torch.ones(len(lengths), 2).long(), len(lengths)
    batch = common.Batch([0] * n, [""] * n, prompt, prompt, mask, mask)
    (minibatch,) = cut(batch, micro_tokens=micro_tokens)
    assert [len(micro.rows) for micro in minibatch.micros] == expected


@pytest.mark.parametrize("lengths, owned, shared", [
    ([5, 4, 3, 2], [[0, 2], [1, 3]], False), ([5, 4, 3, 2, 5, 4], [[0, 1, 2], [4, 5, 3]], True),
    ([5, 3, 4], [[0, 1], [2]], False),  # only the first rank has two of a group
])
def test_prompts_run_once_on_all_ranks_or_on_none(play, lengths, owned, shared):
    """Else one would pass through the sharded model more often than the other: both would hang."""
    n, mask = len(lengths), (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    prompt = torch.ones(n, 2).long()
    batch = common.Batch([0] * n, [""] * n, prompt, prompt, mask, mask, group_size=2)
    for rank in (0, 1):
        play(rank, 2)
        ((micro,),) = (m.micros for m in cut(batch))
        assert sorted(micro.rows.tolist()) == sorted(owned[rank])
        assert (micro.groups is not None) == shared


def test_cut_trims_padding():
    """Sorted by length, long answers do not widen the short ones' micro-batch."""
    prompt_mask = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    batch = common.Batch([0] * 4, [""] * 4, prompt_mask, prompt_mask, mask, mask)
    (minibatch,) = cut(batch, micro_tokens=10)
    shapes = [(sorted(m.rows.tolist()), m.prompt_len, m.response_len) for m in minibatch.micros]
    assert shapes == [([1, 3], 2, 3), ([0, 2], 1, 1)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_whole_puts_the_rows_back(rng, monkeypatch, play, world):
    """What each rank computed for its rows adds up to (N, T), 0 where there is no token, though
    dummies and padding hold NaN."""
    batch, total = ragged_batch(rng), 0
    values = normal(rng, *batch.mask.shape).masked_fill(batch.mask == 0, math.nan)
    monkeypatch.setattr(common, "sum_over_ranks", lambda x: x)

    def taken(model, batch, micro):
        return micro.take(values)

    for rank in range(world):
        play(rank, world)
        cuts = cut(batch, minibatches=2, micro_tokens=20)
        total = total + common.whole(taken, None, batch, cuts)
    check(total, values.nan_to_num(0.0))


# --- the critic ----------------------------------------------------------------------------------

class Echo(torch.nn.Module):
    """A critic whose value at each place is the token there."""

    def get_input_embeddings(self):
        return torch.nn.Embedding(100, 1)

    def forward(self, input_ids, **inputs):
        return SimpleNamespace(logits=input_ids[..., None].float())


@pytest.mark.parametrize("after, expected", [
    (False, [[11, 21, 22], [13, 31, 0]]), (True, [[21, 22, 23], [31, 32, 0]])])
def test_values_are_read_where_their_token_is_predicted(after, expected):
    """V_t, the state *before* token t, is one place to the left of it; `after`, on it."""
    batch = common.Batch(
        ["a", "b"], ["", ""], torch.tensor([[0, 11], [12, 13]]), torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([[21, 22, 23], [31, 32, 99]]), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    cuts = cut(batch, micro_tokens=1)
    check(common.whole(ppo.micro_values, Echo(), batch, cuts, after=after), expected, {
        "read on the token": [[21, 22, 23], [31, 32, 0]],
        "read one place to the left": [[11, 21, 22], [13, 31, 0]]})


def new_critic(folder, checkpoint=None):
    experiment.check_critic(folder)  # as set_up does
    run = SimpleNamespace(start=folder, checkpoint=checkpoint)
    return ppo.load_critic(run, tiny_tokenizer(), settings())


@pytest.mark.parametrize("family", FOLDERS)
def test_critic_starts_at_zero_and_can_learn(rng, folder, family):
    critic, batch = new_critic(folder(family)), ragged_batch(rng)
    (minibatch,) = cut(batch)
    micro = minibatch.micros[0]
    values = ppo.micro_values(critic, batch, micro)
    assert not values.any() and values.shape == micro.mask.shape
    values.sum().backward()
    assert gradient(critic).any()


def test_critic_may_have_fewer_rows_than_the_policy(rng, folder):
    """Qwen2.5-7B has 128 more than the 0.5B; such a token, of no text, was an index error."""
    critic, batch = new_critic(folder("qwen3")), ragged_batch(rng)
    batch.tokens[0, 0] = len(critic.get_input_embeddings().weight) + 100
    assert common.whole(ppo.micro_values, critic, batch, cut(batch)).isfinite().all()


@pytest.mark.parametrize("family", FOLDERS)
def test_critic_does_not_see_padding(rng, folder, family):
    critic, batch = new_critic(folder(family)), ragged_batch(rng)
    head = getattr(critic, "score", None) or critic.classifier
    torch.nn.init.normal_(head.weight)
    values = common.whole(ppo.micro_values, critic, batch, cut(batch))
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        answer = batch.tokens[row][batch.mask[row].bool()]
        alone = critic(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1, 0]
        check(values[row, : len(answer)], alone, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_critic_comes_back_from_a_checkpoint(folder, tmp_path, family):
    """With the head that it had learned, not with a new one."""
    critic = new_critic(folder(family))
    for parameter in critic.parameters():
        torch.nn.init.normal_(parameter)
    sampler = SimpleNamespace(policy=None, tokenizer=tiny_tokenizer())
    experiment.save_model(sampler, critic, tmp_path / "critic")
    again = new_critic(folder(family), checkpoint=tmp_path).state_dict()
    for name, x in critic.state_dict().items():
        assert torch.equal(again[name], x), name


def test_critic_of_another_tokenizer_is_refused(folder, capsys):
    """Its ids would mean other words."""
    run = SimpleNamespace(start=folder("qwen3"), checkpoint=None)
    with pytest.raises(SystemExit):
        ppo.load_critic(run, tiny_tokenizer(unk="zebra"), settings())
    refused(capsys, "--critic", "tokenizer")


# --- experts -------------------------------------------------------------------------------------

class Experts(torch.nn.Module):
    num_experts = 4

    def forward(self, hidden, chosen, weights):
        return hidden


class Router(torch.nn.Module):
    """A model of one layer of four experts that gives the token its expert of that number, and
    the ones after it."""

    def __init__(self, chosen=1):
        super().__init__()
        self.experts, self.chosen = torch.nn.ModuleDict({"experts": Experts()}), chosen

    def forward(self, input_ids, **inputs):
        chosen = (input_ids.reshape(-1, 1) + torch.arange(self.chosen)) % 4
        self.experts["experts"](input_ids.float(), chosen, torch.ones(chosen.shape))


@pytest.mark.parametrize("tokens, chosen, expected", [
    ([0, 1, 2, 3], 1, 1.0), ([2, 2, 2, 2], 1, 0.0), ([0, 0, 3, 3], 1, 0.5),
    ([0, 0, 0, 0], 2, 0.5),  # two experts of four do all the work
])
def test_expert_entropy_by_hand(tokens, chosen, expected):
    """The padding on both sides, all for expert 1, does not count."""
    first, *rest = tokens
    batch = common.Batch(
        ["q"], [""], torch.tensor([[1, 1, first]]), torch.tensor([[0, 0, 1]]),
        torch.tensor([[*rest, 1, 1]]), torch.tensor([[1, 1, 1, 0, 0]]))
    assert experiment.expert_entropy(Router(chosen), batch) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_expert_entropy_of_a_model(rng, family):
    """Counted by hand, one answer at a time."""
    model, batch, counts = tiny_model(family), ragged_batch(rng), torch.zeros(2, 4)
    for row in range(len(batch)):
        ids = torch.cat([batch.prompt_ids[row][batch.prompt_mask[row].bool()],
                         batch.tokens[row][batch.mask[row].bool()]])
        layers = model(ids[None], output_router_logits=True).router_logits
        for count, logits in zip(counts, layers, strict=True):
            count += torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
    share = counts / counts.sum(1, keepdim=True)
    right = -(share * share.log()).sum(1).mean() / math.log(4)
    assert experiment.expert_entropy(model, batch) == pytest.approx(right.item(), abs=1e-6)


def test_expert_entropy_of_a_dense_model_is_none(rng):
    assert experiment.expert_entropy(tiny_model(), ragged_batch(rng)) is None


# --- numbers and steps ---------------------------------------------------------------------------

def test_meter_adds_micro_batches_and_lists_steps():
    meter = common.Meter()
    for step in (1.0, 10.0):
        for share in (0.25, 0.5):
            meter.add(loss=torch.tensor(step * share, requires_grad=True))
        meter.step(grad_norm=step)
    assert meter.result() == {"loss": [0.75, 7.5], "grad_norm": [1.0, 10.0], "sampler_gap": [0.0]}


def test_meter_gap_is_the_largest_where_recorded():
    meter, nan = common.Meter(), math.nan
    recorded = torch.tensor([[-1.0, -2.0, nan], [-1.0, nan, -9.0]])
    trained = torch.tensor([[-1.5, -2.1, -3.0], [-1.2, -7.0, nan]])
    meter.gap(recorded, trained, torch.tensor([[1, 1, 1], [1, 1, 0]]))
    meter.gap(recorded * nan, trained, torch.ones(2, 3))
    meter.add(loss=torch.tensor(0.0))
    meter.step()
    assert meter.result()["sampler_gap"] == [0.5]


def test_meter_of_a_step_without_training_is_empty():
    assert common.Meter().result() == {}


def line_and_optimizer(lr=0.1):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0]])
    return model, common.make_optimizer(model, lr)


@pytest.mark.parametrize("limit, clipped", [(1.0, [[0.6, 0.8]]), (0, [[3.0, 4.0]]),
                                            (9.0, [[3.0, 4.0]])])
def test_optimizer_step_clips(monkeypatch, limit, clipped):
    """Returns the norm before clipping; 0 never clips."""
    model, optimizer = line_and_optimizer()
    model.weight.grad, seen = torch.tensor([[3.0, 4.0]]), []
    monkeypatch.setattr(optimizer, "step", lambda: seen.append(model.weight.grad.clone()))
    assert common.optimizer_step(model, optimizer, 0.1, limit) == pytest.approx(5.0)
    check(seen[0], clipped, atol=1e-5)
    assert model.weight.grad is None


def test_optimizer_step_uses_the_learning_rate_it_is_given():
    """Adam's first step is the learning rate itself; nothing else moves the weights."""
    model, optimizer = line_and_optimizer(lr=0.1)
    model.weight.grad = torch.tensor([[0.5, 0.0]])
    common.optimizer_step(model, optimizer, 0.02, max_grad_norm=0)
    check(model.weight, [[0.98, 2.0]], {"weight decay": [[0.9798, 1.9996]],
                                        "the learning rate it began with": [[0.9, 2.0]]}, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_optimizer_step_refuses_what_is_not_finite(capsys, bad):
    """It stops the run before the weights and the optimizer's memory are spoilt."""
    model, optimizer = line_and_optimizer()
    model.weight.grad = torch.tensor([[1.0, bad]])
    with pytest.raises(SystemExit) as stop:
        common.optimizer_step(model, optimizer, 0.1, 1.0)
    assert stop.value.code == 2 and not optimizer.state
    check(model.weight, [[1.0, 2.0]])
    refused(capsys, "not finite", "--lr")


@pytest.mark.parametrize("right, n, low, high", [
    (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0),
    (90, 100, 0.8256, 0.9448), (0, 0, 0.0, 1.0)])
def test_wilson(right, n, low, high):
    """Unlike mean +- 1.96 standard errors it stays within [0, 1] and never has width 0."""
    assert experiment.wilson(right, n) == pytest.approx((low, high), abs=5e-5)


def test_seed_all():
    """The same numbers give the same draws; (1, 23) is not (12, 3)."""
    def draw(*numbers):
        common.seed_all(*numbers)
        return torch.rand(()).item()

    seeds = [(0, 1, 2), (0, 2, 1), (1, 23), (12, 3), (0,), ("check",), (0, "evaluate")]
    draws = [draw(*seed) for seed in seeds]
    assert draws == [draw(*seed) for seed in seeds]
    assert len(set(draws)) == len(seeds)
