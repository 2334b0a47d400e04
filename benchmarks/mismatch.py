"""How far the sampler is from the training forward, for each --rollout_dtype.

    python benchmarks/mismatch.py [--smollm2 FOLDER]

Samples with the tiny MoE, before and after the default run of grpo.py, from copies of the weights in
each precision, and compares them with the training forward in float32: KL, largest log-ratio, ratios of
whole completions, experts that differ, and the completions that the masks of --rollout_correction would
reject. Samples 8 completions for each of 256 held-out sums. With --smollm2 (a folder made by
examples/smollm2.py) also for SmolLM2-135M on 16 small sums. Writes results/mismatch.csv.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import sweep

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
RULES = ("token_tis", "sequence_mis", "geo_mask", "icepop")


def load(flags):
    """(the flags as grpo.py parses them, the policy)"""
    import common
    import grpo
    from plumbing.args import parse_args

    sys.argv = ["grpo.py", "--device", "cpu", "--micro_batch_size", "64", *flags.split()]
    args = parse_args(grpo.Args)
    return args, common.load_policy(args)


def trained():
    """Checkpoint of a default run of grpo.py, which is made only once."""
    import grpo
    from plumbing import launch

    folder = sweep.RUNS / "mismatch" / "grpo"
    if not list(folder.glob("checkpoint-*60")):
        sys.argv = ["grpo.py", "--run_dir", str(folder)]
        launch(grpo.main, grpo.Args)
    (checkpoint,) = folder.glob("checkpoint-*60")
    return str(checkpoint)


def measure(policy, problems, args, group_size):
    """Yields a row for each precision: {column: number}."""
    import torch

    import common
    from plumbing import rollout_correction
    from plumbing.policy import refresh_rollout_copy, rollout_copy

    def timed_sample(policy):
        generator = torch.Generator().manual_seed(0)
        start = time.perf_counter()
        completions = common.sample(policy, problems, group_size, args, generator)
        return completions, time.perf_counter() - start

    for precision in PRECISIONS:
        args.rollout_dtype = "same"
        _, seconds_same = timed_sample(policy)
        args.rollout_dtype = precision
        sampler = policy.with_model(rollout_copy(policy.model, policy.master, precision))
        refresh_rollout_copy(sampler.model, policy.master, precision)
        completions, seconds = timed_sample(sampler)
        batch = common.collate(completions, args)
        old = common.score_old(policy, batch, batch.minibatches(1), args)
        args.rollout_correction = "none"
        stats = rollout_correction(old, batch, args).stats
        row = {"precision": precision, **{name: float(value) for name, value in stats.items()}}
        for rule in RULES:
            args.rollout_correction = rule
            weights = rollout_correction(old, batch, args).stats
            row[f"{rule}_zero"] = float(weights["weight_zero_frac"])
            row[f"{rule}_effective"] = float(weights["weight_effective_size"])
        row["sampling_time"] = seconds / seconds_same
        yield row


def precisions(smollm2):
    """Yields the rows of mismatch.csv."""
    import common

    cases = [("tiny MoE, before", "tiny-moe", "addition", 256, 8, 48)]
    cases.append(("tiny MoE, after", trained(), "addition", 256, 8, 48))
    if smollm2:
        cases.append(("SmolLM2-135M", smollm2, "runs/small_sums.jsonl", 16, 4, 64))
    for name, source, dataset, count, group_size, cap in cases:
        # --rollout_dtype makes the loader test whether the sampler's experts can be recorded.
        flags = f"--model {source} --dataset {dataset} --max_new_tokens {cap} --rollout_dtype float32"
        args, policy = load(f"{flags} --num_held_out {count}")
        _, problems = common.load_problems(args, policy)
        for row in measure(policy, problems, args, group_size):
            yield {"model": name, **row}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", default="", help="folder of SmolLM2-135M")
    options = parser.parse_args()
    rows = []
    made_of = {"commit": sweep.prepare(), "code": sweep.code_hash("grpo")}
    for row in precisions(options.smollm2):
        rows.append(row | made_of)
        print(row, flush=True)
    measured = {row["model"] for row in rows}
    rows += [row for row in sweep.read_csv("mismatch") if row["model"] not in measured]
    sweep.write_csv(sweep.RESULTS / "mismatch.csv", rows)


if __name__ == "__main__":
    main()
