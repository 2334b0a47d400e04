"""Runs the experiments of experiments.py, and collects them in results/.

    python study/sweep.py nine [--jobs 2]     # or several names, or all
    python study/sweep.py --list

Each run is one command line, with one thread and its own folder under runs/sweep/. For an
experiment X, results/X.csv has a row for each run; nine and more also have results/X_curves.csv, with a
row for every second iteration. An interrupted sweep continues where it stopped: a run that has ended
with the same flags, or has a row, is not repeated. To measure again, delete both results/X*.csv and
runs/sweep/X.
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
from pathlib import Path
from statistics import mean

import torch
from experiments import EXPERIMENTS, shown_bugs

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
RESULTS = Path(__file__).parent / "results"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
END = 8_000  # completions that `area` covers; the last rollout of every default run starts later
CURVE_STEP = 2  # iterations averaged in one row of a curve
CURVE = {  # column: key in metrics.jsonl
    "accuracy": "rollout/accuracy",
    "len": "rollout/response_len_mean",
    "direct": "rollout/direct_frac",
    "entropy": "losses/entropy",
}

# ---------------------------------------------------------------------------------------------- run


def folder_of(name, job):
    words = f"{job.script} {job.variant} {job.seed}"
    return RUNS / name / re.sub(r"[^\w.]+", "-", words)


def write_broken_scripts():
    for file, bug in shown_bugs().items():
        path = ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(bug["broken"])


def run(name, job):
    """Runs a job and writes result.json to its folder. Returns whether there is a result: the run
    ended, or its numbers were not finite."""
    folder = folder_of(name, job)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    command = [sys.executable, job.file, "--seed", str(job.seed), "--run_dir", str(run_dir)]
    command += job.flags.split()
    with open(folder / "log", "w") as log:
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    *_, last_line = (folder / "log").read_text().strip().split("\n")
    ended = ""
    if done.returncode != 0:
        if "is not finite" not in last_line:
            return False
        ended = last_line
    commit = json.loads((run_dir / "settings.json").read_text())["versions"].get("commit", "")
    result = {**held_out(run_dir), "ended": ended, "commit": commit[:7], "flags": job.flags}
    (folder / "result.json").write_text(json.dumps(result))
    for checkpoint in run_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return True


def held_out(run_dir):
    """{column: held-out accuracy or pass@8} before and after a run, read from its last checkpoint."""
    found = {}
    for path in run_dir.glob("checkpoint-*/trainer_state.pt"):
        saved = torch.load(path, weights_only=True)
        for when in ("before", "after"):
            for way in ("greedy", "sampled"):
                for number in ("accuracy", "pass@8"):
                    if saved[when] is not None and number in saved[when][way]:
                        found[f"{when}_{way}_{number}"] = saved[when][way][number]
    return found


def result_of(name, job):
    """The result of the run if it ended with these flags, else None."""
    path = folder_of(name, job) / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return result if result.get("flags") == job.flags else None


def run_all(name, jobs, num_processes):
    """Runs the jobs that have no result yet, several at a time. Returns how many failed."""
    rows = kept(name, jobs)
    todo = [job for job in jobs if job not in rows and result_of(name, job) is None]
    num_failed = 0
    with ThreadPoolExecutor(num_processes) as pool:
        results = pool.map(run, itertools.repeat(name), todo)
        for count, (job, has_result) in enumerate(zip(todo, results, strict=True), start=1):
            words = "" if has_result else f" FAILED, see {folder_of(name, job)}/log"
            num_failed += not has_result
            print(f"{name} {count} of {len(todo)}: {job.script} {job.variant} {job.seed}{words}")
    return num_failed


# ------------------------------------------------------------------------------------------ collect


def read_metrics(run_dir):
    """The lines of metrics.jsonl, each with the number of completions generated so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    settings = json.loads((run_dir / "settings.json").read_text())
    generated = 0
    for line in lines:
        num_prompts = line.get("rollout/groups_generated", settings["prompts_per_iteration"])
        generated += int(num_prompts * settings.get("group_size", 1))
        line["generated"] = generated
    return lines


def average(lines, key, count=0):
    """The mean over the last `count` lines that have the key [0: over all]; "" if none has it."""
    values = [line[key] for line in lines if key in line][-count:]
    return mean(values) if values else ""


def area(lines):
    """Mean height of the accuracy curve over the first END completions; "" if the curve ends earlier. A
    rollout's accuracy is what was learned from the completions before it, so the curve's last point is
    where the last rollout starts."""
    starts = [0, *(line["generated"] for line in lines)]
    points = [(x, line["rollout/accuracy"]) for x, line in zip(starts, lines, strict=False)]
    if not points or points[-1][0] < END:
        return ""
    total = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        width = min(x1, END) - x0
        if width > 0:
            y_end = y0 + (y1 - y0) * width / (x1 - x0)
            total += width * (y0 + y_end) / 2
    return total / END


def largest_drop(lines):
    """The largest drop from the highest accuracy so far to a later one."""
    drop = 0.0
    highest = 0.0
    for line in lines:
        highest = max(highest, line["rollout/accuracy"])
        drop = max(drop, highest - line["rollout/accuracy"])
    return drop


def row_of(job, lines, columns):
    seconds = 0.0
    for line in lines:
        for phase in ("rollout", "reward", "update"):
            seconds += line[f"charts/{phase}_seconds"]
    return {
        "script": job.script,
        "variant": job.variant,
        "seed": job.seed,
        "generated": lines[-1]["generated"] if lines else 0,
        "seconds": round(seconds, 1),
        "area": area(lines),
        "largest_drop": largest_drop(lines),
        **{column: average(lines, *source) for column, source in columns.items()},
    }


def curve_of(job, lines):
    """Means over CURVE_STEP iterations, with the held-out accuracy after the last one, one row each."""
    rows = []
    for start in range(0, len(lines), CURVE_STEP):
        part = lines[start : start + CURVE_STEP]
        last = part[-1]
        rows.append(
            {
                "script": job.script,
                "variant": job.variant,
                "seed": job.seed,
                "iteration": last["iteration"],
                "generated": last["generated"],
                "held_out": last.get("eval/accuracy", ""),
                **{column: average(part, key) for column, key in CURVE.items()},
            }
        )
    return rows


def read_csv(name):
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def key_of(row):
    return row["script"], row["variant"], int(row["seed"])


def kept(name, jobs):
    """{job: row} for the rows of the CSV that still have the same flags."""
    by_key = {job[:3]: job for job in jobs}
    rows = {}
    for row in read_csv(name):
        job = by_key.get(key_of(row))
        if job and job.flags == row["flags"]:
            rows[job] = row
    return rows


def write_csv(name, rows):
    columns = dict.fromkeys(column for row in rows for column in row)
    scratch = RESULTS / f"{name}.tmp"
    with open(scratch, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    scratch.rename(RESULTS / f"{name}.csv")


def collect(name, jobs):
    """Writes the CSVs of an experiment: the finished runs, and the rows of earlier ones."""
    experiment = EXPERIMENTS[name]
    rows = kept(name, jobs)
    curves = {job[:3]: [] for job in jobs}
    for row in read_csv(f"{name}_curves"):
        if key_of(row) in curves:
            curves[key_of(row)].append(row)
    for job in jobs:
        result = result_of(name, job)
        if result is not None:
            lines = read_metrics(folder_of(name, job) / "run")
            rows[job] = row_of(job, lines, experiment.columns) | result
            curves[job[:3]] = curve_of(job, lines)
    write_csv(name, [rows[job] for job in jobs if job in rows])
    if experiment.has_curves:
        write_csv(f"{name}_curves", [row for curve in curves.values() for row in curve])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, or all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="what there is, and what has been run")
    args = parser.parse_args()
    names = list(EXPERIMENTS) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(EXPERIMENTS)}")
    if args.list:
        for name, experiment in EXPERIMENTS.items():
            rows = kept(name, experiment.jobs)
            num_ended = sum(job in rows or result_of(name, job) is not None for job in experiment.jobs)
            print(f"{name:18}{num_ended} of {len(experiment.jobs)} runs")
        return
    num_failed = 0
    for name in names:
        if name == "symptoms":
            write_broken_scripts()
        num_failed += run_all(name, EXPERIMENTS[name].jobs, args.jobs)
        collect(name, EXPERIMENTS[name].jobs)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
