"""Times an iteration of grpo.py against TRL's GRPOTrainer on the same work, in interleaved pairs.

    python benchmarks/trl_speed.py [--pairs 21] [--threads 2] [--lr 1e-9 2e-4]

Same work: the base model of the default job and its tokenizer, 32 prompts x 8 completions of at most
48 tokens at temperature 1, then four optimizer steps of AdamW on 64 completions each, clip range 0.2,
KL 0.04 to a reference, sequence-mean, float32, the same reward function and the same number of threads.
With the first learning rate the weights stay where they are, so that the lengths of both sides come
from the same distribution; with the second, that of grpo.py, both learn, and their answers become
worked ones of much the same length. TRL samples with transformers' generate(). Each side is a process
of its own that waits while the other one works. The first pair is warm-up and is not counted. Writes
results/trl_speed.csv.
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

ROOT = Path(__file__).parent.parent
CSV = ROOT / "benchmarks" / "results" / "trl_speed.csv"
COLUMNS = ["seconds", "sampling", "tokens", "peak_mib"]  # what a worker says of an iteration
QUIET = ["--eval_every", "0", "--save_every", "0"]
sys.path.insert(0, str(ROOT))
sys.argv[0] = "grpo.py"


class Turns:
    """The worker's side: waits for its turn, works for an iteration, and says what it took."""

    def __init__(self, pipe):
        self.pipe = pipe
        self.wait()

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


def parsed(*words):
    import grpo
    import harness

    sys.argv[1:] = words
    return harness.parse_args(grpo.Args)


def ours(pairs, lr, pipe):
    import grpo
    import harness

    real_sample = grpo.sample
    real_log = harness.Run.log

    def sample(*args, **kwargs):
        start = time.perf_counter()
        completions = real_sample(*args, **kwargs)
        turns.sampling += time.perf_counter() - start
        turns.tokens += sum(len(c.ids) for c in completions)
        return completions

    def log(run, *args):
        real_log(run, *args)
        turns.done()

    def evaluate(*args):
        return {"greedy": {}, "sampled": {}, "examples": []}

    grpo.sample = sample
    grpo.evaluate = evaluate
    harness.Run.log = log
    with tempfile.TemporaryDirectory() as folder:
        words = ["--iterations", str(pairs + 1), "--lr", str(lr), "--run_dir", folder]
        args = parsed(*words, *QUIET)
        turns = Turns(pipe)
        grpo.main(args)


def trl(pairs, lr, pipe):
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    import common

    args = parsed()
    model, tokenizer = common.load_model(args)
    problems, _ = common.load_problems(args, model, tokenizer)
    problems = common.take_problems(problems, 0, args.prompts_per_iteration * pairs, args.seed)
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    eos = tokenizer.eos_token_id

    def reward(completions, completion_ids, answer, **kwargs):
        rewards = []
        for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
            value, _ = common.verify(text, gold, truncated=ids[-1] != eos)
            rewards.append(value)
        return rewards

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            turns.sampling += time.perf_counter() - start
            turns.tokens += sum(map(len, result[0]))
            return result

    class Wait(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 4 == 0:
                turns.done()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            seed=args.seed,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            steps_per_generation=4,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            max_steps=4 * pairs,
            num_iterations=1,
            temperature=args.temperature,
            top_p=1.0,
            top_k=0,
            loss_type="grpo",
            epsilon=0.2,
            beta=args.kl_coef,
            use_bias_correction_kl=False,
            router_aux_loss_coef=args.router_aux_coef,
            learning_rate=lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Wait()],
        )
        turns = Turns(pipe)
        trainer.train()


def interleaved(pairs, threads, lr):
    """[{ours_seconds, ..., trl_seconds, ...}], a row for each pair of iterations after the warm-up."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--pairs", str(pairs), "--lr", lr, "--worker"]
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
        row = {"lr": lr, "pair": pair}
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


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", nargs="+", default=["1e-9", "2e-4"])
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the trainers print goes to stderr
        work = ours if args.worker == "ours" else trl
        work(args.pairs + 1, float(args.lr[0]), pipe)
        return
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = []
    for lr in args.lr:
        print(f"learning rate {lr}")
        pairs = interleaved(args.pairs, args.threads, lr)
        report(pairs)
        rows += pairs
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "threads", "commit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"threads": args.threads, "commit": commit} for row in rows)


if __name__ == "__main__":
    main()
