"""Measures speed and memory.

    python study/speed.py sampler    # tokens per second: common.sample() and model.generate()
    python study/speed.py trl        # seconds per iteration: grpo.py and examples/trl_trainer.py
    python study/speed.py memory     # peak memory of grpo.py, in tensors and reserved, and seconds

Prints one row. `sampler` and `trl` measure two sides in turn, with the same weights. They print the
medians of both sides, and the minimum, median and maximum of their ratio. On a CPU everything uses one
thread. `trl` needs examples/requirements.txt: TRL's trainer with grpo.py's loss samples with
generate().

--model   tiny-moe, a folder or hub id, or one of two dense models with random weights, whose answers
          are all as long as they may be: small (6 layers, 32,000 entries), qwen (the shape of
          Qwen2.5-0.5B)
--flags   of grpo.py, for both sides. The learning rate is 1e-9, which keeps the lengths equal, unless
          this has another one.
--ours, --theirs    flags for one side of `trl`, such as --micro_batch_tokens or TRL's
          --per_device_train_batch_size
"""

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from scripts import ROOT, command_line, read_lines

import common
import grpo
from plumbing.args import parse_args

SHAPES = {  # of models with random weights
    "small": transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=True,
        eos_token_id=1,
    ),
    "qwen": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    ),
}


def save_model(name, folder):
    """A model with random weights and the tiny MoE's tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SHAPES[name])
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "tiny_moe").save_pretrained(folder)


def run(file, flags):
    """Runs a script. Returns what it prints."""
    command = [sys.executable, file, *flags.split()]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(result.stderr)
    return result.stdout


def metrics_of(flags):
    """Runs grpo.py. Returns the metrics of each iteration."""
    with tempfile.TemporaryDirectory() as folder:
        run("grpo.py", f"{flags} --run_dir {folder} --eval_every 0 --save_every 0")
        return read_lines(folder, "metrics.jsonl")


def print_pairs(pairs, form):
    """A row for [(our number, the other side's)]."""
    medians = [format(statistics.median(values), form) for values in zip(*pairs, strict=True)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    chosen = [f"{x:.2f}" for x in (ratios[0], statistics.median(ratios), ratios[-1])]
    print(f"| {len(pairs)} | {' | '.join(medians)} | {', '.join(chosen)} |")


# -------------------------------------------------------------------------------------- the sampler


def sampler(flags, num_pairs):
    args = parse_args(grpo.Args, flags.split())
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
    num_ends_before = is_end.cumsum(1) - is_end.int()
    return (num_ends_before == 0).sum().item()


# ------------------------------------------------------------------------------------- an iteration


def trl(flags, ours, theirs, num_pairs):
    use_cpu = "" if torch.cuda.is_available() else "--use_cpu"
    pairs = []
    for _ in range(num_pairs):
        lines = metrics_of(f"{flags} {ours}")
        with tempfile.TemporaryDirectory() as folder:
            words = f"{flags} {theirs} {use_cpu} --save_every 0 --output_dir {folder}"
            printed = run("examples/trl_trainer.py", words)
        (seconds,) = re.findall(r"'train_runtime': '?([\d.]+)", printed)
        phases = [f"charts/{phase}_seconds" for phase in ("rollout", "reward", "update")]
        total = sum(line[phase] for line in lines for phase in phases)
        pairs.append((total / len(lines), float(seconds) / len(lines)))
    print_pairs(pairs, ".2f")


# ------------------------------------------------------------------------------------------- memory


def memory(flags):
    """GiB of tensors, GiB that torch holds, seconds of the rollout, seconds of the update."""
    *_, last = metrics_of(flags)
    names = ("peak_memory_gib", "peak_reserved_gib", "rollout_seconds", "update_seconds")
    cells = [f"{last.get(f'charts/{name}', math.nan):.1f}" for name in names]
    print(f"| {' | '.join(cells)} |")


def main():
    parser = command_line(__doc__)
    parser.add_argument("command", choices=["sampler", "trl", "memory"])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--model", default="tiny-moe")
    for name in ("--flags", "--ours", "--theirs"):
        parser.add_argument(name, default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in SHAPES:
            save_model(model, folder)
            model = folder
        iterations = 7 if model == "tiny-moe" else 2
        flags = f"--model {model} --iterations {iterations} --num_held_out 8 --lr 1e-9 {args.flags}"
        if args.command == "sampler":
            sampler(flags, args.pairs)
        elif args.command == "trl":
            trl(flags, args.ours, args.theirs, args.pairs)
        else:
            memory(flags)


if __name__ == "__main__":
    main()
