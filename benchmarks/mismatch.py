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
    import harness

    folder = sweep.RUNS / "mismatch" / "grpo"
    if not list(folder.glob("checkpoint-*60")):
        sys.argv = ["grpo.py", "--run_dir", str(folder), *flags]
        harness.launch(grpo.main, grpo.Args)
    (checkpoint,) = folder.glob("checkpoint-*60")
    return str(checkpoint)


def measure(master, tokenizer, problems, args, group_size):
    """Yields a row for each precision: {column: number}."""
    import torch

    import common
    import mismatch

    prompts = [problem.prompt_ids for problem in problems]

    def timed_sample(model):
        generator = torch.Generator().manual_seed(0)
        start = time.perf_counter()
        completions = common.sample(model, tokenizer, prompts, group_size, args, generator)
        return completions, time.perf_counter() - start

    for precision in PRECISIONS:
        args.rollout_dtype = "same"
        _, seconds_same = timed_sample(master)
        args.rollout_dtype = precision
        sampler = mismatch.rollout_copy(master, master, precision)
        mismatch.refresh_rollout_copy(sampler, master, precision)
        completions, seconds = timed_sample(sampler)
        batch = common.collate(completions, "cpu")
        logprobs = []
        experts = []
        with torch.no_grad():
            for rows in torch.arange(len(completions)).split(64):
                outputs = common.token_logprobs(master, batch.rows(rows), args.temperature)
                logprobs.append(outputs.logprobs_BT)
                experts.append(outputs.experts_BTLK)
        logprobs = torch.cat(logprobs)
        stats = mismatch.mismatch_stats(logprobs, torch.cat(experts), batch)
        row = {"precision": precision, **{name: float(value) for name, value in stats.items()}}
        for rule in RULES:
            args.rollout_correction = rule
            weights = mismatch.rollout_correction(logprobs, batch, args).stats
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
    import harness

    cases = [("tiny MoE, before", "tiny-moe", "addition", 256, 8, 48)]
    cases.append(("tiny MoE, after", trained([]), "addition", 256, 8, 48))
    if options.smollm2:
        cases.append(("SmolLM2-135M", options.smollm2, "runs/small_sums.jsonl", 16, 4, 64))
    rows = []
    for name, source, dataset, count, group_size, cap in cases:
        flags = f"--model {source} --dataset {dataset} --max_new_tokens {cap} --num_held_out {count}"
        # With another precision than its own, a model is loaded so that it notes its experts.
        sys.argv = ["grpo.py", *flags.split(), "--device", "cpu", "--rollout_dtype", "float32"]
        args = harness.parse_args(grpo.Args)
        master, tokenizer = common.load_model(args)
        _, problems = common.load_problems(args, master, tokenizer)
        for row in measure(master, tokenizer, problems, args, group_size):
            rows.append({"model": name, **row, "commit": commit})
            print(rows[-1], flush=True)
    sweep.write_csv(sweep.RESULTS / "mismatch.csv", rows)


if __name__ == "__main__":
    main()
