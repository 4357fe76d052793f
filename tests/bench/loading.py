"""Bench: host memory of two processes (gloo) while a model is loaded, saved and resumed.

    python tests/bench/loading.py --model FOLDER [--dtype float32|bfloat16]

Prints, for each stage and rank, the peak of resident memory in MB above what the libraries take,
and of that what is the process's own: the rest are pages of the file read, which all processes
share and the system takes back when it needs them. Linux.
"""

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import experiment  # noqa: E402


def resident():
    """(all, own) resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    return int(kilobytes["VmRSS"]) * 1024, int(kilobytes["RssAnon"]) * 1024


class Peak:
    """A with block: the largest `resident` in it above `base`, printed for each rank."""

    def __init__(self, stage, base):
        self.stage, self.base, self.largest, self.going = stage, base, list(base), True

    def __enter__(self):
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        while self.going:
            self.largest = [max(pair) for pair in zip(self.largest, resident())]
            time.sleep(0.002)

    def __exit__(self, *error):
        self.going = False
        self.thread.join()
        above = [(a - b) / 1e6 for a, b in zip(self.largest, self.base)]
        for rank, (everything, own) in enumerate(common.from_all_ranks(above)):
            common.say(f"{self.stage:10} rank {rank}: {everything:7.0f} MB, own {own:7.0f} MB")


def worker(path, dtype, folder):
    """What `experiment.set_up`, a step of AdamW and `Run.save` do, stage by stage."""
    experiment.start_processes(dtype, prompts_per_step=2)
    cfg = SimpleNamespace(model=path, dtype=dtype, temperature=1.0, max_prompt_len=64,
                          max_new_tokens=64, rollout_batch=8)
    base = resident()
    tokenizer, saved = common.load_tokenizer(path), Path(folder) / "step-1"
    for stage, start in (("load", path), ("resume", str(saved))):
        with Peak(stage, base):
            policy = common.load_policy(start, dtype)
            sampler = common.Sampler(policy, tokenizer, cfg)
            optimizer = common.make_optimizer(policy, 1e-6)
            if stage == "resume":
                experiment.load_optimizer(policy, optimizer, saved, "optimizer")
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with Peak("save", base), experiment.whole_folder(saved) as temporary:
            experiment.save_model(sampler, policy, temporary)
            experiment.save_optimizer(policy, optimizer, temporary, "optimizer")
        del policy, sampler, optimizer, parameter
        gc.collect()
    experiment.end_processes()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.model, args.dtype, args.worker)
    folder = tempfile.mkdtemp()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         __file__, "--model", args.model, "--dtype", args.dtype, "--worker", folder],
        check=True, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"})  # freed is given back
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
