"""Tests: two processes compute what one computes: gradients, weights, metrics, files.

Each test runs a short program in 1 and in 2 processes (gloo) on the same given rollouts and
compares what they saved.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from forks import ranks

SCRIPTS = ("grpo", "dapo", "gspo", "ppo")

# Replaces `generate` by answers that depend on (step, question, copy) alone, so that any number of
# processes samples the same. Lengths differ widely; one question's answers are all alike (tied).
PROGRAM = '''
import sys, hashlib, torch
sys.path.insert(0, {impl!r})
import common, experiment, {script} as script
{fault}
LIMIT = 12

def generate(self, prompt_ids, prompt_mask, group_size=1, greedy=False, record=0):
    rows = []
    for ids, mask in zip(prompt_ids.tolist(), prompt_mask.tolist()):
        key = repr([i for i, m in zip(ids, mask) if m])
        tied = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 4 == 0
        for copy in range(group_size):
            copy = 0 if tied else copy
            name = f"{{key}} {{copy}} {{self.count}}".encode()
            gen = torch.Generator().manual_seed(int(hashlib.sha256(name).hexdigest()[:12], 16))
            n = int(torch.randint(1, LIMIT + 1, (), generator=gen))
            row = torch.randint(3, 50, (1, n), generator=gen)
            if n < LIMIT:
                row[0, -1] = self.stop_ids[0]
            rows.append(row)
    self.count += 1
    tokens = common.pad_cat(rows, self.pad)
    return tokens, torch.full(tokens.shape, float("nan"))

common.Sampler.generate, common.Sampler.count = generate, {start}

def score(self, batch):  # right or wrong by the tokens: about half are right, tied groups are tied
    right = torch.tensor([float(sum(row) % 2) for row in (batch.tokens * batch.mask).tolist()])
    return right.clone(), right

experiment.Scorer.__call__ = score
experiment.evaluate = lambda *a: {{}}
argv = {argv!r}.split()
script.train(experiment.parse_args(script.Config, script.TINY, argv))
'''

ARGV = (
    "--cold_start 0 --steps 3 --prompts_per_step 6 --minibatches 2 --max_new_tokens 12 "
    "--micro_tokens 200 --eval_size 8 --lr 1e-3 --keep 9"
)


def launch(folder, impl, script, world, extra="", fault="", start=0):
    """Run a script on given rollouts in `world` processes; returns its run folder.

    `fault` is code that plants one; `start` is the rollout to begin with (after a resume).
    """
    folder.mkdir(exist_ok=True)
    out = folder / f"{script}-{world}"
    argv = f"{'' if '--resume' in extra else ARGV} --out_dir {out} {extra}"
    program = folder / f"{script}_{world}.py"
    names = dict(impl=str(impl), script=script, argv=argv, fault=fault, start=start)
    program.write_text(PROGRAM.format(**names))
    for rank in ranks(program, world, program, XDG_CACHE_HOME=str(folder / "cache")):
        status, _, error = rank.wait()
        assert status == 0, error[-3000:]
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory, impl):
    """alone(script): the folder of its run in one process, made once."""
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda script: launch(folder, impl, script, 1, EXTRA[script]))


def weights(run):
    """All tensors of a run's last checkpoint: weights and optimizer moments, critic's too."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = sorted(p for p in last.rglob("*.safetensors"))
    return {f"{p.relative_to(last)}:{k}": v for p in files for k, v in load_file(p).items()}


def metrics(run):
    """The rows of metrics.csv without times and memory, as lists of floats."""
    header, *lines = (run / "metrics.csv").read_text().splitlines()
    keep = [i for i, c in enumerate(header.split(",")) if not c.startswith(("t_", "mem"))]
    return [[float(line.split(",")[i] or "nan") for i in keep] for line in lines]


def worst(a, b):
    """Largest relative difference of two sets of tensors."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).norm() / (a[k].norm() + 1e-12)).item() for k in a)


EXTRA = {
    "grpo": "--group_size 4 --beta 0.1",
    "dapo": "--group_size 4 --max_gen_rounds 3 --overlong_buffer 4",
    "gspo": "--group_size 4",
    "ppo": "--group_size 1 --prompts_per_step 24 --kl_coef 0.1 --kl_target 0.05",
}


@pytest.mark.parametrize(
    "script", ["grpo", "ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dapo", "gspo"))])
def test_two_processes_train_the_same_weights(script, alone, tmp_path, impl):
    """After 3 steps of 2 updates: uneven lengths, uneven micro-batches, tied groups, refills."""
    one = alone(script)
    two = launch(tmp_path, impl, script, 2, EXTRA[script])
    assert worst(weights(one), weights(two)) < 1e-5
    torch.testing.assert_close(
        torch.tensor(metrics(one)), torch.tensor(metrics(two)), rtol=2e-4, atol=1e-6, equal_nan=True
    )
    assert json.loads((two / "config.json").read_text())["world"] == 2


FAULTS = {  # what a wrong reduction looks like, planted; the comparison must notice it
    "a mean over ranks instead of the sum": "common.world = lambda: 1",
    "each rank divides by its own share": (
        "weights_ = script.token_weights\n"
        "script.token_weights = lambda mask, total=None: weights_(mask)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, alone, tmp_path, impl):
    planted = FAULTS[fault]
    if "world" in planted:  # only the loop's factor, not the plumbing
        planted = (
            "import types\nfake = types.ModuleType('common')\nfake.__dict__.update(vars(common))\n"
            "fake.world = lambda: 1\nscript.common = fake"
        )
    two = launch(tmp_path, impl, "grpo", 2, EXTRA["grpo"], fault=planted)
    assert worst(weights(alone("grpo")), weights(two)) > 1e-4


@pytest.mark.slow
def test_a_step_without_any_group(tmp_path, impl):
    """DAPO drops all of them: nothing is trained on, logged and saved all the same."""
    none = "script.keep_group = lambda correct: correct.sum(1) < 0"
    one, two = (launch(tmp_path, impl, "dapo", n, EXTRA["dapo"], fault=none) for n in (1, 2))
    assert worst(weights(one), weights(two)) == 0
    torch.testing.assert_close(
        torch.tensor(metrics(one)), torch.tensor(metrics(two)), rtol=1e-6, atol=0, equal_nan=True
    )


@pytest.mark.slow
def test_bfloat16_alone_takes_the_sharded_path(tmp_path, impl):
    """One GPU computes in bfloat16 with float32 masters: the same code, here on a CPU."""
    run = launch(tmp_path, impl, "grpo", 1, EXTRA["grpo"] + " --dtype bfloat16")
    rows = metrics(run)
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert (run / "final" / "model.safetensors").is_file()
    assert all(t.dtype == torch.float32 for t in weights(run).values())
    assert len(rows) == 4 and "approx_kl" in header


@pytest.mark.slow
@pytest.mark.parametrize("world", (1, 2))
def test_resume_at_another_world_size(world, alone, tmp_path, impl):
    """A run of one process goes on in two, and the other way round."""
    run = launch(tmp_path, impl, "grpo", world, EXTRA["grpo"] + " --steps 1")
    out = tmp_path / f"grpo-{3 - world}"
    os.rename(run, out)
    again = launch(tmp_path, impl, "grpo", 3 - world, "--resume --steps 3", start=1)
    assert worst(weights(again), weights(alone("grpo"))) < 1e-5


def broken(folder, impl, lines, flags=""):
    """A program that starts as grpo.py does in each process, and then runs these lines."""
    program = folder / "broken.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(impl)!r})\n"
        "import common, experiment, grpo, torch.distributed as dist\n"
        f"argv = '{ARGV} --group_size 4 {flags}'.split()\n"
        "cfg = experiment.parse_args(grpo.Config, grpo.TINY, argv)\n"
        f"experiment.start_processes(cfg.dtype, cfg.prompts_per_step)\n{lines}\n"
    )
    return program


def test_a_rank_that_fails_takes_the_job_down(tmp_path, impl):
    """By torchrun itself: its message is shown and torchrun ends with an error, soon."""
    ill = "if common.rank() == 1:\n    raise RuntimeError('rank 1 is ill')\ndist.barrier()"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         broken(tmp_path, impl, ill)],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )
    assert done.returncode != 0 and "rank 1 is ill" in done.stderr


def test_fewer_questions_than_processes_are_refused(tmp_path, impl):
    few = broken(tmp_path, impl, "dist.barrier()", "--prompts_per_step 1 --minibatches 1")
    done = [rank.wait() for rank in ranks(few, 2, few)]
    assert done[0][0] == 2 and done[1][0] != 0  # the other may notice that rank 0 has gone first
    said = "".join(error for _, _, error in done)
    assert "error: --prompts_per_step 1: 2 processes" in said
