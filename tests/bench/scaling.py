"""Bench: two processes of one thread against one: where does the time of a step go?

    python tests/bench/scaling.py [--model tiny|26m|wide] [--turns 2]

The same global batch, all answers of one length, the steps of grpo.train() itself; turns alternate.
FSDP and gloo work only in the two. gloo's share: the time that rank 0 spends in collectives, with
the wait for the other. Wants two cores and nothing else on them.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import bench

CASES = {  # one update of 128 rows of 36 + 48 tokens; of 64 rows of 36 + 224; wide: sampling alone
    "tiny": replace(bench.CASES["tiny"], cap=48, micro=128),
    "26m": replace(bench.CASES["26m"], prompts=8, cap=224, micro=8),
    "wide": replace(bench.CASES["26m"], prompts=32, cap=48),  # 256 rows
}
STAGES = ("t_sample", "t_logp", "t_update")
STEPS = 3  # one to warm up, two that count
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather_object")


def worker(name, folder):
    """Some steps as one of the processes; rank 0 prints a line of JSON."""
    laps, inside = [], [0.0]
    torch.set_num_threads(1)

    def timed(function):
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            work = function(*args, **kwargs)
            if hasattr(work, "wait"):
                work.wait()
            inside[0] += time.perf_counter() - start
            return work
        return wrapper

    def turn(log, batch, sampler):
        laps.append(dict.fromkeys(STAGES, 0.0) | log.laps | {"gloo": inside[0]})
        inside[0] = 0.0
        if len(laps) == STEPS:
            if bench.common.rank() == 0:
                print(json.dumps({k: np.mean([lap[k] for lap in laps[1:]]) for k in laps[0]}),
                      flush=True)
            raise bench.Done

    def rollouts(*args, rollout=bench.grpo.rollout, **kwargs):
        for _ in range(STEPS):
            start = time.perf_counter()
            rollout(*args, **kwargs)
            turn(SimpleNamespace(laps={"t_sample": time.perf_counter() - start}), None, None)

    if name == "wide":
        bench.grpo.rollout = rollouts
    for module, names in ((torch.distributed, COLLECTIVES), (bench.common, ["full"])):
        for function in names:
            setattr(module, function, timed(getattr(module, function)))
    bench.ours(CASES[name], Path(folder), turn)


def measure(name, folder, processes):
    """{stage: seconds, "gloo": share} of a run in new processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*start, __file__, "--model", name, "--worker", str(folder)],
                          capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(done.stderr)
    return json.loads(lines[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CASES, help="default: all")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    bench.common.say = lambda message: None
    if args.worker:
        return worker(args.model, args.worker)
    for name in [args.model] if args.model else CASES:
        folder = bench.make_folder(CASES[name].shape)
        turns = [[measure(name, folder, n) for n in (1, 2)] for _ in range(args.turns)]
        for stage in ("t_sample",) if name == "wide" else (*STAGES, "step"):
            a, b = ([sum(turn[k][s] for s in ([stage] if stage in STAGES else STAGES))
                     for turn in turns] for k in (0, 1))
            ratio = np.array(a) / b
            print(f"{name} {stage:9} {np.median(a):7.2f} s, with two {np.median(b):7.2f} s: "
                  f"{np.median(ratio):.2f} x [{ratio.min():.2f} - {ratio.max():.2f}]")
        shares = [two["gloo"] / sum(two[stage] for stage in STAGES) for _, two in turns]
        print(f"{name} gloo: {np.median(shares):.0%} of the step")


if __name__ == "__main__":
    main()
