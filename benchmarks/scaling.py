"""How the time of an iteration of grpo.py grows, and how much of it is matrix products.

    python benchmarks/scaling.py [--threads 1] [--repeats 7]

From 16 prompts x 8 completions of exactly 32 tokens on the tiny MoE (hidden size 64), one of three
things grows: completions per prompt, tokens per completion, or the hidden size (random weights; the
experts grow with it). No completion ends early, so the work is known. Each configuration is a process
of its own that runs grpo.py; times are medians over its iterations. After that it runs one more under
torch's profiler: the share of the operators' time that is spent in matrix products and attention.
Writes results/scaling.csv.
"""

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

import sweep

CSV = sweep.RESULTS / "scaling.csv"
AXES = {
    "completions per prompt": ("group_size", [4, 8, 16, 32, 64]),
    "tokens per completion": ("max_new_tokens", [16, 32, 64, 128, 256]),
    "hidden size": ("hidden", [64, 128, 256, 512]),
}
BASE = {"group_size": 8, "max_new_tokens": 32, "hidden": 64}
COLUMNS = ["parameters", "rollout_seconds", "update_seconds", "products", "attention"]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
ATTENTION = "scaled_dot_product"


def wider(size, vocab_size):
    """The tiny MoE with another hidden size and random weights."""
    import torch
    import transformers

    import common

    widths = {
        "hidden_size": size,
        "head_dim": size // 4,
        "intermediate_size": size,
        "moe_intermediate_size": size,
    }
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**common.TINY_MODEL, **widths, "vocab_size": vocab_size})
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()


def measure(setting, repeats, pipe):
    """In a process of its own: runs grpo.py and sends the values of COLUMNS."""
    import torch

    import grpo
    import harness

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    real_load = grpo.load_model
    real_log = harness.Run.log
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    models = []

    def load_model(args):
        model, tokenizer = real_load(args)
        if setting["hidden"] > 64:
            model = wider(setting["hidden"], model.config.vocab_size)
        # Nothing ends early.
        model.generation_config.eos_token_id = None
        tokenizer.eos_token = None
        models.append(model)
        return model, tokenizer

    def evaluate(*args):
        return {"greedy": {"accuracy": 0, "response_len_mean": 0}}

    def log(run, iteration, *rest):
        if iteration == repeats:
            profiler.start()
        real_log(run, iteration, *rest)

    def nothing(*args, **keywords):
        pass

    grpo.load_model = load_model
    grpo.evaluate = evaluate
    harness.Run.log = log
    harness.Run.save = nothing
    harness.Run.finish = nothing
    with tempfile.TemporaryDirectory() as folder:
        words = ["--prompts_per_iteration", "16", "--group_size", str(setting["group_size"])]
        words += ["--max_new_tokens", str(setting["max_new_tokens"])]
        words += ["--iterations", str(repeats + 1), "--run_dir", folder, *sweep.QUICK]
        sys.argv = ["grpo.py", *words]
        grpo.main(harness.parse_args(grpo.Args))
        profiler.stop()
        text = (Path(folder) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    timed = lines[1:repeats]  # the first is a warm-up, the last ran under the profiler
    rollout = statistics.median(line["charts/rollout_seconds"] for line in timed)
    update = statistics.median(line["charts/update_seconds"] for line in timed)
    spent = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(spent.values())
    products = sum(spent.get(key, 0) for key in PRODUCTS) / total
    attention = sum(value for key, value in spent.items() if ATTENTION in key) / total
    parameters = sum(p.numel() for p in models[0].parameters())
    shares = [round(products, 3), round(attention, 3)]
    pipe.send([parameters, round(rollout, 4), round(update, 4), *shares])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    commit = sweep.prepare(args.threads)
    context = multiprocessing.get_context("fork")
    rows = []
    for axis, (name, values) in AXES.items():
        for value in values:
            receiver, sender = context.Pipe(duplex=False)
            setting = {**BASE, name: value}
            process = context.Process(target=measure, args=(setting, args.repeats, sender))
            process.start()
            sender.close()
            measured = dict(zip(COLUMNS, receiver.recv(), strict=True))
            process.join()
            row = {"axis": axis, "value": value, **measured}
            print(row, flush=True)
            rows.append({**row, "threads": args.threads, "commit": commit})
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
