"""Reads the CSVs in results/, and computes means and intervals. Comparisons are paired by seed."""

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TEXT = {"script", "variant", "commit", "flags"}
T_QUANTILES = {2: 4.303, 4: 2.776}  # 97.5 % of Student's t, by degrees of freedom


def read_csv(name):
    """The rows of results/<name>.csv as text; none if there is no such file."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def table(name):
    """The same with numbers. An empty cell is None."""
    rows = read_csv(name)
    for row in rows:
        for column in row.keys() - TEXT:
            row[column] = float(row[column]) if row[column] else None
    return rows


def runs(name):
    """{(script, variant): [row of results/<name>.csv, by seed]}"""
    groups = defaultdict(list)
    for row in table(name):
        groups[row["script"], row["variant"]].append(row)
    return dict(groups)


def values(rows, column):
    """A column without its empty cells."""
    return [row[column] for row in rows if row[column] is not None]


def curves(name):
    """{(script, variant): [rows of a seed]}"""
    groups = defaultdict(lambda: defaultdict(list))
    for row in table(f"{name}_curves"):
        groups[row["script"], row["variant"]][row["seed"]].append(row)
    return {key: list(seeds.values()) for key, seeds in groups.items()}


def mean(rows, column):
    """nan if the column is empty."""
    found = values(rows, column)
    return statistics.mean(found) if found else math.nan


def mean_std(rows, column):
    found = values(rows, column)
    return f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}"


def curve(runs, column):
    """[(completions generated, mean over the seeds, standard deviation)] for a column, averaged over
    three rows, up to the end of the shortest run."""
    points = []
    num_rows = min(len(rows) for rows in runs)
    for i in range(num_rows):
        xs = [rows[i]["generated"] for rows in runs]
        ys = []
        for rows in runs:
            last = rows[max(0, i - 2) : i + 1]
            ys.append(mean(last, column))
        points.append((statistics.mean(xs), statistics.mean(ys), statistics.stdev(ys)))
    return points


def interval(ours, theirs):
    """'+0.013 ± 0.010': mean difference, paired by seed, and half the width of its 95 % interval, over
    the seeds that both have. The half width has two digits, and the mean as many decimals."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=False)]
    half = T_QUANTILES[len(deltas) - 1] * statistics.stdev(deltas) / math.sqrt(len(deltas))
    digits = 3
    if half > 0:
        digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{statistics.mean(deltas):+.{digits}f} ± {half:.{digits}f}"


def markdown(header, rows, align=""):
    """A table. `align` has one letter per column, r for right."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows)]
