"""Differences between runs with their 95% intervals, paired by seed.

python study/stats.py runs/sapo-seed? --minus runs/grpo-seed?

Rollout accuracy and reward are means over the run. The reward is the one that the update uses: dapo's
is shaped, and only of groups that it keeps.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import numpy
from scripts import command_line, read_lines

ROLLOUT = {"rollout accuracy": "rollout/accuracy", "rollout reward": "rollout/reward_mean"}
NO_FLAGS = {"script", "versions", "problems_hash", "model_hash", "seed", "run_dir", "resume"}


def values(rows, column):
    return [row[column] for row in rows if column in row]


def mean(rows, column):
    return statistics.mean(values(rows, column))


def t_quantile(freedom):
    """Student's t at 97.5%: up to here the density has an integral of 0.475 from 0."""
    x = numpy.linspace(0, 20, 200_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density *= math.exp(log_factor) / math.sqrt(freedom * math.pi)
    integral = x[1] * (density.cumsum() - density / 2 - density[0] / 2)
    return numpy.interp(0.475, integral, x)


def interval(ours, theirs):
    """'+0.013 ± 0.010': mean difference, paired by seed, and half the width of its 95% interval, over
    the seeds that both have. The half width has two digits, and the mean has as many decimals. A single
    seed has no interval."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=False)]
    if len(deltas) == 1:
        return f"{deltas[0]:+.3f}"
    half = t_quantile(len(deltas) - 1) * statistics.stdev(deltas) / math.sqrt(len(deltas))
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 3
    return f"{statistics.mean(deltas):+.{digits}f} ± {half:.{digits}f}"


def measured(folder):
    """(settings, {name: number}) of a finished run: means over rollouts, and its last evaluation."""
    evaluations = []
    if Path(folder, "evaluations.jsonl").exists():
        evaluations = read_lines(folder, "evaluations.jsonl")
    if not evaluations:
        sys.exit(f"{folder} has no run, or only its beginning")
    settings = json.loads(Path(folder, "settings.json").read_text())
    last = evaluations[-1]
    if last["iteration"] != settings["iterations"]:
        when = f"after iteration {last['iteration']} of {settings['iterations']}"
        sys.exit(f"{folder} is not finished: its last evaluation is {when}")
    rollouts = read_lines(folder, "metrics.jsonl")
    numbers = {}
    for name, key in ROLLOUT.items():
        if values(rollouts, key):
            numbers[name] = mean(rollouts, key)
    for way in ("greedy", "sampled"):
        for name in ("accuracy", "reward_mean"):
            if name in last.get(way, {}):
                numbers[f"{way} {name}"] = last[way][name]
    return settings, numbers


def by_seed(folders):
    """{seed: what is measured in its run}"""
    found = {}
    names = {}
    for folder in folders:
        settings, numbers = measured(folder)
        seed = settings["seed"]
        if seed in found:
            sys.exit(f"seed {seed} twice: {names[seed]} and {folder}")
        found[seed] = (settings, numbers)
        names[seed] = folder
    return found


def different_flags(ours, theirs):
    """{"lr (0.1, not 0.2)"}: the flags of both scripts that differ between two runs' settings."""
    shared = (ours.keys() & theirs.keys()) - NO_FLAGS
    differing = [flag for flag in shared if ours[flag] != theirs[flag]]
    return {f"{flag} ({ours[flag]}, not {theirs[flag]})" for flag in differing}


def main():
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--minus", nargs="+", metavar="RUN_DIR", required=True)
    args = parser.parse_args()
    ours = by_seed(args.folders)
    theirs = by_seed(args.minus)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        sys.exit("no seed is in both sets of runs")
    differences = set()
    for seed in seeds:
        differences |= different_flags(ours[seed][0], theirs[seed][0])
    if differences:
        print("different flags:", ", ".join(sorted(differences)))
    print("difference, paired by seed:", *seeds)
    for name in ours[seeds[0]][1]:
        pairs = [(ours[seed][1], theirs[seed][1]) for seed in seeds]
        pairs = [(a[name], b[name]) for a, b in pairs if name in a and name in b]
        if pairs:
            print(f"{name:20} {interval(*zip(*pairs, strict=True))}")


if __name__ == "__main__":
    main()
