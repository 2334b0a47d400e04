"""What the CSVs in results/ are read with, and what is made of them: means, areas, intervals, p values.
Comparisons are paired by seed."""

import csv
import functools
import itertools
import math
import statistics
from collections import defaultdict
from pathlib import Path

from experiments import EXPERIMENTS, MORE, SCRIPTS

__all__ = ["MORE", "SCRIPTS"]
RESULTS = Path(__file__).parent / "results"
WIDTH = 118  # of a line of prose
WORDS = {"script", "variant", "commit", "code", "flags", "ended", "model", "precision", "case"}


def table(name):
    """Rows of results/<name>.csv, numbers as floats, an empty field as None."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return text or None

    with open(RESULTS / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column, text in row.items():
            if column not in WORDS:
                row[column] = number(text)
    return rows


class NotRunYet(Exception):
    """Some runs of an experiment are missing. Half of one is not read."""


def runs(name):
    """{(script, variant): [row of results/<name>.csv, by seed]}."""
    groups = defaultdict(list)
    for row in table(name) if (RESULTS / f"{name}.csv").exists() else []:
        groups[row["script"], row["variant"]].append(row)
    experiment = EXPERIMENTS[name]
    if any(len(groups[key]) < experiment.seeds for key in experiment.runs):
        raise NotRunYet(name)
    return groups


def curves(name):
    """{(script, variant): {seed: [row of results/<name>_curves.csv, by iteration]}}, with `x`: how many
    completions were generated so far. Where a run broke off, its accuracy is 0 from there on."""
    all_runs = runs(name)
    groups = defaultdict(lambda: defaultdict(list))
    for row in table(f"{name}_curves"):
        rows = groups[row["script"], row["variant"]][int(row["seed"])]
        row["x"] = row["generated"] + (rows[-1]["x"] if rows else 0)
        rows.append(row)
    for key, of_key in all_runs.items():
        longest = max(groups[key].values(), key=len, default=[])
        for run in of_key:
            rows = groups[key][int(run["seed"])]
            for row in longest[len(rows) :]:
                nothing = dict.fromkeys(row)
                kept = {name: row[name] for name in ("iteration", "generated", "x")}
                rows.append(nothing | kept | {"accuracy": 0.0})
    return groups


# Of the same, to be read and not to be changed.
read_runs = functools.cache(runs)
read_curves = functools.cache(curves)


# --------------------------------------------------------------------------------------- of one run


def interpolate(points, x):
    """The value at x of a curve of straight lines through the points."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def area(points, end):
    """Mean height of the curve from 0 to `end`."""
    points = [point for point in points if point[0] < end] + [(end, interpolate(points, end))]
    areas = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        areas.append((x1 - x0) * (y0 + y1) / 2)
    return sum(areas) / end


def trailing(values, width=5):
    """Mean of each value and of those before it, `width` in all."""
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def rollout_points(rows):
    """[(completions that the weights had learned from, accuracy of their rollout)]."""
    return [(row["x"] - row["generated"], row["accuracy"]) for row in rows]


def at_accuracy(rows, column, height):
    """A column's value when the accuracy first reaches `height`, both as trailing means of five whole
    iterations; None if it never does."""
    heights = trailing([row["accuracy"] for row in rows])[4:]
    values = trailing([row[column] for row in rows])[4:]
    if heights and heights[0] >= height:
        return values[0]
    for i, (low, high) in enumerate(itertools.pairwise(heights)):
        if high >= height:
            return values[i] + (values[i + 1] - values[i]) * (height - low) / (high - low)
    return None


def tail(rows, column, count=10):
    """Mean of a column over the last `count` iterations that have it."""
    values = [row[column] for row in rows if row.get(column) is not None][-count:]
    return statistics.mean(values) if values else None


def drops(rows):
    """How far the accuracy of each iteration is below the highest one so far."""
    values = [row["accuracy"] for row in rows]
    highest = itertools.accumulate(values, max)
    return [high - value for high, value in zip(highest, values, strict=True)]


# -------------------------------------------------------------------------------------- of the seeds


def whole(name, key, column):
    """Mean of a column over all iterations, for each seed in order."""
    of_seeds = read_curves(name)[key]
    return [tail(of_seeds[seed], column, len(of_seeds[seed])) for seed in sorted(of_seeds)]


def held_out_of(name, key, column="after_sampled_accuracy"):
    """Of the trained weights after each run, by seed; 0 where the run broke off."""
    rows = sorted(read_runs(name)[key], key=lambda row: row["seed"])
    return [row[column] or 0.0 for row in rows]


def mean_std(values, digits=3):
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def t_tail(t, freedom):
    """The chance of a Student's t beyond +-t, in closed form for whole degrees of freedom."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = 1.0 if freedom % 2 == 0 else cosine
    total = 0.0 if freedom == 1 else term
    for k in range(2 + freedom % 2, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    if freedom % 2 == 1:
        within = (angle + within) * 2 / math.pi
    return max(0.0, 1 - within)


@functools.cache
def t_quantile(freedom):
    """97.5 % of Student's t are below."""
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 0.05 else (low, middle)
    return low


def mean_and_error(ours, theirs):
    """Of the differences: their mean, and its standard error."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=True)]
    return statistics.mean(deltas), statistics.stdev(deltas) / math.sqrt(len(deltas))


def difference(ours, theirs):
    """(mean, half width of its 95 % interval) of the differences between values paired by seed."""
    mean, error = mean_and_error(ours, theirs)
    return mean, t_quantile(len(ours) - 1) * error


def interval(ours, theirs):
    """'+0.013 ± 0.010': two digits of the half width, and as many decimals of the mean."""
    mean, half = difference(ours, theirs)
    digits = 3
    if half > 0:
        digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:+.{digits}f} ± {half:.{digits}f}"


def p_value(ours, theirs):
    """Two-sided, of Student's t for values paired by seed."""
    mean, error = mean_and_error(ours, theirs)
    if error == 0:
        return 0.0 if mean else 1.0
    return t_tail(mean / error, len(ours) - 1)


def holm(p_values):
    """Adjusted p values: the chance that one or more are below 0.05 where there is no difference is at
    most 5 %."""
    count = len(p_values)
    smallest_first = sorted(range(count), key=lambda i: p_values[i])
    adjusted = [0.0] * count
    highest = 0.0
    for rank, i in enumerate(smallest_first):
        product = (count - rank) * p_values[i]
        highest = max(highest, min(product, 1.0))  # never below that of a smaller p
        adjusted[i] = highest
    return adjusted


def markdown(header, rows, align=""):
    """A table; `align`: a letter per column, r for right."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows)]
