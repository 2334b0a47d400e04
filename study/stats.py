"""Reads the CSVs in results/, and computes means and intervals. Comparisons are paired by seed."""

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TEXT = {"script", "variant", "commit", "flags"}
T_QUANTILES = {2: 4.303, 4: 2.776}  # Student's t at 97.5%, by degrees of freedom


def read_csv(name):
    """The rows of results/<name>.csv as text; none if there is no such file."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def runs(name):
    """{(script, variant): [row of results/<name>.csv]} with numbers, by seed, without empty cells."""
    groups = defaultdict(list)
    for row in sorted(read_csv(name), key=lambda row: int(row["seed"])):
        numbers = {column: float(row[column]) for column in row.keys() - TEXT if row[column]}
        groups[row["script"], row["variant"]].append(numbers)
    return dict(groups)


def values(rows, column):
    return [row[column] for row in rows if column in row]


def mean(rows, column):
    return statistics.mean(values(rows, column))


def mean_std(rows, column):
    found = values(rows, column)
    return f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}"


def interval(ours, theirs):
    """'+0.013 ± 0.010': mean difference, paired by seed, and half the width of its 95% interval, over
    the seeds that both have. The half width has two digits, and the mean has as many decimals."""
    deltas = [a - b for a, b in zip(ours, theirs, strict=False)]
    half = T_QUANTILES[len(deltas) - 1] * statistics.stdev(deltas) / math.sqrt(len(deltas))
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{statistics.mean(deltas):+.{digits}f} ± {half:.{digits}f}"
