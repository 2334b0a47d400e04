"""What a rollout copy, a correction and routing replay cost in time.

    python benchmarks/mismatch_time.py [--rounds 5]

In each round grpo.py runs five iterations of the default job once for each set of flags, in a process
of its own with one thread. The first iteration is left out. Writes results/mismatch_time.csv, a row for
each run: median seconds of a rollout and of an update.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import sweep

CSV = sweep.RESULTS / "mismatch_time.csv"
COMMON = "--iterations 5 --eval_every 0 --save_every 0 --kl_coef 0 --num_held_out 8"
VARIANTS = {
    "no mismatch": "",
    "bfloat16": "--rollout_dtype bfloat16",
    "int8": "--rollout_dtype int8",
    "int8, token_tis": "--rollout_dtype int8 --rollout_correction token_tis",
    "r2": "--routing_replay r2",
    "int8, r3": "--rollout_dtype int8 --routing_replay r3",
}


def seconds(flags):
    """(rollout, update), medians over the iterations but the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "grpo.py", *COMMON.split(), *flags.split(), "--run_dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()[1:]
    metrics = [json.loads(line) for line in lines]
    return [
        statistics.median(line[f"charts/{part}_seconds"] for line in metrics)
        for part in ("rollout", "update")
    ]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    commit = sweep.prepare()
    import common

    common.base_model(1200)
    rows = []
    for number in range(1, args.rounds + 1):
        for variant, flags in VARIANTS.items():
            rollout, update = seconds(flags)
            row = {"round": number, "variant": variant, "rollout": rollout, "update": update}
            print(row, flush=True)
            rows.append(row | {"commit": commit})
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({column: sweep.short(value) for column, value in row.items()})


if __name__ == "__main__":
    main()
