"""Runs the experiments of experiments.py and collects them in results/.

    python benchmarks/sweep.py nine [--jobs 2]     # or another experiment, several, or all
    python benchmarks/sweep.py --list

Each run is a separate process with one thread and a folder under runs/sweep/. A sweep that is cut off
continues where it stopped: runs that have ended, or have a row in results/, are not repeated. For an
experiment X, results/X.csv has a row for each run; nine and more also have results/X_curves.csv with a
row for each iteration.

The scripts run as they are, except that those of EXCHANGED take one function from another script. What
no script logs is recorded beside it: on which share of the tokens the mechanism in question acts.
"""

import argparse
import csv
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from unittest.mock import patch

import stats
from experiments import EXCHANGED, EXPERIMENTS, MADE, WITH_CURVES

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
RESULTS = ROOT / "benchmarks" / "results"

END = 13_000  # completions over which `area` is taken; every default run has generated as many
UPDATES = 36  # iterations over which `area_updates` is taken: dapo's by default

CURVES = {  # column: key in metrics.jsonl
    "reward": "rollout/reward_mean",
    "accuracy": "rollout/accuracy",
    "held_out": "eval/accuracy",
    "generated": "generated",
    "len": "rollout/response_len_mean",
    "truncated": "rollout/truncated_frac",
    "direct": "rollout/direct_frac",
    "entropy": "losses/entropy",
    "clip_low": "losses/clipfrac_low",
    "clip_high": "losses/clipfrac_high",
}
AT_THE_END = {  # columns of a run: means of the last ten iterations
    "end_accuracy": "rollout/accuracy",
    "end_len_wrong": "rollout/response_len_wrong",
    "end_truncated": "rollout/truncated_frac",
    "end_accuracy_whole": "accuracy_whole",
}
OF_ALL = {  # means of all iterations
    "log_ratio_range": "log_ratio_range",
    "clip_low": "losses/clipfrac_low",
    "clip_high": "losses/clipfrac_high",
    "tokens_mixed": "tokens_mixed",
    "tokens_cut": "tokens_cut",
    "tokens_near_cap": "tokens_near_cap",
    "tokens_weighted": "rollout/tokens_weighted",
    "sampler_kl": "rollout/sampler_kl",
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
        """The result of the run if it has ended, with these flags; else None."""
        path = self.folder / "result.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return found if found.get("flags") == self.flags else None


def merged(*texts):
    """One text of flags; a later value of the same flag wins."""
    flags = {}
    for text in texts:
        for part in f" {text}".split(" --")[1:]:
            name, _, value = part.strip().partition(" ")
            flags[name] = value.strip()
    return " ".join(f"--{name} {value}".strip() for name, value in flags.items())


def jobs_of(name):
    """Seed by seed, so that a sweep that is cut off leaves complete comparisons."""
    experiment = EXPERIMENTS[name]
    jobs = []
    for seed in experiment.seeds:
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
    """Makes the models and problems that the runs need and that do not exist yet."""
    for path, command in MADE.items():
        is_named = any(path in job.flags for job in jobs)
        if is_named and not Path(path).exists():
            scratch = f"{path}.tmp"
            subprocess.run([sys.executable, *command.split(), scratch], check=True)
            Path(scratch).rename(path)


def code_hash(script):
    """Hash of the code of a run: the script, common.py and plumbing/."""
    rooms = sorted((ROOT / "plumbing").glob("*.py"))
    return hash_of(ROOT / f"{script.replace('.', '/')}.py", ROOT / "common.py", *rooms)


def hash_of(*paths):
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def share(completions, wanted):
    """The share of the completions' tokens that are in those which `wanted` names, a bool for each."""
    lengths = [len(c.ids) for c in completions]
    pairs = zip(lengths, wanted, strict=True)
    return sum(length for length, is_wanted in pairs if is_wanted) / sum(lengths)


def in_mixed_groups(completions, group_size):
    """[bool]: is the completion in a group of which some, but not all, are right?"""
    result = []
    for start in range(0, len(completions), group_size):
        group = completions[start : start + group_size]
        num_right = sum(c.verdict == "correct" for c in group)
        result += [0 < num_right < group_size] * group_size
    return result


def token_shares(completions, args):
    """{name: share of the generated tokens} that are in mixed groups, in completions that were cut off,
    and in those that dapo's soft penalty touches."""
    shares = {
        "tokens_mixed": share(completions, in_mixed_groups(completions, args.group_size)),
        "tokens_cut": share(completions, [c.truncated for c in completions]),
    }
    if hasattr(args, "overlong_cache"):
        limit = args.max_new_tokens - args.overlong_cache
        is_near = [c.truncated or len(c.ids) > limit for c in completions]
        shares["tokens_near_cap"] = share(completions, is_near)
    return shares


def weighted_share(correction, old, batch, args):
    """The share of tokens whose weight is more than 1 % from 1. Without a correction: whose ratio of
    training forward to sampler is that far from 1."""
    weights = correction.weights
    if args.rollout_correction == "none":
        weights = (old.logprobs_NT - batch.sampler_logprobs_BT).exp()
    is_far = (weights.expand_as(batch.mask_BT) - 1).abs() > 0.01
    return (is_far & batch.mask_BT).sum() / batch.mask_BT.sum()


def watch(script):
    """Makes a script record more than it logs. Returns a dict that has its held-out results at the end
    of the run."""
    from plumbing import Run

    held_out = {}
    real_metrics = script.iteration_metrics
    real_correction = script.rollout_correction
    real_finish = Run.finish

    def iteration_metrics(meter, completions, rewards, args):
        metrics = real_metrics(meter, completions, rewards, args)
        return {**metrics, "generated": len(completions), **token_shares(completions, args)}

    def rollout_correction(old, batch, args, **keywords):
        correction = real_correction(old, batch, args, **keywords)
        if args.old_logprobs == "trainer":
            correction.stats["tokens_weighted"] = weighted_share(correction, old, batch, args)
        return correction

    def finish(self):
        for when, results in (("before", self.before), ("after", self.after)):
            for way in ("greedy", "sampled"):
                held_out[f"{when}_{way}_accuracy"] = results[way]["accuracy"]
        (weights,) = self.folder.glob("checkpoint-*/model.safetensors")
        held_out["weights"] = hash_of(weights)
        real_finish(self)

    script.iteration_metrics = iteration_metrics
    script.rollout_correction = rollout_correction
    Run.finish = finish
    return held_out


def run(job, made_of):
    """Runs a script in this process, with its output in the folder's log. `made_of`: its commit and the
    hash of its code."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    from plumbing.args import UserError, parse_args

    script = importlib.import_module(job.script)
    if (job.script, job.variant) in EXCHANGED:
        function, donor = EXCHANGED[job.script, job.variant]
        setattr(script, function, getattr(importlib.import_module(donor), function))
    run_dir = job.folder / "run"
    sys.argv = [script.__file__, "--seed", str(job.seed), "--run_dir", str(run_dir)]
    sys.argv += job.flags.split()
    held_out = watch(script)
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


def run_all(name, jobs, num_processes, commit, environment):
    """Runs the jobs that have not ended yet, several at a time, with these variables set. Returns how
    many failed."""
    rows = kept(name, jobs)
    todo = []
    for job in jobs:
        if job not in rows and not job.result():
            importlib.import_module(job.script)  # so that what is hashed is what runs
            todo.append((job, {"commit": commit, "code": code_hash(job.script)}))
    num_failed = 0
    # A forked process has torch already, which reads the environment only once.
    context = multiprocessing.get_context("spawn" if environment else "fork")
    with patch.dict(os.environ, environment), context.Pool(num_processes, maxtasksperchild=1) as pool:
        for done, job in enumerate(pool.imap_unordered(run_and_report, todo, chunksize=1), 1):
            failed = "" if job.result() else f" FAILED, see {job.folder}/log"
            num_failed += failed != ""
            print(f"{name} {done} of {len(todo)}: {job[1:4]}{failed}", flush=True)
    return num_failed


def run_and_report(pair):
    """`run` in a process of the pool, which survives its errors; the log has the traceback."""
    job, made_of = pair
    try:
        run(job, made_of)
    except BaseException:
        traceback.print_exc()
    return job


# ------------------------------------------------------------------------------------------ collect


def read_metrics(job):
    """Its lines of metrics.jsonl, with the seconds of each iteration."""
    path = job.folder / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["seconds"] = line["charts/rollout_seconds"] + line["charts/update_seconds"]
        low = line.get("losses/ratio_min", 0)  # 0: too small for a float
        if low > 0:
            line["log_ratio_range"] = math.log(line["losses/ratio_max"] / low)
        whole = 1 - line["rollout/truncated_frac"]
        if whole > 0:  # a completion that was cut off is never right
            line["accuracy_whole"] = line["rollout/accuracy"] / whole
    return lines


def summary(lines):
    """The columns of a run's row, beside its result."""

    def average(key, count):
        values = [line[key] for line in lines if key in line][-count:]
        return mean(values) if values else ""

    accuracies = [line["rollout/accuracy"] for line in lines]
    drops = [max(accuracies[: i + 1]) - accuracy for i, accuracy in enumerate(accuracies)]
    points = []
    generated = 0
    for line in lines:
        generated += line["generated"]
        point = {"x": generated, "generated": line["generated"], "accuracy": line["rollout/accuracy"]}
        points.append(point)
    return {
        "generated": generated,
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "area": stats.area(points, END) if generated > END else "",
        "area_updates": mean(accuracies[:UPDATES]) if len(lines) >= UPDATES else "",
        "largest_drop": max(drops, default=""),
        **{column: average(key, 10) for column, key in AT_THE_END.items()},
        **{column: average(key, len(lines)) for column, key in OF_ALL.items()},
        **{f"held_out_{line['iteration']}": line.get("eval/accuracy", "") for line in lines[4::5]},
    }


def read_csv(name):
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def key_of(row):
    return row["script"], row["variant"], str(row["seed"])


def kept(name, jobs):
    """{job: row} of the CSV, if the flags are still the same."""
    by_key = {(job.script, job.variant, str(job.seed)): job for job in jobs}
    rows = {}
    for row in read_csv(name):
        job = by_key.get(key_of(row))
        if job and job.flags == row["flags"]:
            rows[job] = row
    return rows


def write_csv(path, rows):
    """Leaves out columns that are empty everywhere, except `ended`."""
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
    """Writes the CSVs of an experiment: runs that have ended, and rows of earlier ones."""
    rows = kept(name, jobs)
    kept_keys = {key_of(row) for row in rows.values()}
    curves = [row for row in read_csv(f"{name}_curves") if key_of(row) in kept_keys]
    for job in jobs:
        result = job.result()
        if not result:
            continue
        lines = read_metrics(job)
        key = {"script": job.script, "variant": job.variant, "seed": job.seed}
        rows[job] = {**key, **summary(lines), **result}
        curves = [row for row in curves if key_of(row) != key_of(key)]
        for line in lines:
            values = {column: line.get(source, "") for column, source in CURVES.items()}
            curves.append({**key, "iteration": line["iteration"], **values})
    write_csv(RESULTS / f"{name}.csv", [rows[job] for job in jobs if job in rows])
    if name in WITH_CURVES:
        order = {(job.script, job.variant, str(job.seed)): i for i, job in enumerate(jobs)}
        curves.sort(key=lambda row: order[key_of(row)])
        write_csv(RESULTS / f"{name}_curves.csv", curves)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--list", action="store_true", help="print the experiments and what has been run"
    )
    args = parser.parse_args()
    names = list(EXPERIMENTS) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(EXPERIMENTS)}")
    if args.list:
        for name in EXPERIMENTS:
            jobs = jobs_of(name)
            rows = kept(name, jobs)
            ended = sum(job in rows or job.result() is not None for job in jobs)
            print(f"{name:22}{ended} of {len(jobs)} runs")
        return
    commit = prepare()
    num_failed = 0
    for name in names:
        jobs = jobs_of(name)
        make_what_is_needed(jobs)
        num_failed += run_all(name, jobs, args.jobs, commit, EXPERIMENTS[name].environment)
        collect(name, jobs)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
