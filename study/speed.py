"""Measures speed and memory.

    python study/speed.py sampler    # tokens per second: common.sample() and model.generate()
    python study/speed.py trl        # seconds per iteration: grpo.py and examples/trl_trainer.py
    python study/speed.py memory     # peak memory of grpo.py and ppo.py, and seconds per iteration

Prints one row for each measurement. `sampler` and `trl` measure two sides in turn, with the same
weights and 32 prompts x 8 completions of at most 48 tokens. They print the medians of both sides, and
the minimum, median and maximum of their ratio. On a CPU everything uses one thread.

trl       Needs examples/requirements.txt. TRL's trainer with grpo.py's loss, flags and 16 steps samples
          with generate(). --lr 2e-4 is grpo.py's; the default, 1e-9, keeps the lengths equal. --model
          random is a dense model with random weights and 32,000 entries in its vocabulary: its answers
          are all as long as they may be.
memory    64 prompts x 8 completions of at most 512 tokens. --model is the folder or hub id of a model,
          such as Qwen/Qwen2.5-0.5B. Without a GPU the memory is nan.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from scripts import ROOT

import common
import grpo

ITERATIONS = 7
MEMORY = [  # script, flags
    ("grpo.py", "--kl_coef 0"),
    ("grpo.py", "--kl_coef 0 --dtype bfloat16"),
    ("grpo.py", "--kl_coef 0 --dtype bfloat16 --gradient_checkpointing"),
    ("grpo.py", "--dtype bfloat16"),
    ("ppo.py", "--dtype bfloat16"),
]


def run(file, flags):
    """Runs a script. Returns what it prints."""
    command = [sys.executable, file, *flags.split()]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(result.stderr)
    return result.stdout


def metrics_of(script, flags, folder):
    """Runs one of the nine. Returns the metrics of each iteration."""
    run(script, f"{flags} --run_dir {folder} --eval_every 0 --save_every 0")
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def print_pairs(pairs, form):
    """A row for [(our number, the other side's)]."""
    medians = [format(statistics.median(values), form) for values in zip(*pairs, strict=True)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    chosen = [f"{x:.2f}" for x in (ratios[0], statistics.median(ratios), ratios[-1])]
    print(f"| {len(pairs)} | {' | '.join(medians)} | {', '.join(chosen)} |")


# -------------------------------------------------------------------------------------- the sampler


def sampler(device, num_pairs):
    args = grpo.Args(device=device)
    policy = common.load_policy(args)
    problems, _ = common.load_problems(args, policy, common.load_grader(args))
    pairs = []
    for _ in range(num_pairs + 1):
        prompts = problems.take(args.prompts_per_iteration)
        rates = []
        for side in (sample, generate):
            start = time.perf_counter()
            num_tokens = side(policy, prompts, args)  # a number, so a GPU has finished
            rates.append(num_tokens / (time.perf_counter() - start))
        pairs.append(rates)
    print_pairs(pairs[1:], ",.0f")  # the first one is a warm-up


def sample(policy, problems, args):
    completions = common.sample(policy, problems, args.group_size, args)
    return sum(len(c.ids) for c in completions)


def generate(policy, problems, args):
    """The same with transformers. Counts the tokens up to the first EOS; the rest is padding."""
    prompts = [problem.prompt for problem in problems]
    inputs = policy.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs = inputs.to(args.torch_device)
    output = policy.model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        num_return_sequences=args.group_size,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=policy.end_ids,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
    )
    ends = torch.tensor(policy.end_ids, device=output.device)
    is_end = torch.isin(output[:, inputs.input_ids.shape[1] :], ends)
    is_after = is_end.cumsum(1) - is_end.int() > 0
    return (~is_after).sum().item()


# ------------------------------------------------------------------------------------- an iteration


def save_random_model(folder):
    """A dense model that has learned nothing, with the tiny MoE's tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "tiny_moe").save_pretrained(folder)


def trl(device, num_pairs, lr, model):
    if model == "random":
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(folder)
            trl(device, num_pairs, lr, folder)
        return
    iterations = ITERATIONS if model == "tiny-moe" else 2
    flags = f"--model {model} --lr {lr} --iterations {iterations} --num_held_out 8"
    use_cpu = "--use_cpu" if device == "cpu" else ""
    pairs = []
    for _ in range(num_pairs):
        with tempfile.TemporaryDirectory() as folder:
            lines = metrics_of("grpo.py", f"{flags} --device {device}", f"{folder}/ours")
            theirs = f"--algorithm grpo {flags} --save_every 0 --output_dir {folder}/trl {use_cpu}"
            printed = run("examples/trl_trainer.py", theirs)
        (seconds,) = re.findall(r"'train_runtime': '?([\d.]+)", printed)
        phases = [f"charts/{phase}_seconds" for phase in ("rollout", "reward", "update")]
        ours = sum(line[phase] for line in lines for phase in phases)
        pairs.append((ours / iterations, float(seconds) / iterations))
    print_pairs(pairs, ".2f")


# ------------------------------------------------------------------------------------------- memory


def memory(device, model):
    for script, flags in MEMORY:
        rows = 512 if script == "ppo.py" else 64  # ppo has no groups
        words = f"{flags} --model {model} --device {device} --iterations 2 --lr 1e-6 --num_held_out 8"
        words += f" --prompts_per_iteration {rows} --max_new_tokens 512 --num_minibatches 2"
        with tempfile.TemporaryDirectory() as folder:
            *_, last = metrics_of(script, words, folder)
        gib = last.get("charts/peak_memory_gib", math.nan)
        seconds = [last[f"charts/{phase}_seconds"] for phase in ("rollout", "update")]
        print(f"| `{script} {flags}` | {gib:.1f} | {seconds[0]:.1f} | {seconds[1]:.1f} |")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=["sampler", "trl", "memory"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--lr", default="1e-9", help="for trl")
    parser.add_argument("--model", default="tiny-moe", help="for trl and memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "sampler":
        sampler(args.device, args.pairs)
    elif args.command == "trl":
        trl(args.device, args.pairs, args.lr, args.model)
    else:
        memory(args.device, args.model)


if __name__ == "__main__":
    main()
