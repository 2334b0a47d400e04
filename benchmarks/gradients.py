"""What each objective does with one token: its pull on the token's log-prob, over the token's ratio.

    python benchmarks/gradients.py

By autograd from each script's own policy_loss, with its default constants: dJ / d log pi of one token
in an answer of ten, for the advantages 1 and -1, relative to its size at r = 1. Either this token alone
has moved to the ratio r, or all ten have. grpo's KL is left out: its pull does not depend on r.
Writes results/gradients.csv, which a test compares with the scripts, and draws figures/gradients.png.
"""

import csv
import importlib
import inspect
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))
CSV = Path(__file__).parent / "results" / "gradients.csv"
NUM_TOKENS = 10
GAMMA = 0.8  # rspo's, all the way down at its floor
RATIOS_N = 3 ** torch.linspace(-1, 1, 121, dtype=torch.float64)
COLORS = {1: "#0072b2", -1: "#d55e00"}  # blue and vermilion: colour-blind eyes tell them apart
PANELS = {  # script: title, line below it
    "ppo": ("PPO", "clipped at 0.8 and 1.2; A from a critic"),
    "grpo": ("GRPO", "the same; A from the group's rewards"),
    "dr_grpo": ("Dr. GRPO", "the same; no division by length or std"),
    "dapo": ("DAPO", "clipped at 0.8 and 1.28"),
    "gspo": ("GSPO", "one ratio for the whole answer"),
    "cispo": ("CISPO", "the gradient of log π, times r"),
    "gmpo": ("GMPO", "geometric mean; log r clipped at ±0.4"),
    "rspo": ("RSPO", f"GMPO (grey) times γ, here {GAMMA}"),
    "sapo": ("SAPO", "a soft gate in place of the clip"),
}
WORDS = {  # script: [(ratio, pull, advantage, words)]
    "ppo": [(1.26, 0.22, 1, "clipped:\nno gradient"), (0.34, -1.1, -1, "clipped:\nno gradient")],
    "gspo": [
        (1.1, 0.22, 1, "a step: clipped at\n0.997 and 1.004"),
        (1.25, -0.8, -1, "this token alone"),
        (0.66, -2.1, -1, "all together"),
    ],
    "cispo": [(1.06, 0.15, 1, "no clip; r capped at 5")],
    "sapo": [(1.06, 0.15, 1, "fades, but is never 0")],
}


def pulls(name, advantage, moved, ratios_N, gamma=GAMMA):
    """dJ / d log pi of the first token, for each ratio; `moved`: how many of the tokens have it."""
    policy_loss = importlib.import_module(name).policy_loss
    old_logprobs_NT = torch.zeros(len(ratios_N), NUM_TOKENS, dtype=torch.float64)
    logprobs_NT = old_logprobs_NT.clone()
    logprobs_NT[:, :moved] = ratios_N.log()[:, None]
    logprobs_NT.requires_grad_()
    mask_NT = torch.ones_like(old_logprobs_NT)
    advantages_N1 = advantage * mask_NT[:, :1]
    extra = {"max_new_tokens": NUM_TOKENS, "router_shift_BT": gamma * mask_NT}
    parameters = inspect.signature(policy_loss).parameters
    extra = {key: value for key, value in extra.items() if key in parameters}
    loss, _ = policy_loss(logprobs_NT, old_logprobs_NT, advantages_N1, mask_NT, **extra)
    (gradient_NT,) = torch.autograd.grad(-loss, logprobs_NT)
    return gradient_NT[:, 0]


def columns():
    """{column of the CSV: values}: the ratios, then the pulls in "script advantage tokens moved"."""
    found = {"ratio": RATIOS_N.tolist()}
    for name in PANELS:
        # The size at r = 1, before rspo's gamma
        sizes_N = pulls(name, 1, 1, torch.ones_like(RATIOS_N), gamma=1)
        for advantage in (1, -1):
            for moved in (1, NUM_TOKENS):
                pulls_N = pulls(name, advantage, moved, RATIOS_N) / sizes_N
                found[f"{name} {advantage:+d} {moved}"] = pulls_N.tolist()
    return found


def read():
    """{column: values} of the CSV."""
    with open(CSV) as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in rows[0]}


def draw(axis, name, curves):
    for advantage, color in COLORS.items():
        sign = {1: "+1", -1: "−1"}[advantage]
        axis.text(0.34, 2.6 * advantage, f"A = {sign}", color=color, va="center")
        if name == "rspo":
            for moved, line in ((1, "-"), (NUM_TOKENS, ":")):
                parent = curves[f"gmpo {advantage:+d} {moved}"]
                axis.plot(curves["ratio"], parent, line, color="#aaaaaa", linewidth=2.5)
        alone = curves[f"{name} {advantage:+d} 1"]
        together = curves[f"{name} {advantage:+d} {NUM_TOKENS}"]
        if together != alone:
            axis.plot(curves["ratio"], together, color=color, linestyle=":", linewidth=1.8)
        axis.plot(curves["ratio"], alone, color=color, linewidth=1.8)
    title, below = PANELS[name]
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=17)
    axis.text(0, 1.03, below, transform=axis.transAxes, fontsize=9)
    for ratio, value, advantage, words in WORDS.get(name, ()):
        axis.text(ratio, value, words, color=COLORS[advantage], fontsize=9)
    axis.axhline(0, color="#000000", linewidth=0.6, zorder=0)
    axis.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)


def main():
    found = columns()
    with open(CSV, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(found)
        for row in zip(*found.values(), strict=True):
            writer.writerow(f"{value:.4g}" for value in row)
    import figures  # not above: the test of the numbers needs no matplotlib

    figure, axes = figures.plt.subplots(3, 3, figsize=(9, 6.9), sharex=True, sharey=True)
    curves = read()
    for axis, name in zip(axes.flat, PANELS, strict=True):
        draw(axis, name, curves)
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks([1 / 3, 1 / 2, 1, 2, 3], ["1/3", "1/2", "1", "2", "3"])
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylim(-3.2, 3.2)
    axes[0, 0].set_yticks((-2, -1, 0, 1, 2))
    for axis in axes[-1]:
        axis.set_xlabel("ratio r")
    for axis in axes[:, 0]:
        axis.set_ylabel("pull on log π")
    figure.tight_layout()
    figures.save(figure, "gradients", dpi=200)


if __name__ == "__main__":
    main()
