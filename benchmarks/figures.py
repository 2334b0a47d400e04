"""Draws the figures in benchmarks/figures/ from the CSVs in results/.

    python benchmarks/figures.py [nine stability ...]     # all whose CSVs are there, if none is named

Lines differ in style and lightness, not only in colour, so that they can be told apart in greyscale.
"""

import statistics
import sys
from pathlib import Path

import evidence
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parent / "figures"
STYLES = [("#000000", "-"), ("#0072b2", "--"), ("#e69f00", ":"), ("#cc79a7", "-."), ("#999999", "-")]
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
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9,
        "legend.frameon": False,
        "svg.hashsalt": "figures",
    }
)


def save(figure, name, dpi=110):
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=dpi, metadata={"Software": None})
    plt.close(figure)


def smooth(values, width=5):
    """Trailing mean over `width` iterations."""
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def mean_band(runs, column, width=5):
    """(x, mean, std) over the seeds, at the iterations that have a value."""
    lines = []
    for rows in runs.values():
        rows = [row for row in rows if row.get(column) is not None]
        xs = [row["x"] for row in rows]
        ys = smooth([row[column] for row in rows], width)
        lines.append((xs, ys))
    length = min(len(xs) for xs, _ in lines)
    mean_xs = []
    means = []
    stds = []
    for i in range(length):
        mean_xs.append(statistics.mean(xs[i] for xs, _ in lines))
        ys_here = [ys[i] for _, ys in lines]
        means.append(statistics.mean(ys_here))
        stds.append(statistics.stdev(ys_here) if len(ys_here) > 1 else 0.0)
    return mean_xs, means, stds


def draw(axis, runs, column, style, label=None, width=5, band=True):
    xs, means, stds = mean_band(runs, column, width)
    color, dashes = style
    lines = axis.plot(xs, means, color=color, linestyle=dashes, linewidth=1.5, label=label)
    if band:
        low = [m - s for m, s in zip(means, stds, strict=True)]
        high = [m + s for m, s in zip(means, stds, strict=True)]
        axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    return lines


def draw_group(axis, curves, variant, group, column, width):
    """The scripts of a group, and the others in grey."""
    for script in NAMES:
        if script not in group:
            grey = ("#cccccc", "-")
            draw(axis, curves[script, variant], column, grey, width=width, band=False)
    for script, style in zip(group, STYLES, strict=False):
        draw(axis, curves[script, variant], column, style, NAMES[script], width)


def set_x_axis(axis, x_axis):
    """`x_axis`: (words, first value, last value)."""
    words, first, last = x_axis
    axis.set_xlabel(words)
    axis.set_xlim(first, last)
    if words == "iteration":
        axis.set_xticks((1, 5, 10, 15))


def three_by_three(curves, variant, rows, x_axis, place):
    """A row for each of [(column, words, limits or None, iterations to average)], and a column for each
    group of three scripts, with the other six in grey. `x_axis`: see `set_x_axis`."""
    size = (8.6, 1.75 * len(rows))
    figure, axes = plt.subplots(len(rows), 3, figsize=size, sharex=True, sharey="row")
    for i, (column, words, limits, width) in enumerate(rows):
        for j, group in enumerate(GROUPS):
            axis = axes[i, j]
            draw_group(axis, curves, variant, group, column, width)
            if limits:
                axis.set_ylim(*limits)
            if i == 0:
                axis.legend(loc=place)
            if j == 0:
                axis.set_ylabel(words)
            if i == len(rows) - 1:
                set_x_axis(axis, x_axis)
    figure.tight_layout()
    return figure


def nine():
    curves = evidence.curves("nine")
    runs = evidence.runs("nine")
    for key, seeds in curves.items():  # the greedy curve begins at the base model
        start = runs[key][0]["before_greedy_accuracy"]
        for rows in seeds.values():
            rows.insert(0, {"x": 0, "held_out": start})
    rows = [
        ("held_out", "greedy accuracy,\nheld-out sums", (0.4, 1.0), 1),
        ("accuracy", "accuracy of the rollouts,\ntemperature 1", (0.2, 1.0), 5),
        ("len", "response length\n(tokens)", None, 5),
        ("entropy", "entropy\n(nats per token)", None, 5),
    ]
    x_axis = ("completions generated", 0, 15400)
    save(three_by_three(curves, "default", rows, x_axis, "lower right"), "nine")


LONG_X = ("iteration", 1, 15)


def regimes():
    """The default job beside the second regime at its two rates: a row for each group of three scripts,
    with the other six in grey. In the second regime also grpo without its KL."""
    columns = [
        ("nine", "default", "the default job", ("completions generated", 0, 15400)),
        ("long_nine", "lower", "long answers, stale data, lr 3e-4", LONG_X),
        ("long_high", "higher", "the same, lr 1e-3", LONG_X),
    ]
    free = {
        "long_nine": evidence.curves("long_claims")["grpo", "free"],
        "long_high": evidence.curves("long_high")["grpo", "free"],
    }
    figure, axes = plt.subplots(3, 3, figsize=(8.6, 5.2), sharex="col", sharey=True)
    for seeds in free.values():
        by_iteration(seeds)
    for j, (name, variant, words, x_axis) in enumerate(columns):
        curves = evidence.curves(name) if name == "nine" else long_curves(name)
        for i, group in enumerate(GROUPS):
            axis = axes[i, j]
            draw_group(axis, curves, variant, group, "accuracy", width=1)
            axis.set_ylim(0, 1)
            if i == 0:
                axis.set_title(words)
            if i == 0 and name in free:
                (line,) = draw(axis, free[name], "accuracy", STYLES[3], "GRPO, no KL", width=1)
                axis.legend(handles=[line], loc="lower right" if j == 1 else "upper right")
            if j == 0:
                axis.set_ylabel("accuracy")
                axis.legend(loc="lower right")
        set_x_axis(axes[-1, j], x_axis)
    figure.tight_layout()
    save(figure, "regimes")


def long_rows():
    return [
        ("accuracy", "accuracy of the rollouts,\ntemperature 1", (0.0, 1.0), 1),
        ("len", "response length\n(tokens)", None, 1),
        ("entropy", "entropy\n(nats per token)", (0, None), 1),
        ("log_ratio_p99", "99 % of |log r|\nare below", (0, None), 1),
        ("clipped", "tokens clipped\n(share)", (0, None), 1),
        ("flips", "experts changed\n(share of tokens)", (0, None), 1),
        ("shift", "RSPO's gamma\nbefore its floor", None, 1),
    ]


def by_iteration(seeds):
    """Not by completions, and with the share of tokens that is clipped on either side."""
    for rows in seeds.values():
        for row in rows:
            row["x"] = row["iteration"]
            row["clipped"] = (row["clip_low"] or 0) + (row["clip_high"] or 0)


def long_curves(name):
    """The curves of one of the second regime's experiments."""
    curves = evidence.curves(name)
    for seeds in curves.values():
        by_iteration(seeds)
    return curves


def long_nine():
    curves = long_curves("long_nine")
    save(three_by_three(curves, "lower", long_rows(), LONG_X, "lower right"), "long_nine")


def long_high():
    curves = long_curves("long_high")
    save(three_by_three(curves, "higher", long_rows(), LONG_X, "upper right"), "long_high")


def stability():
    """A map for each script: its accuracy by learning rate and steps per rollout."""
    runs = evidence.runs("stability")
    rates = ("1e-4", "3e-4", "1e-3")
    steps = ("1", "4", "16")
    figure, axes = plt.subplots(3, 3, figsize=(8.6, 7.5))
    for axis, script in zip(axes.flat, evidence.SCRIPTS, strict=True):
        means = [[0.0] * len(steps) for _ in rates]
        for y, rate in enumerate(rates):
            for x, k in enumerate(steps):
                rows = runs[script, f"lr{rate}-steps{k}"]
                accuracies = [row["after_sampled_accuracy"] or 0.0 for row in rows]  # 0 if it broke off
                mean = statistics.mean(accuracies)
                means[y][x] = mean
                look = {"ha": "center", "va": "center", "color": "black" if mean > 0.5 else "white"}
                axis.text(x, y + 0.12, f"{mean:.2f}", size=11, **look)
                axis.text(x, y - 0.22, f"± {statistics.stdev(accuracies):.2f}", size=8, **look)
        axis.imshow(means, cmap="gray", vmin=0, vmax=1, origin="lower", aspect="auto")
        axis.set_title(NAMES[script])
        axis.set_xticks(range(len(steps)), steps)
        axis.set_yticks(range(len(rates)), rates)
        axis.spines[:].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("learning rate")
    for axis in axes[-1]:
        axis.set_xlabel("optimizer steps per rollout")
    figure.tight_layout()
    save(figure, "stability")


def draw_each(axis, runs, column, style, label):
    """A line for each seed, by iteration."""
    color, dashes = style
    for rows in runs.values():
        xs = [row["iteration"] for row in rows]
        ys = [row[column] for row in rows]
        axis.plot(xs, ys, color=color, linestyle=dashes, linewidth=1, label=label)
        label = None  # once is enough


def during_the_fall():
    """What the metrics do in the runs with 16 steps per rollout, at the learning rate where some
    fall."""
    curves = evidence.curves("stability")
    rows = [
        ("accuracy", "accuracy"),
        ("log_ratio_p99", "99 % of |log r|\nare below"),
        ("outside", "tokens outside\nPPO's range"),
        ("flips", "experts changed\n(share of tokens)"),
        ("grad_norm", "gradient norm"),
    ]
    figure, axes = plt.subplots(len(rows), 3, figsize=(8.6, 8.8), sharex=True, sharey="row")
    for i, (column, words) in enumerate(rows):
        for j, group in enumerate(GROUPS):
            for script, style in zip(group, STYLES, strict=False):
                runs = curves[script, "lr1e-3-steps16"]
                draw_each(axes[i, j], runs, column, style, NAMES[script])
            if column in ("log_ratio_p99", "grad_norm"):
                axes[i, j].set_yscale("log")
            if i == 0:
                axes[i, j].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
            if j == 0:
                axes[i, j].set_ylabel(words)
            if i == len(rows) - 1:
                axes[i, j].set_xlabel("iteration")
    figure.tight_layout()
    save(figure, "during_the_fall")


def panels(name, lines, columns, width=5):
    """One panel per column; `lines`: {label: (script, variant)}."""
    curves = evidence.curves(name)
    figure, axes = plt.subplots(1, len(columns), figsize=(8.6, 2.7), squeeze=False)
    for axis, (column, words) in zip(axes[0], columns.items(), strict=True):
        for (label, key), style in zip(lines.items(), STYLES, strict=False):
            draw(axis, curves[key], column, style, label, width)
        axis.set_title(words)
        axis.set_xlabel("completions generated")
        if column == "log_ratio_p99":
            axis.set_yscale("log")
    axes[0, 0].legend()
    figure.tight_layout()
    save(figure, name)


def one_step():
    """Five curves that coincide, so each is drawn thinner than the one below it; two others for
    contrast."""
    curves = evidence.curves("one_step")
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.2))
    looks = {  # script: (label, colour, line width, dashes)
        "grpo": ("GRPO, no KL", "#dddddd", 10, "-"),
        "gspo": ("GSPO", "#e69f00", 7.5, "-"),
        "gmpo": ("GMPO", "#56b4e9", 5, "-"),
        "rspo": ("RSPO", "#999999", 2.5, "-"),
        "sapo": ("SAPO", "#000000", 1, "-"),
        "dr_grpo": ("Dr. GRPO", "#cc79a7", 1.2, "--"),
        "cispo": ("CISPO", "#0072b2", 1.2, ":"),
    }
    titles = {"accuracy": "accuracy at temperature 1", "entropy": "entropy"}
    for axis, (column, words) in zip(axes, titles.items(), strict=True):
        for script, (label, color, width, dashes) in looks.items():
            xs, means, _ = mean_band(curves[script, "one"], column)
            axis.plot(xs, means, color=color, linewidth=width, linestyle=dashes, label=label)
        axis.set_title(words)
        axis.set_xlabel("completions generated")
        axis.set_xlim(0, 15400)
    axes[1].legend()
    figure.tight_layout()
    save(figure, "one_step")


def clip_higher():
    wide = evidence.curves("clip_higher")
    narrow = evidence.curves("clip_higher_narrow")
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.7))
    for axis, steps in zip(axes, ("4", "16"), strict=False):
        for high, style in zip(("0.2", "0.28", "0.5", "1.0"), STYLES, strict=False):
            draw(axis, wide["dapo", f"steps{steps}-high{high}"], "entropy", style, f"eps high {high}")
        axis.set_title(f"entropy, {steps} steps, eps low 0.2")
    for high, style in zip(("0.02", "0.028", "0.1"), STYLES, strict=False):
        draw(axes[2], narrow["dapo", f"high{high}"], "entropy", style, f"eps high {high}")
    axes[2].set_title("entropy, 16 steps, eps low 0.02")
    for axis in axes:
        axis.set_xlabel("completions generated")
        axis.legend()
    figure.tight_layout()
    save(figure, "clip_higher")


def wrong_length():
    lines = {"GRPO, no KL": ("grpo", "kl0"), "Dr. GRPO": ("dr_grpo", "default")}
    columns = {
        "len_wrong": "length of wrong answers",
        "len_right": "length of right answers",
        "accuracy": "accuracy",
    }
    panels("wrong_length", lines, columns)


def dynamic_sampling():
    lines = {"with dynamic sampling": ("dapo", "refill"), "without": ("dapo", "drop")}
    panels("dynamic_sampling", lines, {"accuracy": "accuracy at temperature 1", "entropy": "entropy"})


def overlong():
    lines = {name: ("dapo", name) for name in ("soft", "filter", "none")}
    columns = {
        "accuracy": "accuracy",
        "len": "response length",
        "truncated": "share cut off at the cap",
    }
    panels("overlong", lines, columns)


def stale_ratio():
    names = ("grpo", "cispo", "gspo", "gmpo", "rspo")
    lines = {NAMES[name]: (name, "stale") for name in names}
    columns = {
        "log_ratio_p99": "99 % of |log r| are below",
        "log_ratio_up_max": "largest log r",
        "accuracy": "accuracy",
    }
    panels("stale_ratio", lines, columns)


def router_shift():
    curves = evidence.curves("router_shift")
    rates = ("3e-4", "1e-3")
    figure, axes = plt.subplots(4, 2, figsize=(8.6, 7.4), sharex=True, sharey="row")
    rows = [
        ("accuracy", "accuracy"),
        ("flips", "experts changed\n(share of tokens)"),
        ("shift", "RSPO's gamma\nbefore its floor"),
        ("log_ratio_p99", "99 % of |log r|\nare below"),
    ]
    for j, rate in enumerate(rates):
        for i, (column, words) in enumerate(rows):
            for script, style in zip(("gmpo", "rspo"), STYLES, strict=False):
                if column == "shift" and script == "gmpo":
                    continue  # it has none
                draw_each(axes[i, j], curves[script, f"lr{rate}"], column, style, NAMES[script])
            if j == 0:
                axes[i, j].set_ylabel(words)
        axes[0, j].set_title(f"learning rate {rate}, 64 steps per rollout, five seeds")
        axes[0, j].legend()
        axes[-1, j].set_xlabel("iteration")
    figure.tight_layout()
    save(figure, "router_shift")


def sapo_taus():
    curves = evidence.curves("sapo_taus")
    figure, axes = plt.subplots(1, 4, figsize=(8.6, 2.7))
    pairs = {
        "1.0 / 1.0": "equal",
        "1.0 / 1.05": "paper",
        "1.05 / 1.0": "reversed",
        "1.0 / 2.0": "strong",
        "2.0 / 1.0": "strong-reversed",
    }
    for i, rate in enumerate(("3e-4", "1e-3")):
        for j, column in enumerate(("accuracy", "log_ratio_p99")):
            axis = axes[2 * i + j]
            for (label, name), style in zip(pairs.items(), STYLES, strict=True):
                draw(axis, curves["sapo", f"{name}-lr{rate}"], column, style, label, band=False)
            axis.set_title(f"{'accuracy' if j == 0 else '99 % of |log r|'}, lr {rate}")
            axis.set_xlabel("completions")
    axes[0].legend(title="tau_pos / tau_neg", fontsize=8)
    figure.tight_layout()
    save(figure, "sapo_taus")


def dots(axis, groups, title):
    """A row for each of {name: values} with a dot for each value, and a stroke at their mean."""
    for row, values in enumerate(groups.values()):
        axis.plot(values, [row] * len(values), "o", color="#0072b2", markersize=4, alpha=0.6)
        axis.plot(statistics.mean(values), row, "|", color="#000000", markersize=16)
    axis.set_yticks(range(len(groups)), groups)
    axis.invert_yaxis()
    axis.set_title(title)


def mismatch():
    figure, axes = plt.subplots(1, 3, figsize=(9.4, 2.9))
    precisions = ("bfloat16", "int8", "int4")
    rows = evidence.table("mismatch")
    for name, style in zip(dict.fromkeys(row["model"] for row in rows), STYLES, strict=False):
        of_model = {row["precision"]: row["sampler_kl"] for row in rows if row["model"] == name}
        color, line = style
        values = [of_model[precision] for precision in precisions]
        axes[0].plot(precisions, values, line, color=color, marker="o", label=name)
    axes[0].set_yscale("log")
    axes[0].set_title("KL per token, sampler to training forward")
    axes[0].legend(fontsize=8)
    runs = evidence.runs("rollout_correction")
    names = {"no mismatch": "same", "int4": "int4"}
    names |= {f"int4, {rule}": f"int4-{rule}" for rule in ("token_tis", "sequence_tis", "geo_mask")}
    groups = {}
    for label, variant in names.items():
        rows = runs["grpo", f"lr1e-3-{variant}"]
        groups[label] = [row["after_sampled_accuracy"] for row in rows]
    dots(axes[1], groups, "GRPO at 1e-3: held-out accuracy")
    curves = evidence.curves("routing_replay")
    groups = {}
    for label, key in {
        "GRPO": ("grpo", "steps64-none"),
        "GRPO, r2": ("grpo", "steps64-r2"),
        "RSPO": ("rspo", "steps64-none"),
        "int4: GRPO": ("grpo", "steps64-int4"),
        "int4: GRPO, r3": ("grpo", "steps64-int4-r3"),
        "int4: RSPO": ("rspo", "steps64-int4"),
    }.items():
        runs_of = curves[key].values()
        groups[label] = [evidence.tail(rows, "log_ratio_p99", 10_000) for rows in runs_of]
    dots(axes[2], groups, "99 % of |log r|, 64 steps")
    figure.tight_layout()
    save(figure, "mismatch")


ALL = [
    nine,
    stability,
    during_the_fall,
    one_step,
    clip_higher,
    wrong_length,
    dynamic_sampling,
    overlong,
    stale_ratio,
    router_shift,
    sapo_taus,
    mismatch,
    regimes,
    long_nine,
    long_high,
]


def main():
    wanted = sys.argv[1:] or [function.__name__ for function in ALL]
    for function in ALL:
        if function.__name__ in wanted:
            try:
                function()
            except FileNotFoundError as error:
                print(f"{function.__name__}: no {error.filename} yet")


if __name__ == "__main__":
    main()
