"""Draws two figures in figures/ from the CSVs in results/.

    python study/figures.py [nine ...]     # all of them if you name none

Lines differ in style and lightness as well as color, so you can tell them apart in grayscale.
"""

import statistics
import sys
from pathlib import Path

import matplotlib
import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parent / "figures"
STYLES = [("#000000", "-"), ("#0072b2", "--"), ("#e69f00", ":")]
GRAY = ("#cccccc", "-")
GROUPS = [  # each is one column of `nine`
    {"ppo": "PPO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO"},
    {"dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO"},
    {"gmpo": "GMPO", "rspo": "RSPO", "sapo": "SAPO"},
]
WIDTH = 8.6  # inches
plt.rcParams |= {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


def points(rows, column, x, is_smooth):
    """[(x, y)] for the rows that have the column; if smooth, y is a mean of three."""
    rows = [row for row in rows if row[column] is not None]
    ys = [row[column] for row in rows]
    if is_smooth:
        ys = stats.trailing(ys)
    return [(row[x], y) for row, y in zip(rows, ys, strict=True)]


def draw(axis, runs, column, style, label=None, is_smooth=True):
    """Draws the mean over seeds as a line and, if it has a label, the standard deviation as a band."""
    lines = [points(rows, column, "generated", is_smooth) for rows in runs.values()]
    xs = []
    means = []
    stds = []
    for together in zip(*lines, strict=False):  # up to the end of the shortest
        here, ys = zip(*together, strict=True)
        xs.append(statistics.mean(here))
        means.append(statistics.mean(ys))
        stds.append(statistics.stdev(ys))
    color, dashes = style
    axis.plot(xs, means, color=color, linestyle=dashes, label=label)
    if label:
        low = [mean - std for mean, std in zip(means, stds, strict=True)]
        high = [mean + std for mean, std in zip(means, stds, strict=True)]
        axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def curves_of_the_nine():
    """{script: {seed: [row]}}. Greedy held-out accuracy starts before the first iteration."""
    found = {}
    for (script, variant), seeds in stats.curves("nine").items():
        if variant == "default":
            start = stats.column("nine", (script, variant), "before_greedy_accuracy")[0]
            for rows in seeds.values():
                first = dict.fromkeys(rows[0]) | {"generated": 0, "iteration": 0, "held_out": start}
                rows.insert(0, first)
            found[script] = seeds
    return found


def one_run():
    """The default run of grpo, seed 1."""
    rows = curves_of_the_nine()["grpo"][1]
    panels = [
        ("accuracy", {"held_out": "held-out sums, greedy", "accuracy": "rollouts, temperature 1"}),
        ("answers without working (share)", {"direct": None}),
        ("response length (tokens)", {"len": None}),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.6))
    for axis, (title, columns) in zip(axes, panels, strict=True):
        for (column, label), (color, dashes) in zip(columns.items(), STYLES, strict=False):
            xs, ys = zip(*points(rows, column, "iteration", is_smooth=False), strict=True)
            axis.plot(xs, ys, color=color, linestyle=dashes, label=label)
        axis.set_title(title)
        axis.set_xlabel("iteration")
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(loc="lower right")
    axes[1].set_ylim(bottom=0)
    return figure


def nine():
    """One column per group of three scripts, with the other six in gray."""
    curves = curves_of_the_nine()
    panels = [  # column, words, limits
        ("held_out", "greedy accuracy,\nheld-out sums", (0.4, 1.0)),
        ("accuracy", "accuracy of the rollouts,\ntemperature 1", (0.2, 1.0)),
        ("len", "response length\n(tokens)", None),
        ("entropy", "entropy\n(nats per token)", None),
    ]
    figure, axes = plt.subplots(4, len(GROUPS), figsize=(WIDTH, 7), sharex=True, sharey="row")
    for row, (column, words, limits) in zip(axes, panels, strict=True):
        is_smooth = column != "held_out"
        row[0].set_ylabel(words)
        for axis, group in zip(row, GROUPS, strict=True):
            for script in curves.keys() - group.keys():
                draw(axis, curves[script], column, GRAY, is_smooth=is_smooth)
            for (script, label), style in zip(group.items(), STYLES, strict=True):
                draw(axis, curves[script], column, style, label, is_smooth)
            axis.set_xlim(0, 10_400)
            if limits:
                axis.set_ylim(*limits)
    for axis in axes[0]:
        axis.legend(loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("completions generated")
        axis.set_xticks([0, 5000, 10_000], ["0", "5k", "10k"])
    return figure


def main():
    for function in (one_run, nine):
        name = function.__name__
        if name in sys.argv[1:] or not sys.argv[1:]:
            figure = function()
            figure.tight_layout()
            figure.savefig(FIGURES / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
