"""Times an iteration of grpo.py against TRL's GRPOTrainer on the same work, in interleaved pairs.

    python benchmarks/trl_speed.py [--pairs 21] [--threads 2] [--lr 1e-9 2e-4]

Same work: the base model of the default job and its tokenizer, 32 prompts x 8 completions of at most 48
tokens at temperature 1, then four optimizer steps of AdamW on 64 completions each, clip range 0.2, KL 0.04
to a reference, sequence-mean, float32, the same reward function and the same number of threads. With the
first learning rate the weights stay where they are, so that the lengths of both sides come from the same
distribution; with the second, that of grpo.py, both learn, and their answers become worked ones of much the
same length. TRL samples with transformers' generate(). Each side is a process of its own that waits while
the other one works. The first pair is warm-up and is not counted. Writes results/trl_speed.csv.
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
sys.path.insert(0, str(ROOT))
sys.argv[0] = "grpo.py"


class Turns:
    """The worker's side: waits for its turn, works for an iteration, and says what it took."""

    def __init__(self, pipe):
        self.pipe, self.sampling, self.tokens = pipe, 0.0, 0
        self.wait()

    def wait(self):
        if not sys.stdin.readline():
            raise SystemExit
        self.start = time.perf_counter()
        self.sampling, self.tokens = 0.0, 0

    def done(self):
        seconds = time.perf_counter() - self.start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(seconds, self.sampling, self.tokens, peak, file=self.pipe, flush=True)
        self.wait()


def ours(pairs, lr, pipe):
    import common
    import grpo

    real_sample, real_log = common.sample, common.Run.log

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
        return {name: {} for name in ("greedy", "sampled")} | {"examples": []}

    grpo.sample, common.Run.log, grpo.evaluate = sample, log, evaluate
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(pipe)
        grpo.main(parsed("--iterations", str(pairs + 1), "--lr", str(lr), "--run_dir", folder, *QUIET))


QUIET = ["--eval_every", "0", "--save_every", "0"]


def parsed(*words):
    import common
    import grpo

    sys.argv[1:] = words
    return common.parse_args(grpo.Args)


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
        both = zip(completions, completion_ids, answer, strict=True)
        return [common.verify(text, gold, ids[-1] != eos)[0] for text, ids, gold in both]

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


COLUMNS = ["seconds", "sampling", "tokens", "peak_mib"]


def interleaved(pairs, threads, lr):
    """[{ours_seconds, ..., trl_seconds, ...}], a row for each pair of iterations after the warm-up."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--pairs", str(pairs), "--lr", lr, "--worker"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    names = ("ours", "trl")
    workers = {name: subprocess.Popen([*command, name], cwd=ROOT, env=env, **pipes) for name in names}
    rows = []
    for pair in range(pairs + 1):
        row = {"lr": lr, "pair": pair}
        for name in names if pair % 2 else names[::-1]:  # who goes first alternates
            workers[name].stdin.write("go\n")
            workers[name].stdin.flush()
            values = workers[name].stdout.readline().split()
            if not values:
                sys.exit(f"the worker {name} ended: run it alone with --worker {name} to see why")
            values = (round(float(value), 4) for value in values)
            row |= {f"{name}_{key}": value for key, value in zip(COLUMNS, values, strict=True)}
        rows.append(row)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return rows[1:]


def report(rows):
    for name in ("ours", "trl"):
        column = {key: [row[f"{name}_{key}"] for row in rows] for key in COLUMNS}
        middle = {key: statistics.median(values) for key, values in column.items()}
        rest = statistics.median(a - b for a, b in zip(column["seconds"], column["sampling"], strict=True))
        print(
            f"{name:5} {middle['seconds']:.3f} s per iteration: sampling {middle['sampling']:.3f},"
            f" the rest {rest:.3f}; {middle['tokens']:.0f} tokens; peak {max(column['peak_mib']):.0f} MiB"
        )
    for words, seconds in (
        ("time", lambda row, name: row[f"{name}_seconds"]),
        ("sampling", lambda row, name: row[f"{name}_sampling"]),
        ("rest", lambda row, name: row[f"{name}_seconds"] - row[f"{name}_sampling"]),
    ):
        ratios = [seconds(row, "ours") / seconds(row, "trl") for row in rows]
        values = f"min {min(ratios):.2f}  median {statistics.median(ratios):.2f}  max {max(ratios):.2f}"
        print(f"ratio of the {words:9}{values}", flush=True)


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
        {"ours": ours, "trl": trl}[args.worker](args.pairs + 1, float(args.lr[0]), pipe)
        return
    git, rows = ["git", "rev-parse", "--short", "HEAD"], []
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for lr in args.lr:
        print(f"learning rate {lr}")
        rows += interleaved(args.pairs, args.threads, lr)
        report([row for row in rows if row["lr"] == lr])
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "threads", "commit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"threads": args.threads, "commit": commit} for row in rows)


if __name__ == "__main__":
    main()
