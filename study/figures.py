"""Draws three pictures in figures/: gradients and tokens from the scripts, nine from results/.

    python study/figures.py

Lines differ in style or lightness as well as color, so you can tell them apart in grayscale.
"""

from pathlib import Path

import matplotlib
import pictures
import stats
from experiments import SCRIPTS

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
COLORS = {1: "#0072b2", -1: "#d55e00"}  # blue and vermilion, which color-blind readers can tell apart
PANELS = {  # script: title, line below it
    "ppo": ("PPO", "clipped at 0.8 and 1.2; A from a critic"),
    "grpo": ("GRPO", "the same; A from the group's rewards"),
    "dr_grpo": ("Dr. GRPO", "the same; no division by length or std"),
    "dapo": ("DAPO", "clipped at 0.8 and 1.28"),
    "gspo": ("GSPO", "one ratio for the whole answer"),
    "cispo": ("CISPO", "the gradient of log π, times r"),
    "gmpo": ("GMPO", "geometric mean; log r clipped at ±0.4"),
    "rspo": ("RSPO", f"GMPO (gray) times γ, here {pictures.GAMMA}"),
    "sapo": ("SAPO", "a soft gate in place of the clip"),
}
WORDS = {  # script: [(ratio, pull, advantage, words)]
    "ppo": [(1.26, 0.22, 1, "clipped:\nno gradient"), (0.34, -1.5, -1, "clipped:\nno gradient")],
    "gspo": [
        (1.1, 0.22, 1, "a step: clipped at\n0.997 and 1.004"),
        (1.15, -0.8, -1, "this token alone"),
        (0.66, -2.1, -1, "all together"),
    ],
    "cispo": [(1.06, 0.15, 1, "no clip; r at most 5")],
    "sapo": [(1.06, 0.15, 1, "fades, is never 0")],
}
TOKENS = {
    "more.rloo": ("sum (reinforce, rloo)", "-."),
    "grpo": ("per completion (grpo, sapo)", "-"),
    "gmpo": ("geometric mean (gmpo, rspo; gspo)", "o"),
    "dapo": ("over all (ppo, dapo, cispo)", ":"),
    "dr_grpo": ("by a constant (dr_grpo)", "--"),
}
plt.rcParams |= {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 3.5,
}

# ---------------------------------------------------------------------------- from the scripts


def draw_pulls(axis, name, curves):
    for advantage, color in COLORS.items():
        sign = {1: "+1", -1: "−1"}[advantage]
        axis.text(0.34, 2.6 * advantage, f"A = {sign}", color=color, va="center")
        if name == "rspo":
            for moved, line in ((1, "-"), (pictures.NUM_TOKENS, ":")):
                parent = curves[f"gmpo {advantage:+d} {moved}"]
                axis.plot(curves["ratio"], parent, line, color="#aaaaaa", linewidth=2.5)
        alone = curves[f"{name} {advantage:+d} 1"]
        together = curves[f"{name} {advantage:+d} {pictures.NUM_TOKENS}"]
        axis.plot(curves["ratio"], together, color=color, linestyle=":", linewidth=1.8)
        axis.plot(curves["ratio"], alone, color=color, linewidth=1.8)
    title, below = PANELS[name]
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=17)
    axis.text(0, 1.03, below, transform=axis.transAxes)
    for ratio, value, advantage, words in WORDS.get(name, ()):
        axis.text(ratio, value, words, color=COLORS[advantage])
    axis.axhline(0, color="#000000", linewidth=0.6, zorder=0)
    axis.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)


def gradients():
    """The pull on a token's log-prob, over the token's ratio."""
    curves = pictures.gradients(SCRIPTS)
    figure, axes = plt.subplots(3, 3, figsize=(8, 6.4), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, PANELS, strict=True):
        draw_pulls(axis, name, curves)
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks([1 / 3, 1 / 2, 1, 2, 3], ["1/3", "1/2", "1", "2", "3"])
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylim(-3.2, 3.2)
    axes[0, 0].set_yticks((-2, -1, 0, 1, 2))
    for axis in axes[-1]:
        axis.set_xlabel("ratio r")
    for axis in axes[:, 0]:
        axis.set_ylabel("pull on log π")
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.08, top=0.92, wspace=0.08, hspace=0.4)
    return figure


def tokens():
    """The weight of a token, over the length of its answer. Lines in different styles, and dots for a
    line that lies on top of another one."""
    weights = pictures.tokens(TOKENS)
    figure, axis = plt.subplots(figsize=(6, 3))
    for name, (label, style) in TOKENS.items():
        axis.plot(weights["length"], weights[name], style, label=label)
    axis.set_xlabel("length of the answer")
    axis.set_ylabel("weight of a token")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(loc="upper right", bbox_to_anchor=(1, 0.94))
    figure.tight_layout()
    return figure


# ------------------------------------------------------------------------------ from results/


def draw_mean(axis, runs, column, style, label=None):
    """Draws the mean over seeds as a line and, if it has a label, the standard deviation as a band."""
    xs, means, stds = zip(*stats.curve(runs, column), strict=True)
    color, dashes = style
    axis.plot(xs, means, color=color, linestyle=dashes, label=label)
    if label:
        low = [mean - std for mean, std in zip(means, stds, strict=True)]
        high = [mean + std for mean, std in zip(means, stds, strict=True)]
        axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def nine():
    """One column per group of three scripts, with the other six in gray."""
    curves = stats.curves("nine")
    panels = {  # column: words
        "accuracy": "rollout accuracy\n(temperature 1)",
        "len": "response length\n(tokens)",
        "entropy": "entropy\n(nats per token)",
    }
    figure, axes = plt.subplots(3, len(GROUPS), figsize=(8, 5.2), sharex=True, sharey="row")
    for row, (column, words) in zip(axes, panels.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, group in zip(row, GROUPS, strict=True):
            for script in SCRIPTS:
                if script not in group:
                    draw_mean(axis, curves[script, "default"], column, GRAY)
            for (script, label), style in zip(group.items(), STYLES, strict=True):
                draw_mean(axis, curves[script, "default"], column, style, label)
    for axis in axes[0]:
        axis.legend(loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("completions generated")
        axis.set_xlim(0, 10_400)
        axis.set_xticks([0, 5000, 10_000], ["0", "5k", "10k"])
    figure.tight_layout()
    return figure


def main():
    for draw in (gradients, tokens, nine):
        draw().savefig(FIGURES / f"{draw.__name__}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
