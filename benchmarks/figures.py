"""Draws the figures in benchmarks/figures/ from the CSVs in results/.

    python benchmarks/figures.py [nine mismatch ...]     # if none is named: all that have results

Lines differ in style and lightness, not only in colour, so that they can be told apart in greyscale.
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
NAMES = {
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "gmpo": "GMPO",
    "rspo": "RSPO",
    "sapo": "SAPO",
}
GROUPS = [("ppo", "grpo", "dr_grpo"), ("dapo", "gspo", "cispo"), ("gmpo", "rspo", "sapo")]
WIDTH = 8.6  # inches
COMPLETIONS = (0, 15_400)
HELD_OUT = "after_sampled_accuracy"
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.5,
    }
)


def save(figure, name):
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw(axis, runs, column, style, label=None, width=5, x="x", band=True):
    """Mean (line) and standard deviation (band) over the seeds, at the iterations that have a value."""
    lines = []
    for rows in runs.values():
        rows = [row for row in rows if row.get(column) is not None]
        ys = stats.trailing([row[column] for row in rows], width)
        lines.append([(row[x], y) for row, y in zip(rows, ys, strict=True)])
    xs = []
    means = []
    stds = []
    for points in zip(*lines, strict=False):  # as far as the shortest
        here, values = zip(*points, strict=True)
        xs.append(statistics.mean(here))
        means.append(statistics.mean(values))
        stds.append(statistics.stdev(values) if len(values) > 1 else 0.0)
    color, dashes = style
    axis.plot(xs, means, color=color, linestyle=dashes, label=label)
    if band:
        low = [m - s for m, s in zip(means, stds, strict=True)]
        high = [m + s for m, s in zip(means, stds, strict=True)]
        axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def draw_group(axis, curves, group, column, width, x="x"):
    """The scripts of a group, and the others in grey."""
    for script in NAMES:
        if script not in group and (script, "default") in curves:
            grey = ("#cccccc", "-")
            draw(axis, curves[script, "default"], column, grey, width=width, x=x, band=False)
    for script, style in zip(group, STYLES, strict=True):
        if (script, "default") in curves:
            draw(axis, curves[script, "default"], column, style, NAMES[script], width, x)


def from_the_base_model(name):
    """The curves of an experiment. Greedy held-out accuracy begins before the first iteration."""
    curves = stats.curves(name)
    runs = stats.runs(name)
    for key, seeds in curves.items():
        start = runs[key][0]["before_greedy_accuracy"]
        for rows in seeds.values():
            rows.insert(0, {"x": 0, "iteration": 0, "held_out": start})
    return curves


def one_run():
    """The default run of grpo, seed 1."""
    rows = from_the_base_model("nine")["grpo", "default"][1]
    panels = [
        ("accuracy", {"held_out": "held-out sums, greedy", "accuracy": "rollouts, temperature 1"}),
        ("answers without working (share)", {"direct": None}),
        ("response length (tokens)", {"len": None}),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.6))
    for axis, (title, columns) in zip(axes, panels, strict=True):
        for (column, label), (color, dashes) in zip(columns.items(), STYLES, strict=False):
            of_column = [row for row in rows if row.get(column) is not None]
            xs = [row["iteration"] for row in of_column]
            ys = [row[column] for row in of_column]
            axis.plot(xs, ys, color=color, linestyle=dashes, label=label)
        axis.set_title(title)
        axis.set_xlabel("iteration")
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(loc="lower right")
    axes[1].set_ylim(bottom=0)
    save(figure, "one_run")


def nine():
    """A column for each group of three scripts, with the other six in grey."""
    curves = from_the_base_model("nine")
    panels = [  # column, words, limits, iterations to average
        ("held_out", "greedy accuracy,\nheld-out sums", (0.4, 1.0), 1),
        ("accuracy", "accuracy of the rollouts,\ntemperature 1", (0.2, 1.0), 5),
        ("len", "response length\n(tokens)", None, 5),
        ("entropy", "entropy\n(nats per token)", None, 5),
    ]
    figure, axes = plt.subplots(4, 3, figsize=(WIDTH, 7), sharex=True, sharey="row")
    for row, (column, words, limits, width) in zip(axes, panels, strict=True):
        row[0].set_ylabel(words)
        for axis, group in zip(row, GROUPS, strict=True):
            draw_group(axis, curves, group, column, width)
            axis.set_xlim(*COMPLETIONS)
            if limits:
                axis.set_ylim(*limits)
    for axis in axes[0]:
        axis.legend(loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("completions generated")
        axis.set_xticks([0, 5000, 10_000, 15_000], ["0", "5k", "10k", "15k"])
    save(figure, "nine")


def dots(axis, groups, title):
    """A row for each of {name: values}, with a dot for each value and a stroke at the mean."""
    for row, values in enumerate(groups.values()):
        axis.plot(values, [row] * len(values), "o", color="#0072b2", markersize=4, alpha=0.6)
        axis.plot(statistics.mean(values), row, "|", color="#000000", markersize=14)
    axis.set_yticks(range(len(groups)), groups)
    axis.set_ylim(len(groups) - 0.5, -0.5)  # the first on top
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.set_title(title)


def of_grpo(variant):
    return stats.column("rollout_correction", ("grpo", variant), HELD_OUT)


def mismatch():
    """How far a sampler in low precision is from the training forward, and what it costs."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    precisions = ("bfloat16", "int8", "int4")
    rows = stats.table("mismatch")
    for name, style in zip(dict.fromkeys(row["model"] for row in rows), STYLES, strict=True):
        of_model = {row["precision"]: row["sampler_kl"] for row in rows if row["model"] == name}
        color, line = style
        values = [of_model[precision] for precision in precisions]
        axes[0].plot(precisions, values, line, color=color, marker="o", label=name)
    axes[0].set_yscale("log")
    axes[0].set_title("KL per token, sampler to training forward")
    axes[0].legend(fontsize=8)
    groups = {"same precision": of_grpo("same")}
    groups["int4"] = of_grpo("int4")
    for rule in ("token_tis", "sequence_tis", "geo_mask"):
        groups[f"int4, {rule}"] = of_grpo(f"int4-{rule}")
    dots(axes[1], groups, "GRPO at 1e-3: held-out accuracy after the run")
    save(figure, "mismatch")


ALL = [one_run, nine, mismatch]


def main():
    wanted = sys.argv[1:] or [function.__name__ for function in ALL]
    for function in ALL:
        if function.__name__ in wanted:
            function()


if __name__ == "__main__":
    main()
