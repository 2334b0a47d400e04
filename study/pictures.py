"""How each objective treats a token, and the length of an answer.

    python study/pictures.py

Writes two pictures, each with its numbers in a CSV, which a test compares with the scripts:

    figures/gradients   the pull on a token's log-prob, over the token's ratio
    figures/tokens      the weight of a token, over the length of its answer

The page has both for any two scripts, and the weight of a prompt. No formula is repeated here: all
numbers come from the scripts' own functions, with their default settings.
"""

import csv
import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))
FIGURES = Path(__file__).parent / "figures"
NUM_TOKENS = 10
GAMMA = 0.8  # rspo's, here at its floor
RATIOS_N = 3 ** torch.linspace(-1, 1, 121, dtype=torch.float64)
COLORS = {1: "#0072b2", -1: "#d55e00"}  # blue and vermilion, which color-blind readers can tell apart
PANELS = {  # script: title, line below it
    "ppo": ("PPO", "clipped at 0.8 and 1.2; A from a critic"),
    "grpo": ("GRPO", "the same; A from the group's rewards"),
    "dr_grpo": ("Dr. GRPO", "the same; no division by length or std"),
    "dapo": ("DAPO", "clipped at 0.8 and 1.28"),
    "gspo": ("GSPO", "one ratio for the whole answer"),
    "cispo": ("CISPO", "the gradient of log π, times r"),
    "gmpo": ("GMPO", "geometric mean; log r clipped at ±0.4"),
    "rspo": ("RSPO", f"GMPO (gray) times γ, here {GAMMA}"),
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


def gradient(name, logprobs_NT, mask_NT, advantage=1, gamma=1, **flags):
    """dJ / d log pi of all tokens, by autograd, with all old log-probs 0. The advantage and rspo's
    gamma are numbers or tensors that broadcast over the tokens. Unknown flags are ignored."""
    policy_loss = importlib.import_module(name).policy_loss
    logprobs_NT = logprobs_NT.clone().requires_grad_()
    advantages = advantage * torch.ones_like(logprobs_NT[:, :1])
    gamma_NT = gamma * torch.ones_like(logprobs_NT)
    known = {"max_new_tokens": mask_NT.shape[1], "router_shift_BT": gamma_NT} | flags
    parameters = inspect.signature(policy_loss).parameters
    known = {key: value for key, value in known.items() if key in parameters}
    loss, _ = policy_loss(logprobs_NT, torch.zeros_like(logprobs_NT), advantages, mask_NT, **known)
    return torch.autograd.grad(-loss, logprobs_NT)[0]


def pulls(name, advantage, moved):
    """The pull on the first of ten tokens, relative to r = 1, when `moved` of them have each ratio.
    grpo's KL is left out because its pull does not depend on r."""
    logprobs_NT = torch.zeros(len(RATIOS_N), NUM_TOKENS, dtype=torch.float64)
    mask_NT = torch.ones_like(logprobs_NT)
    sizes_N = gradient(name, logprobs_NT, mask_NT)[:, 0]  # before rspo's gamma
    logprobs_NT[:, :moved] = RATIOS_N.log()[:, None]
    return gradient(name, logprobs_NT, mask_NT, advantage, GAMMA)[:, 0] / sizes_N


def gradients(names=tuple(PANELS)):
    """{column: values}: the ratios, then the pulls in "script advantage tokens moved"."""
    found = {"ratio": RATIOS_N.tolist()}
    for name in names:
        for advantage in (1, -1):
            for moved in (1, NUM_TOKENS):
                found[f"{name} {advantage:+d} {moved}"] = pulls(name, advantage, moved).tolist()
    return found


def prompt_weight(name, rewards_1G):
    """Mean of max(A, 0) over a group's answers: how hard the right ones are pushed. None if the group
    is dropped. A critic or a running mean has not learned anything yet."""
    module = importlib.import_module(name)
    if hasattr(module, "mixed_groups"):
        words = {1: "correct", 0: "wrong"}
        completions = [SimpleNamespace(verdict=words[reward]) for reward in rewards_1G[0].tolist()]
        if not module.mixed_groups(completions, len(completions)):
            return None
    if hasattr(module, "compute_gae"):  # answers of one token
        rewards_NT = rewards_1G.T
        no_values_NT = torch.zeros_like(rewards_NT)
        advantages, _ = module.compute_gae(rewards_NT, no_values_NT, torch.ones_like(rewards_NT), 1, 1)
    elif "baseline" in inspect.signature(module.compute_advantages).parameters:
        advantages = module.compute_advantages(rewards_1G, baseline=0)
    else:
        advantages = module.compute_advantages(rewards_1G)
    return advantages.clamp(min=0).mean().item()


def prompts(names):
    """{column: values}: the fraction of right answers in a group, then each script's weights."""
    size = importlib.import_module("grpo").Args().group_size
    right_OG = torch.ones(size + 1, size, dtype=torch.float64).tril(-1)  # every outcome: 0 to G right
    found = {"right": right_OG.mean(1).tolist()}
    for name in names:
        found[name] = [prompt_weight(name, rewards_G[None]) for rewards_G in right_OG]
    return found


def tokens(names=tuple(TOKENS)):
    """{column: values}: the length of an answer, then the weight of one of its tokens in each script,
    at r = 1, times the number of tokens in the step. The step has one answer of each length."""
    longest = importlib.import_module("grpo").Args().max_new_tokens
    mask_NT = torch.ones(longest, longest, dtype=torch.float64).tril()
    found = {"length": mask_NT.sum(1).tolist()}
    for name in names:
        weights_NT = gradient(name, torch.zeros_like(mask_NT), mask_NT)
        found[name] = (weights_NT[:, 0] * mask_NT.sum()).tolist()
    return found


PICTURES = {"gradients": gradients, "tokens": tokens}


def read(name):
    """{column: values} of figures/<name>.csv."""
    with open(FIGURES / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) if row[key] else None for row in rows] for key in rows[0]}


def write(name, found):
    with open(FIGURES / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(found)
        for row in zip(*found.values(), strict=True):
            writer.writerow("" if value is None else f"{value:.4g}" for value in row)


def draw_panel(axis, name, curves):
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


def draw_gradients(plt, curves):
    figure, axes = plt.subplots(3, 3, figsize=(8, 6.4), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, PANELS, strict=True):
        draw_panel(axis, name, curves)
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


def draw_tokens(plt, weights):
    """Lines in different styles, and dots for a line that lies on top of another one."""
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


def main():
    import matplotlib  # imported here because the test does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    plt.rcParams |= {"legend.frameon": False, "lines.markersize": 3.5}
    for name, numbers in PICTURES.items():
        write(name, numbers())
    figures = {
        "gradients": draw_gradients(plt, read("gradients")),
        "tokens": draw_tokens(plt, read("tokens")),
    }
    for name, figure in figures.items():
        figure.savefig(FIGURES / f"{name}.png", dpi=200, metadata={"Software": None})


if __name__ == "__main__":
    main()
