"""Finds, for each script with a clip, the range at which the clip binds on the same share of tokens.

    python benchmarks/calibrate.py [--long] [--target 0.02] [--jobs 2]

The papers' ranges are not comparable: they bound a token's ratio, its logarithm, a weight, or a
sequence's ratio. Here each range keeps its shape and is scaled by bisection, on ten iterations with
learning rate 1e-4 and 16 optimizer steps per rollout (seed 1), until `--target` of the tokens are
clipped. Writes results/calibrate.csv, which the experiment stability_calibrated of sweep.py reads. Runs
that are there are not repeated.

--long does it for the second regime: on four iterations of its job, at its lower learning rate, into
results/long_calibrate.csv, which long_calibrated reads.
"""

import argparse
import csv
import math
import multiprocessing
from multiprocessing.pool import ThreadPool

import sweep

RANGES = {  # script: {flag: (where nothing is clipped, the script's own bound)}
    "ppo": {"clip_eps_low": (0, 0.2), "clip_eps_high": (0, 0.2)},
    "grpo": {"clip_eps_low": (0, 0.2), "clip_eps_high": (0, 0.2)},
    "dr_grpo": {"clip_eps_low": (0, 0.2), "clip_eps_high": (0, 0.2)},
    "dapo": {"clip_eps_low": (0, 0.2), "clip_eps_high": (0, 0.28)},
    "gspo": {"clip_eps_low": (0, 0.003), "clip_eps_high": (0, 0.004)},
    "cispo": {"is_weight_cap": (1, 5.0)},
    "gmpo": {"log_ratio_clip": (0, 0.4)},
    "rspo": {"log_ratio_clip": (0, 0.4)},
}


def flags_at(script, scale):
    """The script's range scaled about the point where nothing moves: a ratio of 1, a log-ratio of 0."""
    words = []
    for flag, (center, bound) in RANGES[script].items():
        value = center + (bound - center) * scale
        if flag == "clip_eps_low":
            value = min(value, 1.0)
        words += [f"--{flag}", f"{value:.3g}"]
    return tuple(words)


def short_run(script, flags, is_long):
    """The job whose clipped tokens are counted."""
    variant = "_".join(word.strip("-") for word in flags)
    if is_long:
        more = ("--iterations", "4", *flags)
        return sweep.long_job("long_calibrate", script, 1, sweep.LONG_LR, variant, *more)
    shared = ("--iterations", "10", "--lr", "1e-4", *sweep.steps_flags(16))
    return sweep.Job("calibrate", script, variant, 1, (*shared, *flags, *sweep.QUICK))


def clipped_share(job, commit):
    """Mean share of tokens that the clip takes the gradient from (cispo: whose weight is capped)."""
    if not job.has_ended:
        process = multiprocessing.get_context("fork").Process(target=sweep.run, args=(job, commit))
        process.start()
        process.join()
    lines = sweep.read_metrics(job)
    total = 0.0
    for line in lines:
        total += line.get("losses/clipfrac_low", 0)
        total += line.get("losses/clipfrac_high", 0)
    return total / len(lines)


def calibrate(script, target, is_long, commit):
    """Bisection over the logarithm of the scale; a wider range clips less."""
    tried = []
    low = math.log(1e-3)
    high = math.log(30)
    scale = 1.0
    for _ in range(8):
        flags = flags_at(script, scale)
        share = clipped_share(short_run(script, flags, is_long), commit)
        row = {"script": script, "scale": round(scale, 4), "flags": " ".join(flags), "share": share}
        tried.append(row)
        if share > target:
            low = math.log(scale)
        else:
            high = math.log(scale)
        if abs(share / target - 1) < 0.1:
            break
        scale = math.exp((low + high) / 2)
    best = min(tried, key=lambda row: abs(row["share"] - target))
    own = tried[0]["share"]
    print(f"{script:8} {best['flags']}: {best['share']:.2%} clipped (own range: {own:.2%})")
    return [row | {"chosen": "yes" if row is best else "", "commit": commit} for row in tried]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--long", action="store_true", help="for the second regime")
    parser.add_argument("--target", type=float, default=0.02)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    commit = sweep.prepare()

    def calibrated(script):
        return calibrate(script, args.target, args.long, commit)

    with ThreadPool(args.jobs) as pool:
        tables = pool.map(calibrated, RANGES, chunksize=1)
    rows = [row for table in tables for row in table]
    path = sweep.LONG_CALIBRATED if args.long else sweep.CALIBRATED
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({column: sweep.short(value) for column, value in row.items()})


if __name__ == "__main__":
    main()
