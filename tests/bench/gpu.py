"""Bench: what only a GPU can show, in fifteen minutes, the most telling first.

    python tests/bench/gpu.py             on one GPU
    python tests/bench/gpu.py --small     all of it, shrunk, on any machine

Each part says what to expect, then prints what it found as it ends; one that fails says why, and
the next one begins. --peak is what the GPU's data sheet says of dense bfloat16, in TFLOP/s. The
0.5B model has random weights: its answers never end, so every length is the longest. The part
against TRL wants `pip install trl`.
"""

import argparse
import csv
import importlib.util
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plots")]
import common  # noqa: E402
import experiment  # noqa: E402
import memory  # noqa: E402

HALF = (151_936, 896, 24, 14, 2, 4864)  # Qwen2.5-0.5B, as bench.py writes shapes
SMALL = (512, 64, 2, 4, 2, 128)
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "A10": 125}


def random_model(folder, shape):
    """Random weights of this shape, in bfloat16, with the built-in tokenizer."""
    tokenizer = experiment._tiny_tokenizer()
    vocabulary, hidden, layers, heads, kv_heads, intermediate = shape
    torch.manual_seed(0)
    config = transformers.Qwen3Config(  # Qwen3: the built-in tokenizer loads beside it
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads,
        intermediate_size=intermediate, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(script, out, *flags):
    """Run a script with these flags; returns the rows of its metrics.csv, numbers as floats."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--out_dir", str(out), *map(str, flags)]
    print("$", " ".join(command[1:]), flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    with open(out / "metrics.csv") as file:
        return [{k: float(v) if v else None for k, v in row.items()}
                for row in csv.DictReader(file)]


class Bench:
    """The parts, in their order; each returns what it found, as text."""

    def __init__(self, home, small, peak):
        self.home, self.small, self.peak = home, small, peak
        self.shape = SMALL if small else HALF
        self.model = random_model(home / "model", self.shape)
        self.flags = ("--model", self.model, "--data", "words", "--dtype", "bfloat16",
                      "--eval_size", 8, "--test_size", 8)

    def step(self, prompts, tokens):
        """Flags of a rollout step; --small: a few answers."""
        prompts, tokens = (4, 20) if self.small else (prompts, tokens)
        return *self.flags, "--prompts_per_step", prompts, "--max_new_tokens", tokens

    def ratio(self):
        """The ratio before an update. Expect: approx_kl and clip fraction exactly 0 (the learning
        rate moves no weight, so all four updates are first ones), sampler gap below 0.05."""
        rows = run("grpo", self.home / "ratio", *self.step(16, 128), "--steps", 2, "--lr", 1e-30)
        return ", ".join(f"{name} {max(row[name] for row in rows[1:]):.3g}"
                         for name in ("approx_kl", "clip_frac", "sampler_gap"))

    def tiny(self):
        """The built-in run. Expect: greedy 0.88 to 0.95, sampled 0.82 to 0.91, from 0.6 and 0.2."""
        short = ("--steps", 2, "--cold_start", 5, "--eval_size", 16) if self.small else ()
        rows = run("grpo", self.home / "tiny", *short)
        ends = [(row["eval_accuracy"], row["eval_sampled"]) for row in (rows[0], rows[-1])]
        seconds = sum(row["t_total"] for row in rows[1:])
        return f"(greedy, sampled) {ends[0]} -> {ends[1]} in {seconds:.0f} s of steps"

    def half(self):
        """A step of 256 x 8 answers of 512 tokens, 0.5B, --rollout_batch 0. Expect: 34 s on paper,
        12 of them sampling where 2,048 answers fit at once (80 GB: two batches), 40 % of the peak
        in the update, memory not above the plan."""
        flags = (*self.step(256, 512), "--steps", 2)
        row = run("grpo", self.home / "half", *flags)[-1]
        stages = {name: row[name] for name in ("t_sample", "t_logp", "t_update", "t_total")}
        text = ", ".join(f"{name} {value:.1f} s" for name, value in stages.items())
        # 2 FLOPs a weight and token forward, 4 backward; attention and prompts are left out.
        update = 6 * memory.shape(self.model).params * row["tokens"] / row["t_update"]
        share = f"{update / self.peak / 1e12:.0%} of the peak" if self.peak else "no --peak"
        gb = 80.0
        if common.device().type == "cuda":
            gb = torch.cuda.get_device_properties(0).total_memory / memory.GB
        plan = memory.peak(memory.config("grpo", [*map(str, flags)], gb), 1)
        return (f"{text}; {row['tokens'] / row['t_total']:.0f} tokens/s; update "
                f"{update / 1e12:.3g} TFLOP/s, {share}; peak {row['mem_gb']:.1f} GB, "
                f"planned {plan:.1f}")

    def trl(self):
        """The same model against TRL's GRPOTrainer. Expect: 1.7 to 2.3 x with unequal lengths, 1.1
        to 1.5 x with equal ones (a CPU's figures)."""
        if not importlib.util.find_spec("trl"):
            return "left out: trl is not installed"
        sys.path.append(str(ROOT / "tests" / "bench"))
        import bench

        base = bench.CASES["tiny" if self.small else "half"]
        case = replace(base, shape=self.shape, cap=24) if self.small else replace(
            base, shape=self.shape, prompts=16, cap=256, micro=32)
        bench.CASES["gpu"] = case
        bench.trl("gpu", repeats=1 if self.small else 3, quick=True)
        for side in multiprocessing.active_children():  # their memory is for the other parts
            side.terminate()
        return "see above"

    def ppo(self):
        """PPO with a critic of 0.5B. Expect: as a GRPO step, and 1.6 x its t_update."""
        return self.stages(run("ppo", self.home / "ppo", *self.step(128, 256), "--steps", 1))

    def checkpointing(self):
        """--gradient_checkpointing. Expect: t_update a third longer, less memory than above."""
        return self.stages(run("grpo", self.home / "less", *self.step(16, 256), "--steps", 1,
                               "--gradient_checkpointing"))

    def resume(self):
        """The same run resumed. Expect: step 2, approx_kl as small as before."""
        rows = run("grpo", self.home / "less", "--resume", "--steps", 2)
        return f"step {rows[-1]['step']:.0f}, {self.stages(rows)}"

    def stages(self, rows):
        row = rows[-1]
        return ", ".join(f"{name} {row[name]:.3g}" for name in (
            "t_sample", "t_logp", "t_update", "mem_gb", "approx_kl", "grad_norm"))

    @torch.no_grad()
    def decode(self):
        """One token of many answers. Expect: 24 ms whatever the rows, as long as the kernels take
        less: then the host's launches are what one waits for, and more rows at once are free."""
        model, texts = common.load_frozen(self.model, "bfloat16"), []
        for rows in (2, 4) if self.small else (64, 256, 1024):
            cache = common.DynamicCache(config=model.config)
            prompt = torch.full((rows, 8 if self.small else 256), 5, device=common.device())
            model.base_model(input_ids=prompt, cache=cache, use_cache=True)

            def token():
                model(input_ids=prompt[:, :1], cache=cache, use_cache=True)
                if common.device().type != "cpu":
                    torch.accelerator.synchronize()

            token()  # warms up
            start = time.perf_counter()
            for _ in range(10):
                token()
            milliseconds = (time.perf_counter() - start) * 100
            with torch.profiler.profile() as profile:
                token()
            kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1e3
            texts.append(f"{rows} rows: {milliseconds:.1f} ms, kernels {kernels:.1f} ms")
        return "; ".join(texts)


PARTS = ("ratio", "tiny", "half", "trl", "ppo", "checkpointing", "resume", "decode")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peak", type=float, help="TFLOP/s; default: of a GPU that is known here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    args = parser.parse_args()
    name, peak = "a CPU", args.peak
    if common.device().type == "cuda":
        name = torch.cuda.get_device_name()
        peak = peak or next((PEAKS[key] for key in PEAKS if key in name), None)
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    failed, begun = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(Path(home), args.small, peak)
        for part in args.only:
            print(f"\n{part}: {' '.join(getattr(bench, part).__doc__.split())}", flush=True)
            try:
                found = getattr(bench, part)()
            except Exception as error:  # the fifteen minutes are for the other parts
                failed.append(part)
                found = f"FAILED: {error!r}"
            print(f"{part}: {found} [{time.perf_counter() - begun:.0f} s so far]", flush=True)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
