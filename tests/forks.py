"""Tests: programs that start at once, as forks of a server that has imported the libraries.

`python grpo.py` spends four seconds of CPU on imports before its first line. Here the server pays
them once, and a program is a fork of it: it has its own memory, signals, folder and environment.
The scripts themselves are imported afresh in each.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.convert_slow_tokenizer",
    "datasets", "pytest"])
# What the libraries read when they are imported.
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}


class Fork:
    """`python FILE ARGUMENTS`, begun but not waited for; what it prints goes to two files.

    `log`: their path without suffix. `environment`: added to this process's."""

    def __init__(self, log, file, *arguments, **environment):
        self.out, self.err = Path(f"{log}.out"), Path(f"{log}.err")
        before = dict(os.environ)
        os.environ |= OFFLINE  # for the server, if this is its first program
        try:
            argv = [str(a) for a in (file, *arguments)]
            self.process = SERVER.Process(target=_run, args=(
                argv, os.getcwd(), before | {"OMP_NUM_THREADS": "1"} | environment,
                str(self.out), str(self.err)))
            self.process.start()
        finally:
            os.environ.clear()
            os.environ |= before

    def wait(self, seconds=300):
        """(exit status, what it printed, what it printed on stderr); killed after `seconds`."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"{self.out}: not done within {seconds} s")
        return self.process.exitcode, self.out.read_text(), self.err.read_text()


def ranks(log, world, *command, **environment):
    """The Forks of a command in `world` processes, with what torchrun tells each of them."""
    if world > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            environment |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
                            "MASTER_PORT": str(free.getsockname()[1])}
    return [Fork(f"{log}-{r}", *command, **{"RANK": str(r), "LOCAL_RANK": str(r)} | environment)
            if world > 1 else Fork(log, *command, **environment) for r in range(world)]


def _run(argv, folder, environment, out, err):
    """In the fork."""
    import torch

    for number, path in (1, out), (2, err):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")
