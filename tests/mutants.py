"""Tests: planted faults: does the test suite notice? Each is one edit of a copy of the scripts.

    python tests/mutants.py                  all of them, on two cores
    python tests/mutants.py --only gae std   those with one of these words in file or name

A fault is killed if a test fails on the copy: of the tests that should notice, or else of all fast
ones. Exit status 1 if one survives, if an edit does not match its file exactly once any more, or if
the tests fail on the scripts as they are.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SCRIPTS = ("grpo", "dapo", "gspo", "ppo", "common", "experiment", "rewards")
FAST = [f"test_{name}.py" for name in ("grpo", "dapo", "gspo", "ppo", "common", "rewards",
                                       "steps", "sampling")]

STEPS = "test_steps.py"
UNCHANGED = "nothing changed"
TRAIN = ("        batch = rollout(sampler, questions, cfg.group_size, "
         "seed=(cfg.seed, run.step))\n")

# name, file, old text, new text, the tests that should notice (default: the file's own)
MUTANTS = [
    ("sign of the advantage", "grpo", "centred = groups - groups.mean(1, keepdim=True)",
     "centred = groups.mean(1, keepdim=True) - groups"),
    ("biased std", "grpo", "groups.std(1, keepdim=True)",
     "groups.std(1, keepdim=True, correction=0)"),
    ("epsilon inside the root", "grpo", "(groups.std(1, keepdim=True) + eps)",
     "(groups.var(1, keepdim=True) + eps).sqrt()"),
    ("mean over the batch", "grpo", "groups.mean(1, keepdim=True)", "groups.mean()"),
    ("std over the batch", "grpo", "groups.std(1, keepdim=True)", "groups.std()"),
    ("tied group not zeroed", "grpo", "advantages.masked_fill(tied, 0.0)", "advantages"),
    ("every P-th row a group", "grpo", "groups = rewards.view(-1, group_size)",
     "groups = rewards.view(group_size, -1).T.contiguous()"),
    ("a group of one accepted", "grpo", "group_size < 2 or", "group_size < 1 or"),
    ("total ignored", "grpo", "total = len(mask) if total is None else total",
     "total = len(mask)"),
    ("padded width for the answer's length", "grpo",
     "mask.sum(1, keepdim=True).clamp(min=1) / total", "mask.shape[1] / total"),
    ("k3 reversed", "grpo", "    d = ref_logp - logp\n", "    d = logp - ref_logp\n"),
    ("k3 without expm1", "grpo", "torch.expm1(d) - d\n", "torch.exp(d) - d - 1\n"),
    ("KL outside the mean", "grpo", "beta * (weights * kl).sum()", "beta * kl.sum() / len(mask)"),
    ("KL without gradient", "grpo", "beta * (weights * kl).sum()",
     "beta * (weights * kl).sum().detach()"),
    ("min for max", "grpo", "torch.maximum(unclipped, clipped)",
     "torch.minimum(unclipped, clipped)"),
    ("ratio upside down", "grpo", "(logp - old_logp).masked_fill", "(old_logp - logp).masked_fill"),
    ("mask after the exponential", "grpo",
     "log_ratio = (logp - old_logp).masked_fill(~mask, 0.0)  # before exp: 0 * inf would be NaN\n"
     "    ratio = log_ratio.exp()",
     "log_ratio = logp - old_logp\n    ratio = log_ratio.exp().masked_fill(~mask, 0.0)"),
    ("mean of means", "grpo", "loss = (weights * torch.maximum(unclipped, clipped)).sum()",
     "loss = (weights * torch.maximum(unclipped, clipped)).sum() / weights.sum()"),
    ("stats keep the graph", "grpo", '"pg_loss": loss.detach()', '"pg_loss": loss'),
    ("old log-probs not detached", "grpo", "old = logp.detach() if on_policy",
     "old = logp if on_policy", STEPS),
    ("old log-probs of the moving policy", "grpo",
     "old = logp.detach() if on_policy else micro.take(old_logp)", "old = logp.detach()", STEPS),
    ("each micro-batch its own mean", "grpo", "total=len(minibatch.rows)", "total=len(micro.rows)",
     STEPS),
    ("advantages of other rows", "grpo", "micro.take(advantages)",
     "micro.take(advantages.flip(0))", STEPS),
    ("every step samples alike", "grpo", TRAIN, TRAIN.replace("run.step", "0"), STEPS),
    ("clip on the wrong side", "dapo", "1 - clip_low, 1 + clip_high",
     "1 - clip_high, 1 + clip_low"),
    ("symmetric clip", "dapo", "clip_low=0.2, clip_high=0.28", "clip_low=0.2, clip_high=0.2"),
    ("GRPO's weights in DAPO", "dapo", "mask / max(mask.sum() if total is None else total, 1)",
     "mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)"),
    ("overlong off by one", "dapo", "(max_len - buffer_len - lengths)",
     "(max_len - buffer_len - lengths + 1)"),
    ("overlong without a floor", "dapo", ".clamp(-1.0, 0.0)", ".clamp(max=0.0)"),
    ("groups all right are kept", "dapo",
     "(0 < correct.sum(1)) & (correct.sum(1) < correct.shape[1])", "0 < correct.sum(1)"),
    ("shaped reward in the filter", "dapo", "keep_group(batch.correct.view(-1, batch.group_size))",
     "keep_group(batch.rewards.view(-1, batch.group_size))", STEPS),
    ("micro-batch's tokens for the step's", "dapo", "total=minibatch.tokens",
     "total=int(micro.mask.sum())", STEPS),
    ("wrong answers cost nothing", "dapo", "weight * wrong", "weight * (0 * wrong)", STEPS),
    ("product in place of the mean ratio", "gspo",
     "(log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).exp()",
     "log_ratio.sum(1, True).exp()"),
    ("a ratio per token in GSPO", "gspo",
     "(log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).exp()", "log_ratio.exp()"),
    ("token average for GSPO", "gspo",
     "return mask / mask.sum(1, keepdim=True).clamp(min=1) / total",
     "return mask / mask.sum().clamp(min=1)"),
    ("GSPO clipped like PPO", "gspo", "clip_low=3e-4, clip_high=4e-4",
     "clip_low=0.2, clip_high=0.2"),
    ("score on the wrong token", "ppo", "torch.arange(1, mask.shape[1] + 1, device=mask.device)",
     "torch.arange(mask.shape[1], device=mask.device)"),
    ("KL with the wrong sign", "ppo", "rewards = -kl_coef * (logp - ref_logp)",
     "rewards = kl_coef * (logp - ref_logp)"),
    ("GAE leaks through padding", "ppo",
     "rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)\n    advantages",
     "rewards.masked_fill(~mask, 0.0), values\n    advantages"),
    ("lambda forgotten", "ppo", "gamma * lam * next_advantage", "gamma * next_advantage"),
    ("value off by one", "ppo", "rewards[:, t] + gamma * next_value - values[:, t]",
     "rewards[:, t] + gamma * values[:, t] - next_value"),
    ("returns without values", "ppo", "return advantages, advantages + values",
     "return advantages, advantages"),
    ("whitening over padding", "ppo", "cells = x[mask]", "cells = x.flatten()"),
    ("whitening with the biased variance", "ppo", "cells.var()", "cells.var(correction=0)"),
    ("value loss without its half", "ppo", "loss = 0.5 * (weights", "loss = (weights"),
    ("value clipped around 0", "ppo", "torch.minimum(torch.maximum(values, old_values - clip_eps), "
     "old_values + clip_eps)", "values.clamp(-clip_eps, clip_eps)"),
    ("whitened returns for the critic", "ppo",
     "advantages = whiten(advantages, batch.mask)  # over",
     "advantages = whiten(advantages, batch.mask); returns = whiten(returns, batch.mask)  # over",
     STEPS),
    ("end token unmasked", "common", "(stops.cumsum(-1) - stops == 0)", "(stops.cumsum(-1) == 0)",
     "test_common.py -k response_mask"),
    ("mask from pad", "common", "    return (stops.cumsum(-1) - stops == 0).long()",
     "    return (tokens != (0 if stops.any() else -1)).long()", "test_common.py -k response_mask"),
    ("temperature forgotten", "common", "logits if temperature == 1 else logits / temperature",
     "logits",
     "test_common.py -k token_logps"),
    ("entropy with the wrong sign", "common", "-(log_probs.exp() * log_probs).sum(-1)",
     "(log_probs.exp() * log_probs).sum(-1)", "test_common.py -k token_logps"),
    ("positions count the padding", "common", "return (attention_mask.cumsum(-1) - 1).clamp(min=0)",
     "return torch.arange(attention_mask.shape[1]).expand_as(attention_mask)",
     "test_common.py -k positions"),
    ("log-probs read one place off", "common", "[:, width - 1 : -1]  # the state",
     "[:, width:]  # the state", "test_common.py -k token_logps"),
    ("values read on the token", "ppo", "end = out.logits.shape[1] - (not after)",
     "end = out.logits.shape[1]", "test_common.py -k values_are_read"),
    ("gradient not reduced", "common", "by_length[r :: world()]", "by_length[r :: world() + 1]",
     "test_common.py -k summed_over_ranks"),
    ("dummies train", "common", "dummy.mask = torch.zeros_like(dummy.mask)", "pass",
     "test_common.py -k summed_over_ranks"),
    ("weight decay left on", "common", "weight_decay=0.0)", "weight_decay=0.01)",
     "test_common.py -k optimizer_step"),
    ("dropout left on", "common", "            module.p = 0.0\n", "            pass\n",
     "test_common.py -k dropout"),
    ("top_k left on", "common", "top_k=None if greedy else 0,", "top_k=None if greedy else 50,",
     "test_sampling.py -k first_tokens"),
    ("samples without the temperature", "common",
     "temperature=None if greedy else self.temperature", "temperature=None if greedy else 1.0",
     "test_sampling.py -k first_tokens"),
    ("cut means as long as the limit", "common",
     "return (~torch.isin(tokens, stops).any(1)).float()",
     "return (~torch.isin(tokens[:, :-1], stops).any(1)).float()",
     "test_sampling.py -k truncated"),
    ("each epoch in the same order", "experiment", 'random.Random(f"{seed} {epoch}")',
     'random.Random(f"{seed}")', "test_common.py -k epoch"),
    ("resume re-seeded", "experiment", 'self.kept.pop("cursor")', '0 * self.kept.pop("cursor")',
     f"{STEPS} -k resume"),
    ("resume without the optimizer", "experiment",
     "        if self.checkpoint:\n            load_optimizer",
     "        if False:\n            load_optimizer", f"{STEPS} -k resume"),
    ("the first marker counts", "rewards", 'text.rpartition("####")',
     'text.partition("####")'),
    ("reads on into the next question", "rewards",
     "    text = NEXT_QUESTION.split(text, 1)[0]\n    _, marker",
     "    _, marker"),
    ("the sign dropped", "rewards", 'return -size if sign == "-" else size', "return size"),
    ("the last number pays", "rewards", "extract_answer(completion, lenient)\n",
     "extract_answer(completion, True)\n"),
    ("a gold that is none pays", "rewards", "right is not None and _value", "_value"),
]


class FirstFailure:
    """Notes the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid.rsplit("/")[-1].removeprefix("tests/")

    def pytest_collectreport(self, report):
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (does not even import)"


def run_tests(folder, tests):
    """The first test that fails on the scripts in `folder`, or "". In a process of its own."""
    import pytest

    files, _, expression = tests.partition(" -k ")
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--impl", str(folder)]
    options += ["-k", expression] if expression else []
    plugin = FirstFailure()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), \
            contextlib.redirect_stderr(null):
        code = pytest.main([*options, *(str(HERE / f) for f in files.split())], plugins=[plugin])
    return "" if code == 0 else plugin.failed or f"pytest's exit status {code.name}"


def attempt(job):
    """(name, file, what killed it or "", seconds) of one mutant. Each in a fork of its own, which
    imports the scripts afresh."""
    name, file, text, tests = job
    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 300)  # seconds of CPU; for an edit that never ends
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            shutil.copy(ROOT / f"{script}.py", folder)
        Path(folder, f"{file}.py").write_text(text)
        killer = run_tests(folder, tests)
        if not killer and name != UNCHANGED:
            killer = run_tests(folder, " ".join(FAST))
    return name, file, killer, time.monotonic() - start


def give_up(*_):
    raise TimeoutError("too slow")


def jobs(only):
    """The mutants as jobs; an edit that does not match exactly once ends the program."""
    for name, file, old, new, *tests in MUTANTS:
        source = (ROOT / f"{file}.py").read_text()
        if source.count(old) != 1:
            raise SystemExit(f"error: {name}: its text is {source.count(old)} times in {file}.py")
        if not only or any(word in f"{file} {name}" for word in only):
            yield name, file, source.replace(old, new), (tests or [f"test_{file}.py"])[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="words of names")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    import torch
    import transformers  # noqa: F401  imported once, before the forks

    torch.set_num_threads(1)
    start, alive, work = time.monotonic(), [], list(jobs(args.only))
    if not args.only:  # killed means nothing if the tests fail anyway
        work.append((UNCHANGED, "grpo", (ROOT / "grpo.py").read_text(), " ".join(FAST)))
    with multiprocessing.get_context("fork").Pool(args.workers, maxtasksperchild=1) as pool:
        for name, file, killer, seconds in pool.imap(attempt, work):
            good = bool(killer) != (name == UNCHANGED)
            alive += [] if good else [name]
            print(f"{file:8}{name:38}{killer or 'no test fails'}{'' if good else '   <-- WRONG'}"
                  f"  ({seconds:.0f} s)", flush=True)
    print(f"{len(work) - len(alive)} of {len(work)} as they should be, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
