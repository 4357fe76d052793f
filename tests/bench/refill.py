"""Bench: what would it gain if waiting questions took the places of answers that have ended?

    python tests/bench/refill.py

Counts forward calls of a rollout, by simulation: on a GPU a token of a small model costs nearly the
same for any number of rows. 512 tokens at most, lengths lognormal around a quarter of that; the
default workloads of GRPO with --rollout_batch 0; medians of five draws. As it is: batch after
batch, one pass for prompts and the longest answer each. Refilled: every 16 tokens, a group at a
time, one more pass where some enter.
"""

import numpy as np

CAP, CHUNK = 512, 16


def batches(lengths, rows):
    return sum(1 + lengths[i : i + rows].max() for i in range(0, len(lengths), rows))


def refilled(lengths, rows, group):
    waiting, left, calls = list(lengths.reshape(-1, group)), np.array([], int), 0
    while waiting or len(left):
        room = (rows - len(left)) // group
        entering, waiting = waiting[:room], waiting[room:]
        left = np.concatenate([left, *entering])
        tokens = min(CHUNK, left.max())
        calls += tokens + (len(entering) > 0)
        left = left[left > tokens] - tokens
    return calls


def main():
    rng = np.random.default_rng(0)
    for name, answers, group, rows in [
            ("0.5B on 24 GB", 2048, 8, 384), ("0.5B on 80 GB", 2048, 8, 1304),
            ("1.5B on 80 GB", 2048, 8, 616), ("7B on 4 x 80 GB, each", 512, 8, 320),
            ("7B on 8 x 80 GB, each", 256, 8, 320), ("DAPO, 7B on 8 x 80 GB", 512, 16, 320)]:
        for sigma in (1.0, 0.5):
            pairs = []
            for _ in range(5):
                draw = np.exp(rng.normal(np.log(CAP / 4), sigma, answers)).round()
                lengths = draw.clip(1, CAP).astype(int)
                pairs.append((batches(lengths, rows), refilled(lengths, rows, group)))
            now, then = np.median(pairs, 0)
            print(f"{name:23} sigma {sigma}: {answers} answers, {rows} at once: "
                  f"{now:.0f} calls, refilled {then:.0f}: {now / then:.2f} x")


if __name__ == "__main__":
    main()
