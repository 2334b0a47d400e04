"""Runs the experiments of benchmarks/README.md and collects them in benchmarks/results/.

    python benchmarks/sweep.py nine [--jobs 2] [--fresh]     # or another experiment, or several, or all
    python benchmarks/sweep.py --list

Each run is a process of its own with one thread, with its folder under runs/sweep/. A sweep that is cut off
goes on where it was: what has ended is not run again. --fresh throws earlier runs away. For an experiment X,
results/X.csv has a row for each run and results/X_curves.csv one for each iteration.

The scripts run as they are. Beside their own metrics, a run records what the claims are about and no script
logs: the range of the log-ratios, the lengths of right and wrong answers, and, where asked for, the share of
the gradient that comes from tokens which PPO's clip would drop.
"""

import argparse
import csv
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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]

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
    "uniform": "rollout/frac_zero_std_groups",
    "entropy": "losses/entropy",
    "clip_low": "losses/clipfrac_low",
    "clip_high": "losses/clipfrac_high",
    "ratio_max": "losses/ratio_max",
    "log_ratio_up_max": "losses/log_ratio_up_max",
    "log_ratio_down_max": "losses/log_ratio_down_max",
    "log_ratio_p99": "losses/log_ratio_p99",
    "outside": "losses/outside",
    "outside_gradient": "losses/outside_gradient",
    "flips": "moe/expert_flip_frac",
    "shift": "moe/router_shift",
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


def steps_flags(steps):
    """Optimizer steps per rollout: up to 16 minibatches, then several passes."""
    passes = math.ceil(steps / 16)
    return ("--num_minibatches", str(steps // passes), "--update_epochs", str(passes))


RAMBLING = "the base model that rambles"  # a word that a run replaces by its folder
QUICK = ("--eval_every", "0", "--save_every", "0")
# Ranges at which the clip binds on the same share of tokens: see calibrate.py.
CALIBRATED = RESULTS / "calibrate.csv"


def calibrated():
    """{script: flags} from results/calibrate.csv."""
    with open(CALIBRATED) as file:
        return {row["script"]: tuple(row["flags"].split()) for row in csv.DictReader(file) if row["chosen"]}


def stability(name, ranges):
    for lr, steps, script in itertools.product(("1e-4", "3e-4", "1e-3"), (1, 4, 16), SCRIPTS):
        if ranges is not None and (steps == 1 or lr == "1e-4" or script not in ranges):
            continue  # nothing is clipped at the first step, and little at a low learning rate
        more = () if ranges is None else ranges[script]
        flags = ("--iterations", "20", "--lr", lr, *steps_flags(steps), *more, *QUICK)
        for seed in (1, 2, 3):
            yield Job(name, script, f"lr{lr}-steps{steps}", seed, flags)


def variants(name, script, seeds, options, *shared):
    """`options`: {variant: flags in one string}."""
    for variant, flags in options.items():
        for seed in seeds:
            yield Job(name, script, variant, seed, (*shared, *flags.split()))


def experiments():
    """{name: function that yields its jobs}."""
    seeds, five = (1, 2, 3), (1, 2, 3, 4, 5)
    stale = ("--lr", "1e-4", "--num_minibatches", "16", *QUICK)

    def nine():
        for seed in five:
            for script in SCRIPTS:
                every = "1" if script == "dapo" else "2"
                yield Job("nine", script, "default", seed, ("--eval_every", every, "--save_every", "0"))

    def one_step():
        flags = {name: "" for name in ("gspo", "gmpo", "rspo", "sapo", "dr_grpo", "cispo")}
        for script, own in ({"grpo": "--kl_coef 0"} | flags).items():
            common = ("--num_minibatches", "1", "--eval_every", "5", "--save_every", "0")
            yield from variants("one_step", script, seeds, {"one": own}, *common)

    def clip_higher():
        options = {high: f"--clip_eps_high {high}" for high in ("0.2", "0.28", "0.5", "1.0")}
        for steps in ("4", "16"):
            named = {f"steps{steps}-high{high}": flags for high, flags in options.items()}
            yield from variants("clip_higher", "dapo", five, named, "--num_minibatches", steps, *QUICK)

    def clip_higher_narrow():  # where the clip binds: both bounds a tenth of the paper's, then higher
        options = {high: f"--clip_eps_low 0.02 --clip_eps_high {high}" for high in ("0.02", "0.028", "0.1")}
        common = ("--iterations", "20", "--num_minibatches", "16", *QUICK)
        named = {f"high{high}": flags for high, flags in options.items()}
        yield from variants("clip_higher_narrow", "dapo", five, named, *common)

    def wrong_length():
        common = ("--iterations", "40", "--max_new_tokens", "96", *QUICK)
        options = {"kl0": "--kl_coef 0"}
        yield from variants("wrong_length", "grpo", five, options, *common)
        yield from variants("wrong_length", "dr_grpo", five, {"default": ""}, *common)

    def dynamic_sampling():
        common = ("--overlong", "none", "--save_every", "0")
        options = {
            "refill": "--iterations 36 --eval_every 1",
            "drop": "--iterations 60 --eval_every 2 --max_sampling_rounds 1",
        }
        yield from variants("dynamic_sampling", "dapo", five, options, *common)

    def overlong():
        options = {name: f"--overlong {name}" for name in ("soft", "filter", "none")}
        common = ("--model", RAMBLING, "--eval_every", "2", "--save_every", "0")
        yield from variants("overlong", "dapo", five, options, *common)

    def gradient_share():
        for steps in ("4", "16"):
            common = ("--iterations", "12", "--num_minibatches", steps, *QUICK)
            yield from variants("gradient_share", "cispo", seeds, {f"steps{steps}": ""}, *common)
            options = {f"steps{steps}": "--kl_coef 0"}
            yield from variants("gradient_share", "grpo", seeds, options, *common)

    def stale_ratio():
        for script, own in {"grpo": "--kl_coef 0", "gspo": "", "gmpo": "", "rspo": "", "cispo": ""}.items():
            yield from variants("stale_ratio", script, five, {"stale": own}, "--iterations", "20", *stale)
        for lr in ("3e-4", "1e-3"):  # to compare with the siblings' runs of the stability map
            flags = ("--iterations", "20", "--lr", lr, *steps_flags(16), *QUICK)
            yield from variants("stale_ratio", "grpo", seeds, {f"lr{lr}": "--kl_coef 0"}, *flags)

    def router_shift():
        for lr in ("3e-4", "1e-3"):
            flags = ("--iterations", "20", "--lr", lr, *steps_flags(64), *QUICK)
            yield from variants("router_shift", "gmpo", five, {f"lr{lr}": ""}, *flags)
            yield from variants("router_shift", "rspo", five, {f"lr{lr}": ""}, *flags)

    def sapo_taus():
        pairs = {"paper": (1.0, 1.05), "equal": (1.0, 1.0), "reversed": (1.05, 1.0)}
        pairs |= {"strong": (1.0, 2.0), "strong-reversed": (2.0, 1.0)}
        options = {name: f"--tau_pos {pos} --tau_neg {neg}" for name, (pos, neg) in pairs.items()}
        for lr in ("3e-4", "1e-3"):
            flags = ("--iterations", "20", "--lr", lr, "--num_minibatches", "16", *QUICK)
            named = {f"{name}-lr{lr}": own for name, own in options.items()}
            yield from variants("sapo_taus", "sapo", five, named, *flags)

    def ranges():
        paper = {"paper": "--clip_eps_low 3e-4 --clip_eps_high 4e-4", "own": ""}
        yield from variants("ranges", "gspo", seeds, paper, "--iterations", "10", *QUICK)
        yield from variants("ranges", "ppo", seeds, {"slow-critic": "--critic_lr 2e-4"}, *QUICK)

    named = [
        nine,
        one_step,
        clip_higher,
        clip_higher_narrow,
        wrong_length,
        dynamic_sampling,
        overlong,
        gradient_share,
    ]
    named += [stale_ratio, router_shift, sapo_taus, ranges]
    return {function.__name__: function for function in named} | {
        "stability": lambda: stability("stability", None),
        "stability_calibrated": lambda: stability("stability_calibrated", calibrated()),
    }


def rambling_base():
    """Folder of a base model whose demonstrations ramble three times out of five."""
    import tasks

    before = dict(tasks.WARM_START)
    tasks.WARM_START.update(direct=0.1, worked=0.3)
    try:
        return str(tasks.base_model(1200))
    finally:
        tasks.WARM_START.update(before)


def probe(policy_loss, gradient_of=None):
    """The same policy_loss with more stats; `gradient_of`: the model whose gradient is taken apart."""
    import torch

    def wrapper(logprobs, old, advantages, mask, *args, **keywords):
        loss, stats = policy_loss(logprobs, old, advantages, mask, *args, **keywords)
        mask = mask.bool()
        logratio = torch.where(mask, logprobs - old, 0).detach()
        if not mask.any():
            return loss, stats
        signs = advantages.sign() if advantages.dim() == 2 else advantages.sign()[:, None]
        outside = (signs * logratio > 0) & ((logratio.exp() - 1).abs() > 0.2)  # where PPO's clip binds
        stats["log_ratio_up_max"], stats["log_ratio_down_max"] = logratio.max(), -logratio.min()
        stats["log_ratio_p99"] = logratio[mask].abs().quantile(0.99)
        stats["outside"] = outside.sum() / mask.sum()
        if gradient_of:
            (slope,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            norms = []
            for part in (torch.where(outside, slope, 0), slope):
                parameters = list(gradient_of[0].parameters())
                gradient = torch.autograd.grad(
                    (part * logprobs).sum(), parameters, retain_graph=True, allow_unused=True
                )
                norms.append(sum((g**2).sum() for g in gradient if g is not None).sqrt())
            stats["outside_gradient"] = norms[0] / norms[1].clamp(min=1e-12)
        return loss, stats

    return wrapper


def run(job, commit):
    """In a process of its own: one run of a script, its output in the folder's log."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    import common

    script = importlib.import_module(job.script)
    flags = [rambling_base() if word == RAMBLING else word for word in job.flags]
    words = ["--seed", str(job.seed), "--run_dir", str(job.folder / "run"), *flags]
    sys.argv = [f"{job.script}.py", *words]
    ended, result, models = "", {}, []
    real_log, real_load, real_finish = common.Run.log, script.load_model, common.Run.finish

    def logged(self, iteration, metrics, problems, completions, verdicts):
        lengths = {True: [], False: []}
        for completion, (_, why) in zip(completions, verdicts, strict=True):
            lengths[why == "correct"].append(len(completion.ids))
        for name, right in (("len_right", True), ("len_wrong", False)):
            if lengths[right]:
                metrics[name] = sum(lengths[right]) / len(lengths[right])
        metrics["generated"] = len(completions)
        metrics["seconds"] = metrics["charts/rollout_seconds"] + metrics["charts/update_seconds"]
        real_log(self, iteration, metrics, problems, completions, verdicts)

    def load(args):
        model, tokenizer = real_load(args)
        models.append(model)
        return model, tokenizer

    def finish(self, before, after):
        for when, both in (("before", before), ("after", after)):
            for how in ("greedy", "sampled"):
                for key in ("accuracy", "direct_frac", "response_len_mean", "truncated_frac"):
                    result[f"{when}_{how}_{key.split('_')[0]}"] = both[how][key]
        real_finish(self, before, after)

    common.Run.log, common.Run.finish, script.load_model = logged, finish, load
    script.policy_loss = probe(script.policy_loss, models if job.experiment == "gradient_share" else None)
    try:
        script.main(common.parse_args(script.Args))
    except SystemExit:
        ended = (job.folder / "log").read_text().splitlines()[-1].replace(str(ROOT) + "/", "")
    for folder in (job.folder / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    result |= {"ended": ended, "commit": commit}
    (job.folder / "result.tmp").write_text(json.dumps(result))
    (job.folder / "result.tmp").rename(job.folder / "result.json")


def short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def collect(name, jobs):
    """The two CSVs of an experiment, from the runs that have ended."""
    rows, curves = [], []
    for job in jobs:
        if not (job.folder / "result.json").exists():
            continue
        result = json.loads((job.folder / "result.json").read_text())
        path = job.folder / "run" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        key = {"script": job.script, "variant": job.variant, "seed": job.seed}
        generated = sum(line["generated"] for line in lines)
        seconds = round(sum(line["seconds"] for line in lines), 1)
        ratio_error = max((line["losses/first_step_ratio_error_max"] for line in lines), default="")
        explained = [line.get("losses/explained_variance") for line in lines[-10:]]
        explained = sum(explained) / len(explained) if explained and explained[0] is not None else ""
        more = {"explained_variance_last10": explained, "first_step_ratio_error_max": ratio_error}
        row = key | result | more | {"generated": generated, "seconds": seconds, "flags": " ".join(job.flags)}
        rows.append(row)
        for line in lines:
            values = {column: short(line.get(source, "")) for column, source in CURVES.items()}
            curves.append(key | {"iteration": line["iteration"]} | values)
    for suffix, table in (("", rows), ("_curves", curves)):
        columns = list(dict.fromkeys(key for row in table for key in row))
        columns = [c for c in columns if any(row.get(c, "") != "" for row in table) or c == "ended"]
        with open(RESULTS / f"{name}{suffix}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows({c: short(v) for c, v in row.items()} for row in table)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="throw earlier runs away")
    parser.add_argument("--list", action="store_true", help="print the experiments and what has been run")
    args = parser.parse_args()
    known = experiments()
    names = list(known) if args.names == ["all"] else args.names
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.list:
        for name, jobs in known.items():
            if name != "stability_calibrated" or CALIBRATED.exists():
                jobs = list(jobs())
                print(
                    f"{name:22}{sum((j.folder / 'result.json').exists() for j in jobs)} of {len(jobs)} runs"
                )
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import tasks

    tasks.base_model(1200)  # once, before there are several processes
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    context = multiprocessing.get_context("fork")
    for name in names:
        jobs = list(known[name]())
        if args.fresh:
            shutil.rmtree(RUNS / name, ignore_errors=True)
        todo = [job for job in jobs if not (job.folder / "result.json").exists()]
        running, done, start = [], 0, time.time()
        while todo or running:
            for process, job in [pair for pair in running if not pair[0].is_alive()]:
                running.remove((process, job))
                done += 1
                minutes = (time.time() - start) / 60
                failed = "" if (job.folder / "result.json").exists() else f" FAILED, see {job.folder}/log"
                print(
                    f"{minutes:5.1f} min {name} {done}, left {len(todo) + len(running)}: {job[1:4]}{failed}"
                )
                sys.stdout.flush()
            while todo and len(running) < args.jobs:
                job = todo.pop(0)
                process = context.Process(target=run, args=(job, commit))
                process.start()
                running.append((process, job))
            time.sleep(0.05)
        collect(name, jobs)


if __name__ == "__main__":
    main()
