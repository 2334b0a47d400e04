"""How far the sampler is from the training forward, for each --rollout_dtype, and what that costs.

    python benchmarks/mismatch.py precisions [--smollm2 FOLDER]
    python benchmarks/mismatch.py rejected

precisions   samples with the tiny MoE, before and after the default run of grpo.py, from copies of the
weights in each precision, and compares them with the training forward in float32: KL, largest
log-ratio, ratios of whole completions, experts that differ, and what the masks of --rollout_correction
would leave out. Samples 8 completions for each of 256 held-out sums. With --smollm2 (a folder made by
examples/smollm2.py) the same for SmolLM2-135M on 16 small sums. Writes results/mismatch.csv.

rejected     asks whether masks reject long completions. The product of a completion's ratios goes
further from 1 with each token, their geometric mean does not. Samples long sums in int4 (from
runs/long_addition, which `python benchmarks/long_addition.py runs/long_addition` makes): for each of
five seeds one completion of each of 256 problems, which no other seed has. Of those that work the sum
out, which takes 118 tokens or more, counts how many sequence_mis and geo_mask would reject at their
default bounds if they ended after 16, 32, 64 or 118 tokens: the same completions at each length. Writes
results/rejected.csv. Predicted before it was measured: sequence_mis rejects more at 118 tokens than at
16, geo_mask does not.
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
    """(the flags as grpo.py reads them, the policy that they name)"""
    import common
    import grpo
    from plumbing.args import parse_args

    sys.argv = ["grpo.py", "--device", "cpu", "--micro_batch_size", "64", *flags.split()]
    args = parse_args(grpo.Args)
    return args, common.load_policy(args)


def trained():
    """Folder of the checkpoint that grpo.py leaves, from a run that is made only once."""
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


def precisions(smollm2, commit):
    """Yields the rows of mismatch.csv."""
    import common

    cases = [("tiny MoE, before", "tiny-moe", "addition", 256, 8, 48)]
    cases.append(("tiny MoE, after", trained(), "addition", 256, 8, 48))
    if smollm2:
        cases.append(("SmolLM2-135M", smollm2, "runs/small_sums.jsonl", 16, 4, 64))
    for name, source, dataset, count, group_size, cap in cases:
        # With another precision than its own, a model is loaded so that it records its experts.
        flags = f"--model {source} --dataset {dataset} --max_new_tokens {cap} --rollout_dtype float32"
        args, policy = load(f"{flags} --num_held_out {count}")
        _, problems = common.load_problems(args, policy)
        for row in measure(policy, problems, args, group_size):
            yield {"model": name, **row, "commit": commit}


LENGTHS = (16, 32, 64, 118)  # tokens; the shortest worked sum has 118


def rejected(commit):
    """Yields the rows of rejected.csv."""
    import torch

    import common
    from plumbing.correction import rollout_weights

    folder = "runs/long_addition"
    flags = f"--model {folder}/model --dataset {folder}/problems.jsonl --max_new_tokens 192"
    args, policy = load(f"{flags} --rollout_dtype int4")
    sampler = policy.sampler_at(iteration=1)
    problem_stream, _ = common.load_problems(args, policy)
    for seed in range(1, 6):
        generator = torch.Generator().manual_seed(seed)
        completions = common.sample(sampler, problem_stream.take(256), 1, args, generator)
        worked = [each for each in completions if len(each.ids) >= LENGTHS[-1]]
        batch = common.collate(worked, args)
        old = common.score(policy, batch, batch.minibatches(1), args)
        for rule in ("sequence_mis", "geo_mask"):
            for length in LENGTHS:
                tensors = (old.logprobs_NT, batch.sampler_logprobs_BT, batch.mask_BT)
                weights, _ = rollout_weights(*(x[:, :length] for x in tensors), rule=rule)
                yield {
                    "seed": seed,
                    "rule": rule,
                    "tokens": length,
                    "completions": len(worked),
                    "rejected": (weights == 0).all(1).sum().item(),
                    "commit": commit,
                    "code": sweep.code_hash("grpo"),
                }


def write(name, found):
    rows = []
    for row in found:
        rows.append(row)
        print(row, flush=True)
    sweep.write_csv(sweep.RESULTS / name, rows)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("table", choices=["precisions", "rejected"])
    parser.add_argument("--smollm2", default="", help="folder of SmolLM2-135M")
    options = parser.parse_args()
    commit = sweep.prepare()
    if options.table == "precisions":
        write("mismatch.csv", precisions(options.smollm2, commit))
    else:
        write("rejected.csv", rejected(commit))


if __name__ == "__main__":
    main()
