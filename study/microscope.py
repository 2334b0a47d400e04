"""Answers five questions about the mechanisms, with a tabular policy.

    python study/microscope.py [rare ...]     # all five if you name none, in half a minute
    python study/microscope.py --help         # their names

The policy is a row of logits, or one row for each position of an answer, so only the objective matters.
All advantages and losses are the scripts' own. A panel writes its picture to
figures/microscope_<name>.png. microscope.toml has the text: each panel's question, what you see, what
the paper says, and the titles of its plots.
"""

import functools
import importlib
import itertools
import textwrap
import tomllib
from pathlib import Path

import torch
from scripts import command_line

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "figures"
WORDS = tomllib.loads((FOLDER / "microscope.toml").read_text())
GROUPS = 256
GROUP_SIZE = 16
ROLLOUTS = 12
STEPS = 64  # optimizer steps per rollout
LR = 0.3  # for plain SGD; with AdamW, a larger gradient would not mean a larger step
RARE = ((0.02, 0.45, 0.45) + (0.01,) * 8, (1, 0, 0) + (0,) * 8)  # probabilities, rewards
THREE = ((0.3, 0.15, 0.05) + (0.0625,) * 8, (1, 1, 1) + (0,) * 8)
COLORS = ["#000000", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"]
OBJECTIVES = {  # label: script, flags
    "clip at 1.2 (grpo)": ("grpo", {}),
    "clip at 1.28 (dapo)": ("dapo", {}),
    "clip at 1.4": ("dapo", {"clip_eps_high": 0.4}),
    "gmpo": ("gmpo", {}),
    "sapo": ("sapo", {}),
    "cispo": ("cispo", {}),
    "gspo": ("gspo", {}),
}


# ----------------------------------------------------------------------------------- a policy to train


def train(script, flags, probs_V, rewards_V, rollouts):
    """grpo.py's loop, for one prompt and V one-token answers. Returns the policy after each rollout."""
    module = importlib.import_module(script)
    noise = torch.Generator().manual_seed(0)
    logits_V = probs_V.log().requires_grad_()
    optimizer = torch.optim.SGD([logits_V], lr=LR)
    history = [probs_V]
    for _ in range(rollouts):
        old_logprobs_V = logits_V.detach().log_softmax(0)
        answers_B = torch.multinomial(old_logprobs_V.exp(), GROUPS * GROUP_SIZE, True, generator=noise)
        rewards_PG = rewards_V[answers_B].view(GROUPS, GROUP_SIZE)
        advantages_B1 = module.compute_advantages(rewards_PG).view(-1, 1)
        minibatches = list(zip(answers_B.chunk(4), advantages_B1.chunk(4), strict=True))
        for step in range(STEPS):
            rows, mini_B1 = minibatches[step % 4]
            logprobs_B1 = logits_V.log_softmax(0)[rows, None]
            old_B1 = old_logprobs_V[rows, None]
            loss, _ = module.policy_loss(logprobs_B1, old_B1, mini_B1, torch.ones_like(old_B1), **flags)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(logits_V.detach().softmax(0))
    return torch.stack(history)


@functools.cache
def trained(probs, rewards):
    """{label: probabilities after each rollout, shape (rollouts + 1, V)} for all objectives."""
    probs_V = torch.tensor(probs, dtype=torch.float64)
    rewards_V = torch.tensor(rewards, dtype=torch.float64)
    found = {}
    for label, (script, flags) in OBJECTIVES.items():
        found[label] = train(script, flags, probs_V, rewards_V, ROLLOUTS)
    return found


# ------------------------------------------------------------- the panels: [{label: (xs, ys)}] by plot


def rare():
    """The probability of the right answer, and how it would grow if it always stopped at the clip."""
    rollouts = range(ROLLOUTS + 1)
    lines = {label: (rollouts, probs_NV[:, 0]) for label, probs_NV in trained(*RARE).items()}
    for bound in (1.2, 1.28):
        lines[f"0.02 x {bound}^n"] = (rollouts, [0.02 * bound**n for n in rollouts])
    return [lines]


def entropy():
    """Entropy over time for two prompts; for the second one, also by its error rate."""
    found = []
    for answers in (RARE, THREE):
        lines = {}
        for label, probs_NV in trained(*answers).items():
            lines[label] = (range(ROLLOUTS + 1), -(probs_NV * probs_NV.log()).sum(1))
        found.append(lines)
    at_equal_success = {}
    for label, probs_NV in trained(*THREE).items():
        _, entropy_N = lines[label]
        at_equal_success[label] = (probs_NV[:, 3:].sum(1), entropy_N)
    return [*found, at_equal_success]


def negative():
    """How one sampled token moves all logits and probabilities."""
    probs_V = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64], dtype=torch.float64)
    pushes = {}
    changes = {}
    cases = {"1/2, A = +1": (0, 1.0), "1/2, A = -1": (0, -1.0), "1/32, A = -1": (4, -1.0)}
    for name, (sampled, advantage) in cases.items():
        logits_V = probs_V.log().requires_grad_()
        logprobs_11 = logits_V.log_softmax(0)[sampled].view(1, 1)
        one_11 = torch.ones_like(logprobs_11)
        policy_loss = importlib.import_module("grpo").policy_loss
        loss, _ = policy_loss(logprobs_11, logprobs_11.detach(), advantage * one_11, one_11)
        push_V = torch.autograd.grad(-loss, logits_V)[0]
        # A small step along the push moves the probabilities by Jacobian (symmetric) x push.
        change_V = torch.autograd.grad(logits_V.softmax(0), logits_V, push_V)[0]
        pushes[f"sampled: {name}"] = (probs_V, push_V)
        changes[f"sampled: {name}"] = (probs_V, change_V)
    return [pushes, changes]


def clip():
    """Answers of growing length, after a random move. grpo then clips about as much as GSPO reports."""
    noise = torch.Generator().manual_seed(0)
    T, V, N = 16_384, 16, 64
    old_TV = (3 * torch.randn(T, V, generator=noise, dtype=torch.float64)).log_softmax(1)
    new_TV = (old_TV + 0.07 * torch.randn(T, V, generator=noise, dtype=torch.float64)).log_softmax(1)
    tokens_TN = torch.multinomial(old_TV.exp(), N, True, generator=noise)
    logratios_NT = (new_TV - old_TV).gather(1, tokens_TN).T.contiguous()
    clips = {
        "token, 0.2 (grpo)": ("grpo", {}),
        "mean, 0.003 (gspo)": ("gspo", {}),
        "mean, 0.0003 (its paper)": ("gspo", {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}),
        "sum, 0.4 (gmpo, per sequence)": ("gmpo", {"clip_level": "sequence"}),
    }
    lengths = [4**k for k in range(1, 8)]
    lines = {}
    for label, (script, flags) in clips.items():
        policy_loss = importlib.import_module(script).policy_loss
        fractions = []
        for length in lengths:
            logratios_BT = logratios_NT.reshape(-1, length)  # more answers with fewer tokens
            ones_BT = torch.ones_like(logratios_BT)
            advantages_B1 = ones_BT[:, :1].clone()
            advantages_B1[::2] = -1
            _, stats = policy_loss(logratios_BT, 0 * ones_BT, advantages_B1, ones_BT, **flags)
            fractions.append((stats["clipfrac_low"] + stats["clipfrac_high"]).item())
        lines[label] = (lengths, fractions)
    return [lines]


def outcomes(size, rates_N):
    """Rewards of groups with 0, 1, ... size right answers, and their probability at each pass rate."""
    rewards_OG = torch.ones(size + 1, size, dtype=torch.float64).tril(-1)
    chance = torch.distributions.Binomial(size, rates_N[:, None])
    return rewards_OG, chance.log_prob(rewards_OG.sum(1)).exp()


def group():
    """The average weight of a prompt, and how often its whole group has the same reward."""
    rates_N = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    rewards_OG, chances_NO = outcomes(8, rates_N)
    weights = {}
    labels = {"grpo": "mean, std (grpo)", "dr_grpo": "mean (dr_grpo)", "dapo": "mixed only (dapo)"}
    for script, label in labels.items():
        advantages_OG = importlib.import_module(script).compute_advantages(rewards_OG)
        weights_O = advantages_OG.clamp(min=0).mean(1)
        kept_NO = chances_NO.clone()
        if script == "dapo":  # replaces groups that are all wrong or all right
            kept_NO[:, [0, -1]] = 0
        weights[label] = (rates_N, kept_NO @ weights_O / kept_NO.sum(1))
    silent = {}
    for size in (4, 8, 16, 64):
        _, chances_NO = outcomes(size, rates_N)
        silent[f"groups of {size}"] = (rates_N, chances_NO[:, 0] + chances_NO[:, -1])
    return [weights, silent]


PANELS = {panel.__name__: panel for panel in (rare, entropy, negative, clip, group)}


# ---------------------------------------------------------------------------------------- pictures


def draw(name):
    import matplotlib.pyplot as plt  # here, since report.py and the tests need no picture

    plt.rcParams |= {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False}
    plt.rcParams |= {"axes.spines.right": False, "legend.frameon": False, "lines.markersize": 4}
    words = WORDS[name]
    plots = PANELS[name]()
    most = max(len(lines) for lines in plots)
    num_columns = 3 // len(plots)  # of a legend
    size = (8, 2.6 + 0.2 * most / num_columns)
    figure, axes = plt.subplots(1, len(plots), figsize=size, layout="constrained", squeeze=False)
    for axis, plot, lines in zip(axes[0], words["plots"], plots, strict=True):
        for (label, line), color in zip(lines.items(), itertools.cycle(COLORS), strict=False):
            style = ":" if label in words.get("bounds", ()) else "-"
            axis.plot(*line, style + plot.get("marker", ""), color=color, label=label)
        axis.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["y"], **plot.get("axes", {}))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=num_columns)
    figure.suptitle(words["question"], x=0.01, ha="left", fontsize=12, fontweight="bold")
    path = FIGURES / f"microscope_{name}.png"
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})
    return path


def main():
    parser = command_line(__doc__)
    parser.add_argument("panels", nargs="*", choices=[*PANELS, "all"], default="all")
    panels = parser.parse_args().panels
    names = PANELS if "all" in panels else panels
    torch.set_num_threads(1)
    for name in names:
        path = draw(name)
        seen = textwrap.fill(WORDS[name]["seen"], 100)
        print(f"{WORDS[name]['question']}\n{seen}\nThe picture: {path}\n")


if __name__ == "__main__":
    main()
