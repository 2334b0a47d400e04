"""Reads the CSVs in results/; means, areas and intervals. Comparisons are paired by seed."""

import csv
import itertools
import math
import statistics
from collections import defaultdict
from pathlib import Path

from experiments import EXPERIMENTS

RESULTS = Path(__file__).parent / "results"
WORDS = set("script variant commit code flags weights ended model precision case".split())
# 97.5 % and 80 % of Student's t are below, by degrees of freedom.
T_QUANTILES = {2: (4.303, 1.061), 4: (2.776, 0.941), 7: (2.365, 0.896)}


def table(name):
    """Rows of results/<name>.csv, numbers as floats, an empty field as None."""
    with open(RESULTS / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in row.keys() - WORDS:
            row[column] = float(row[column]) if row[column] else None
    return rows


def runs(name):
    """{(script, variant): [row of results/<name>.csv, by seed]}."""
    groups = defaultdict(list)
    for row in table(name) if (RESULTS / f"{name}.csv").exists() else []:
        groups[row["script"], row["variant"]].append(row)
    experiment = EXPERIMENTS[name]
    if any(len(groups[key]) < len(experiment.seeds) for key in experiment.runs):
        raise SystemExit(f"some runs are missing: python benchmarks/sweep.py {name}")
    return groups


def column(name, key, of):
    """A column of an experiment's runs, by seed; None counts as 0, as for a run that broke off."""
    return [row[of] or 0.0 for row in runs(name)[key]]


def curves(name):
    """{(script, variant): {seed: [row by iteration]}}, with `x`, the completions generated so far."""
    runs(name)
    groups = defaultdict(lambda: defaultdict(list))
    for row in table(f"{name}_curves"):
        rows = groups[row["script"], row["variant"]][int(row["seed"])]
        row["x"] = row["generated"] + (rows[-1]["x"] if rows else 0)
        rows.append(row)
    return groups


def area(rows, end):
    """Mean height of the accuracy's curve over the first `end` completions. The rollout of an iteration
    has the accuracy that was learned from the completions before it."""
    points = [(row["x"] - row["generated"], row["accuracy"]) for row in rows]
    total = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 < end:
            y1 = y0 + (y1 - y0) * (min(x1, end) - x0) / (x1 - x0)
            total += (min(x1, end) - x0) * (y0 + y1) / 2
    return total / end


def trailing(values, width):
    """Mean of each value and of those before it, `width` in all."""
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def mean_std(values, digits=3):
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def half_width(deltas, quantile):
    return quantile * statistics.stdev(deltas) / math.sqrt(len(deltas))


def interval(ours, theirs):
    """'+0.013 ± 0.010': mean and half width of the 95 % interval of differences paired by seed. Two
    digits of the half width, and as many decimals of the mean."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = half_width(deltas, T_QUANTILES[len(deltas) - 1][0])
    digits = 3
    if half > 0:
        digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{statistics.mean(deltas):+.{digits}f} ± {half:.{digits}f}"


def detectable(ours, theirs):
    """The difference that as many seeds with this scatter would show (an interval without 0) four times
    in five, to two digits."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=True)]
    return f"{half_width(deltas, sum(T_QUANTILES[len(deltas) - 1])):.2g}"


def markdown(header, rows, align=""):
    """A table; `align`: a letter per column, r for right."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows)]
