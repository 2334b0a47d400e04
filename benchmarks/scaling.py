"""How the time of an iteration of grpo.py grows, and how much of it is matrix products.

    python benchmarks/scaling.py [--threads 1] [--repeats 7]

From 16 prompts x 8 completions of exactly 32 tokens on the tiny MoE (hidden size 64), one of three things
grows: completions per prompt, tokens per completion, or the hidden size (random weights; the experts grow
with it). No completion ends early, so the work is known. Each configuration is a process of its own that runs
grpo.py; times are medians over its iterations. After that it runs one more under torch's profiler: the share
of the operators' time that is spent in matrix products and attention. Writes results/scaling.csv.
"""

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import sweep

AXES = {
    "completions per prompt": ("group_size", [4, 8, 16, 32, 64]),
    "tokens per completion": ("max_new_tokens", [16, 32, 64, 128, 256]),
    "hidden size": ("hidden", [64, 128, 256, 512]),
}
BASE = {"group_size": 8, "max_new_tokens": 32, "hidden": 64}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
ATTENTION = "scaled_dot_product"


def measure(setting, repeats, pipe):
    """In a process of its own: sends (parameters, seconds of rollouts, of updates, share of products)."""
    import torch
    import transformers

    import common
    import grpo
    import tasks

    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    real_load, real_log = grpo.load_model, common.Run.log
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    parameters = []

    def load(args):
        model, tokenizer = real_load(args)
        if setting["hidden"] > 64:
            size = setting["hidden"]
            widths = dict(hidden_size=size, head_dim=size // 4, intermediate_size=size)
            widths |= dict(moe_intermediate_size=size, vocab_size=model.config.vocab_size)
            torch.manual_seed(0)
            config = transformers.Qwen3MoeConfig(**tasks.TINY_MODEL | widths)
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        model.generation_config.eos_token_id = tokenizer.eos_token = None  # nothing ends early
        parameters.append(sum(p.numel() for p in model.parameters()))
        return model, tokenizer

    def log(run, iteration, *rest):
        if iteration == repeats:
            profiler.start()
        real_log(run, iteration, *rest)

    grpo.load_model, common.Run.log, common.Run.save = load, log, lambda *args, **keywords: None
    grpo.evaluate = lambda *args: {"greedy": dict.fromkeys(("accuracy", "response_len_mean"), 0)}
    common.Run.finish = lambda *args: None
    with tempfile.TemporaryDirectory() as folder:
        words = ["--prompts_per_iteration", "16", "--group_size", str(setting["group_size"])]
        words += ["--max_new_tokens", str(setting["max_new_tokens"]), "--iterations", str(repeats + 1)]
        sys.argv = ["grpo.py", *words, "--run_dir", folder, *sweep.QUICK]
        grpo.main(common.parse_args(grpo.Args))
        profiler.stop()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    spent = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(spent.values())
    products = sum(spent.get(key, 0) for key in PRODUCTS) / total
    attention = sum(value for key, value in spent.items() if ATTENTION in key) / total
    rollout, update = (
        statistics.median(line[f"charts/{name}_seconds"] for line in lines[1:repeats])
        for name in ("rollout", "update")
    )
    pipe.send([parameters[0], round(rollout, 4), round(update, 4), round(products, 3), round(attention, 3)])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(sweep.ROOT))
    os.chdir(sweep.ROOT)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    columns = ["axis", "value", "parameters", "rollout_seconds", "update_seconds", "products", "attention"]
    context, rows = multiprocessing.get_context("fork"), []
    for axis, (name, values) in AXES.items():
        for value in values:
            receiver, sender = context.Pipe(duplex=False)
            setting = BASE | {name: value}
            process = context.Process(target=measure, args=(setting, args.repeats, sender))
            process.start()
            sender.close()
            rows.append(dict(zip(columns, [axis, value, *receiver.recv()], strict=True)))
            process.join()
            print(rows[-1], flush=True)
    with open(sweep.RESULTS / "scaling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "threads", "commit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"threads": args.threads, "commit": commit} for row in rows)


if __name__ == "__main__":
    main()
