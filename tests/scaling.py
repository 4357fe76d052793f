"""Two processes of one thread against one: where does the time of a step go?

    python tests/scaling.py [--model tiny|26m] [--turns 2]

The same global batch, all answers of one length, the steps of grpo.train() itself; turns alternate.
FSDP and gloo work only in the two. gloo's share: the time of its collectives on rank 0 in one more
step, with the profiler on. Wants two cores and nothing else on them.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import bench

CASES = {  # one update of 128 rows of 36 + 48 tokens; of 64 rows of 36 + 224
    "tiny": replace(bench.CASES["tiny"], cap=48, micro=128),
    "26m": replace(bench.CASES["26m"], prompts=8, cap=224, micro=8),
}
STAGES = ("t_sample", "t_logp", "t_update")
STEPS = 4  # one to warm up, two that count, one that is profiled


def worker(name, folder):
    """Some steps as one of the processes; rank 0 prints a line of JSON."""
    laps, profiler = [], profile(activities=[ProfilerActivity.CPU])
    torch.set_num_threads(1)

    def turn(run, batch, sampler):
        laps.append(run.laps | {"t_rest": 0.0})
        if len(laps) == STEPS - 1:
            profiler.start()
        if len(laps) == STEPS:
            profiler.stop()
            events = profiler.profiler.kineto_results.events()
            gloo = sum(e.duration_ns() for e in events if e.name().startswith("gloo:")) / 1e9
            if bench.common.rank() == 0:
                mean = {k: np.mean([lap[k] for lap in laps[1:3]]) for k in STAGES}
                print(json.dumps(mean | {"gloo": gloo / sum(laps[-1].values())}), flush=True)
            raise bench.Done

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
    parser.add_argument("--model", choices=CASES, help="default: both")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    bench.common.say = lambda message: None
    if args.worker:
        return worker(args.model, args.worker)
    for name in [args.model] if args.model else CASES:
        folder = bench.make_folder(CASES[name].shape)
        turns = [[measure(name, folder, n) for n in (1, 2)] for _ in range(args.turns)]
        for stage in (*STAGES, "step"):
            a, b = ([sum(turn[k][s] for s in ([stage] if stage in STAGES else STAGES))
                     for turn in turns] for k in (0, 1))
            ratio = np.array(a) / b
            print(f"{name} {stage:9} {np.median(a):7.2f} s, with two {np.median(b):7.2f} s: "
                  f"{np.median(ratio):.2f} x [{ratio.min():.2f} - {ratio.max():.2f}]")
        print(f"{name} gloo: {np.median([two['gloo'] for _, two in turns]):.0%} of the step")


if __name__ == "__main__":
    main()
