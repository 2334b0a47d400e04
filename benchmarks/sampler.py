"""Tokens per second of the sampler against `model.generate()`: same model, prompts, cap, temperature.

    python benchmarks/sampler.py [--pairs 11]

Both sample, in turn, the same 32 prompts, 8 completions each, from the default base model, trained if
not cached, on one thread unless OMP_NUM_THREADS says otherwise. Prints the ratio of each interleaved
pair as min / median / max.
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
from common import load_model, load_problems, pad, sample
from grpo import Args

CSV = Path(__file__).parent / "results" / "sampler.csv"


@torch.no_grad()
def generate(model, tokenizer, prompts, group_size, args):
    """The same work by transformers, as a trainer would ask for it; returns the number of tokens up to
    the EOS."""
    prompt_length = max(len(prompt) for prompt in prompts)
    ids = pad(prompts, "cpu", left=True)
    attention = pad([[1] * len(prompt) for prompt in prompts], "cpu", left=True)
    output = model.generate(
        ids.repeat_interleave(group_size, dim=0),
        attention_mask=attention.repeat_interleave(group_size, dim=0),
        max_new_tokens=args.max_new_tokens,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    responses = output[:, prompt_length:]
    return (responses != tokenizer.pad_token_id).sum().item()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pairs", type=int, default=11)
    num_pairs = parser.parse_args().pairs
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args = Args(device="cpu")
    model, tokenizer = load_model(args)
    problems, _ = load_problems(args, model, tokenizer)
    prompts = [problem.prompt_ids for problem in problems[: args.prompts_per_iteration]]
    generator = torch.Generator().manual_seed(0)
    rates = {"sampler": [], "generate": []}
    for pair in range(-1, num_pairs):  # the first pair is a warm-up
        for name in rates:
            start = time.perf_counter()
            if name == "sampler":
                completions = sample(model, tokenizer, prompts, args.group_size, args, generator)
                tokens = sum(len(c.ids) for c in completions)
            else:
                tokens = generate(model, tokenizer, prompts, args.group_size, args)
            if pair >= 0:
                rates[name].append(tokens / (time.perf_counter() - start))
    pairs = list(zip(rates["sampler"], rates["generate"], strict=True))
    with open(CSV, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["pair", "sampler_tokens_per_second", "generate_tokens_per_second"])
        for i, (ours, theirs) in enumerate(pairs, 1):
            writer.writerow([i, round(ours), round(theirs)])
    for name, values in rates.items():
        print(f"{name:10}{statistics.median(values):10.0f} tokens/s (median of {num_pairs})")
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    median = statistics.median(ratios)
    print(f"ratio     min {ratios[0]:.2f}  median {median:.2f}  max {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
