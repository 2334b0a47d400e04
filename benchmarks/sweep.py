"""Runs the experiments of benchmarks/README.md and collects them in benchmarks/results/.

    python benchmarks/sweep.py nine [--jobs 2] [--fresh]     # or another experiment, several, or all
    python benchmarks/sweep.py --list

Each run is a process of its own with one thread, with its folder under runs/sweep/. A sweep that is cut
off goes on where it was: what has ended is not run again. --fresh throws earlier runs away. For an
experiment X, results/X.csv has a row for each run and results/X_curves.csv one for each iteration.

The scripts run as they are. Beside their own metrics, a run records what the claims are about and no
script logs: the range of the log-ratios, the lengths of right and wrong answers, and, where asked for,
the share of the gradient that comes from tokens which PPO's clip would drop.
"""

import argparse
import csv
import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]

MORE = ["more.reinforce", "more.rloo", "more.vapo"]

CURVES = {  # column: key in metrics.jsonl
    "reward": "rollout/reward_mean",
    "accuracy": "rollout/accuracy",
    "held_out": "eval/accuracy",
    "generated": "generated",
    "len": "rollout/response_len_mean",
    "len_right": "len_right",
    "len_wrong": "len_wrong",
    "truncated": "rollout/truncated_frac",
    "direct": "rollout/direct_frac",
    "entropy": "losses/entropy",
    "clip_low": "losses/clipfrac_low",
    "clip_high": "losses/clipfrac_high",
    "log_ratio_up_max": "losses/log_ratio_up_max",
    "log_ratio_down_max": "losses/log_ratio_down_max",
    "log_ratio_p99": "losses/log_ratio_p99",
    "log_ratio_std": "losses/log_ratio_std",
    "mean_log_ratio_std": "losses/mean_log_ratio_std",
    "outside": "losses/outside",
    "outside_gradient": "losses/outside_gradient",
    "flips": "moe/expert_flip_frac",
    "shift": "moe/router_shift",
    "sampler_kl": "rollout/sampler_kl",
    "weight_zero": "rollout/weight_zero_frac",
    "weight_effective": "rollout/weight_effective_size",
    "grad_norm": "charts/grad_norm",
    "seconds": "seconds",
}


class Job(NamedTuple):
    experiment: str
    script: str
    variant: str
    seed: int
    flags: tuple  # of the script's command line, beside --seed and --run_dir

    @property
    def folder(self):
        return RUNS / self.experiment / f"{self.script}_{self.variant}_{self.seed}"

    @property
    def has_ended(self):
        return (self.folder / "result.json").exists()


# -------------------------------------------------------------------------------------- experiments

THREE = (1, 2, 3)  # seeds
FIVE = (1, 2, 3, 4, 5)
QUICK = ("--eval_every", "0", "--save_every", "0")
# The second regime: long answers, many experts, stale data. Of the papers' constants only gspo's range
# is not the scripts' default. dapo's punishment begins beyond the longest right answer.
LONG = """--model runs/long_addition/model --dataset runs/long_addition/problems.jsonl
--max_new_tokens 192 --num_held_out 128 --num_minibatches 16 --iterations 15""".split()
LONG_OWN = {
    "dapo": ("--overlong_cache", "16"),
    "gspo": ("--clip_eps_low", "3e-4", "--clip_eps_high", "4e-4"),
}
LONG_LR, LONG_HIGH_LR = "3e-4", "1e-3"  # with seed 1, grpo learns at the one and falls at the other
RAMBLING = "runs/rambling"  # a base model whose demonstrations ramble three times out of five
MADE = {  # what runs need: {folder: what makes it}
    RAMBLING: ["tiny_moe/train.py", "--direct", "0.1", "--worked", "0.3"],
    "runs/long_addition": ["benchmarks/long_addition.py"],
}


def steps_flags(steps):
    """Optimizer steps per rollout: up to 16 minibatches, then several passes."""
    passes = math.ceil(steps / 16)
    return ("--num_minibatches", str(steps // passes), "--update_epochs", str(passes))


def variants(name, script, seeds, options, *shared):
    """`options`: {variant: flags in one string}."""
    for variant, flags in options.items():
        for seed in seeds:
            yield Job(name, script, variant, seed, (*shared, *flags.split()))


def nine():
    for seed in FIVE:
        for script in SCRIPTS:
            every = "1" if script == "dapo" else "2"
            yield Job("nine", script, "default", seed, ("--eval_every", every, "--save_every", "0"))
        free = ("--kl_coef", "0", "--eval_every", "2", "--save_every", "0")
        yield Job("nine", "grpo", "free", seed, free)


def more():
    for seed in THREE:
        for script in MORE:
            yield Job("more", script, "default", seed, ("--eval_every", "2", "--save_every", "0"))


def one_step():
    shared = ("--num_minibatches", "1", "--eval_every", "5", "--save_every", "0")
    yield from variants("one_step", "grpo", THREE, {"one": "--kl_coef 0"}, *shared)
    for script in ("gspo", "gmpo", "rspo", "sapo", "dr_grpo", "cispo"):
        yield from variants("one_step", script, THREE, {"one": ""}, *shared)


def clip_higher():
    for steps in ("4", "16"):
        options = {}
        for high in ("0.2", "0.28", "0.5", "1.0"):
            options[f"steps{steps}-high{high}"] = f"--clip_eps_high {high}"
        yield from variants("clip_higher", "dapo", FIVE, options, "--num_minibatches", steps, *QUICK)


def clip_higher_narrow():
    """Where the clip binds: both bounds a tenth of the paper's, then the upper one higher."""
    shared = ("--iterations", "20", "--num_minibatches", "16", *QUICK)
    options = {}
    for high in ("0.02", "0.028", "0.1"):
        options[f"high{high}"] = f"--clip_eps_low 0.02 --clip_eps_high {high}"
    yield from variants("clip_higher_narrow", "dapo", FIVE, options, *shared)


def wrong_length():
    shared = ("--iterations", "40", "--max_new_tokens", "96", *QUICK)
    yield from variants("wrong_length", "grpo", FIVE, {"kl0": "--kl_coef 0"}, *shared)
    yield from variants("wrong_length", "dr_grpo", FIVE, {"default": ""}, *shared)


def dynamic_sampling():
    shared = ("--overlong", "none", "--save_every", "0")
    options = {
        "refill": "--iterations 36 --eval_every 1",
        "drop": "--iterations 60 --eval_every 2 --max_sampling_rounds 1",
    }
    yield from variants("dynamic_sampling", "dapo", FIVE, options, *shared)


def overlong():
    shared = ("--model", RAMBLING, "--eval_every", "2", "--save_every", "0")
    options = {name: f"--overlong {name}" for name in ("soft", "filter", "none")}
    yield from variants("overlong", "dapo", FIVE, options, *shared)


def gradient_share():
    for steps in ("4", "16"):
        shared = ("--iterations", "12", "--num_minibatches", steps, *QUICK)
        name = f"steps{steps}"
        yield from variants("gradient_share", "cispo", THREE, {name: ""}, *shared)
        yield from variants("gradient_share", "grpo", THREE, {name: "--kl_coef 0"}, *shared)


def stale_ratio():
    stale = ("--iterations", "20", "--lr", "1e-4", "--num_minibatches", "16", *QUICK)
    yield from variants("stale_ratio", "grpo", FIVE, {"stale": "--kl_coef 0"}, *stale)
    for script in ("gspo", "gmpo", "rspo", "cispo"):
        yield from variants("stale_ratio", script, FIVE, {"stale": ""}, *stale)
    for lr in ("3e-4", "1e-3"):  # to compare with the siblings' runs of the stability map
        flags = ("--iterations", "20", "--lr", lr, *steps_flags(16), *QUICK)
        yield from variants("stale_ratio", "grpo", THREE, {f"lr{lr}": "--kl_coef 0"}, *flags)


def router_shift():
    for lr in ("3e-4", "1e-3"):
        flags = ("--iterations", "20", "--lr", lr, *steps_flags(64), *QUICK)
        yield from variants("router_shift", "gmpo", FIVE, {f"lr{lr}": ""}, *flags)
        yield from variants("router_shift", "rspo", FIVE, {f"lr{lr}": ""}, *flags)


def sapo_taus():
    pairs = {
        "paper": (1.0, 1.05),
        "equal": (1.0, 1.0),
        "reversed": (1.05, 1.0),
        "strong": (1.0, 2.0),
        "strong-reversed": (2.0, 1.0),
    }
    for lr in ("3e-4", "1e-3"):
        flags = ("--iterations", "20", "--lr", lr, "--num_minibatches", "16", *QUICK)
        options = {}
        for name, (pos, neg) in pairs.items():
            options[f"{name}-lr{lr}"] = f"--tau_pos {pos} --tau_neg {neg}"
        yield from variants("sapo_taus", "sapo", FIVE, options, *flags)


def rollout_correction():
    """grpo with all five rules at 3e-4 and 16 steps; elsewhere token_tis, at 1e-3 also sequence_tis,
    and for grpo geo_mask."""
    rules = ("token_tis", "sequence_tis", "sequence_mis", "geo_mask", "icepop")
    options = {"same": "", "int8": "--rollout_dtype int8", "int4": "--rollout_dtype int4"}
    for rule in rules:
        options[f"int4-{rule}"] = f"--rollout_dtype int4 --rollout_correction {rule}"
    few = ("same", "int8", "int4", "int4-token_tis")
    at_1e3 = ("same", "int4", "int4-token_tis", "int4-sequence_tis")
    grpo_at_1e3 = (*at_1e3, "int4-geo_mask")
    for script in ("grpo", "gspo", "cispo", "gmpo"):
        own = ("--kl_coef", "0") if script == "grpo" else ()
        regimes = [  # prefix, learning rate, steps, variants
            ("", "3e-4", "16", options if script == "grpo" else few),
            ("steps4-", "3e-4", "4", few),
            ("lr1e-3-", "1e-3", "16", grpo_at_1e3 if script == "grpo" else at_1e3),
        ]
        for prefix, lr, steps, names in regimes:
            flags = (*own, "--iterations", "20", "--lr", lr, "--num_minibatches", steps, *QUICK)
            chosen = {prefix + name: options[name] for name in names}
            yield from variants("rollout_correction", script, FIVE, chosen, *flags)


def routing_replay():
    """Whose experts: its own (none), the old policy's (r2), the sampler's (r3, with a mismatch). Two of
    grpo's variants with 16 steps are runs of rollout_correction: same and int4."""
    options = {
        "none": "",
        "r2": "--routing_replay r2",
        "int4": "--rollout_dtype int4",
        "int4-r2": "--rollout_dtype int4 --routing_replay r2",
        "int4-r3": "--rollout_dtype int4 --routing_replay r3",
    }
    for steps, iterations in ((16, "20"), (64, "10")):
        flags = ("--iterations", iterations, "--lr", "3e-4", *steps_flags(steps), *QUICK)
        of_grpo = {f"steps{steps}-{name}": text for name, text in options.items()}
        if steps == 16:
            del of_grpo["steps16-none"], of_grpo["steps16-int4"]
        yield from variants("routing_replay", "grpo", FIVE, of_grpo, "--kl_coef", "0", *flags)
        of_rspo = {f"steps{steps}-{name}": options[name] for name in ("none", "int4")}
        yield from variants("routing_replay", "rspo", FIVE, of_rspo, *flags)


def stability():
    for lr, steps, script in itertools.product(("1e-4", "3e-4", "1e-3"), (1, 4, 16), SCRIPTS):
        flags = ("--iterations", "20", "--lr", lr, *steps_flags(steps), *QUICK)
        for seed in THREE:
            yield Job("stability", script, f"lr{lr}-steps{steps}", seed, flags)


def long_job(name, script, seed, lr, variant, *more):
    flags = (*LONG, *LONG_OWN.get(script, ()), "--lr", lr, *QUICK, *more)
    return Job(name, script, variant, seed, flags)


def long_nine():
    for seed, script in itertools.product(FIVE, SCRIPTS):
        yield long_job("long_nine", script, seed, LONG_LR, "lower")


def long_high():
    for seed, script in itertools.product(THREE, SCRIPTS):
        yield long_job("long_high", script, seed, LONG_HIGH_LR, "higher")
    for seed in THREE:  # grpo is the only one of the eight children with a KL in its loss
        yield long_job("long_high", "grpo", seed, LONG_HIGH_LR, "free", "--kl_coef", "0")


def long_claims():
    """What is compared with the runs of long_nine."""
    options = [
        ("dapo", "high0.2", "--clip_eps_high 0.2"),
        ("sapo", "equal", "--tau_pos 1.0 --tau_neg 1.0"),
        ("sapo", "reversed", "--tau_pos 1.05 --tau_neg 1.0"),
        ("grpo", "free", "--kl_coef 0"),
        ("grpo", "r2", "--kl_coef 0 --routing_replay r2"),
        ("gspo", "r2", "--routing_replay r2"),
    ]
    for seed, (script, variant, flags) in itertools.product(FIVE, options):
        yield long_job("long_claims", script, seed, LONG_LR, variant, *flags.split())


def experiments():
    """{name: function that yields its jobs}."""
    functions = [
        nine,
        more,
        one_step,
        clip_higher,
        clip_higher_narrow,
        wrong_length,
        dynamic_sampling,
        overlong,
        gradient_share,
        stale_ratio,
        router_shift,
        sapo_taus,
        rollout_correction,
        routing_replay,
        stability,
        long_nine,
        long_high,
        long_claims,
    ]
    return {function.__name__: function for function in functions}


# ---------------------------------------------------------------------------------------------- run


def prepare(threads=1):
    """The environment of all runs, to be called before anything imports torch. Returns the commit."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def make_what_is_needed(jobs):
    """The base models and problems that the runs name and that are not there yet."""
    for folder, command in MADE.items():
        is_named = any(flag.startswith(folder) for job in jobs for flag in job.flags)
        if is_named and not Path(folder).exists():
            scratch = f"{folder}.tmp"
            subprocess.run([sys.executable, *command, scratch], check=True)
            Path(scratch).rename(folder)


def probe(policy_loss, gradient_of=None):
    """The same policy_loss with more stats; `gradient_of`: a list with the policy whose gradient is
    taken apart."""
    import torch

    def gradient_norm(slope_BT, logprobs_BT):
        """Of the gradient in the weights that this slope of the loss in the log-probs makes."""
        parameters = list(gradient_of[0].parameters())
        total = (slope_BT * logprobs_BT).sum()
        gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return sum((g**2).sum() for g in gradients if g is not None).sqrt()

    def wrapper(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords):
        loss, stats = policy_loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords)
        mask_BT = mask_BT.bool()
        if not mask_BT.any():
            return loss, stats
        logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).detach()
        is_far_BT = (logratio_BT.exp() - 1).abs() > 0.2
        outside_BT = is_far_BT & (advantages_BT.sign() * logratio_BT > 0)  # where PPO's clip binds
        stats["log_ratio_up_max"] = logratio_BT.max()
        stats["log_ratio_down_max"] = -logratio_BT.min()
        stats["log_ratio_p99"] = logratio_BT[mask_BT].abs().quantile(0.99)
        stats["log_ratio_std"] = logratio_BT[mask_BT].square().mean().sqrt()  # around 0, not their mean
        mean_B = logratio_BT.sum(1) / mask_BT.sum(1).clamp(min=1)  # gspo's ratio, its logarithm
        stats["mean_log_ratio_std"] = mean_B.square().mean().sqrt()
        stats["outside"] = outside_BT.sum() / mask_BT.sum()
        if gradient_of:
            (slope_BT,) = torch.autograd.grad(loss, logprobs_BT, retain_graph=True)
            outside_norm = gradient_norm(torch.where(outside_BT, slope_BT, 0), logprobs_BT)
            norm = gradient_norm(slope_BT, logprobs_BT)
            stats["outside_gradient"] = outside_norm / norm.clamp(min=1e-12)
        return loss, stats

    return wrapper


def mean_lengths(completions):
    """{"len_right": ..., "len_wrong": ...}: of right answers, if there are any, and of all others."""
    lengths = {"len_right": [], "len_wrong": []}
    for completion in completions:
        name = "len_right" if completion.why == "correct" else "len_wrong"
        lengths[name].append(len(completion.ids))
    return {name: sum(values) / len(values) for name, values in lengths.items() if values}


def watch(script, takes_gradient_apart):
    """Makes a script record more than it logs. Returns a dict that holds its held-out results when it
    has ended."""
    from plumbing import Run

    held_out = {}
    policies = []
    real_metrics = script.iteration_metrics
    real_load = script.load_policy
    real_finish = Run.finish

    def iteration_metrics(meter, completions, rewards, args):
        metrics = real_metrics(meter, completions, rewards, args)
        return {**metrics, **mean_lengths(completions), "generated": len(completions)}

    def load_policy(args):
        policies.append(real_load(args))
        return policies[-1]

    def finish(self):
        for when, results in (("before", self.before), ("after", self.after)):
            held_out[f"{when}_greedy_accuracy"] = results["greedy"]["accuracy"]
            for key in ("accuracy", "direct_frac", "response_len_mean"):
                held_out[f"{when}_sampled_{key.split('_')[0]}"] = results["sampled"][key]
        real_finish(self)

    script.iteration_metrics = iteration_metrics
    script.load_policy = load_policy
    script.policy_loss = probe(script.policy_loss, policies if takes_gradient_apart else None)
    Run.finish = finish
    return held_out


def code_hash(script):
    """Of what a run consists of: the script, common.py and plumbing/."""
    digest = hashlib.sha256()
    for path in [
        ROOT / f"{script.replace('.', '/')}.py",
        ROOT / "common.py",
        *sorted((ROOT / "plumbing").glob("*.py")),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run(job, commit):
    """In a process of its own: one run of a script, its output in the folder's log."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    from plumbing.args import UserError, parse_args

    script = importlib.import_module(job.script)
    run_dir = job.folder / "run"
    sys.argv = [script.__file__, "--seed", str(job.seed), "--run_dir", str(run_dir), *job.flags]
    held_out = watch(script, takes_gradient_apart=job.experiment == "gradient_share")
    ended = ""
    try:
        script.main(parse_args(script.Args))
    except UserError as error:  # a number that is not finite is a result
        traceback.print_exc()
        message = " ".join(str(error).split())
        ended = f"{job.script}.py: error: {message}".replace(f"{ROOT}/", "")
    for folder in run_dir.glob("checkpoint-*"):
        shutil.rmtree(folder)
    scratch = job.folder / "result.tmp"
    row = {**held_out, "ended": ended, "commit": commit, "code": code_hash(job.script)}
    scratch.write_text(json.dumps(row))
    scratch.rename(job.folder / "result.json")


def run_all(name, jobs, num_processes, commit):
    """Runs what has not ended yet, several at a time."""
    context = multiprocessing.get_context("fork")
    todo = [job for job in jobs if not job.has_ended]
    running = []  # (process, job)
    done = 0
    start = time.time()
    while todo or running:
        for pair in list(running):
            process, job = pair
            if process.is_alive():
                continue
            running.remove(pair)
            done += 1
            minutes = (time.time() - start) / 60
            left = len(todo) + len(running)
            failed = "" if job.has_ended else f" FAILED, see {job.folder}/log"
            print(f"{minutes:5.1f} min {name} {done}, left {left}: {job[1:4]}{failed}", flush=True)
        while todo and len(running) < num_processes:
            job = todo.pop(0)
            process = context.Process(target=run, args=(job, commit))
            process.start()
            running.append((process, job))
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------ collect


def short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def read_metrics(job):
    """Its lines of metrics.jsonl, with the seconds of each iteration."""
    path = job.folder / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["seconds"] = line["charts/rollout_seconds"] + line["charts/update_seconds"]
    return lines


def summary(job, lines):
    """What a run's row has beside the result: {column: value}."""
    ratio_errors = [line["losses/first_step_ratio_error_max"] for line in lines]
    explained = [line.get("losses/explained_variance") for line in lines[-10:]]
    has_critic = bool(explained) and explained[0] is not None
    return {
        "explained_variance_last10": sum(explained) / len(explained) if has_critic else "",
        "first_step_ratio_error_max": max(ratio_errors, default=""),
        "generated": sum(line["generated"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "flags": " ".join(job.flags),
    }


def write_csv(path, rows):
    """A column that is empty everywhere is left out, but for `ended`."""
    names = {}  # in order
    for row in rows:
        names.update(row)
    columns = []
    for column in names:
        if column == "ended" or any(row.get(column, "") != "" for row in rows):
            columns.append(column)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({column: short(value) for column, value in row.items()})


def collect(name, jobs):
    """The two CSVs of an experiment, from the runs that have ended."""
    rows = []
    curves = []
    for job in jobs:
        if not job.has_ended:
            continue
        result = json.loads((job.folder / "result.json").read_text())
        lines = read_metrics(job)
        key = {"script": job.script, "variant": job.variant, "seed": job.seed}
        rows.append({**key, **result, **summary(job, lines)})
        for line in lines:
            values = {column: short(line.get(source, "")) for column, source in CURVES.items()}
            curves.append({**key, "iteration": line["iteration"], **values})
    write_csv(RESULTS / f"{name}.csv", rows)
    write_csv(RESULTS / f"{name}_curves.csv", curves)


def print_list(known):
    for name, function in known.items():
        jobs = list(function())
        print(f"{name:22}{sum(job.has_ended for job in jobs)} of {len(jobs)} runs")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="throw earlier runs away")
    parser.add_argument(
        "--list", action="store_true", help="print the experiments and what has been run"
    )
    args = parser.parse_args()
    known = experiments()
    names = list(known) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.list:
        print_list(known)
        return
    commit = prepare()
    for name in names:
        if args.fresh:
            shutil.rmtree(RUNS / name, ignore_errors=True)
        jobs = list(known[name]())
        make_what_is_needed(jobs)
        run_all(name, jobs, args.jobs, commit)
        collect(name, jobs)


if __name__ == "__main__":
    main()
