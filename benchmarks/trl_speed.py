"""Times an iteration of grpo.py against TRL's GRPOTrainer on the same work, in interleaved pairs.

    python benchmarks/trl_speed.py [--cases learning smollm2-float32] [--threads 1 2] [--pairs 21]

Same work: the same weights, tokenizer, prompts and reward function; the same number of completions, of
at most as many tokens, from the whole distribution at temperature 1; then four optimizer steps of AdamW
on a quarter of them each, in one pass, clip range 0.2, KL 0.04 to a reference, sequence-mean; the same
number of threads. TRL samples with transformers' generate(). The cases:

fixed, learning    the default job, 32 prompts x 8 completions of at most 48 tokens in float32. With the
                   learning rate 1e-9 the weights stay where they are, so that the lengths of both sides
                   come from the same distribution. With that of grpo.py both learn, and their answers
                   become worked ones of much the same length.
smollm2-...        SmolLM2-135M-Instruct with weights that stay, on 16 small sums x 4 completions of at
                   most 64 tokens. Needs runs/smollm2 (examples/smollm2.py) and
                   runs/small_sums.jsonl (examples/small_sums.py).

In bfloat16, grpo.py computes with a copy of the weights, and AdamW moves float32 weights. TRL has no
such thing; what it has is measured in two cases:

smollm2-bfloat16   bf16=True, its default: float32 weights and autocast. AdamW does the same work as
                   ours, but the forward casts all weights anew for each token that is sampled.
smollm2-bfloat16-weights
                   bf16=True and a model loaded in bfloat16 (model_init_kwargs). Nothing is cast, but
                   AdamW moves bfloat16 weights, which lose steps of less than some 0.4 % of a weight.

Each side is a process of its own that waits while the other one works. The first pair is warm-up and is
not counted. Rows of results/trl_speed.csv with the same case and threads are replaced, others are kept.
"""

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
CSV = ROOT / "benchmarks" / "results" / "trl_speed.csv"
COLUMNS = ["seconds", "sampling", "tokens", "peak_mib"]  # what a worker says of an iteration
QUIET = "--eval_every 0 --save_every 0"
SMOLLM2 = (
    "--model runs/smollm2 --dataset runs/small_sums.jsonl --lr 1e-9"
    " --prompts_per_iteration 16 --group_size 4 --max_new_tokens 64"
)
# name: (pairs, flags of grpo.py, dtype of TRL's weights)
CASES = {
    "fixed": (21, "--lr 1e-9", "float32"),
    "learning": (21, "--lr 2e-4", "float32"),
    "smollm2-float32": (5, SMOLLM2, "float32"),
    "smollm2-bfloat16": (5, f"{SMOLLM2} --dtype bfloat16", "float32"),
    "smollm2-bfloat16-weights": (5, f"{SMOLLM2} --dtype bfloat16", "bfloat16"),
}
sys.path.insert(0, str(ROOT))


class Turns:
    """The worker's side: waits for its turn, works for an iteration, and says what it took."""

    def __init__(self, pipe):
        self.pipe = pipe

    def wait(self):
        if not sys.stdin.readline():
            raise SystemExit
        self.start = time.perf_counter()
        self.sampling = 0.0
        self.tokens = 0

    def done(self):
        seconds = time.perf_counter() - self.start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(seconds, self.sampling, self.tokens, peak, file=self.pipe, flush=True)
        self.wait()


def parsed(flags):
    """The flags as grpo.py would read them."""
    import grpo
    from plumbing.args import parse_args

    sys.argv = ["grpo.py", *flags.split()]
    return parse_args(grpo.Args)


def ours(case, pairs, pipe):
    import grpo
    from plumbing import Run

    real_sample = grpo.sample
    real_log = Run.log

    def sample(*args, **kwargs):
        start = time.perf_counter()
        completions = real_sample(*args, **kwargs)
        turns.sampling += time.perf_counter() - start
        turns.tokens += sum(len(c.ids) for c in completions)
        return completions

    def log(run, *args):
        real_log(run, *args)
        turns.done()

    def evaluate(*args, sampled):
        return {"metrics": {}, "greedy": {}, "sampled": {}, "examples": []}

    grpo.sample = sample
    grpo.evaluate = evaluate
    Run.log = log
    _, flags, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        args = parsed(f"{flags} {QUIET} --iterations {pairs + 1} --run_dir {folder}")
        turns = Turns(pipe)
        turns.wait()
        grpo.main(args)


def make_trainer(
    model, tokenizer, problems, reward, args, turns, folder, iterations, passes=1, **options
):
    """TRL's GRPOTrainer with the job that `args` are for grpo.py, each step in so many passes. It tells
    `turns` the tokens and seconds of its sampling, and when an iteration is done."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    steps = args.num_minibatches
    aux_coef = args.router_aux_coef
    if not hasattr(model.config, "num_experts"):  # a dense model, for which only 0 is allowed
        aux_coef = 0.0

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            turns.sampling += time.perf_counter() - start
            turns.tokens += sum(map(len, result[0]))
            return result

    class Wait(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                turns.done()

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=args.device == "cpu",
        seed=args.seed,
        per_device_train_batch_size=args.prompts_per_iteration * args.group_size // steps // passes,
        gradient_accumulation_steps=passes,
        steps_per_generation=steps * passes,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        max_steps=steps * iterations,
        num_iterations=1,
        temperature=args.temperature,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        epsilon=args.clip_eps_high,
        beta=args.kl_coef,
        use_bias_correction_kl=False,
        router_aux_loss_coef=aux_coef,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=args.max_grad_norm,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Wait()],
    )


def second_iteration(model, tokenizer, problems, args, passes, **options):
    """(seconds of sampling, seconds of the rest, tokens) of TRL's second iteration, after a warm-up.
    Every other completion has a reward."""
    import torch

    ends = []
    turns = SimpleNamespace(sampling=0.0, tokens=0)

    def done():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append((time.perf_counter(), turns.sampling, turns.tokens))

    def reward(completions, **kwargs):
        return [float(i % 2) for i in range(len(completions))]

    turns.done = done
    with tempfile.TemporaryDirectory() as folder:
        inputs = (model, tokenizer, problems, reward, args, turns, folder)
        make_trainer(*inputs, iterations=2, passes=passes, **options).train()
    first, second = ends
    seconds, sampling, tokens = [b - a for a, b in zip(first, second, strict=True)]
    return sampling, seconds - sampling, tokens


def trl(case, pairs, pipe):
    import torch
    import transformers

    import common
    from plumbing.models import end_ids, load_model
    from plumbing.policy import Policy

    _, flags, weights = CASES[case]
    args = parsed(flags)
    model, tokenizer = load_model(args)
    if weights == "bfloat16":
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    problem_stream, _ = common.load_problems(args, Policy(model, tokenizer))
    problems = problem_stream.take(args.prompts_per_iteration * pairs)
    # TRL is given the prompts as text; it has to read the same tokens in them.
    for problem in problems:
        assert tokenizer(problem.prompt).input_ids == problem.prompt_ids
    ends = end_ids(model, tokenizer)

    def reward(completions, completion_ids, answer, **kwargs):
        rewards = []
        for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
            value, _ = common.verify(text, gold, truncated=ids[-1] not in ends)
            rewards.append(value)
        return rewards

    turns = Turns(pipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, tokenizer, problems, reward, args, turns, folder, pairs)
        turns.wait()
        trainer.train()


def interleaved(case, threads, pairs):
    """[{ours_seconds, ..., trl_seconds, ...}], a row for each pair of iterations after the warm-up."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--cases", case, "--pairs", str(pairs), "--worker"]
    workers = {}
    for name in ("ours", "trl"):
        workers[name] = subprocess.Popen(
            [*command, name],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    rows = []
    for pair in range(pairs + 1):
        row = {"case": case, "threads": threads, "pair": pair}
        order = ("ours", "trl") if pair % 2 == 1 else ("trl", "ours")  # who goes first alternates
        for name in order:
            workers[name].stdin.write("go\n")
            workers[name].stdin.flush()
            values = workers[name].stdout.readline().split()
            if not values:
                sys.exit(f"the worker {name} ended: run it alone with --worker {name} to see why")
            for key, value in zip(COLUMNS, values, strict=True):
                row[f"{name}_{key}"] = round(float(value), 4)
        rows.append(row)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return rows[1:]


def report(rows):
    """Prints the medians of both sides, and the ratios."""
    times = {}  # side: {part: [seconds, by pair]}
    for name in ("ours", "trl"):
        seconds = [row[f"{name}_seconds"] for row in rows]
        sampling = [row[f"{name}_sampling"] for row in rows]
        rest = [a - b for a, b in zip(seconds, sampling, strict=True)]
        times[name] = {"time": seconds, "sampling": sampling, "rest": rest}
        tokens = statistics.median(row[f"{name}_tokens"] for row in rows)
        peak = max(row[f"{name}_peak_mib"] for row in rows)
        print(
            f"{name:5} {statistics.median(seconds):.3f} s per iteration:"
            f" sampling {statistics.median(sampling):.3f}, the rest {statistics.median(rest):.3f};"
            f" {tokens:.0f} tokens; peak {peak:.0f} MiB"
        )
    for part in ("time", "sampling", "rest"):
        pairs = zip(times["ours"][part], times["trl"][part], strict=True)
        ratios = [ours / trl for ours, trl in pairs]
        middle = statistics.median(ratios)
        values = f"min {min(ratios):.2f}  median {middle:.2f}  max {max(ratios):.2f}"
        print(f"ratio of the {part:9}{values}", flush=True)


def write(rows):
    """Puts the rows into the CSV, in place of those with the same case and threads."""
    measured = {(row["case"], str(row["threads"])) for row in rows}
    with open(CSV) as file:
        old = list(csv.DictReader(file))
    kept = [row for row in old if (row["case"], row["threads"]) not in measured]
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pairs", type=int, help="[21 of the default job, 5 of SmolLM2]")
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the trainers print goes to stderr
        work = ours if args.worker == "ours" else trl
        work(args.cases[0], args.pairs + 1, pipe)
        return
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for case in args.cases:
        for threads in args.threads:
            pairs, _, _ = CASES[case]
            if args.pairs is not None:
                pairs = args.pairs
            print(f"{case}, threads: {threads}")
            rows = interleaved(case, threads, pairs)
            report(rows)
            write([row | {"commit": commit} for row in rows])  # each case, lest a crash lose all


if __name__ == "__main__":
    main()
