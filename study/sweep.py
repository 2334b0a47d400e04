"""Runs the experiments of experiments.py, and writes results/.

    python study/sweep.py nine [--jobs 2]     # or several names, or all

Each run is one command line, with one thread; its log stays in runs/sweep/. For an experiment X,
results/X.csv has a row for each run; nine also has results/nine_curves.csv, with a row for every fourth
iteration. An interrupted sweep continues where it stopped: a run that has a row is not repeated.
To measure again, delete the files.
"""

import argparse
import csv
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

import numpy
import stats
from experiments import EXPERIMENTS, shown_bugs
from scripts import ROOT

RUNS = ROOT / "runs" / "sweep"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
END = 8_000  # completions that `area` covers; the last rollout of every default run starts later
CURVE_STEP = 4  # iterations averaged in one row of a curve
CURVE = {  # column: key in metrics.jsonl
    "accuracy": "rollout/accuracy",
    "len": "rollout/response_len_mean",
    "entropy": "losses/entropy",
}

# ---------------------------------------------------------------------------------------------- run


def write_broken_scripts():
    for file, bug in shown_bugs().items():
        path = ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(bug["broken"])


def run(name, job):
    """Runs a job. Returns its row and the rows of its curve, or None if it failed."""
    words = re.sub(r"[^\w.]+", "-", f"{job.script} {job.variant} {job.seed}")
    folder = RUNS / name / words
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    command = [sys.executable, job.file, "--seed", str(job.seed), "--run_dir", str(run_dir)]
    command += job.flags.split()
    with open(folder / "log", "w") as log:
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    if done.returncode != 0:
        return None
    settings = json.loads((run_dir / "settings.json").read_text())
    lines = lines_of(run_dir / "metrics.jsonl")
    count_completions(lines, settings)
    end = lines_of(run_dir / "evaluations.jsonl")[-1]
    key = {"script": job.script, "variant": job.variant, "seed": job.seed}
    row = key | row_of(lines, EXPERIMENTS[name].columns)
    row |= {f"after_{way}_accuracy": end[way]["accuracy"] for way in ("greedy", "sampled")}
    row |= {"commit": settings["versions"].get("commit", "")[:7], "flags": job.flags}
    shutil.rmtree(run_dir)
    return row, [key | part for part in curve_of(lines)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------ one row


def count_completions(lines, settings):
    """Adds to each iteration the number of completions generated so far."""
    generated = 0
    for line in lines:
        num_prompts = line.get("rollout/groups_generated", settings["prompts_per_iteration"])
        generated += int(num_prompts * settings.get("group_size", 1))
        line["generated"] = generated


def average(lines, key, count=0):
    """The mean over the last `count` lines that have the key [0: over all]; "" if none has it."""
    values = [line[key] for line in lines if key in line][-count:]
    return mean(values) if values else ""


def area(lines):
    """Mean height of the accuracy curve over the first END completions; "" if the curve ends earlier. A
    rollout's accuracy is what was learned from the completions before it, so the curve's last point is
    where the last rollout starts."""
    starts = [0] + [line["generated"] for line in lines[:-1]]
    if starts[-1] < END:
        return ""
    xs = [start for start in starts if start < END] + [END]
    ys = numpy.interp(xs, starts, [line["rollout/accuracy"] for line in lines])
    return numpy.trapezoid(ys, xs) / END


def largest_drop(lines):
    """The largest drop from the highest accuracy so far to a later one."""
    accuracies = [line["rollout/accuracy"] for line in lines]
    highest = itertools.accumulate(accuracies, max)
    return max(high - now for high, now in zip(highest, accuracies, strict=True))


def row_of(lines, columns):
    averages = {column: average(lines, *source) for column, source in columns.items()}
    return {"area": area(lines), "largest_drop": largest_drop(lines), **averages}


def curve_of(lines):
    """Means over CURVE_STEP iterations, one row each."""
    rows = []
    for start in range(0, len(lines), CURVE_STEP):
        part = lines[start : start + CURVE_STEP]
        row = {key: part[-1][key] for key in ("iteration", "generated")}
        rows.append(row | {column: average(part, key) for column, key in CURVE.items()})
    return rows


# -------------------------------------------------------------------------------------------- results


def key_of(row):
    return row["script"], row["variant"], int(row["seed"])


def append(name, rows):
    """Adds rows to results/<name>.csv. If the file exists, its columns stay as they are."""
    path = stats.RESULTS / f"{name}.csv"
    known = stats.read_csv(name)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, (known or rows)[0], lineterminator="\n")
        if not known:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def sweep(name, num_processes):
    """Runs the jobs that have no row yet, several at a time. Returns how many failed."""
    experiment = EXPERIMENTS[name]
    done = {key_of(row) for row in stats.read_csv(name)}
    todo = [job for job in experiment.jobs if job[:3] not in done]
    num_failed = 0
    with ThreadPoolExecutor(num_processes) as pool:
        results = pool.map(run, itertools.repeat(name), todo)
        for count, (job, result) in enumerate(zip(todo, results, strict=True), start=1):
            words = f"{name} {count} of {len(todo)}: {job.script} {job.variant} {job.seed}"
            if result is None:
                num_failed += 1
                print(f"{words} FAILED, see its log in {RUNS / name}")
                continue
            print(words)
            row, curve = result
            append(name, [row])
            if experiment.has_curves:
                append(f"{name}_curves", curve)
    return num_failed


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    names = EXPERIMENTS if "all" in args.names else args.names
    num_failed = 0
    for name in names:
        if name == "symptoms":
            write_broken_scripts()
        num_failed += sweep(name, args.jobs)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
