"""Runs the nine scripts with their defaults on some seeds and collects the results in default_runs.csv.

    python benchmarks/default_runs.py --fresh [--seeds 1 2 3] [--jobs 2] [--only grpo sapo]

Each run is a process of its own with one thread. Without --fresh, a sweep that was cut off goes on: what is
in the CSV is done, and a run that has a checkpoint is resumed.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
RUNS = ROOT / "runs" / "default_runs"
CSV = ROOT / "benchmarks" / "results" / "default_runs.csv"
COLUMNS = """script seed base_greedy base_sampled base_direct base_len greedy sampled direct len completions
explained_variance_last10 first_step_ratio_error_max seconds commit""".split()


def parse_table(stdout):
    """The before/after table that a script prints: {row: [greedy before, after, sampled before, after]}."""
    rows = [line.replace("->", " ").split() for line in stdout.splitlines() if "->" in line]
    return {row[0]: [float(x) for x in row[1:5]] for row in rows if len(row) == 5}


def one_run(script, seed, commit):
    folder = RUNS / f"{script}-seed{seed}"
    command = [sys.executable, f"{script}.py", "--seed", str(seed), "--resume", "--run_dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}: {result.stderr.splitlines()[-1]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    table = parse_table(result.stdout)
    explained = [line.get("losses/explained_variance", "") for line in lines[-10:]]
    groups = [line.get("rollout/groups_generated", 32) * 8 for line in lines]
    return {
        "script": script,
        "seed": seed,
        "base_greedy": table["accuracy"][0],
        "base_sampled": table["accuracy"][2],
        "base_direct": table["direct_frac"][2],
        "base_len": table["response_len_mean"][2],
        "greedy": table["accuracy"][1],
        "sampled": table["accuracy"][3],
        "direct": table["direct_frac"][3],
        "len": table["response_len_mean"][3],
        "completions": sum(groups),
        "explained_variance_last10": round(sum(explained) / 10, 3) if explained[0] != "" else "",
        "first_step_ratio_error_max": max(line["losses/first_step_ratio_error_max"] for line in lines),
        "seconds": round(sum(x["charts/rollout_seconds"] + x["charts/update_seconds"] for x in lines)),
        "commit": commit,
    }


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="throw away earlier results")
    parser.add_argument("--only", nargs="+", default=SCRIPTS, choices=SCRIPTS)
    args = parser.parse_args()
    CSV.parent.mkdir(exist_ok=True)
    if args.fresh:
        CSV.unlink(missing_ok=True)
        shutil.rmtree(RUNS, ignore_errors=True)
    rows = list(csv.DictReader(CSV.read_text().splitlines())) if CSV.exists() else []
    done = {(row["script"], int(row["seed"])) for row in rows}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    todo = [(name, seed) for seed in args.seeds for name in args.only if (name, seed) not in done]

    def finish(job):
        row = one_run(*job, commit.strip())
        rows.append(row)
        print(f"{row['script']:8} seed {row['seed']}: {row['greedy']:.3f} in {row['seconds']} s", flush=True)
        order = sorted(rows, key=lambda r: (SCRIPTS.index(r["script"]), int(r["seed"])))
        with open(CSV, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(order)

    if todo:
        finish(todo[0])  # alone, so that the base model is trained once
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(finish, todo[1:]))


if __name__ == "__main__":
    main()
