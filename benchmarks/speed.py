"""Times the sampler against generate(), and an iteration of grpo.py against one of TRL's GRPOTrainer.

    python benchmarks/speed.py sampler [--pairs 40]
    python benchmarks/speed.py trl [--pairs 10]      # needs examples/requirements.txt

Prints a row of README.md's table for each case: both medians, and the minimum, median and maximum
ratio.

The two sides take turns, on a CPU with one thread, in float32, with the same weights and prompts: 32
prompts x 8 completions of at most 48 tokens, sampled from the full distribution at temperature 1.

sampler   A rollout of the default job, from its base model: common.sample() against generate().
trl       A pair is a run of seven iterations on each side; the first one is not counted. Each has
          grpo.py's 16 optimizer steps of AdamW, clip range 0.2, KL 0.04 to a reference, sequence-mean.
          TRL samples with generate(). In the case `fixed` the learning rate is 1e-9, so both sides draw
          their lengths from the same distribution; in `learning` it is grpo.py's.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
import grpo  # noqa: E402
from plumbing.model import end_ids  # noqa: E402

ITERATIONS = 7
RATES = {"fixed": 1e-9, "learning": 2e-4}


def load(args, num_rollouts):
    """(policy, [the problems of each rollout])"""
    policy = common.load_policy(args)
    stream, _ = common.load_problems(args, policy)
    return policy, [stream.take(args.prompts_per_iteration) for _ in range(num_rollouts)]


def in_turn(sides, pair):
    """The two sides, which take turns going first."""
    return sides if pair % 2 == 0 else sides[::-1]


# -------------------------------------------------------------------------------------- the sampler


def sampler_pairs(num_pairs):
    """[(tokens per second with the sampler, with generate())]"""
    args = grpo.Args(device="cpu")
    policy, rollouts = load(args, num_pairs + 1)
    pairs = []
    for pair, problems in enumerate(rollouts):
        rates = {}
        for side in in_turn([sample, generate], pair):
            start = time.perf_counter()
            num_tokens = side(policy, problems, args)
            rates[side] = num_tokens / (time.perf_counter() - start)
        pairs.append((rates[sample], rates[generate]))
    return pairs[1:]  # the first one is a warm-up


def sample(policy, problems, args):
    completions = common.sample(policy, problems, args.group_size, args)
    return sum(len(c.ids) for c in completions)


def generate(policy, problems, args):
    """The same with transformers. Counts the tokens up to the first EOS; the rest is padding."""
    ends = end_ids(policy.model, policy.tokenizer)
    prompts = [problem.prompt for problem in problems]
    inputs = policy.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    output = policy.model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        num_return_sequences=args.group_size,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=ends,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
    )
    is_end = torch.isin(output[:, inputs.input_ids.shape[1] :], torch.tensor(ends))
    is_after = is_end.cumsum(1) - is_end.int() > 0
    return (~is_after).sum().item()


# ------------------------------------------------------------------------------------- an iteration


def trl_pairs(case, num_pairs):
    """[(seconds per iteration of grpo.py, of TRL)]"""
    pairs = []
    for pair in range(num_pairs):
        seconds = {}
        for side in in_turn([run_ours, run_trl], pair):
            seconds[side] = statistics.median(side(case)[1:])
        pairs.append((seconds[run_ours], seconds[run_trl]))
    return pairs


def run_ours(case):
    """The seconds of each iteration in a run of grpo.py, without the evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--lr {RATES[case]} --iterations {ITERATIONS} --eval_every 0 --save_every 0"
        command = [sys.executable, "grpo.py", *flags.split(), "--run_dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    phases = [f"charts/{phase}_seconds" for phase in ("rollout", "reward", "update")]
    return [sum(metrics[phase] for phase in phases) for metrics in map(json.loads, lines)]


def run_trl(case):
    """The same for TRL."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    args = grpo.Args(device="cpu", lr=RATES[case])
    policy, rollouts = load(args, ITERATIONS)
    rows = [{"prompt": p.prompt, "answer": p.answer} for problems in rollouts for p in problems]
    ends = end_ids(policy.model, policy.tokenizer)
    steps = args.num_minibatches
    times = []

    def reward(completions, completion_ids, answer, **kwargs):
        rows = zip(completions, completion_ids, answer, strict=True)
        return [common.verify(text, gold, ids[-1] not in ends)[0] for text, ids, gold in rows]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            seed=args.seed,
            per_device_train_batch_size=args.prompts_per_iteration * args.group_size // steps,
            steps_per_generation=steps,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            max_steps=steps * ITERATIONS,
            temperature=args.temperature,
            loss_type="grpo",
            epsilon=args.clip_eps_high,
            beta=args.kl_coef,
            use_bias_correction_kl=False,
            router_aux_loss_coef=args.router_aux_coef,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_grad_norm=args.max_grad_norm,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return [end - start for start, end in itertools.pairwise(times)]


def print_row(case, pairs, form):
    medians = [format(statistics.median(values), form) for values in zip(*pairs, strict=True)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    chosen = [f"{x:.2f}" for x in (ratios[0], statistics.median(ratios), ratios[-1])]
    print(f"| `{case}` | {len(pairs)} | {' | '.join(medians)} | {', '.join(chosen)} |", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=["sampler", "trl"])
    parser.add_argument("--pairs", type=int)
    args = parser.parse_args()
    if args.command == "sampler":
        print_row("default", sampler_pairs(args.pairs or 40), ",.0f")
    else:
        for case in RATES:
            with contextlib.redirect_stdout(io.StringIO()):  # TRL's logs
                pairs = trl_pairs(case, args.pairs or 10)
            print_row(case, pairs, ".2f")


if __name__ == "__main__":
    main()
