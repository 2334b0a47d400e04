"""What figures.py, readme.py and second_regime.py make of the CSVs in results/: means, curves,
intervals, verdicts, tables."""

import csv
import functools
import itertools
import math
import statistics
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
MORE = ["more.reinforce", "more.rloo", "more.vapo"]
WIDTH = 118  # of a line of prose
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 97.5 % quantile of Student's t, by number of seeds


def table(name):
    """Rows of results/<name>.csv, numbers as floats, an empty field as None."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return text or None

    words = ("script", "variant", "commit", "flags", "ended")
    with open(RESULTS / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column, text in row.items():
            if column not in words:
                row[column] = number(text)
    return rows


def runs(name):
    """{(script, variant): [row of results/<name>.csv, by seed]}."""
    groups = defaultdict(list)
    for row in table(name):
        groups[row["script"], row["variant"]].append(row)
    return groups


def curves(name):
    """{(script, variant): {seed: [row of results/<name>_curves.csv, by iteration]}}, with `x`: how many
    completions were generated so far."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in table(f"{name}_curves"):
        rows = groups[row["script"], row["variant"]][int(row["seed"])]
        row["x"] = row["generated"] + (rows[-1]["x"] if rows else 0)
        rows.append(row)
    return groups


# Of the same, to be read and not to be changed.
read_runs = functools.cache(runs)
read_curves = functools.cache(curves)


def held_out(rows, start):
    """[(completions generated, held-out accuracy)] of a run, from `start`, the accuracy of the base
    model."""
    measured = [row for row in rows if row["held_out"] is not None]
    return [(0.0, start)] + [(row["x"], row["held_out"]) for row in measured]


def interpolate(points, x):
    """The value at x of a curve of straight lines through the points."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def area(points, end):
    """Mean height of the curve from 0 to `end`."""
    points = [point for point in points if point[0] < end] + [(end, interpolate(points, end))]
    areas = []
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        areas.append((x1 - x0) * (y0 + y1) / 2)
    return sum(areas) / end


def reaches(points, height):
    """Where the curve is first at this height or above, None if it never is."""
    return next((x for x, y in points if y >= height), None)


def tail(rows, column, count=10):
    """Mean of a column over the last `count` iterations that have it."""
    values = [row[column] for row in rows if row.get(column) is not None][-count:]
    return statistics.mean(values) if values else None


def per_seed(name, key, column, count=10):
    """Mean of a column over the last `count` iterations, for each seed in order."""
    runs = read_curves(name)[key]
    return [tail(runs[seed], column, count) for seed in sorted(runs)]


def whole(name, key, column):
    """The same over all iterations."""
    return per_seed(name, key, column, 10_000)


def held_out_of(name, key, column="after_sampled_accuracy"):
    """Of the trained weights after each run, by seed."""
    rows = sorted(read_runs(name)[key], key=lambda row: row["seed"])
    return [row[column] for row in rows]


def drops(rows):
    """How far the accuracy of each iteration is below the highest one so far."""
    values = [row["accuracy"] for row in rows]
    highest = itertools.accumulate(values, max)
    return [high - value for high, value in zip(highest, values, strict=True)]


def largest_drop(name, key):
    """For each seed: how far the accuracy of an iteration is below an earlier one, at most."""
    runs = read_curves(name)[key]
    return [max(drops(runs[seed])) for seed in sorted(runs)]


def shift_before_fall(name, key):
    """Correlation of the changed experts with the next change of the accuracy, for each seed."""
    correlations = []
    for rows in read_curves(name)[key].values():
        pairs = itertools.pairwise(row["accuracy"] for row in rows)
        changes = [after - before for before, after in pairs]
        flips = [row["flips"] for row in rows[:-1]]
        correlations.append(statistics.correlation(flips, changes))
    return correlations


def mean_std(values, digits=3):
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def difference(ours, theirs):
    """(mean, half width of its 95 % interval) of the differences between values paired by seed."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(deltas) / math.sqrt(len(deltas))
    return statistics.mean(deltas), STUDENT[len(deltas)] * error


def verdict(ours, theirs):
    """Is `ours` larger? By the 95 % interval of the paired differences."""
    mean, half = difference(ours, theirs)
    if abs(mean) < 1e-12:
        mean = 0.0  # what is left is rounding
    if mean > half:
        word = "shown"
    elif mean < -half:
        word = "the opposite"
    else:
        word = "not shown"
    return f"{word} ({mean:+.3g} ± {half:.2g})"


def first_word(text):
    """Of what `verdict` returns: the verdict without the numbers."""
    return text.split(" (")[0]


def directed(ours, theirs, sign):
    """`sign`: 1 if ours is predicted to be larger, -1 if smaller, 0 if nothing is predicted: then the
    words are larger, smaller and not shown."""
    word = verdict(theirs, ours) if sign < 0 else verdict(ours, theirs)
    if sign == 0:
        found = first_word(word)
        unpredicted = {"shown": "larger", "the opposite": "smaller", "not shown": "not shown"}
        word = word.replace(found, unpredicted[found], 1)
    return word


def overall(*verdicts):
    """One word for several comparisons: theirs if they agree, else "not shown"."""
    words = {first_word(each) for each in verdicts}
    return words.pop() if len(words) == 1 else "not shown"


def apart(ours, theirs, more, less):
    """The mean difference in words: '0.44 ± 0.14 shorter'."""
    mean, half = difference(ours, theirs)
    digits = 3
    if half > 0:  # two digits of the interval, and as many decimals of the mean
        digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{abs(mean):.{digits}f} ± {half:.{digits}f} {more if mean > 0 else less}"


def p_value(ours, theirs):
    """Two-sided, of Student's t for values paired by three or five seeds: its distribution function has
    a closed form for 2 and for 4 degrees of freedom."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(deltas) / math.sqrt(len(deltas))
    if error == 0:
        return 0.0 if statistics.mean(deltas) else 1.0
    t = abs(statistics.mean(deltas)) / error
    if len(deltas) == 3:
        return 1 - t / math.sqrt(2 + t**2)
    if len(deltas) == 5:
        x = t / math.sqrt(4 + t**2)
        return 1 - x * (3 - x**2) / 2
    raise ValueError(f"{len(deltas)} seeds")


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


def rank_correlation(xs, ys):
    """Spearman's: the correlation of the ranks (no ties expected)."""
    x_ranks = [sorted(xs).index(x) for x in xs]
    y_ranks = [sorted(ys).index(y) for y in ys]
    return statistics.correlation(x_ranks, y_ranks)


def markdown(header, rows, align=""):
    """A table; `align`: a letter per column, r for right."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows)]
