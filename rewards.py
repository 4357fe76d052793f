"""Rewards: text in, number out. Answer checking, format rules, a reward model, word problems.

What counts as an answer: the text is cut where a next question or chat turn begins. Then the last
`####` marker counts, with the rest of its line; without a marker the last complete `\\boxed{...}`;
else there is none. The lenient reading falls back on the last number.

What counts as right: one number, perhaps with a currency sign before and a unit behind it, exactly
equal to the gold. A unit is words that leave the value alone (see `_is_unit`): "18 dollars per day"
is 18; "18 or 20", "18 + 2", "5 = 18", "18x", "18 M" and "18 thousand" are not. A gold in letters
wants the same LaTeX text; a broken number ("3/0", "1.8.0", "nan") equals nothing.
"""

import math
import random
import re
from fractions import Fraction

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

# --- finding the answer --------------------------------------------------------------------------

NEXT_QUESTION = re.compile(  # a base model likes to go on asking itself; also "**Question 2:**"
    r"\n[ \t>*#]{0,9}(?:Question|Problem|Q)(?: ?[0-9]{1,4})?\*{0,2} ?:|\n(?:User|Human):"
    r"|<\|(?:im_start|im_end|user|assistant|system|end|endoftext|end_of_text|eot_id"
    r"|start_header_id)\|>|<(?:start|end)_of_turn>|</s>|\[INST\]"
)
LAST_NUMBER = re.compile(  # a minus after a digit, letter or bracket subtracts: not a sign
    r"(?=[-\u2212$€£¥.0-9])(?:(?<![\w.)\]])[-\u2212])?[$€£¥]?"
    r"(?:[0-9]{1,9} (?=[0-9]{1,9}/))?\.?[0-9][0-9.,/]*%?"
)


def extract_answer(text, lenient=False):
    """Completion -> the text of its final answer, or None: see the top of this file."""
    text = NEXT_QUESTION.split(text, 1)[0]
    _, marker, rest = text.rpartition("####")
    answer = rest.partition("\n")[0].lstrip(": ") if marker else _last_box(text)
    if lenient and not answer.strip():
        answer = (LAST_NUMBER.findall(text) or [""])[-1].rstrip(".,/")
    return answer.strip() or None


def _last_box(text):
    """What the last `\\boxed{...}` with balanced braces holds, or "". One pass over any text."""
    pieces = re.split(r"(\\boxed\s?\{|(?<!\\)[{}])", text)  # text, brace, text, ..., brace, text
    opened, content = [], slice(0)
    for i in range(1, len(pieces), 2):
        if pieces[i] != "}":
            opened.append(i)
        elif opened and pieces[start := opened.pop()] != "{":
            content = slice(start + 1, i)
    return "".join(pieces[content])


# --- judging the answer --------------------------------------------------------------------------

MAX_ANSWER = 1000  # characters; with exponents below 1000 it bounds the size of every number
DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"  # not 1,23,4
NUMBER = re.compile(
    r"[\s*_`$€£¥]*(?:([-+])[\s$€£¥]*)?(?:([0-9]+) )?"  # sign, whole part of a mixed number
    rf"({DECIMAL}(?:[eE][-+]?[0-9]{{1,3}})?)(?: ?/ ?(-?{DECIMAL}))?"
    r"([\s*_`$€£¥%.,;:~]*(?:[(/]?\s?[A-Za-z][A-Za-z²³\s.,;:!?'’\"()/*_`$%&-]*)?)"  # a unit?
)
SYMBOL = re.compile(  # short words that are units, or begin one: "18 cm", "18 a day"
    r"[mghslLa]|mm|(?i:[ck]m|ft|in|mi|yds?|sq|k?mh|mph|kph|[km]?g|lbs?|oz|[cdm]l|gal|pt|qt|hrs?|"
    r"min|sec|[ap]m|usd|eur|[kmgt]b|kwh?|hz|rpm|pcs|pts|an|of|at|on)"
)
STEM = "(?:twen|thir|four|for(?=t)|fif|six|seven|eight?|nine?|ten|eleven|twelve?|twelf)"
ONES = f"(?:zero|one|two|three|five|{STEM}(?:teen|ty)?)"
LARGE = "(?:hundred|thousand|[a-z]{1,12}illion)"
PART = f"(?:third|(?:{STEM}(?:teen|tie)?|{LARGE})th)"
NOT_UNIT = re.compile(  # number words, operations, single letters; first, what is no noun phrase
    r"(?:(?i:^[^a-z]*(?:and|but|nor|not|are|was|were|ha[sd]|can|will|did|[a-z]{2,6}n['’]t)"
    rf"|(?<![a-z'’])(?:(?<!\(){ONES}(?!-)(?:e?s)?|{PART}(?:s|(?=[^a-z]*$| of))|{LARGE}s?"
    r"|mill?|mio|mln|bil|tril|thou|lakhs?|crores?|grand(?=[^a-z]*$)|hal(?:f|ves?|ved)|quarters?"
    r"|or|plus|minus|negative|negated|squared|cubed|factorial|(?:dou|tri|tre|[a-z]{3,5}u)[bp]led))"
    r"|(?<![A-Za-z'’])(?![mghslLaA]|.[-'’][a-z]{3})[A-Za-z])(?![A-Za-z]|['’][a-z](?![a-z]))"
)
BROKEN = re.compile(r"[-+0-9.,/$%*_`]*(?:e[-+]?[0-9]+)?|[-+]?(?:nan|inf|infinity|none|null)")
UPRIGHT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm)|mbox)\s?\{"
REWRITES = (
    (r"[\u2212\u2013\uff0d]", "-"),  # minus sign, en dash, full-width hyphen
    (r"(?<=[0-9])(?:\\,|\{,\}|,?\\!,?|,\\! )(?=[0-9])", ","),  # thousands: 1\,234 1{,}234
    (r"\\[,;: ()\[\]]", " "),  # spaces, and the \( \) or \[ \] around mathematics
    (r"\\!|\\(?:left|right)(?![a-z])", ""),
    (r"\\([$%#&_])", r"\1"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"(?<=[0-9])_([0-9]{1,2})(?![0-9])", r"_{\1}"),  # 101_7, a number in base 7
    (rf"({UPRIGHT}[^{{}}]*)\}}\s?\^(?:2|\{{2\}})", r"\1²}"),  # \text{ cm}^2
    (rf"({UPRIGHT}[^{{}}]*)\}}\s?\^(?:3|\{{3\}})", r"\1³}"),
    (r"(?<=[A-Za-z]{2})\^(?:2|\{2\})", "²"),
    (r"(?<=[A-Za-z]{2})\^(?:3|\{3\})", "³"),
    (rf"{UPRIGHT}~?([^{{}}]*)\}}", r" \1 "),
    (r"(?:\^\{?\\circ\}?|°| degrees?(?= [CF]\b))(?:\s*[CF]\b)?", ""),
    (r"\\boxed\s?\{(.*)\}", r" \1 "),  # "#### $\boxed{18}$"
)
FRACTION = re.compile(r"\\frac\s?(?:\{(-?[0-9.,]+)\}|([0-9]))\s?(?:\{([0-9.,]+)\}|([0-9]))")


def is_correct(completion, gold, lenient=False):
    """Whether the answer equals the bare `gold` ("18", "1,234", "\\frac{3}{4}"; None is no gold).
    Never raises and never hangs, whatever the two strings."""
    right, answer = _value(gold or ""), extract_answer(completion, lenient)
    return right is not None and _value(answer or "") == right


def _value(text):
    """What an answer says: a Fraction, or normalised LaTeX text, or None for a broken number."""
    if len(text) > MAX_ANSWER:
        return None
    if text.isascii() and text.isdigit():  # as most golds are: no need to look further
        return Fraction(int(text))
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    spaced = FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    number = NUMBER.fullmatch(" ".join(spaced.split()))  # split() knows no-break spaces, too
    if number and _is_unit(number[5]):
        sign, whole, top, bottom = (p and p.replace(",", "") for p in number.groups()[:4])
        if (whole and not bottom) or Fraction(bottom or 1) == 0:  # "1 8", "3/0"
            return None
        size = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
        return -size if sign == "-" else size
    text = "".join(text.split()).strip("$*_`.").replace("²", "^2").replace("³", "^3")
    return None if BROKEN.fullmatch(text.lower()) else re.sub(r"\{(\w)\}", r"\1", text)


def _is_unit(tail):
    """Whether what follows a number leaves its value alone: nothing, or a noun phrase.

    Letters as short as a variable or a conjunction (up to 3 glued to the number, 2 elsewhere) must
    be a known SYMBOL, and one letter stands behind a space: `2b`, `2m`, `1/A`, "2 pi", "18 to".
    Elsewhere any word may come but those of NOT_UNIT. "7 dozen" stays 7, as GSM8K has it.
    """
    gap, first = re.match("([^A-Za-z]*)([A-Za-z]*(?:[-'’][a-z]{3,})?)", tail).groups()
    if 0 < len(first) < (3 if " " in gap or "/" in gap else 4):
        lone = len(first) == 1 and (" " not in gap or "/" in gap)
        if lone or not SYMBOL.fullmatch(first):
            return False
    return not NOT_UNIT.search(tail)


def gold_answer(row):
    """A row's bare gold or None: what its `answer` has after the last `####`, else in the last
    \\boxed{}, else a one-line `answer` itself."""
    answer = str(row.get("answer", ""))
    _, marker, rest = answer.rpartition("####")
    gold = (rest if marker else _last_box(answer) or answer).strip()
    return gold if "\n" not in gold and _value(gold) is not None else None


def without_annotations(answer):
    """GSM8K's solution without its calculator notes: "2+3=<<2+3=5>>5" -> "2+3=5"."""
    return re.sub(r"<<[^<>]*>>", "", answer)


# --- rewards -------------------------------------------------------------------------------------

def correct(completion, gold):
    """1 for the right answer, strictly read."""
    return float(is_correct(completion, gold))


def think_format(completion, gold=None):
    """1 for exactly one <think>...</think> that holds something, with an answer after it.
    `completion` is the whole turn: a <think> that the prompt opened stands before it."""
    text = re.split("(</?think>)", NEXT_QUESTION.split(completion, 1)[0])
    tidy = text[1::2] == ["<think>", "</think>"] and text[2].strip() and extract_answer(text[4])
    return float(bool(tidy))


def marker_format(completion, gold=None):
    """1 if the strict reading finds an answer at all, right or wrong."""
    return float(extract_answer(completion) is not None)


def contains(completion, gold):
    """1 if the gold appears anywhere. Here to be hacked: "#### 118" or a list of guesses pays."""
    return float(gold is not None and str(gold) in completion)


REWARDS = {rule.__name__: rule for rule in (correct, think_format, marker_format, contains)}
NEEDS_GOLD = frozenset({"correct", "contains"})


def parse_reward(spec):
    """'correct+0.5*think_format' -> {"correct": 1.0, "think_format": 0.5}, or ValueError.
    "model" stands for the reward model. A weight is a plain number; a negative one punishes."""
    weights, valid = {}, [*REWARDS, "model"]
    for term in spec.split("+"):
        weight, star, name = (part.strip() for part in term.rpartition("*"))
        if name not in valid:
            raise ValueError(f"reward {spec!r}: no reward {name!r}, valid: {', '.join(valid)}")
        if name in weights:
            raise ValueError(f"reward {spec!r}: {name!r} is given twice")
        if star and not re.fullmatch(r"-?[0-9]{0,9}\.?[0-9]{1,9}(?:e-?[0-9]{1,2})?", weight):
            raise ValueError(f"reward {spec!r}: weight {weight!r} of {name} is not a plain number")
        weights[name] = float(weight) if star else 1.0
    return weights


def score(completions, golds, weights, model_scores=None):
    """N completions, N golds (str or None), {name: weight}, N model scores -> N weighted sums.
    ValueError for a score that is not finite: it says which reward gave it, and to what."""
    pairs, totals = list(zip(completions, golds, strict=True)), [0.0] * len(completions)
    for name, weight in weights.items():
        if name == "model" and model_scores is None:
            raise ValueError("a weight for the reward model, but no model_scores")
        scores = model_scores if name == "model" else [REWARDS[name](*pair) for pair in pairs]
        for (completion, _), s in zip(pairs, scores, strict=True):
            if not math.isfinite(s):
                raise ValueError(f"reward {name!r} gave {s} to the answer {completion[:200]!r}")
        totals = [total + weight * s for total, s in zip(totals, scores)]
    return totals


class RewardModel:
    """A frozen sequence classifier with one label. ValueError if what is there is not one."""

    def __init__(self, name_or_dir, device, dtype):
        config = AutoConfig.from_pretrained(name_or_dir, trust_remote_code=False)
        if config.num_labels != 1:
            raise ValueError(f"{name_or_dir} has {config.num_labels} labels, a reward model has 1")
        if "/" in str(config._attn_implementation):  # transformers would fetch and run it
            raise ValueError(f"its attn_implementation {config._attn_implementation} is code on "
                             "the hub; remove that setting from its config.json")
        config.update({k: 0.0 for k, rate in config.to_dict().items() if "drop" in k and rate})
        self.model, report = AutoModelForSequenceClassification.from_pretrained(
            name_or_dir, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True,
        )
        if report["missing_keys"]:  # transformers makes up a random head and goes on
            raise ValueError(f"{name_or_dir} lacks weights: {sorted(report['missing_keys'])}")
        self.model.to(device).eval().requires_grad_(False)
        # tokenizer.json as it is: AutoTokenizer gives any Qwen2 model Qwen2's own splitting rules
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(name_or_dir)

    @torch.no_grad()
    def __call__(self, questions, completions, batch_size=32):
        """N questions, N completions -> N floats, each as if scored alone. ValueError for a text
        with more tokens than the model has positions: nothing is cut."""
        rows = [self.encode(*pair) for pair in zip(questions, completions, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.empty(len(rows))
        for start in range(0, len(rows), batch_size):
            part = order[start : start + batch_size]
            batch = [rows[i] for i in part]
            # The model reads its score at the last id that is not padding. So pad with an id no row
            # ends in: with pad == eos a closing eos would be passed over.
            ends = {None, *(row[-1].item() for row in batch)}
            pads = (self.tokenizer.pad_token_id, *range(len(batch) + 1))
            self.model.config.pad_token_id = next(i for i in pads if i not in ends)
            ids = pad_sequence(batch, True, self.model.config.pad_token_id)
            mask = pad_sequence([torch.ones_like(row) for row in batch], True)
            logits = self.model(ids.to(self.model.device), mask.to(self.model.device)).logits
            scores[part] = logits[:, 0].float().cpu()
        return scores.tolist()

    def encode(self, question, completion):
        """Token ids. Special tokens spelled out in the texts stay text: no turn can be forged."""
        tok = self.tokenizer
        if tok.chat_template:
            chat = [dict(role="user", content=question), dict(role="assistant", content=completion)]
            ids = tok.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
        else:
            ids = tok(f"{question}\n{completion}", split_special_tokens=True)["input_ids"]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and len(ids) > limit:
            raise ValueError(f"{len(ids)} tokens to score, the reward model has {limit} positions")
        return torch.tensor(ids)


# --- the built-in word problems: GSM8K in miniature ----------------------------------------------

NAMES = "Ana Ben Eva Leo Max Mia Sam Tom".split()
THINGS = {  # how they come and how they go
    "apples": ("picks buys finds", "eats sells drops"),
    "books": ("buys borrows finds", "sells lends loses"),
    "cakes": ("bakes buys gets", "eats sells drops"),
    "cards": ("wins buys gets", "plays lends loses"),
    "coins": ("earns wins finds", "spends pays loses"),
    "eggs": ("buys finds gets", "eats sells breaks"),
}


def word_problems(count, seed, exclude=()):
    """`count` rows {"question", "answer"}, the same for the same seed, of distinct questions, none
    of them in `exclude`. Millions exist: 2-3 steps of 1-5 from 1-10, never below 0 or above 15."""
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        thing, total, size = rng.choice(list(THINGS)), rng.randint(1, 10), rng.randint(2, 3)
        events = [f"{rng.choice(NAMES)} has {total} {thing[:-1] if total == 1 else thing}"]
        lines = []
        while len(lines) < size:
            change = rng.choice((1, -1)) * rng.randint(1, 5)
            if 0 <= total + change <= 15:
                events.append(f"{rng.choice(THINGS[thing][change < 0].split())} {abs(change)}")
                lines.append(f"{total}{change:+d}={total + change}")
                total += change
        question = f"{', '.join(events)}. How many {thing} now?"
        if question not in exclude:
            rows[question] = {"question": question, "answer": "\n".join([*lines, f"#### {total}"])}
    return list(rows.values())


def words_split():
    """4,000 training, 256 held-out and 256 test rows; no question is in two of them."""
    rows = word_problems(4512, seed=0)
    return rows[:4000], rows[4000:4256], rows[4256:]


def sloppy_pupil(row, rng, gives_up=0.5, again=0.35):
    """A pupil's answer to a word problem, 37 % right: gives up before each later step (p = 0.5),
    takes a sign for the other in one attempt of ten, writes `wait` and starts again (p = 0.35).
    For the cold start: a model taught only clean solutions is confidently wrong, beyond RL."""
    lines, goes_on = [], True
    while goes_on:
        total = int(re.match("[0-9]+", row["answer"])[0])
        changes = [int(change) for change in re.findall("([+-][0-9]+)=", row["answer"])]
        if rng.random() < 0.1:
            changes[rng.randrange(len(changes))] *= -1
        for k, change in enumerate(changes):
            if k and rng.random() < gives_up:
                break
            lines.append(f"{total}{change:+d}={total + change}")
            total += change
        goes_on = rng.random() < again
        lines.append("wait" if goes_on else f"#### {total}")
    return "\n".join(lines)
