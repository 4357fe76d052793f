"""plots/viewer.py and what a run records for it: are the page's numbers those of the scripts, and
does whatever a model writes stay text?
"""

import base64
import hashlib
import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "plots"))
import viewer  # noqa: E402

import common  # noqa: E402
import dapo  # noqa: E402
import experiment  # noqa: E402
import grpo  # noqa: E402
import gspo  # noqa: E402
import ppo  # noqa: E402

SCRIPTS = {"grpo": grpo, "dapo": dapo, "gspo": gspo, "ppo": ppo}
every_script = pytest.mark.parametrize("name", SCRIPTS)
LOW_HIGH = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "ppo": (0.2, 0.2)}
ANSWERS = [  # question, gold, four answers; . stands for the end token
    ("Ana has 5 eggs, buys 2. How many eggs now?", "7",
     ("5+2=7\n#### 7.", "#### 3.", "5+2=7\nwait", "5+2=7\nwait\n5+2=7\n#### 7.")),
    ("Leo has 9 cakes, eats 4. How many cakes now?", "5", ("#### 13.", "#### 6.", "9-4", "wait.")),
    ("Mia has 3 books, buys 1. How many books now?", "4",
     ("3+1=4\n#### 4.", "#### 4.", "3+1=5\n#### 5.", "3+1=4\nwait\nwait\n#### 4."))]
HOSTILE = ["</script><img src=x onerror='hacked=1'>", "<script>hacked=1</script>", "\u202egnp.exe",
           "\x00\x07\x1b[31m", "\ud800", "&lt;b&gt;", "<!--", "שלום", "]]>\u2028", "${hacked=1}"]


# --- recorded groups, made by the scripts' own functions -----------------------------------------

def make_batch(cfg):
    """Twelve answers to three questions, scored, on the built-in tokenizer."""
    tokenizer = experiment._tiny_tokenizer()
    rows = [(experiment.Question(question, "", gold), text)
            for question, gold, texts in ANSWERS for text in texts]
    ids = [tokenizer(text.removesuffix(".")).input_ids
           + [tokenizer.eos_token_id] * text.endswith(".") for _, text in rows]
    tokens = common.pad_cat([torch.tensor([row]) for row in ids], tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in ids])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    prompt = torch.ones(len(rows), 2, dtype=torch.long)
    cut = torch.tensor([float(not text.endswith(".")) for _, text in rows])
    batch = common.Batch([question for question, _ in rows], [text for _, text in rows], prompt,
                         prompt, tokens, mask, truncated=cut, group_size=4)
    batch.rewards, batch.correct = experiment.Scorer(cfg)(batch)
    return batch, tokenizer


def noise(base, spread, seed):
    return base + spread * torch.randn(base.shape, generator=torch.manual_seed(seed))


def record(folder, name, steps=(2, 4), **changes):
    """A run's folder with metrics.csv, config.json and what `Log` records of a step; the batch."""
    script = SCRIPTS[name]
    settings = script.TINY | dict(steps=4, overlong_buffer=4, max_new_tokens=12) | changes
    known = script.Config.__dataclass_fields__
    cfg = script.Config(**{key: value for key, value in settings.items() if key in known})
    folder.mkdir(parents=True, exist_ok=True)
    about = dict(script=name, config=vars(cfg))
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "metrics.csv").write_text(",".join(experiment.COLUMNS) + "\n")
    batch, tokenizer = make_batch(cfg)
    if name == "dapo":
        batch.rewards = dapo.shaped_rewards(batch, 1, cfg.max_new_tokens, cfg.overlong_buffer)
    log = experiment.Log(folder, {}, SimpleNamespace(model=None, tokenizer=tokenizer), cfg)
    for step in steps:
        log.write(dict(step=step, reward=0.5, accuracy=0.5, entropy=1.0 / step, clip_frac=0.1))
        record_step(log, script, cfg, batch, step)
    return batch


def record_step(log, script, cfg, batch, step):
    """What the loop of a script tells the log in one step of three minibatches."""
    old = noise(-torch.ones(batch.mask.shape), 0.3, step)
    new = noise(old, 2e-3 if script is gspo else 0.3, step + 10)
    ref, values = noise(old, 0.1, step + 20), noise(torch.zeros_like(old), 0.3, step + 30)
    extra, token_means = {}, None
    if script is ppo:
        token_rewards = ppo.token_rewards(batch.rewards, old, ref, batch.mask, cfg.kl_coef)
        advantages, _ = ppo.gae(token_rewards, values, batch.mask, cfg.gamma, cfg.lam)
        advantages = ppo.whiten(advantages, batch.mask)
        token_means = (advantages * batch.mask).sum(1) / batch.mask.sum(1)
        extra = dict(ref_logp=ref, values=values, token_rewards=token_rewards,
                     advantages=advantages)
    else:
        advantages = script.group_advantages(batch.rewards, 4)
        batch.ref_logp = ref if script is grpo else None
    for minibatch in common.cut(batch, 3, 60):
        for micro in minibatch.micros:
            arrays = dict(logp=new, old_logp=old, entropy=-old) | extra
            log.note(minibatch, micro, **{key: micro.take(x) for key, x in arrays.items()})
    log._show(step, batch, advantages if token_means is None else token_means)
    log.seen = []


def make_run(folder, name, hostile=False):
    """The folder of a recorded run; `hostile`: with answers that would like to be code."""
    record(folder, name)
    if hostile:
        rows = samples(folder)
        rows[0]["tokens"] = (HOSTILE * 9)[: len(rows[0]["tokens"])]
        rows[-1]["tokens"] = (HOSTILE * 9)[: len(rows[-1]["tokens"])]
        rows[-2] |= dict(question=HOSTILE[0], gold=HOSTILE[1])
        rows += [dict(step=4, question=text, gold=text, completion=text * 3, reward=1.0,
                      advantage=0.5) for text in [*HOSTILE, "word " * 20_000]]
        rows.sort(key=lambda row: row["step"])
        write(folder, rows)
    return folder


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def write(folder, rows):
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """The page as a browser reads it: its tags and what stands in its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.key = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.key = dict(attributes).get("id", tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.key = None

    def handle_data(self, text):
        if self.key:
            self.inside[self.key] = self.inside.get(self.key, "") + text


def page_of(*folders, out=None):
    """(the page's data, the Page)."""
    out = out or folders[0] / "page.html"
    viewer.main([*map(str, folders), "--out", str(out)])
    page = Page(out.read_text(encoding="utf-8"))
    return json.loads(page.inside["data"]), page


def at(x, t):
    return x[t] if isinstance(x, list) else x


# --- the numbers ---------------------------------------------------------------------------------

def by_hand(name, row, t, advantage):
    """(weight, ratio, term, push, is it clipped) of a token, in plain Python."""
    answers, tokens = row["update"]
    length = len(row["tokens"])
    weight = 1 / tokens if name in ("ppo", "dapo") else 1 / answers / length
    gaps = [new - old for new, old in zip(row["logp"], row["old_logp"])]
    ratio = math.exp(sum(gaps) / length if name == "gspo" else gaps[t])
    low, high = LOW_HIGH[name]
    unclipped, near = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    term, push = max(unclipped, near), 0.0 if near > unclipped else weight * advantage * ratio
    if name == "grpo" and "ref_logp" in row:
        d = row["ref_logp"][t] - row["logp"][t]
        term += 0.01 * (math.exp(d) - d - 1)  # TINY's beta
        push += weight * 0.01 * (math.exp(d) - 1)
    return weight, ratio, term, push, near > unclipped


@every_script
def test_every_number_of_every_token(name, tmp_path):
    """Of the run's own script and of the others, against plain Python."""
    record(tmp_path, name)
    data, _ = page_of(tmp_path)
    groups = viewer.groups_of(samples(tmp_path))
    assert len(groups) == len(data["runs"][0]["groups"]) == 6
    for other in SCRIPTS:
        clips = [check_group(other, group, page)
                 for group, page in zip(groups, data["runs"][0]["groups"])]
        assert sum(clips) > 0 or name == "gspo" != other  # so near 1 that only GSPO clips


def check_group(other, group, page):
    """Compare a group under script `other`; how many of its tokens are clipped."""
    total, clipped, ratios = 0, 0, set()
    for row, shown in zip(group, page["rows"]):
        seen = shown["by"][other]
        for t in range(len(row["tokens"])):
            a = at(seen["A"], t)
            weight, ratio, term, push, clip = by_hand(other, row, t, a)
            assert at(seen["w"], t) == pytest.approx(weight, rel=1e-4)
            assert at(seen["wA"], t) == pytest.approx(weight * a, rel=1e-3, abs=1e-9)
            assert at(seen["ratio"], t) == pytest.approx(ratio, rel=1e-6)
            assert at(seen["term"], t) == pytest.approx(term, rel=1e-3, abs=1e-4)
            assert at(seen["push"], t) == pytest.approx(push, rel=1e-3, abs=1e-6)
            assert clip == (t in seen["clip"])
            total, clipped = total + weight * term, clipped + clip
            ratios.add(ratio)
    assert page["sums"][other] == pytest.approx(total, rel=1e-3, abs=1e-5)
    assert len(ratios) > 3  # GSPO has one an answer
    return clipped


@every_script
def test_the_loss_is_policy_loss(name, tmp_path):
    """The sum over a group is what the script returns for its rows, as is that of one answer."""
    record(tmp_path, name)
    data, _ = page_of(tmp_path)
    cfg = SCRIPTS[name].Config(**json.loads((tmp_path / "config.json").read_text())["config"])
    for group, page in zip(viewer.groups_of(samples(tmp_path)), data["runs"][0]["groups"]):
        for row, shown in zip(group, page["rows"]):
            new, old = (torch.tensor([row[key]]) for key in ("logp", "old_logp"))
            mask = torch.ones_like(new)
            advantage = torch.tensor([row["advantages"] if name == "ppo" else row["advantage"]])
            low, high = LOW_HIGH[name]
            rest = [low, high] if name in ("dapo", "gspo") else [low]
            if name == "grpo":
                rest += [torch.tensor([row["ref_logp"]]), cfg.beta]
            total = row["update"][name in ("ppo", "dapo")]
            weights = SCRIPTS[name].token_weights(mask, total)
            loss, _ = SCRIPTS[name].policy_loss(new, old, advantage, mask, weights, *rest)
            assert shown["by"][name]["sum"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-6)


def test_advantages_under_the_others(tmp_path):
    """From GRPO's 0 and 1: DAPO's come from -1 and 1 less the overlong penalty. And back."""
    record(tmp_path / "grpo", "grpo", overlong_buffer=4)
    record(tmp_path / "dapo", "dapo")
    data, _ = page_of(tmp_path / "grpo", tmp_path / "dapo")
    mine, theirs = (run["groups"][0]["rows"] for run in data["runs"])
    rewards = [row["correct"] for row in mine]
    assert rewards == [1, 0, 0, 1]
    spread = math.sqrt(sum((r - 0.5) ** 2 for r in rewards) / 3)
    for row in (*mine, *theirs):
        expected = (row["correct"] - 0.5) / (spread + 1e-6)
        assert row["by"]["grpo"]["A"] == pytest.approx(expected, rel=1e-4)
    lengths = [len(row["tokens"]) for row in mine]
    shaped = [2 * right - 1 + min(0, max(-1, (12 - 4 - n) / 4))
              for right, n in zip(rewards, lengths)]  # the run's own buffer of 4 in 12
    mean = sum(shaped) / 4
    spread = math.sqrt(sum((r - mean) ** 2 for r in shaped) / 3)
    for row, r in zip(theirs, shaped):
        assert row["by"]["dapo"]["A"] == pytest.approx((r - mean) / (spread + 1e-6), rel=1e-4)
    tied = data["runs"][0]["groups"][1]
    assert tied["tied"] and "drops" in tied["notes"]["dapo"]
    assert all(row["by"]["gspo"]["A"] == 0 for row in tied["rows"])


def test_td_errors_and_kl(tmp_path):
    """delta = R + gamma V_next - V; the KL is k3 of the new log-prob."""
    record(tmp_path, "ppo")
    data, _ = page_of(tmp_path)
    for group, page in zip(viewer.groups_of(samples(tmp_path)), data["runs"][0]["groups"]):
        for row, shown in zip(group, page["rows"]):
            following = [*row["values"][1:], 0.0]
            for t, value in enumerate(row["values"]):
                delta = row["token_rewards"][t] + following[t] - value
                assert at(shown["delta"], t) == pytest.approx(delta, abs=1e-4)
                d = row["ref_logp"][t] - row["logp"][t]
                assert at(shown["kl"], t) == pytest.approx(math.exp(d) - d - 1, abs=1e-4)


def test_one_answer_a_question_has_no_group(tmp_path):
    record(tmp_path, "ppo")
    rows = samples(tmp_path)[:1]
    write(tmp_path, rows)
    data, _ = page_of(tmp_path)
    group, = data["runs"][0]["groups"]
    assert list(group["rows"][0]["by"]) == ["ppo"] and "no group" in group["notes"]["grpo"]


# --- what a run records --------------------------------------------------------------------------

def test_whole_groups_with_all_their_tokens(tmp_path):
    """Text, ids and numbers of an answer are as long as its mask; together the texts are it."""
    batch = record(tmp_path, "grpo")
    rows = samples(tmp_path)
    assert [(row["step"], row["group"]) for row in rows] == [
        (step, group) for step in (2, 4) for group in range(3) for _ in range(4)]
    for i, row in enumerate(rows):
        length = int(batch.mask[i % 12].sum())
        assert all(len(row[key]) == length for key in (
            "tokens", "ids", "logp", "old_logp", "ref_logp", "entropy"))
        ended = row["tokens"][-1] == "<eos>"
        assert ended != row["truncated"] and row["special"] == [length - 1] * ended
        assert "".join(row["tokens"]).removesuffix("<eos>") == batch.texts[i % 12].removesuffix(".")
        assert row["update"][0] == 4 and row["update"][1] == int(
            batch.mask[4 * row["group"] : 4 * row["group"] + 4].sum())


def test_a_mixed_group_is_among_them():
    rewards = torch.tensor([0.0, 1, 0, 0, 1, 1, 0, 0])
    assert experiment.pick_groups(rewards, 2, 2) == [0, 3]
    assert experiment.pick_groups(rewards, 2, 9) == [0, 1, 2, 3]
    assert experiment.pick_groups(rewards, 2, 0) == []
    assert experiment.pick_groups(torch.tensor([0.0, 0, 0, 1]), 2, 1) == [1]
    assert experiment.pick_groups(torch.zeros(4), 2, 1) == [1]
    assert experiment.pick_groups(torch.zeros(4), 1, 2) == [2, 3]


def test_of_two_epochs_the_last_and_a_dummy_changes_nothing(tmp_path):
    batch, tokenizer = make_batch(grpo.Config(**grpo.TINY))
    cfg = SimpleNamespace(samples=1)
    log = experiment.Log(tmp_path, {}, SimpleNamespace(model=None, tokenizer=tokenizer), cfg)
    minibatch, = common.cut(batch, 1, 60)
    for epoch in (1.0, 2.0):
        for micro in minibatch.micros:
            log.note(minibatch, micro, logp=torch.full(micro.mask.shape, epoch), values=None)
    dummy = common.micro_of(batch, torch.tensor([3]))
    dummy.mask = torch.zeros_like(dummy.mask)
    log.note(minibatch, dummy, logp=torch.full(dummy.mask.shape, 9.0))
    whole = log._gathered(batch)
    assert whole.keys() == {"logp"} and torch.equal(whole["logp"], 2.0 * batch.mask)


def test_samples_0_keeps_none(tmp_path):
    record(tmp_path, "grpo", samples=0)
    assert samples(tmp_path) == []
    record(tmp_path / "one", "grpo", samples=1)
    assert len(samples(tmp_path / "one")) == 8


def test_the_file_is_bounded(tmp_path, monkeypatch):
    """Beyond the share of the run so far, a group's texts only."""
    monkeypatch.setattr(experiment, "SAMPLES_BYTES", 20_000)
    record(tmp_path, "grpo", steps=(1, 2, 3, 4))
    rows = samples(tmp_path)
    kept = ["tokens" in row for row in rows]
    assert len(rows) == 48 and 4 <= sum(kept) < 48
    assert sum(kept[i : i + 4] not in ([True] * 4, [False] * 4) for i in range(0, 48, 4)) == 0
    assert (tmp_path / "samples.jsonl").stat().st_size < 20_000 + 48 * 300
    data, _ = page_of(tmp_path)
    assert len(data["runs"][0]["groups"]) == 12


def bpe(text, **parts):
    """A tokenizer of single characters and bytes, with one pair of them joined."""
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *text])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token=None))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_a_tokens_own_text():
    """Spaces belong to tokens, though some decoders drop them at the start of a text."""
    tiny = experiment._tiny_tokenizer()
    ids = tiny("5+2 eggs\n#### 7").input_ids + [tiny.eos_token_id]
    assert "".join(experiment.token_texts(tiny, ids)) == "5+2 eggs\n#### 7<eos>"
    split = pre_tokenizers.Metaspace(prepend_scheme="never")
    meta = bpe(["▁", "▁a", "a", "1"], pre_tokenizer=split, decoder=decoders.Metaspace())
    assert experiment.token_texts(meta, [2, 3, 1, 0]) == [" a", "a", " ", "<eos>"]
    byte = bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), decoder=decoders.ByteLevel(),
               pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    texts = experiment.token_texts(byte, byte("1 é").input_ids)
    assert texts[:2] == ["1", " "] and len(texts) == 4  # half a character is none


# --- the page ------------------------------------------------------------------------------------

def test_model_output_is_text(tmp_path):
    """As a browser reads the page: two scripts, no picture, no handler; the answers unchanged."""
    data, page = page_of(make_run(tmp_path, "grpo", hostile=True))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2 and tags.count("style") == 1 and "img" not in tags
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    inside = text.split('id="data">')[1].split("</script>")[0]
    assert inside.isascii() and "<" not in inside
    groups = data["runs"][0]["groups"]
    n = len(groups[0]["rows"][0]["tokens"])
    assert groups[0]["rows"][0]["tokens"] == (HOSTILE * 9)[:n]
    assert {text * 3 for text in HOSTILE} <= {
        row["text"] for group in groups for row in group["rows"]}
    longest = max(len(row["text"] or "") for group in groups for row in group["rows"])
    assert longest < 21_000 and "80000 more characters" in text


def test_nothing_may_be_loaded(tmp_path):
    """The policy allows two blocks by their hashes, which are those of the page."""
    _, page = page_of(make_run(tmp_path, "grpo"))
    policy, = (a["content"] for tag, a in page.tags
               if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "base-uri", "form-action", "style-src", "script-src"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("style", "script"):
        digest = hashlib.sha256(page.inside[tag].encode()).digest()
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert not any({"src", "href", "style"} & attributes.keys() for _, attributes in page.tags)
    code = page.inside["script"]
    assert all(word not in code for word in ("innerHTML", "eval(", "fetch(", "insertAdjacentHTML"))


def test_an_old_run_shows_texts(tmp_path):
    make_run(tmp_path, "dapo")
    old = ("step", "question", "gold", "completion", "reward", "advantage")
    rows = [{key: row[key] for key in old} for row in samples(tmp_path)]
    write(tmp_path, rows)
    data, _ = page_of(tmp_path)
    groups = data["runs"][0]["groups"]
    assert [len(group["rows"]) for group in groups] == [4] * 6
    assert groups[0]["rows"][0]["text"] == rows[0]["completion"]
    assert "tokens" not in groups[0]["rows"][0] and groups[0]["rows"][0]["correct"] is None


def test_a_large_run_fits(tmp_path, monkeypatch, capsys):
    """Groups spread over the run come first; what is left out is said."""
    record(tmp_path, "grpo", steps=range(1, 41), samples=2)
    monkeypatch.setattr(viewer, "MOST_BYTES", 230_000)
    data, _ = page_of(tmp_path)
    assert (tmp_path / "page.html").stat().st_size <= 230_000
    groups = data["runs"][0]["groups"]
    steps = [group["step"] for group in groups if "tokens" in group["rows"][0]]
    assert steps == sorted(steps) and {1, 40} <= set(steps)
    assert max(b - a for a, b in zip(steps, steps[1:])) <= 12
    assert "with every token" in capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_spread(n):
    """Every place once; any beginning of it is spread evenly."""
    assert sorted(viewer.spread(n)) == list(range(n))
    if n >= 7:
        first = sorted(viewer.spread(n)[:5])
        gaps = [b - a for a, b in zip(first, first[1:])]
        assert first[0] == 0 and first[-1] == n - 1 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("damage", [
    dict(logp=[math.nan]), dict(logp=[1.0]), dict(tokens="text"), dict(update=None), dict(ids=[]),
    dict(old_logp=["1"]), dict(entropy=None), dict(tokens=[])])
def test_damaged_arrays_are_shown_as_text(tmp_path, damage):
    make_run(tmp_path, "grpo")
    rows = samples(tmp_path)
    rows[0] |= damage
    write(tmp_path, rows)
    data, _ = page_of(tmp_path)
    groups = data["runs"][0]["groups"]
    assert "tokens" not in groups[0]["rows"][0] and "tokens" in groups[1]["rows"][0]


def test_lines_that_are_no_answers_are_said(tmp_path, capsys):
    make_run(tmp_path, "gspo")
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('[]\nnull\n{"step": 4}\n{"step": 4, "quest')
    data, _ = page_of(tmp_path)
    assert len(data["runs"][0]["groups"]) == 6
    assert "4 lines" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nowhere"], ["here"], ["good", "--out", "no/such/file.html"]])
def test_mistakes_are_one_line(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    make_run(Path("good"), "grpo")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        viewer.main(argv)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
