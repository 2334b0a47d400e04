"""Differences between runs with their 95% intervals, paired by seed.

python study/stats.py runs/sapo-seed? --minus runs/grpo-seed?

Rollout accuracy and reward are means over the run. The reward is the one that the update uses: dapo's
is shaped, and only of groups that it keeps.
"""

import math
import statistics
import sys

import numpy
from scripts import command_line, read_run

ROLLOUT = {"rollout accuracy": "rollout/accuracy", "rollout reward": "rollout/reward_mean"}
NO_FLAGS = {"versions", "problems_hash", "model_hash", "seed", "run_dir", "resume"}


def t_quantile(freedom):
    """Student's t at 97.5%: up to here the density has an integral of 0.475 from 0."""
    x = numpy.linspace(0, 20, 200_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density *= math.exp(log_factor) / math.sqrt(freedom * math.pi)
    integral = x[1] * (density.cumsum() - density / 2 - density[0] / 2)
    return numpy.interp(0.475, integral, x)


def interval(deltas):
    """'+0.013 ± 0.010': the mean difference, and half the width of its 95% interval. The half width has
    two digits, and the mean has as many decimals. A single difference has no interval."""
    if len(deltas) == 1:
        return f"{deltas[0]:+.3f}"
    half = t_quantile(len(deltas) - 1) * statistics.stdev(deltas) / math.sqrt(len(deltas))
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 3
    return f"{statistics.mean(deltas):+.{digits}f} ± {half:.{digits}f}"


def measured(folder):
    """(settings, {name: number}) of a finished run: means over rollouts, and its last evaluation."""
    settings, rollouts, evaluations = read_run(folder)
    planned = settings["iterations"]
    end = rollouts[-1]["iteration"] if rollouts else planned
    last = evaluations[-1] if evaluations else {}
    # Where a run ends, which dapo may do early, the evaluation is also sampled.
    if "sampled" not in last or last["iteration"] != end:
        sys.exit(f"{folder} is not finished: {len(rollouts)} of {planned} iterations")
    if end != planned:
        print(f"{folder} ended after iteration {end} of {planned}")
    numbers = {}
    for name, key in ROLLOUT.items():
        values = [row[key] for row in rollouts if key in row]
        if values:
            numbers[name] = statistics.mean(values)
    for way in ("greedy", "sampled"):
        for name in ("accuracy", "reward_mean"):
            if name in last[way]:
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
    """{"lr (0.1, not 0.2)"}: the flags that differ between two runs' settings."""
    found = set()
    for flag in (ours.keys() | theirs.keys()) - NO_FLAGS:
        if flag not in theirs:
            found.add(f"{flag} (only {ours['script']}'s)")
        elif flag not in ours:
            found.add(f"{flag} (only {theirs['script']}'s)")
        elif ours[flag] != theirs[flag]:
            found.add(f"{flag} ({ours[flag]}, not {theirs[flag]})")
    return found


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
    pairs = [(ours[seed][1], theirs[seed][1]) for seed in seeds]
    for name in ours[seeds[0]][1]:
        if all(name in a and name in b for a, b in pairs):
            print(f"{name:20} {interval([a[name] - b[name] for a, b in pairs])}")


if __name__ == "__main__":
    main()
