"""Times an iteration of grpo.py against TRL's GRPOTrainer, and the sampler against generate().

    python benchmarks/speed.py trl        # results/trl_speed.csv
    python benchmarks/speed.py sampler    # results/sampler.csv

Each side is a separate process that waits while the other one works. The first pair of turns is warm-up
and is not counted.

trl       Both sides have the same weights, tokenizer, prompts and reward function, and one thread: 32
prompts x 8 completions of at most 48 tokens from the full distribution at temperature 1; then four
optimizer steps of AdamW, clip range 0.2, KL 0.04 to a reference, sequence-mean; in float32. TRL samples
with transformers' generate(). In the case `fixed` the learning rate is 1e-9, so that the lengths of
both sides come from the same distribution; in `learning` it is that of grpo.py.

sampler   The rollout of the default job, from its base model: common.sample() against generate().
"""

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

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
    """A side's turns: it waits, works, and reports the seconds of its sampling and its tokens."""

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

    def timed(self, sample, count):
        """`sample`, whose seconds and tokens are added; `count` finds the tokens in its result."""

        def timed_sample(*args, **kwargs):
            start = time.perf_counter()
            result = sample(*args, **kwargs)
            self.sampling += time.perf_counter() - start
            self.tokens += count(result)
            return result

        return timed_sample


def count_ids(completions):
    return sum(len(c.ids) for c in completions)


def parsed(flags):
    """The flags as grpo.py would parse them."""
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
    real_log = Run.log

    def log(run, *args):
        real_log(run, *args)
        turns.done()

    grpo.sample = turns.timed(grpo.sample, count_ids)
    Run.log = log
    with tempfile.TemporaryDirectory() as folder:
        quiet = f"--eval_every 0 --save_every 0 --iterations {iterations} --run_dir {folder}"
        args = parsed(f"{flags} {quiet}")
        turns.wait()
        grpo.main(args)


def trl(flags, iterations, turns):
    args, policy, rollouts = load(flags, iterations)
    problems = [problem for rollout in rollouts for problem in rollout]
    # TRL gets the prompts as text, and has to read the same tokens in them.
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


def make_trainer(model, tokenizer, problems, reward, args, turns, folder, iterations):
    """TRL's GRPOTrainer with the job of grpo.py's `args`; it reports after each iteration."""
    import datasets  # here, so that it is not in grpo.py's peak
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    steps = args.num_minibatches

    class Wait(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                turns.done()

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=args.device == "cpu",
        seed=args.seed,
        per_device_train_batch_size=args.prompts_per_iteration * args.group_size // steps,
        gradient_accumulation_steps=1,
        steps_per_generation=steps,
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
        router_aux_loss_coef=args.router_aux_coef,
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
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Wait()],
    )
    generate = trainer._generate_single_turn
    trainer._generate_single_turn = turns.timed(generate, lambda result: sum(map(len, result[0])))
    return trainer


# -------------------------------------------------------------------------------------- the sampler


def sampler(flags, iterations, turns):
    args, policy, rollouts = load(flags, iterations)
    sample = turns.timed(common.sample, count_ids)
    turns.wait()
    for problems in rollouts:
        sample(policy, problems, args.group_size, args)
        turns.done()


def generate(flags, iterations, turns):
    """The same by transformers. Counts the tokens up to the first EOS: the rest is padding."""
    args, policy, rollouts = load(flags, iterations)
    ends = end_ids(policy.model, policy.tokenizer)
    sampling = dict(do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0)
    turns.wait()
    for problems in rollouts:
        prompts = [problem.prompt for problem in problems]
        inputs = policy.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        output = policy.model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            num_return_sequences=args.group_size,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=ends,
            **sampling,
        )
        is_end = torch.isin(output[:, inputs.input_ids.shape[1] :], torch.tensor(ends))
        is_after = is_end.cumsum(1) - is_end.int() > 0
        turns.tokens = (~is_after).sum().item()
        turns.done()


# ------------------------------------------------------------------------------------------ in turns

CASES = {  # command: the CSV, the two sides, pairs, {case: flags of grpo.py}
    "trl": ("trl_speed", (ours, trl), 21, {"fixed": "--lr 1e-9", "learning": "--lr 2e-4"}),
    "sampler": ("sampler", (sampler, generate), 40, {"default": ""}),
}


def worker(side, *inputs):
    with open(os.devnull, "w") as sys.stdout:  # hides what the trainers print
        side(*inputs)


def compare(sides, flags, pairs):
    """Yields a row for each pair after the warm-up: {column of a side: number}."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for side in sides:
        pipe, its_end = context.Pipe()
        inputs = (side, flags, pairs + 1, Turns(its_end))
        context.Process(target=worker, args=inputs, daemon=True).start()
        its_end.close()
        pipes[side.__name__] = pipe
    for pair in range(pairs + 1):
        row = {"pair": pair}
        names = list(pipes)
        if pair % 2 == 0:  # the sides take turns in going first
            names.reverse()
        for name in names:
            start = time.perf_counter()
            pipes[name].send("go")
            report = pipes[name].recv()
            report["seconds"] = time.perf_counter() - start
            report["tokens_per_second"] = report["tokens"] / report["seconds"]
            row |= {f"{name}_{key}": round(value, 4) for key, value in report.items()}
        if pair > 0:
            yield row
    for pipe in pipes.values():
        pipe.send("stop")
    for process in multiprocessing.active_children():
        process.join()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=CASES)
    commit = sweep.prepare()
    name, sides, pairs, cases = CASES[parser.parse_args().command]
    rows = []
    made_of = {"commit": commit, "code": sweep.code_hash("grpo")}
    for case, flags in cases.items():
        for row in compare(sides, flags, pairs):
            rows.append({"case": case, **row, **made_of})
            print(*rows[-1].values(), flush=True)
    sweep.write_csv(sweep.RESULTS / f"{name}.csv", rows)


if __name__ == "__main__":
    main()
