"""How fast, how lean: our GRPO step against its bare cost and against TRL's, and how both grow.

    python tests/bench.py bound                 our step : bare `generate`, forward and backward
    python tests/bench.py trl                   our step : TRL's GRPOTrainer  (pip install trl)
    python tests/bench.py memory                peak of log-probs and gradient : the naive form
    python tests/bench.py growth                plots/growth.png: seconds and memory, with slopes
    ... --model tiny|26m|half --repeats 5 --quick

Ours is grpo.train() itself. Turns alternate, A B A B; a figure is the median ratio [least - most],
in CPU seconds (other programs shared the cores). Two cores, CPU, one thread a side, TRL 1.16:

| tiny, against          | setting                          | ratio              | bar    |
|------------------------|----------------------------------|--------------------|--------|
| bare cost              | 16 x 8 x 48, one update, step    | 1.03 [0.76 - 1.12] | <= 1.06|
| bare cost              | its rollout alone                | 1.02 [0.87 - 1.23] | <= 1.02|
| TRL, variable lengths  | 4 updates, beta 0                | 1.37 [1.34 - 1.38] | >= 1.8 |
| TRL, variable lengths  | 4 updates, beta 0.04             | 1.33 [1.27 - 1.33] | >= 1.8 |
| TRL, fixed lengths     | 1 update, beta 0 / 0.04          | 1.09 / 1.11        | >= 1.05|
| TRL, fixed lengths     | 4 updates, beta 0 / 0.04         | 1.07 / 1.09        | >= 1.05|
| memory, half           | 8 x (64 + 512), token_logps      | 0.23               | <= 0.25|

Not yet measured: tiny variable with 1 update, interleaved; 26m and half against TRL; 26m against
the bare cost; growth.

| tried (ratio of CPU seconds to the step as it is)            | tiny | 26m  | kept |
|--------------------------------------------------------------|------|------|------|
| micro-batch ends at a row under half as long, 4 updates      | 0.81 | -    | open |
| the same, 1 update                                           | 1.00 | -    | open |
| ... under two thirds as long, 4 updates / 1 update           | 0.79 / 1.02 | - | no  |
| look for finished rows every 16 tokens instead of 32         | 0.95 | 1.02 | no   |
| ... every 8                                                  | 0.96 | 1.00 | no   |
"""

import argparse
import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: the cores are shared
sys.path.append(str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from models import Memory  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import common  # noqa: E402
import grpo  # noqa: E402

EOS = 1
SHAPES = {  # vocabulary, hidden, layers, heads, key-value heads, intermediate
    "tiny": (76, 64, 3, 4, 4, 256),  # the built-in model, 0.2M parameters
    "26m": (32_000, 384, 8, 6, 6, 1024),
    "half": (151_936, 896, 2, 14, 2, 4864),  # Qwen2.5-0.5B with two layers
}


@dataclass
class Case:
    """One setting, the same for both sides. A micro-batch holds `micro` rows of full length."""

    shape: tuple = SHAPES["tiny"]
    prompts: int = 16
    group: int = 8
    cap: int = 128  # tokens of an answer at most
    micro: int = 32
    variable: bool = False  # lengths lognormal (sigma 1), median cap / 4; else all `cap`
    updates: int = 1  # per rollout
    beta: float = 0.0

    @property
    def rows(self):
        return self.prompts * self.group


CASES = {
    "tiny": Case(),
    "26m": Case(SHAPES["26m"], prompts=2, cap=96, micro=4),
    "half": Case(SHAPES["half"], prompts=1, cap=64, micro=2),
}

# --- the same work for everyone ------------------------------------------------------------------


def config(shape):
    vocab, hidden, layers, heads, kv_heads, intermediate = shape
    return transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden // heads, intermediate_size=intermediate,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS, pad_token_id=0)


def make_folder(shape):
    """model/ (random weights, a tokenizer of as many words) and questions.jsonl, all one length."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(shape))
    model.save_pretrained(folder / "model")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, shape[0]))]
    rust = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.integers(3, shape[0], 16)) for _ in range(64)]
    lines = [json.dumps({"question": row, "answer": "#### 1"}) for row in rows]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder


class Lengths(transformers.LogitsProcessor):
    """Decides how long each answer gets, by its first token, which its row decides: so both sides
    make the same lengths, and rows that leave the batch take theirs along."""

    def __init__(self, case, prompt_len):
        self.case, self.prompt_len = case, prompt_len
        self.kinds = min(case.rows, 64)
        normal, rng = NormalDist(np.log(case.cap / 4), 1.0), np.random.default_rng(0)
        quantiles = [np.exp(normal.inv_cdf((i + 0.5) / self.kinds)) for i in range(self.kinds)]
        lengths = torch.tensor(rng.permutation(quantiles)).round().long().clamp(min=2)
        self.lengths = F.pad(lengths, (3, 0)).to(common.device())  # words begin at id 3

    def __call__(self, ids, logits):
        made = ids.shape[1] - self.prompt_len
        if not self.case.variable:
            logits[:, EOS] = -torch.inf
        elif made == 0:
            first = 3 + torch.arange(len(ids), device=ids.device) % self.kinds
            logits = torch.full_like(logits, -torch.inf).scatter(1, first[:, None], 0.0)
        else:
            ends = self.lengths[ids[:, self.prompt_len]] == made + 1
            logits[:, EOS] = -torch.inf
            logits[ends] = torch.where(torch.arange(logits.shape[1]) == EOS, 0.0, -torch.inf)
        return logits

    def steer(self, model):
        """Let `model.generate` ask this after all its other logits processors."""
        inner = model._get_logits_processor

        def with_lengths(*args, **kwargs):
            processors = inner(*args, **kwargs)
            processors.append(self)
            return processors

        model._get_logits_processor = with_lengths


def reward(text):
    return len(text) % 7 / 7


def clock():
    """(seconds, CPU seconds): on shared cores the second is steadier."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


class Done(Exception):
    """Raised by a turn to leave a side's endless loop."""


def ours(case, folder, turn):
    """grpo.train() itself, on this work; `turn(run, batch, sampler)` comes after each step."""
    width = len(prompt_texts(folder)[0].split())
    cfg = grpo.Config(
        model=str(folder / "model"), data=str(folder / "questions.jsonl"), steps=10**9,
        out_dir=tempfile.mkdtemp(dir=folder), prompts_per_step=case.prompts,
        group_size=case.group, max_new_tokens=case.cap, rollout_batch=10**6, beta=case.beta,
        minibatches=case.updates, micro_tokens=case.micro * (width + case.cap),
        eval_every=10**9, eval_size=1, save_every=10**9)
    set_up, log = common.set_up, common.Run.log

    def steered_set_up(*args):
        run, data, policy, sampler = set_up(*args)
        Lengths(case, width).steer(sampler.model)
        return run, data, policy, sampler

    def log_and_turn(run, batch, advantages, meter, result, sampler, **values):
        log(run, batch, advantages, meter, result, sampler, **values)
        turn(run, batch, sampler)

    def scorer(cfg):
        return lambda batch: (torch.tensor([reward(t) for t in batch.texts]).to(batch.tokens.device),
                              torch.zeros(len(batch), device=batch.tokens.device))

    try:
        with mock.patch.multiple(common, set_up=steered_set_up, Scorer=scorer), \
                mock.patch.object(common.Run, "log", log_and_turn), \
                mock.patch("signal.signal"):  # Ctrl-C just stops
            grpo.train(cfg)
    except Done:
        if dist.is_initialized():  # on a GPU
            dist.destroy_process_group()


def prompt_texts(folder):
    """The questions in the words that `common.encode` would put them."""
    lines = (folder / "questions.jsonl").read_text().splitlines()
    instruction = f"\n{common.INSTRUCTION}"
    return [common.PLAIN_PROMPT.format(question=json.loads(line)["question"],
                                       instruction=instruction) for line in lines]


def trls(case, folder, turn):
    """TRL's GRPOTrainer on the same work; `turn()` comes after each rollout's last update."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    micros = case.rows // case.micro
    cpu = not torch.cuda.is_available()
    args = dict(
        output_dir=str(folder / "trl"), per_device_train_batch_size=case.micro,
        gradient_accumulation_steps=micros // case.updates, steps_per_generation=micros,
        num_generations=case.group, max_completion_length=case.cap, beta=case.beta, epsilon=0.2,
        loss_type="grpo", scale_rewards="group", temperature=1.0, top_k=0, top_p=1.0,
        mask_truncated_completions=False, learning_rate=1e-6, lr_scheduler_type="constant",
        max_grad_norm=1.0, weight_decay=0.0, max_steps=10**6, gradient_checkpointing=False,
        bf16=not cpu, use_cpu=cpu, report_to="none", save_strategy="no", logging_steps=10**6,
        disable_tqdm=True, dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
        use_bias_correction_kl=False)  # ours has none
    known = GRPOConfig.__dataclass_fields__  # options come and go between versions
    args = GRPOConfig(**{k: v for k, v in args.items() if k in known})

    class Turns(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % case.updates == 0:
                turn()

    trainer = GRPOTrainer(
        str(folder / "model"), args=args, callbacks=[Turns()],
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(folder)}),
        reward_funcs=lambda completions, **kwargs: [reward(c) for c in completions])
    Lengths(case, len(prompt_texts(folder)[0].split())).steer(trainer.model)
    try:
        trainer.train()
    except Done:
        pass


# --- against the bare cost -----------------------------------------------------------------------


def bare(model, batch, case, generation_config):
    """Seconds of plain `generate` of this batch's prompts, and of one forward and backward."""
    start = clock()
    model.eval()
    model.generate(batch.prompt_ids, attention_mask=batch.prompt_mask,
                   generation_config=generation_config)
    model.train()
    sampled = clock()
    ids = torch.cat([batch.prompt_ids, batch.tokens], 1)
    for rows in torch.arange(len(ids)).split(case.micro):
        logits = model(input_ids=ids[rows], attention_mask=torch.ones_like(ids[rows]),
                       logits_to_keep=case.cap + 1, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1).float(), batch.tokens[rows].flatten()).backward()
    model.zero_grad()
    return sampled - start, clock() - start


def bound(name, repeats):
    """Our step with one minibatch and beta 0 against its bare cost, A B A B in one process."""
    case = replace(CASES[name], cap=48, micro=CASES[name].rows)
    steps, rollouts, last = [], [], [None]

    def timed_rollout(*args, inner=grpo.rollout, **kwargs):
        start = clock()
        batch = inner(*args, **kwargs)
        last[0] = clock() - start
        return batch

    def turn(run, batch, sampler):
        step = clock() - turn.start
        generate, whole = bare(sampler.model, batch, case, sampler._config(case.cap))
        if turn.start[0]:  # the first step warms up
            steps.append(step / whole)
            rollouts.append(last[0] / generate)
        if len(steps) == repeats:
            raise Done
        turn.start = clock()

    turn.start = np.zeros(2)
    with mock.patch.object(grpo, "rollout", timed_rollout):
        ours(case, make_folder(case.shape), turn)
    print(f"bound {name}: step {spread(steps)}, rollout {spread(rollouts)}", flush=True)


def spread(ratios):
    """Median [least - most] of wall ratios; of CPU seconds where they are not the same thing."""
    wall, cpu = np.array(ratios).T
    text = [f"{np.median(x):.2f} [{x.min():.2f} - {x.max():.2f}]" for x in (wall, cpu)]
    return text[0] if torch.cuda.is_available() else f"{text[0]} (CPU time {text[1]})"


# --- against TRL ---------------------------------------------------------------------------------


def serve(side, folder, pipe):
    """A process of one side: takes cases, and waits for its turn after each step."""
    common.say = lambda message: None
    warnings.filterwarnings("ignore")

    def turn(*_):
        pipe.send(clock() - turn.start)
        if not pipe.recv():
            raise Done
        turn.start = clock()

    turn.start = np.zeros(2)
    while case := pipe.recv():
        side(case, folder, turn)
        gc.collect()


def trl(name, repeats, quick):
    """Samples per second of both sides, for all lengths, updates and betas."""
    try:
        import trl  # noqa: F401
    except ImportError:
        raise SystemExit("bench.py trl needs its rival: pip install trl")
    folder = make_folder(CASES[name].shape)
    pipes = []
    for side in (ours, trls):
        mine, theirs = get_context("spawn").Pipe()
        get_context("spawn").Process(target=serve, args=(side, folder, theirs)).start()
        pipes.append(mine)
    for variable, updates, beta in product((True, False), (1, 4), (0.0, 0.04)):
        if quick and (updates, beta) not in ((1, 0.0), (4, 0.04)):
            continue
        case = replace(CASES[name], variable=variable, updates=updates, beta=beta)
        for pipe in pipes:
            pipe.send(case)
            pipe.recv()  # set up, and one step to warm up
        seconds = []
        for _ in range(repeats):  # A B A B, never both at once
            for pipe in pipes:
                pipe.send(True)
                seconds.append(pipe.recv())
        for pipe in pipes:
            pipe.send(False)
        a, b = np.array(seconds[::2]), np.array(seconds[1::2])
        speed = [case.rows / np.median(x[:, 0]) for x in (a, b)]
        print(f"trl {name} {'variable' if variable else 'fixed'}, {updates} updates, beta {beta}: "
              f"{speed[0]:.1f} : {speed[1]:.1f} samples/s, {spread(b / a)}", flush=True)
    for pipe in pipes:
        pipe.send(None)


# --- memory --------------------------------------------------------------------------------------


def naive(model, ids, mask, length):
    """The usual form: all logits, log_softmax, gather."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return logits[:, -length - 1 : -1].log_softmax(-1).gather(-1, ids[:, -length:, None])


def memory():
    """Peak above weights and gradients at the 0.5B shape, counted on tensors without content."""
    rows, prompt, length = 8, 64, 512
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(SHAPES["half"])).train()
        ids = torch.zeros(rows, prompt + length, dtype=torch.long)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    peaks = []
    for form in (lambda *args: common.token_logps(*args)[0], naive):
        with Memory(model) as counter, mock.patch(  # it would look into the mask
            "transformers.masking_utils.fast_all", lambda mask: True
        ):
            form(model, ids, torch.ones_like(ids), length).sum().backward()
        peaks.append(counter.peak / 1e6)
    print(f"memory half, {rows} x ({prompt} + {length}) tokens: {peaks[0]:.0f} : {peaks[1]:.0f} MB, "
          f"ratio {peaks[0] / peaks[1]:.2f}")


# --- growth --------------------------------------------------------------------------------------


def measure(case):
    """(seconds, peak MB above weights and optimizer) of one step of ours."""
    times, counter = [], []

    def turn(run, batch, sampler):
        if counter:
            counter[0].__exit__(None, None, None)
            raise Done
        times.append((clock() - turn.start)[0 if torch.cuda.is_available() else 1])
        if len(times) == 4:  # counting slows: in a step of its own
            counter.append(Memory(sampler.model))
            counter[0].__enter__()
        turn.start = clock()

    turn.start = clock()
    ours(case, make_folder(case.shape), turn)
    return min(times[1:]), counter[0].peak / 1e6


def growth(quick):
    """plots/growth.png: log-log curves over the four sizes that decide, with their slopes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = Case(prompts=4, cap=64, micro=8)
    sizes = [(76, h, 3, 4, 4, 4 * h) for h in (64, 128, 256, 512)]
    vocabularies = [(v, *SHAPES["tiny"][1:]) for v in (1_000, 8_000, 32_000, 128_000)]
    curves = {
        "group size": {g: replace(base, group=g) for g in (4, 8, 16, 32)},
        "answer tokens": {c: replace(base, cap=c) for c in (32, 64, 128, 256)},
        "vocabulary": {s[0]: replace(base, shape=s, prompts=2) for s in vocabularies},
        "hidden size": {s[1]: replace(base, shape=s, prompts=2) for s in sizes},
    }
    figure, axes = plt.subplots(2, 4, figsize=(14, 6), constrained_layout=True)
    for (name, cases), column in zip(curves.items(), axes.T):
        x = list(cases)[: 2 if quick else None]
        values = np.array([measure(cases[i]) for i in x]).T
        for unit, y, axis in zip(("seconds a step", "peak MB above weights"), values, column):
            slope = np.polyfit(np.log(x), np.log(y), 1)[0]
            axis.loglog(x, y, "o-")
            axis.set(xlabel=name, ylabel=unit, title=f"slope {slope:.2f}")
            axis.set_xticks(x, x, minor=False)
            axis.minorticks_off()
            print(f"growth {name} {x}: {unit} {np.round(y, 2).tolist()}, slope {slope:.2f}",
                  flush=True)
    figure.savefig(ROOT / "plots" / "growth.png", dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bound", "trl", "memory", "growth"))
    parser.add_argument("--model", choices=CASES, help="default: all (bound: tiny and 26m)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of turns")
    parser.add_argument("--quick", action="store_true", help="fewer settings")
    args = parser.parse_args()
    common.say = lambda message: None
    warnings.filterwarnings("ignore")
    if args.what == "memory":
        memory()
    elif args.what == "growth":
        growth(args.quick)
    for name in (args.model,) if args.model else CASES:
        if args.what == "bound" and (name != "half" or args.model):
            bound(name, args.repeats)
        elif args.what == "trl":
            trl(name, args.repeats, args.quick)
