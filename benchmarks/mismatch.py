"""How far the sampler is from the training forward, for each --rollout_dtype, and what that costs.

    python benchmarks/mismatch.py [--smollm2 FOLDER]

Samples with the tiny MoE, before and after the default run of grpo.py, from copies of the weights in
each precision, and compares them with the training forward in float32: KL, largest log-ratio, ratios of
whole completions, experts that differ, and what the masks of --rollout_correction would leave out. A
token's log-prob is compared for 256 held-out sums, 8 completions each. With --smollm2 (a folder made
by examples/smollm2.py) the same for SmolLM2-135M on 16 small sums. Writes results/mismatch.csv.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import sweep

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
RULES = ("token_tis", "sequence_mis", "geo_mask", "icepop")


def trained(flags):
    """Folder of the checkpoint that grpo.py leaves, from a run that is made only once."""
    import grpo
    from plumbing import launch

    folder = sweep.RUNS / "mismatch" / "grpo"
    if not list(folder.glob("checkpoint-*60")):
        sys.argv = ["grpo.py", "--run_dir", str(folder), *flags]
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
        old = common.score(policy, batch, batch.minibatches(1), args)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", default="", help="folder of SmolLM2-135M")
    options = parser.parse_args()
    commit = sweep.prepare()
    import common
    import grpo
    from plumbing.args import parse_args

    cases = [("tiny MoE, before", "tiny-moe", "addition", 256, 8, 48)]
    cases.append(("tiny MoE, after", trained([]), "addition", 256, 8, 48))
    if options.smollm2:
        cases.append(("SmolLM2-135M", options.smollm2, "runs/small_sums.jsonl", 16, 4, 64))
    rows = []
    for name, source, dataset, count, group_size, cap in cases:
        flags = f"--model {source} --dataset {dataset} --max_new_tokens {cap} --num_held_out {count}"
        # With another precision than its own, a model is loaded so that it records its experts.
        flags += " --device cpu --rollout_dtype float32 --micro_batch_size 64"
        sys.argv = ["grpo.py", *flags.split()]
        args = parse_args(grpo.Args)
        policy = common.load_policy(args)
        _, problems = common.load_problems(args, policy)
        for row in measure(policy, problems, args, group_size):
            rows.append({"model": name, **row, "commit": commit})
            print(rows[-1], flush=True)
    sweep.write_csv(sweep.RESULTS / "mismatch.csv", rows)


if __name__ == "__main__":
    main()
