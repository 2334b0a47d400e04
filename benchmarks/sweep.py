"""Runs the experiments of experiments.py and collects them in results/.

    python benchmarks/sweep.py nine [--jobs 2] [--fresh]     # or another experiment, several, or all
    python benchmarks/sweep.py --list

Each run is a process of its own with one thread, with its folder under runs/sweep/. A sweep that is
cut off goes on where it was: what has ended here, or has a row in results/, is not run again (--fresh
throws both away). For an experiment X, results/X.csv has a row for each run, results/X_curves.csv one
for each iteration.

The scripts run as they are. Beside their own metrics, a run records what the claims are about and no
script logs: log-ratios and, where asked for, the share of the gradient that comes from tokens which
PPO's clip would drop.
"""

import argparse
import csv
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from experiments import EXPERIMENTS, MADE

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
RESULTS = ROOT / "benchmarks" / "results"

CURVES = {  # column: key in metrics.jsonl
    "reward": "rollout/reward_mean",
    "accuracy": "rollout/accuracy",
    "held_out": "eval/accuracy",
    "generated": "generated",
    "len": "rollout/response_len_mean",
    "len_right": "rollout/response_len_right",
    "len_wrong": "rollout/response_len_wrong",
    "truncated": "rollout/truncated_frac",
    "direct": "rollout/direct_frac",
    "entropy": "losses/entropy",
    "clip_low": "losses/clipfrac_low",
    "clip_high": "losses/clipfrac_high",
    "log_ratio_p99": "losses/log_ratio_p99",
    "outside": "losses/outside",
    "outside_gradient": "losses/outside_gradient",
    "matched_gradient": "losses/matched_gradient",
    "flips": "moe/expert_flip_frac",
    "sampler_kl": "rollout/sampler_kl",
    "weight_zero": "rollout/weight_zero_frac",
    "weight_effective": "rollout/weight_effective_size",
}


class Job(NamedTuple):
    experiment: str
    script: str
    variant: str
    seed: int
    flags: str  # of the script's command line, beside --seed and --run_dir

    @property
    def folder(self):
        return RUNS / self.experiment / f"{self.script}_{self.variant}_{self.seed}"

    def result(self):
        """What is left of the run if it has ended, with these flags; else None."""
        path = self.folder / "result.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return found if found.get("flags") == self.flags else None


def merged(*texts):
    """One text of flags; of two values of the same flag the later one."""
    flags = {}
    for text in texts:
        for part in f" {text}".split(" --")[1:]:
            name, _, value = part.strip().partition(" ")
            flags[name] = value.strip()
    return " ".join(f"--{name} {value}".strip() for name, value in flags.items())


def jobs_of(name):
    """Seed by seed, so that a sweep that is cut off leaves whole comparisons."""
    experiment = EXPERIMENTS[name]
    jobs = []
    for seed in range(1, experiment.seeds + 1):
        for (script, variant), own in experiment.runs.items():
            jobs.append(Job(name, script, variant, seed, merged(experiment.flags, own)))
    return jobs


# ---------------------------------------------------------------------------------------------- run


def prepare():
    """The environment of all runs, before anything imports torch. Returns the commit."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    importlib.import_module("common")  # once, not in each process
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def make_what_is_needed(jobs):
    """The models and problems that the runs name and that are not there yet."""
    for path, command in MADE.items():
        is_named = any(path in job.flags for job in jobs)
        if is_named and not Path(path).exists():
            scratch = f"{path}.tmp"
            subprocess.run([sys.executable, *command.split(), scratch], check=True)
            Path(scratch).rename(path)


def code_hash(script):
    """Of what a run consists of: the script, common.py and plumbing/."""
    digest = hashlib.sha256()
    rooms = sorted((ROOT / "plumbing").glob("*.py"))
    for path in (ROOT / f"{script.replace('.', '/')}.py", ROOT / "common.py", *rooms):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def equally_improbable(outside_BT, old_logprobs_BT, advantages_BT, mask_BT):
    """For each token outside of PPO's range another one: inside, A of the same sign, and of those that
    are left the nearest in log-prob when it was sampled."""
    matched_BT = mask_BT & False
    for sign in (-1, 1):
        has_sign_BT = mask_BT & (advantages_BT.sign() == sign)
        inside = (has_sign_BT & ~outside_BT).nonzero().tolist()
        for row, column in (has_sign_BT & outside_BT).nonzero().tolist():
            if not inside:
                break
            logprob = old_logprobs_BT[row, column]
            nearest = min(inside, key=lambda place: abs(old_logprobs_BT[*place] - logprob))
            inside.remove(nearest)
            matched_BT[*nearest] = True
    return matched_BT


def probe(policy_loss, gradient_of=None, leaves_out_matched=False):
    """The same policy_loss with more stats. `gradient_of`: a list with the policy whose gradient is
    taken apart. `leaves_out_matched`: the loss has no gradient from as many tokens as PPO's clip would
    drop, equally improbable ones."""
    import torch

    def gradient_norm(slope_BT, logprobs_BT):
        """Of the gradient in the weights that this slope of the loss in the log-probs makes."""
        parameters = list(gradient_of[0].parameters())
        total = (slope_BT * logprobs_BT).sum()
        gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return sum((g**2).sum() for g in gradients if g is not None).sqrt()

    def wrapper(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords):
        mask_BT = mask_BT.bool()
        logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).detach()
        is_far_BT = (logratio_BT.exp() - 1).abs() > 0.2
        outside_BT = is_far_BT & (advantages_BT.sign() * logratio_BT > 0)  # where PPO's clip binds
        if gradient_of or leaves_out_matched:
            matched_BT = equally_improbable(outside_BT, old_logprobs_BT, advantages_BT, mask_BT)
        if leaves_out_matched:
            advantages_BT = torch.where(matched_BT, 0, advantages_BT)  # also where they were (B, 1)
        loss, stats = policy_loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords)
        if not mask_BT.any():
            return loss, stats
        stats["log_ratio_p99"] = logratio_BT[mask_BT].abs().quantile(0.99)
        stats["outside"] = outside_BT.sum() / mask_BT.sum()
        if gradient_of:
            (slope_BT,) = torch.autograd.grad(loss, logprobs_BT, retain_graph=True)
            norm = gradient_norm(slope_BT, logprobs_BT).clamp(min=1e-12)
            for name, chosen_BT in (("outside", outside_BT), ("matched", matched_BT)):
                part = gradient_norm(torch.where(chosen_BT, slope_BT, 0), logprobs_BT)
                stats[f"{name}_gradient"] = part / norm
        return loss, stats

    return wrapper


def watch(script, job):
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
        return {**metrics, "generated": len(completions)}

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
    script.policy_loss = probe(
        script.policy_loss,
        gradient_of=policies if job.experiment == "gradient_share" else None,
        leaves_out_matched=job.variant == "control",
    )
    Run.finish = finish
    return held_out


def run(job, made_of):
    """In a process of its own: one run of a script, its output in the folder's log. `made_of`: its
    commit and the hash of its code."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    from plumbing.args import UserError, parse_args

    script = importlib.import_module(job.script)
    run_dir = job.folder / "run"
    sys.argv = [script.__file__, "--seed", str(job.seed), "--run_dir", str(run_dir)]
    sys.argv += job.flags.split()
    held_out = watch(script, job)
    ended = ""
    try:
        script.main(parse_args(script.Args))
    except UserError as error:
        if "is not finite" not in str(error):
            raise
        traceback.print_exc()
        ended = f"{job.script}.py: error: {error}"  # this is a result, too
    for folder in run_dir.glob("checkpoint-*"):
        shutil.rmtree(folder)
    scratch = job.folder / "result.tmp"
    scratch.write_text(json.dumps({**held_out, "ended": ended, **made_of, "flags": job.flags}))
    scratch.rename(job.folder / "result.json")


def run_all(name, jobs, num_processes, commit):
    """Runs what has not ended yet, several at a time. Returns how many failed."""
    context = multiprocessing.get_context("fork")
    rows, _ = kept(name, jobs)
    todo = [job for job in jobs if job not in rows and not job.result()]
    made_of = {}
    for script in {job.script for job in todo}:
        importlib.import_module(script)  # what is run is what is hashed
        made_of[script] = {"commit": commit, "code": code_hash(script)}
    num_failed = 0
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
            failed = "" if job.result() else f" FAILED, see {job.folder}/log"
            num_failed += failed != ""
            print(f"{minutes:5.1f} min {name} {done}, left {left}: {job[1:4]}{failed}", flush=True)
        while todo and len(running) < num_processes:
            job = todo.pop(0)
            process = context.Process(target=run, args=(job, made_of[job.script]))
            process.start()
            running.append((process, job))
        time.sleep(0.05)
    return num_failed


# ------------------------------------------------------------------------------------------ collect


def read_metrics(job):
    """Its lines of metrics.jsonl, with the seconds of each iteration."""
    path = job.folder / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["seconds"] = line["charts/rollout_seconds"] + line["charts/update_seconds"]
    return lines


def summary(lines):
    """What a run's row has beside the result: {column: value}."""
    return {
        "generated": sum(line["generated"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines), 1),
    }


def read_csv(name):
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def kept(name, jobs):
    """({job: row}, {job: rows of its curve}) of the CSVs, where flags are those of today."""
    by_key = {(job.script, job.variant, str(job.seed)): job for job in jobs}
    rows = {}
    for row in read_csv(name):
        job = by_key.get((row["script"], row["variant"], row["seed"]))
        if job and job.flags == row["flags"]:
            rows[job] = row
    curves = {job: [] for job in rows}
    for row in read_csv(f"{name}_curves"):
        job = by_key.get((row["script"], row["variant"], row["seed"]))
        if job in rows:
            curves[job].append(row)
    return rows, curves


def write_csv(path, rows):
    """A column that is empty everywhere is left out, but for `ended`."""
    names = {}  # in order
    for row in rows:
        names.update(row)
    columns = []
    for column in names:
        if column == "ended" or any(row.get(column, "") != "" for row in rows):
            columns.append(column)
    scratch = path.with_suffix(".tmp")
    with open(scratch, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(short)
    scratch.rename(path)


def collect(name, jobs):
    """The two CSVs of an experiment: the runs that have ended here, and the rows of earlier ones."""
    rows, curves = kept(name, jobs)
    for job in jobs:
        result = job.result()
        if not result:
            continue
        lines = read_metrics(job)
        key = {"script": job.script, "variant": job.variant, "seed": job.seed}
        rows[job] = {**key, **summary(lines), **result}
        curves[job] = []
        for line in lines:
            values = {column: line.get(source, "") for column, source in CURVES.items()}
            curves[job].append({**key, "iteration": line["iteration"], **values})
    in_order = [job for job in jobs if job in rows]
    write_csv(RESULTS / f"{name}.csv", [rows[job] for job in in_order])
    write_csv(RESULTS / f"{name}_curves.csv", [row for job in in_order for row in curves[job]])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="throw earlier runs and rows away")
    parser.add_argument(
        "--list", action="store_true", help="print the experiments and what has been run"
    )
    args = parser.parse_args()
    names = list(EXPERIMENTS) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if args.list:
        for name in EXPERIMENTS:
            jobs = jobs_of(name)
            rows, _ = kept(name, jobs)
            ended = sum(job in rows or job.result() is not None for job in jobs)
            print(f"{name:22}{ended} of {len(jobs)} runs")
        return
    commit = prepare()
    num_failed = 0
    for name in names:
        if args.fresh:
            shutil.rmtree(RUNS / name, ignore_errors=True)
            for path in (RESULTS / f"{name}.csv", RESULTS / f"{name}_curves.csv"):
                path.unlink(missing_ok=True)
        jobs = jobs_of(name)
        make_what_is_needed(jobs)
        num_failed += run_all(name, jobs, args.jobs, commit)
        collect(name, jobs)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
