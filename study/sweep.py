"""Runs the experiments of experiments.py, and writes results/.

    python study/sweep.py nine [--jobs 2]     # or several names, or all

Each run is one command line, with one thread; its log stays in runs/sweep/. For an experiment X,
results/X.csv has a row for each run. An interrupted sweep continues where it stopped: a run that has a
row is not repeated. To measure again, delete the file.
"""

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
from experiments import EXPERIMENTS, exercises, shown_bugs
from repair import changed
from scripts import ROOT, command_line, read_lines

RUNS = ROOT / "runs" / "sweep"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
END = 8_000  # completions that `area` covers; the last rollout of every default run starts later

# ---------------------------------------------------------------------------------------------- run


def write_changed_scripts():
    for file, change in (shown_bugs() | exercises()).items():
        path = ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed(change))


def run(name, job):
    """Runs a job. Returns its row, or None if it failed."""
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
    lines = read_lines(run_dir, "metrics.jsonl")
    count_completions(lines, settings)
    *_, end = read_lines(run_dir, "evaluations.jsonl")
    row = {"script": job.script, "variant": job.variant, "seed": job.seed}
    row |= {"area": area(lines), "largest_drop": largest_drop(lines)}
    row |= {column: average(lines, *source) for column, source in EXPERIMENTS[name].columns.items()}
    for way in ("greedy", "sampled"):
        row[f"after_{way}_accuracy"] = end[way]["accuracy"]
    row |= {"commit": settings["versions"].get("commit", "")[:7], "flags": job.flags}
    shutil.rmtree(run_dir)
    return row


# ------------------------------------------------------------------------------------------ one row


def count_completions(lines, settings):
    """Adds to each iteration the number of completions generated so far."""
    generated = 0
    for line in lines:
        num_prompts = line.get("rollout/groups_generated", settings["prompts_per_iteration"])
        generated += int(num_prompts * settings.get("group_size", 1))
        line["generated"] = generated


def average(lines, key, count):
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
    accuracies = [line["rollout/accuracy"] for line in lines]
    xs = [start for start in starts if start < END] + [END]
    ys = numpy.interp(xs, starts, accuracies)
    return numpy.trapezoid(ys, xs) / END


def largest_drop(lines):
    """The largest drop from the highest accuracy so far to a later one."""
    accuracies = [line["rollout/accuracy"] for line in lines]
    highest = numpy.maximum.accumulate(accuracies)
    return (highest - accuracies).max()


# ------------------------------------------------------------------------------------------ results


def key_of(row):
    return row["script"], row["variant"], int(row["seed"])


def append(name, row):
    """Adds a row to results/<name>.csv. If the file exists, its columns stay as they are."""
    known = stats.read_csv(name)
    columns = known[0] if known else row
    with open(stats.RESULTS / f"{name}.csv", "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not known:
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def sweep(name, num_processes):
    """Runs the jobs that have no row yet, several at a time. Returns how many failed."""
    done = {key_of(row) for row in stats.read_csv(name)}
    todo = [job for job in EXPERIMENTS[name].jobs if job[:3] not in done]
    num_failed = 0
    with ThreadPoolExecutor(num_processes) as pool:
        rows = pool.map(run, itertools.repeat(name), todo)
        for count, (job, row) in enumerate(zip(todo, rows, strict=True), start=1):
            words = f"{name} {count} of {len(todo)}: {job.script} {job.variant} {job.seed}"
            if row:
                append(name, row)
                print(words)
            else:
                num_failed += 1
                print(f"{words} FAILED, see its log in {RUNS / name}")
    return num_failed


def main():
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    names = EXPERIMENTS if "all" in args.names else args.names
    num_failed = 0
    write_changed_scripts()
    for name in names:
        num_failed += sweep(name, args.jobs)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
