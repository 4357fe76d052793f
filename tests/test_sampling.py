"""Tests: how common.py samples and reads text.

The sampler's law is the trained law, whatever a model's folder says; no short cut
changes an answer.
"""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from tokenizers.processors import TemplateProcessing
from safetensors.torch import load_file

import common
import experiment
import rewards
from models import (FOLDERS, REFUSED, VOCAB, WORDS, gradient, save_folder, settings, tiny_model,
                    tiny_tokenizer)
from oracles import check

LAW = ["qwen3", "gpt2", "llama", "qwen3_moe"]
HOSTILE = dict(  # what checkpoints bring along, and more
    do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, typical_p=0.9,
    repetition_penalty=1.1, no_repeat_ngram_size=2, suppress_tokens=[5, 6], bad_words_ids=[[7]],
    begin_suppress_tokens=[8], min_new_tokens=3, exponential_decay_length_penalty=[1, 1.5])


def sampler_of(folder, **changes):
    cfg, tokenizer = settings(**changes), common.load_tokenizer(folder)
    sampler = common.Sampler(common.load_policy(folder, cfg.dtype), tokenizer, cfg)
    experiment.check_law(sampler)  # as set_up does
    return sampler


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """family -> a folder of such a model whose generation_config changes every law it can."""
    @cache
    def hostile(family):
        model = tiny_model(family, initializer_range=0.15)
        return save_folder(tmp_path_factory.mktemp(family), model, **HOSTILE)
    return hostile


PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]


# --- the law -------------------------------------------------------------------------------------

def exact_law(model, prompt, temperature):
    """The probability of each next token."""
    with torch.no_grad():
        return (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)


def assert_drawn_from(tokens, law):
    """Pearson's chi-square, with rare tokens taken together: its mean is the number of classes,
    its variance twice that. Six standard deviations never happen by chance."""
    counts, expected = torch.bincount(tokens, minlength=len(law)).double(), law * len(tokens)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    classes = len(counts) - 1
    assert chi_square < classes + 6 * (2 * classes) ** 0.5, f"{chi_square:.0f}, {classes} classes"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", LAW)
def test_first_tokens_follow_the_softmax(hostile, family, temperature):
    """transformers merges a checkpoint's own top_k, top_p, penalties into every call (trl #5783:
    16 of 64 tokens could be drawn); unset, top_k is 50."""
    sampler = sampler_of(hostile(family), temperature=temperature, max_new_tokens=1,
                         rollout_batch=4000)
    common.seed_all(0)
    ids, mask = common.padded(PROMPTS[:1], sampler.pad)
    tokens, _ = sampler.generate(ids, mask, group_size=4000)
    assert tokens.shape == (4000, 1)
    assert_drawn_from(tokens[:, 0], exact_law(sampler.model, PROMPTS[0], temperature))
    assert len(tokens.unique()) > (50 if temperature == 1 else 20), "a top_k is on"


@pytest.mark.parametrize("family", LAW)
def test_second_tokens_follow_the_softmax(hostile, family):
    """Penalties and n-gram bans look back: the token just drawn must not become rarer."""
    sampler = sampler_of(hostile(family), max_new_tokens=2, rollout_batch=4000)
    common.seed_all(0)
    ids, mask = common.padded(PROMPTS[1:2], sampler.pad)
    tokens, _ = sampler.generate(ids, mask, group_size=4000)
    first = tokens[tokens[:, 0] != 1, 0].mode().values.item()  # after 1, the end, comes nothing
    seconds = tokens[tokens[:, 0] == first, 1]
    assert_drawn_from(seconds, exact_law(sampler.model, [*PROMPTS[1], first], 1.0))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", LAW)
def test_sampler_and_trainer_agree_on_log_probs(hostile, family, temperature):
    """What the sampler recorded is what `token_logps` computes: same temperature, same positions
    under left padding, no penalty, padded rows of the vocabulary included in both."""
    sampler = sampler_of(hostile(family), temperature=temperature, max_new_tokens=10)
    common.seed_all(1)
    ids, mask = common.padded(PROMPTS, sampler.pad)
    tokens, recorded = sampler.generate(ids, mask, group_size=4, record=12)
    answer_mask = common.response_mask(tokens, sampler.stop_ids)
    logp, _ = common.token_logps(
        sampler.model, torch.cat([ids.repeat_interleave(4, 0), tokens], 1),
        torch.cat([mask.repeat_interleave(4, 0), answer_mask], 1), tokens.shape[1], temperature)
    seen = answer_mask.bool() & ~recorded.isnan()
    assert seen[:, :-1].sum() == answer_mask[:, :-1].sum(), "all but the last column is recorded"
    assert (tokens[seen] >= WORDS).any(), "no row beyond the tokenizer was drawn"
    check(recorded[seen], logp[seen].detach(), {
        "temperature in one of them only": logp[seen].detach() * temperature}, atol=1e-5)


def test_recording_is_for_the_first_rows(hostile):
    """Of the first prompts' first chunk of tokens: enough to see the two part, for nothing."""
    sampler = sampler_of(hostile("qwen3"), max_new_tokens=4, rollout_batch=4)
    common.seed_all(1)
    tokens, recorded = sampler.generate(*common.padded(PROMPTS, 0), group_size=4, record=3)
    assert recorded.shape == tokens.shape
    assert not recorded[:3, :1].isnan().any() and recorded[3:].isnan().all()


def test_a_law_that_cannot_be_cleaned_is_refused(hostile, monkeypatch, capsys):
    """If a future transformers adds one more knob, the run stops instead of training a lie."""
    monkeypatch.setattr(common.Sampler, "config", lambda self, n, greedy=False: (
        transformers.GenerationConfig(max_new_tokens=n, do_sample=True, min_p=0.1, pad_token_id=0)))
    with pytest.raises(SystemExit) as stop:
        sampler_of(hostile("qwen3"))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "changes the logits" in line


@pytest.mark.parametrize("family", REFUSED)
def test_logits_that_are_not_the_heads_are_refused(tmp_path, capsys, family):
    """Log-probs, taken from the output head, would not be those of the model."""
    folder = save_folder(tmp_path, tiny_model(family))
    with pytest.raises(SystemExit) as stop:
        sampler_of(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "soft-capped or scaled" in line


# --- short cuts that must not show ---------------------------------------------------------------

STOPS = [1, 3, 4, 12, 13, 14, 15]  # many, so that random models do stop


@pytest.fixture(scope="session")
def stopping(tmp_path_factory):
    """family -> a folder whose answers often end."""
    @cache
    def stopping(family):
        model = tiny_model(family, initializer_range=0.4)
        return save_folder(tmp_path_factory.mktemp(family), model, eos_token_id=STOPS)
    return stopping


def plain_greedy(folder, prompt, new_tokens):
    """What `generate` itself says to one prompt without padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=STOPS, pad_token_id=0)
    return out[0, len(prompt):].tolist()


MIXED = [[20, 21, 22, 23, 24, 25], [30], [31, 32], [40, 41, 42, 43], [50], [33, 34, 35]]


def answers(sampler, prompts, **how):
    """Greedy answers as lists of ids up to the stop token."""
    tokens, _ = sampler.generate(*common.padded(prompts, sampler.pad), greedy=True, **how)
    lengths = common.response_mask(tokens, sampler.stop_ids).sum(1)
    assert tokens.shape[1] == lengths.max(), "wider than the longest answer"
    return [row[:n].tolist() for row, n in zip(tokens, lengths)]


@pytest.mark.parametrize("prompts", [MIXED, [[30], [50], [9]], [[20, 21, 22, 23]]],
                         ids=["mixed", "one token each", "a single prompt"])
@pytest.mark.parametrize("family", FOLDERS)
def test_greedy_answers_are_those_of_generate(stopping, monkeypatch, family, prompts):
    """One prefill for a group, chunks, rows that leave when finished: all invisible."""
    monkeypatch.setattr(common, "CHUNK", 4)
    folder = stopping(family)
    right = [plain_greedy(folder, prompt, 11) for prompt in prompts]
    assert len(set(map(len, right))) > 1 or prompts is not MIXED, "all answers are equally long"
    for group_size, rollout_batch in [(1, 64), (4, 64), (4, 8), (1, 1)]:
        sampler = sampler_of(folder, max_new_tokens=11, rollout_batch=rollout_batch)
        got = answers(sampler, prompts, group_size=group_size)
        assert got == [answer for answer in right for _ in range(group_size)]


@pytest.mark.parametrize("new_tokens", [2, 3, 4, 5, 8, 9, 30])
def test_limits_around_a_chunk(stopping, monkeypatch, new_tokens):
    """Chunks of 4: an answer may end on any side of their edges."""
    monkeypatch.setattr(common, "CHUNK", 4)
    folder = stopping("qwen3")
    right = [plain_greedy(folder, prompt, new_tokens) for prompt in MIXED]
    assert len(set(map(len, right))) > 1 or new_tokens < 4, "all answers are equally long"
    assert answers(sampler_of(folder, max_new_tokens=new_tokens), MIXED) == right


def test_a_group_that_is_larger_than_the_rollout_batch(stopping):
    sampler = sampler_of(stopping("qwen3"), rollout_batch=2)
    assert len(answers(sampler, MIXED, group_size=4)) == 4 * len(MIXED)


def test_groups_differ_and_stay_with_their_prompt(stopping):
    """Sampled answers of one prompt are independent, and consecutive."""
    common.seed_all(0)
    sampler = sampler_of(stopping("qwen3"), temperature=1e-3, max_new_tokens=6)  # all but greedy
    tokens, _ = sampler.generate(*common.padded(MIXED, 0), group_size=3)
    groups = tokens.view(len(MIXED), 3, -1)
    assert (groups == groups[:, :1]).all() and len(groups[:, 0].unique(dim=0)) > 3
    sampler = sampler_of(stopping("qwen3"), temperature=3.0, max_new_tokens=6)
    tokens, _ = sampler.generate(*common.padded(MIXED[:1], 0), group_size=16)
    assert len(tokens.unique(dim=0)) > 12


def test_sampling_leaves_the_policy_as_it_was(stopping):
    """In training mode, without gradients, with gradient checkpointing (which turns off the cache
    in training mode) the same answers."""
    sampler = sampler_of(stopping("gpt2"), gradient_checkpointing=True, max_new_tokens=11)
    right = [plain_greedy(stopping("gpt2"), prompt, 11) for prompt in MIXED]
    assert answers(sampler, MIXED) == right
    assert sampler.policy.training and not gradient(sampler.policy).any()


# --- reading answers -----------------------------------------------------------------------------

def test_truncated_means_without_a_stop_token(stopping):
    """Not "as long as the limit": the first answer ends exactly there (trl #1536, AReaL #1637)."""
    sampler = sampler_of(stopping("qwen3"))
    tokens = torch.tensor([[20, 21, 22, 1], [20, 21, 22, 23], [20, 13, 0, 0], [20, 0, 0, 21]])
    check(sampler.truncated(tokens), [0, 1, 0, 1], {
        "as long as the limit": [1, 1, 0, 1], "only one stop token": [0, 1, 1, 1],
        "padding ends an answer": [0, 1, 0, 0]})


def test_ids_beyond_the_tokenizer_decode_to_nothing(stopping):
    """The embedding has more rows than the tokenizer has words (Qwen2.5: 151,936 of 151,665): such
    ids are drawn late in training ("token id out of vocabulary", NeMo-RL #237)."""
    sampler = sampler_of(stopping("qwen3"))
    tokens = torch.tensor([[20, VOCAB - 1, 21, 1], [WORDS, WORDS + 1, VOCAB - 1, 22]])
    assert sampler.decode(tokens, torch.ones_like(tokens)) == ["w20 w21", "w22"]


def test_decode_stops_at_the_mask_and_drops_special_tokens(stopping):
    sampler = sampler_of(stopping("qwen3"))
    tokens = torch.tensor([[20, 0, 1, 21], [22, 23, 24, 25]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert sampler.decode(tokens, mask) == ["w20", "w22 w23 w24 w25"]


def test_decode_cuts_at_the_first_special_token(qwen):
    """Dropped, it let both sides grow together: "#### 1<|im_start|>8" was paid as 18."""
    sampler, tokenizer = sampler_of(qwen), common.load_tokenizer(qwen)
    for text, answer in (("#### 1<|im_start|>8", "1"), ("#### 18<|im_start|>user\n#### 7", "18"),
                         ("#### 18", "18")):
        tokens = torch.tensor([tokenizer(text).input_ids])
        (decoded,) = sampler.decode(tokens, torch.ones_like(tokens))
        assert rewards.extract_answer(decoded) == answer
        assert rewards.is_correct(decoded, "18") is (answer == "18")


def test_thinking_is_no_end_of_a_turn(qwen):
    """Some tokenizers call <think> special; think_format has to see it."""
    tokenizer = common.load_tokenizer(qwen)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    sampler = sampler_of(qwen)
    sampler.tokenizer, sampler.special_ids = tokenizer, common.special_ids(tokenizer)
    text = "<think>16+2</think>\n#### 18"
    tokens = torch.tensor([tokenizer(text + "<|im_end|>").input_ids])
    assert sampler.decode(tokens, torch.ones_like(tokens)) == [text]


def test_an_unknown_word_is_no_end_of_a_turn(stopping):
    sampler = sampler_of(stopping("qwen3"))
    assert sampler.decode(torch.tensor([[20, 2, 21]]), torch.ones(1, 3).long()) == ["w20 <unk> w21"]


@pytest.mark.parametrize("opening, opened", [
    ("<think>\n", "<think>"), ("<think>", "<think>"), ("<think>\n\n</think>\n\n", ""), ("", "")])
def test_think_format_knows_what_the_prompt_opened(qwen, opening, opened):
    tokenizer = common.load_tokenizer(qwen)
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{%", f"assistant\n{opening}{{%")
    (row,) = experiment.encode(tokenizer, questions("How many? <think>"), settings(
        max_prompt_len=512))
    assert row.opened == opened
    row.gold, once, twice = "18", "16+2</think>\n#### 18", "<think>16+2</think>\n#### 18"
    score = experiment.Scorer(SimpleNamespace(reward="think_format", reward_model=""))
    paid, _ = score(SimpleNamespace(questions=[row, row], texts=[once, twice]))
    assert paid.tolist() == ([1, 0] if opened else [0, 1])


# --- a folder in the shape of Qwen2.5-0.5B -------------------------------------------------------

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEXT_END, TURN_END = 256, 258  # after 256 bytes: <|endoftext|> <|im_start|> <|im_end|>


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """bfloat16; tied; a template that ends turns with <|im_end|>, while eos, pad and
    generation_config know <|endoftext|> alone; rows of the embedding beyond the tokenizer's."""
    alphabet = sorted(bytes_to_unicode().values())
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[], unk_token=None,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("qwen2", vocab_size=264, tie_word_embeddings=True, eos_token_id=TEXT_END,
                       pad_token_id=None).bfloat16()
    return save_folder(
        tmp_path_factory.mktemp("qwen"), model, tokenizer, eos_token_id=TEXT_END, do_sample=True,
        top_k=20, top_p=0.8, repetition_penalty=1.05, max_new_tokens=2048)


def test_stop_ids_are_a_set_from_three_places(qwen):
    """Config, tokenizer and template may each name another (trl #7039)."""
    tokenizer = common.load_tokenizer(qwen)
    config = transformers.GenerationConfig(eos_token_id=[TEXT_END, 7])
    assert common.stop_ids(tokenizer, config) == [7, TEXT_END, TURN_END]
    assert sampler_of(qwen).stop_ids == [TEXT_END, TURN_END]


def test_lessons_end_as_the_template_does(qwen, hostile):
    """Else a cold start teaches an end that no later prompt of the template expects."""
    assert experiment.turn_end(common.load_tokenizer(qwen)) == TURN_END
    assert experiment.turn_end(common.load_tokenizer(hostile("qwen3"))) == 1


def questions(*texts):
    return [SimpleNamespace(question=text) for text in texts]


def test_prompts_use_the_template(qwen):
    """And ask for an answer: the assistant's turn is opened."""
    tokenizer = common.load_tokenizer(qwen)
    (row,) = experiment.encode(tokenizer, questions("How many?"), settings(max_prompt_len=512))
    assert tokenizer.decode(row.prompt_ids) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHow many?\n"
        f"{experiment.INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_without_a_template(hostile):
    """A base model has none: the plain form (open-r1 #85)."""
    tokenizer = common.load_tokenizer(hostile("qwen3"))
    (row,) = experiment.encode(tokenizer, questions("w20 w21"), settings())
    plain = common.PLAIN_PROMPT.format(f"w20 w21\n{experiment.INSTRUCTION}")
    assert row.prompt_ids == tokenizer(plain).input_ids and 20 in row.prompt_ids


def test_long_prompts_are_dropped_and_counted(hostile, capsys):
    """Cut, a question would be another one."""
    tokenizer = common.load_tokenizer(hostile("qwen3"))
    rows = questions("w20 " * 5, "w21 " * 90)
    kept = experiment.encode(tokenizer, rows, settings(max_prompt_len=60), "train questions")
    assert kept == rows[:1]
    assert "1 of 2 train questions dropped" in capsys.readouterr().out


def test_answers_may_end_either_way(qwen):
    """Pad is one of the ends: the first one counts, the rest is padding."""
    sampler, hi = sampler_of(qwen), common.load_tokenizer(qwen)("hi").input_ids
    tokens = torch.tensor([[*hi, TURN_END, TEXT_END], [*hi, TEXT_END, TEXT_END],
                           [*hi, *hi], [*hi, 262, TURN_END]])
    mask = common.response_mask(tokens, sampler.stop_ids)
    check(mask, [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    check(sampler.truncated(tokens), [0, 0, 1, 0])
    assert sampler.decode(tokens, mask) == ["hi", "hi", "hihi", "hi"]


def assert_as_it_came(folder, original):
    """Same settings, dtype, weights and template, for plain `from_pretrained`."""
    def saved(folder, name):
        settings = json.loads((Path(folder) / name).read_text())
        return {key: x for key, x in settings.items() if key != "transformers_version"}

    for name in ("config.json", "generation_config.json"):
        assert saved(folder, name) == saved(original, name)
    final, first = map(transformers.AutoModelForCausalLM.from_pretrained, (folder, original))
    assert final.dtype == first.dtype
    for name, x in first.state_dict().items():
        assert torch.equal(final.state_dict()[name], x), name
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


def test_final_is_what_came_in(qwen, tmp_path):
    """Trained in float32, given back to its users in the form that they knew."""
    sampler = sampler_of(qwen)
    assert {p.dtype for p in sampler.policy.parameters()} == {torch.float32}
    experiment.save_model(sampler, sampler.policy, tmp_path, final=True)
    assert_as_it_came(tmp_path, qwen)


def test_saving_leaves_the_sampler_clean(qwen, tmp_path):
    """The folder's top_k must not come back with its generation_config."""
    sampler = sampler_of(qwen)
    experiment.save_model(sampler, sampler.policy, tmp_path, final=True)
    assert sampler.model.generation_config.top_k == 0
    experiment.check_law(sampler)


def test_final_of_a_resumed_run_is_what_came_in(qwen, tmp_path):
    """The checkpoint in between is float32, and sampled from with a clean generation_config."""
    sampler = sampler_of(qwen)
    experiment.save_model(sampler, sampler.policy, tmp_path / "checkpoint")
    resumed = sampler_of(str(tmp_path / "checkpoint"))
    assert resumed.stop_ids == sampler.stop_ids
    experiment.save_model(resumed, resumed.policy, tmp_path / "final", final=True)
    assert_as_it_came(tmp_path / "final", qwen)


def test_checkpoints_are_float32(qwen, tmp_path):
    """Rounded to bfloat16, most of a step's change at lr 1e-6 would be lost."""
    sampler = sampler_of(qwen)
    experiment.save_model(sampler, sampler.policy, tmp_path)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


# --- tokenizers ----------------------------------------------------------------------------------

def test_tokenizer_without_pad_borrows_the_end_token(tmp_path):
    """Never a new id: that would resize the embedding. Masks do not look at it."""
    tokenizer_folder = save_folder(tmp_path, tokenizer=tiny_tokenizer(pad_token=None))
    tokenizer = common.load_tokenizer(tokenizer_folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1 and len(tokenizer) == WORDS
    assert answers(sampler_of(tokenizer_folder), MIXED)


@pytest.mark.parametrize("end", ["eos", "sep"])
def test_an_end_token_that_is_appended_ends_no_prompt(tmp_path, end):
    """The model would be asked to go on after the end of the text (T5's tokenizer, BERT's)."""
    tokenizer = tiny_tokenizer(sep_token="w59")
    ending, number = {"eos": ("<eos>", 1), "sep": ("w59", 59)}[end]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"w58 $A {ending}", special_tokens=[("w58", 58), (ending, number)])
    tokenizer = common.load_tokenizer(save_folder(tmp_path, tokenizer=tokenizer))
    (row,) = experiment.encode(tokenizer, questions("w20 w21"), settings())
    plain = tokenizer(common.PLAIN_PROMPT.format(f"w20 w21\n{experiment.INSTRUCTION}")).input_ids
    assert plain[-1] in (1, 59) and row.prompt_ids == plain[:-1] and row.prompt_ids[0] == 58


@pytest.mark.parametrize("template", ["", TEMPLATE], ids=["plain", "template"])
def test_many_prompts_are_as_each_alone(qwen, template):
    """They are tokenised a thousand at a time."""
    tokenizer = common.load_tokenizer(qwen)
    tokenizer.chat_template = template
    rows = questions(*(f"How many are {i}?" for i in range(1003)))
    experiment.encode(tokenizer, rows, settings(max_prompt_len=512))
    for i in (0, 7, 999, 1000, 1002):
        (alone,) = experiment.encode(tokenizer, questions(f"How many are {i}?"), settings(
            max_prompt_len=512))
        assert rows[i].prompt_ids == alone.prompt_ids


def test_tokenizer_without_end_token_is_refused(tmp_path, capsys):
    """No answer could ever stop."""
    folder = save_folder(tmp_path, tokenizer=tiny_tokenizer(eos_token=None))
    with pytest.raises(SystemExit) as stop:
        common.load_tokenizer(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "end-of-text" in line
