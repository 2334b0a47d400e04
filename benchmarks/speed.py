"""Times an iteration of grpo.py against TRL's GRPOTrainer, and the sampler against generate().

    python benchmarks/speed.py trl [--cases fixed learning] [--pairs 21]   # results/trl_speed.csv
    python benchmarks/speed.py sampler [--pairs 40]                        # results/sampler.csv

Each side is a process of its own that waits while the other one works. The first pair of turns is
warm-up and is not counted. Rows with the same case and threads are replaced, others are kept.

trl       The same weights, tokenizer, prompts, reward function and number of threads; as many
completions of at most as many tokens, from the whole distribution at temperature 1; then four optimizer
steps of AdamW on a quarter of them each, clip range 0.2, KL 0.04 to a reference, sequence-mean; in
float32. TRL samples with transformers' generate(). The cases:

    fixed     the default job, 32 prompts x 8 completions of at most 48 tokens, with the learning rate
              1e-9: the weights stay, and lengths of both sides come from the same distribution
    learning  the same with the learning rate of grpo.py: both learn, and their answers become worked
              ones of much the same length
    smollm2-float32
              SmolLM2-135M-Instruct with weights that stay, on 16 small sums x 4 completions of at most
              64 tokens; needs runs/smollm2 (examples/smollm2.py) and runs/small_sums.jsonl
              (examples/small_sums.py), and three minutes for a pair

sampler   The rollout of the default job, from its base model: common.sample() against generate().
"""

import argparse
import csv
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import grpo
import sweep
from plumbing import Run
from plumbing.args import parse_args
from plumbing.models import end_ids


class Turns:
    """The worker's side: waits for its turn, works, and says what it took."""

    def __init__(self, pipe):
        self.pipe = pipe

    def wait(self):
        if self.pipe.recv() == "stop":
            raise SystemExit
        self.sampling = 0.0
        self.tokens = 0

    def done(self):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.pipe.send({"sampling": self.sampling, "tokens": self.tokens, "peak_mib": peak})
        self.wait()


def parsed(flags):
    """The flags as grpo.py would read them."""
    sys.argv = ["grpo.py", "--device", "cpu", "--num_held_out", "32", *flags.split()]
    return parse_args(grpo.Args)


def load(flags, iterations):
    """(args, policy, [problems of an iteration])"""
    args = parsed(flags)
    policy = common.load_policy(args)
    problem_stream, _ = common.load_problems(args, policy)
    rollouts = [problem_stream.take(args.prompts_per_iteration) for _ in range(iterations)]
    return args, policy, rollouts


# ------------------------------------------------------------------------------------- an iteration


def ours(flags, iterations, turns):
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

    grpo.sample = sample
    Run.log = log
    with tempfile.TemporaryDirectory() as folder:
        quiet = f"--eval_every 0 --save_every 0 --iterations {iterations} --run_dir {folder}"
        args = parsed(f"{flags} {quiet}")
        turns.wait()
        grpo.main(args)


def trl(flags, iterations, turns):
    args, policy, rollouts = load(flags, iterations)
    problems = [problem for rollout in rollouts for problem in rollout]
    # TRL is given the prompts as text; it has to read the same tokens in them.
    for problem in problems:
        assert policy.tokenizer(problem.prompt).input_ids == problem.prompt_ids
    ends = end_ids(policy.model, policy.tokenizer)

    def reward(completions, completion_ids, answer, **kwargs):
        rows = zip(completions, completion_ids, answer, strict=True)
        return [common.verify(text, gold, ids[-1] not in ends)[0] for text, ids, gold in rows]

    with tempfile.TemporaryDirectory() as folder:
        inputs = (policy.model, policy.tokenizer, problems, reward, args, turns, folder, iterations)
        trainer = make_trainer(*inputs)
        turns.wait()
        trainer.train()


def make_trainer(
    model, tokenizer, problems, reward, args, turns, folder, iterations, passes=1, **options
):
    """TRL's GRPOTrainer with the job that `args` are for grpo.py, each step in so many passes. It tells
    `turns` the tokens and seconds of its sampling, and when an iteration is done."""
    import datasets  # here, so that it is not in grpo.py's peak
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


# -------------------------------------------------------------------------------------- the sampler


def sampler(flags, iterations, turns):
    args, policy, rollouts = load(flags, iterations)
    turns.wait()
    for problems in rollouts:
        completions = common.sample(policy, problems, args.group_size, args)
        turns.tokens = sum(len(c.ids) for c in completions)
        turns.done()


def generate(flags, iterations, turns):
    """As a trainer would ask for it. Counts the tokens up to the first EOS: what follows is padding."""
    args, policy, rollouts = load(flags, iterations)
    ends = end_ids(policy.model, policy.tokenizer)
    turns.wait()
    for problems in rollouts:
        prompts = [problem.prompt for problem in problems]
        inputs = policy.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        output = policy.model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            num_return_sequences=args.group_size,
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=ends,
        )
        is_end = torch.isin(output[:, inputs.input_ids.shape[1] :], torch.tensor(ends))
        is_after = is_end.cumsum(1) - is_end.int() > 0
        turns.tokens = (~is_after).sum().item()
        turns.done()


# ------------------------------------------------------------------------------------------ in turns

SMOLLM2 = (
    "--model runs/smollm2 --dataset runs/small_sums.jsonl --lr 1e-9"
    " --prompts_per_iteration 16 --group_size 4 --max_new_tokens 64"
)
CASES = [  # command, case, threads, pairs, flags of grpo.py
    ("trl", "fixed", 1, 21, "--lr 1e-9"),
    ("trl", "fixed", 2, 21, "--lr 1e-9"),
    ("trl", "learning", 1, 21, "--lr 2e-4"),
    ("trl", "learning", 2, 21, "--lr 2e-4"),
    ("trl", "smollm2-float32", 1, 2, SMOLLM2),
    ("sampler", "default", 1, 40, ""),
]
COMMANDS = {  # the CSV, the two sides, columns of each
    "trl": ("trl_speed.csv", (ours, trl), ("seconds", "sampling", "tokens", "peak_mib")),
    "sampler": ("sampler.csv", (sampler, generate), ("tokens_per_second",)),
}


def worker(side, *inputs):
    with open(os.devnull, "w") as sys.stdout:  # what the trainers print
        side(*inputs)


def compare(sides, columns, flags, pairs):
    """Yields so many pairs, after one that is warm-up: {"pair": number, column of a side: number}."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for side in sides:
        pipe, its_end = context.Pipe()
        turns = Turns(its_end)
        inputs = (side, flags, pairs + 1, turns)
        context.Process(target=worker, args=inputs, daemon=True).start()
        its_end.close()
        pipes[side.__name__] = pipe
    for pair in range(pairs + 1):
        row = {"pair": pair}
        names = list(pipes)
        if pair % 2 == 0:  # who goes first alternates
            names.reverse()
        for name in names:
            start = time.perf_counter()
            pipes[name].send("go")
            took = pipes[name].recv()
            took["seconds"] = time.perf_counter() - start
            took["tokens_per_second"] = took["tokens"] / took["seconds"]
            for column in columns:
                row[f"{name}_{column}"] = round(took[column], 4)
        if pair > 0:
            yield row
    for pipe in pipes.values():
        pipe.send("stop")
    for process in multiprocessing.active_children():
        process.join()


def write(path, rows):
    measured = (rows[0]["case"], str(rows[0]["threads"]))
    old = []
    if path.exists():
        with open(path) as file:
            old = list(csv.DictReader(file))
    kept = [row for row in old if (row["case"], row["threads"]) != measured]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--cases", nargs="+", help="[all of the command]")
    parser.add_argument("--pairs", type=int, help="[as many as in the CSV]")
    parser.add_argument("--csv", type=Path, help="[the one in results/]")
    options = parser.parse_args()
    commit = sweep.prepare()
    name, sides, columns = COMMANDS[options.command]
    for command, case, threads, pairs, flags in CASES:
        if command != options.command or case not in (options.cases or [case]):
            continue
        os.environ["OMP_NUM_THREADS"] = str(threads)
        rows = []
        for row in compare(sides, columns, flags, options.pairs or pairs):
            rows.append({"case": case, "threads": threads, **row, "commit": commit})
            print(*rows[-1].values(), flush=True)
        write(options.csv or sweep.RESULTS / name, rows)


if __name__ == "__main__":
    main()
