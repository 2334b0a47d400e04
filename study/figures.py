"""Draws figures/gradients.png: the pull of each script's objective on a token, over the token's ratio.

    python study/figures.py

Lines differ in style or lightness as well as color, so you can tell them apart in grayscale.
"""

import importlib
import inspect
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from scripts import SCRIPTS, changes_of, command_line, parent_of, title_of

PATH = Path(__file__).parent / "figures" / "gradients.png"
NUM_TOKENS = 10
GAMMA = 0.8  # rspo's, here at its floor
RATIOS_N = 3 ** torch.linspace(-1, 1, 121, dtype=torch.float64)
COLORS = {1: "#0072b2", -1: "#d55e00"}  # blue and vermilion, which color-blind readers can tell apart
WORDS = {  # script: [(ratio, pull, advantage, words)], if something needs to be said
    "ppo": [(1.26, 0.22, 1, "clipped:\nno gradient"), (0.34, -1.5, -1, "clipped:\nno gradient")],
    "gspo": [
        (1.1, 0.22, 1, "a step: clipped at\n0.997 and 1.004"),
        (1.15, -0.8, -1, "this token alone"),
        (0.66, -2.1, -1, "all together"),
    ],
    "cispo": [(0.36, 1.4, 1, "no clip; r at most 5")],
    "rspo": [(0.36, 1.4, 1, f"here γ is {GAMMA}")],
    "sapo": [(0.36, 1.4, 1, "fades, is never 0")],
}
plt.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def gradient(name, logprobs_NT, advantage, gamma):
    """dJ / d log pi of all tokens, by autograd of the script's own loss, with all old log-probs 0."""
    policy_loss = importlib.import_module(name).policy_loss
    logprobs_NT = logprobs_NT.clone().requires_grad_()
    ones_NT = torch.ones_like(logprobs_NT)
    own = {"max_new_tokens": NUM_TOKENS, "router_shift_BT": gamma * ones_NT}
    known = inspect.signature(policy_loss).parameters
    own = {key: value for key, value in own.items() if key in known}
    loss, _ = policy_loss(logprobs_NT, 0 * ones_NT, advantage * ones_NT[:, :1], ones_NT, **own)
    return torch.autograd.grad(-loss, logprobs_NT)[0]


def pulls(name, advantage, moved):
    """The pull on the first of ten tokens, relative to r = 1, when `moved` of them have each ratio.
    grpo's KL is left out because its pull does not depend on r."""
    logprobs_NT = torch.zeros(len(RATIOS_N), NUM_TOKENS, dtype=torch.float64)
    sizes_N = gradient(name, logprobs_NT, 1, 1)[:, 0]
    logprobs_NT[:, :moved] = RATIOS_N.log()[:, None]
    return gradient(name, logprobs_NT, advantage, GAMMA)[:, 0] / sizes_N


def draw_pulls(axis, name):
    for advantage, color in COLORS.items():
        sign = {1: "+1", -1: "−1"}[advantage]
        axis.text(0.34, 2.6 * advantage, f"A = {sign}", color=color, va="center")
        for moved, line in ((NUM_TOKENS, ":"), (1, "-")):
            if parent_of(name):
                parent = pulls(parent_of(name), advantage, moved)
                axis.plot(RATIOS_N, parent, line, color="#bbbbbb", linewidth=2.5, zorder=1)
            own = pulls(name, advantage, moved)
            axis.plot(RATIOS_N, own, line, color=color, linewidth=1.8)
    axis.set_title(title_of(name), loc="left", fontsize=11, fontweight="bold", pad=17)
    axis.text(0, 1.03, "; ".join(changes_of(name)[:2]), transform=axis.transAxes)
    for ratio, value, advantage, words in WORDS.get(name, ()):
        axis.text(ratio, value, words, color=COLORS[advantage])
    axis.axhline(0, color="#000000", linewidth=0.6, zorder=0)
    axis.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)


def draw():
    num_rows = math.ceil(len(SCRIPTS) / 3)
    size = (8, 2.13 * num_rows)
    figure, axes = plt.subplots(num_rows, 3, figsize=size, sharex=True, sharey=True)
    for axis, name in zip(axes.flat, SCRIPTS, strict=False):
        draw_pulls(axis, name)
    for axis in axes.flat[len(SCRIPTS) :]:
        axis.set_visible(False)
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


def main():
    command_line(__doc__).parse_args()
    draw().savefig(PATH, dpi=150, metadata={"Software": None})
    print(PATH)


if __name__ == "__main__":
    main()
