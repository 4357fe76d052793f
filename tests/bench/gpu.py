"""Bench: what only a GPU can show, in one go of a few minutes. Not collected by pytest.

    python tests/bench/gpu.py                   on a GPU
    python tests/bench/gpu.py --small           the same steps, shrunk, on any machine
    python tests/bench/gpu.py --smollm2 FOLDER  also two steps of that model, built-in problems

Prints: the tiny run's accuracy and seconds; for a random Qwen2.5-0.5B shape one GRPO step of 16 x 8
answers of 256 tokens: seconds per stage, tokens per second, peak memory beside the plan of
plots/memory.py, and the largest gap between the bfloat16 sampler's and trainer's log-probs.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def run(out, *flags):
    """Run grpo.py with these flags; returns the rows of its metrics.csv."""
    command = [sys.executable, "-u", str(ROOT / "grpo.py"), "--out_dir", str(out), *map(str, flags)]
    print("$", *command[2:], flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    with open(out / "metrics.csv") as file:
        return list(csv.DictReader(file))


def random_model(folder, small):
    """Write a random-weight model of Qwen2.5-0.5B's shape with the built-in tokenizer."""
    import torch
    import transformers

    import experiment

    tokenizer = experiment._tiny_tokenizer()
    big = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
               num_attention_heads=14, num_key_value_heads=2, vocab_size=151_936)
    shape = big if not small else dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                       num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(  # Qwen3: the built-in tokenizer loads beside it
        **shape, head_dim=64, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(name, rows):
    """The last step's stages, speed, memory and sampler gap."""
    last = rows[-1]
    stages = {k: float(last[k]) for k in ("t_sample", "t_logp", "t_update", "t_total")}
    text = ", ".join(f"{k} {v:.2f} s" for k, v in stages.items())
    speed = float(last["tokens"]) / stages["t_total"]
    print(f"{name}: {text}; {speed:.0f} tokens/s; peak {float(last['mem_gb']):.2f} GB; "
          f"largest sampler gap {float(last['sampler_gap'] or 0):.4f}; "
          f"held-out {rows[0]['eval_accuracy']} -> {last['eval_accuracy']}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--smollm2", metavar="FOLDER")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        tiny = ("--steps", 2, "--cold_start", 5, "--eval_size", 16) if args.small else ()
        report("tiny", run(home / "tiny", *tiny))
        random_model(home / "model", args.small)
        answers, prompts = (24, 4) if args.small else (256, 16)
        shape = ("--prompts_per_step", prompts, "--group_size", 8, "--max_new_tokens", answers)
        step = ("--model", home / "model", "--data", "words", "--steps", 2, "--eval_size", 8,
                "--test_size", 8, *shape, "--minibatches", 2)
        report("random 0.5B", run(home / "random", *step, "--dtype", "bfloat16"))
        plan = (ROOT / "plots" / "memory.py", "--script", "grpo", "--model", home / "model", *shape)
        subprocess.run([sys.executable, *map(str, plan), "--gpus", "1", "--gb", "80"], check=True)
        if args.smollm2:
            report("SmolLM2", run(home / "smollm2", "--model", args.smollm2, "--data", "words",
                                  "--steps", 2, "--prompts_per_step", 8, "--max_new_tokens", 64,
                                  "--cold_start", 20, "--cold_start_lr", 5e-5, "--lr", 1e-5))


if __name__ == "__main__":
    main()
