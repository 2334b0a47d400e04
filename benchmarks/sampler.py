"""Tokens per second of the sampler against `model.generate()`: same model, prompts, cap, temperature.

    python benchmarks/sampler.py [--cases default smollm2-float32] [--threads 1 2] [--pairs 11]

Both sample, in turn, the same prompts from the same model: the default base model, trained if not
cached, 32 prompts with 8 completions of at most 48 tokens each; or SmolLM2-135M-Instruct, whose weights
both have in float32 or both in bfloat16, 16 small sums with 4 completions of at most 64 tokens each
(trl_speed.py says what it needs). The first pair is warm-up and is not counted. Prints the ratio of
each interleaved pair as min / median / max. Writes results/sampler.csv.
"""

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import load_policy, load_problems, pad, sample
from plumbing.models import end_ids
from trl_speed import SMOLLM2, parsed

CSV = Path(__file__).parent / "results" / "sampler.csv"
# name: (pairs, flags of grpo.py)
CASES = {
    "default": (11, ""),
    "smollm2-float32": (5, SMOLLM2),
    "smollm2-bfloat16": (5, f"{SMOLLM2} --dtype bfloat16"),
}


@torch.no_grad()
def generate(policy, problems, args):
    """The same work by transformers, as a trainer would ask for it; returns the number of tokens, with
    the EOS of each completion that has one."""
    prompts = [problem.prompt_ids for problem in problems]
    prompt_length = max(len(prompt) for prompt in prompts)
    ends = end_ids(policy.model, policy.tokenizer)
    ids = pad(prompts, "cpu", left=True)
    attention = pad([[1] * len(prompt) for prompt in prompts], "cpu", left=True)
    output = policy.model.generate(
        ids.repeat_interleave(args.group_size, dim=0),
        attention_mask=attention.repeat_interleave(args.group_size, dim=0),
        max_new_tokens=args.max_new_tokens,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=ends,
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    is_end = torch.isin(output[:, prompt_length:], torch.tensor(ends))
    # What follows the first EOS is padding, which may be an EOS too.
    is_after = is_end.cumsum(1) - is_end.int() > 0
    return (~is_after).sum().item()


def measure(case, threads, num_pairs):
    """[{"case", "threads", "pair", rates in tokens per second}], a row for each pair."""
    _, flags = CASES[case]
    args = parsed(f"{flags} --device cpu")
    policy = load_policy(args)
    torch.set_num_threads(threads)  # after load_policy, which sets it for the tiny model
    problem_stream, _ = load_problems(args, policy)
    problems = problem_stream.problems[: args.prompts_per_iteration]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # for generate()
    rows = []
    for pair in range(num_pairs + 1):
        row = {"case": case, "threads": threads, "pair": pair}
        # Who goes first alternates.
        order = ("sampler", "generate") if pair % 2 == 1 else ("generate", "sampler")
        for name in order:
            start = time.perf_counter()
            if name == "sampler":
                completions = sample(policy, problems, args.group_size, args, generator)
                tokens = sum(len(c.ids) for c in completions)
            else:
                tokens = generate(policy, problems, args)
            rate = tokens / (time.perf_counter() - start)
            row[f"{name}_tokens_per_second"] = round(rate)
        rows.append(row)
    return rows[1:]


def report(rows):
    """Prints the medians of both, and the ratios."""
    for name in ("sampler", "generate"):
        median = statistics.median(row[f"{name}_tokens_per_second"] for row in rows)
        print(f"{name:10}{median:10.0f} tokens/s (median of {len(rows)})")
    ratios = [row["sampler_tokens_per_second"] / row["generate_tokens_per_second"] for row in rows]
    middle = statistics.median(ratios)
    print(f"ratio     min {min(ratios):.2f}  median {middle:.2f}  max {max(ratios):.2f}", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pairs", type=int, help="[11 of the default job, 5 of SmolLM2]")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    table = []
    for case in options.cases:
        for threads in options.threads:
            pairs, _ = CASES[case]
            if options.pairs is not None:
                pairs = options.pairs
            print(f"{case}, threads: {threads}")
            rows = measure(case, threads, pairs)
            report(rows)
            table += rows
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, [*table[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
