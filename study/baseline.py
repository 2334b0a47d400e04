"""Measures how noisy the policy gradient is with each baseline, before and after training.

    python study/baseline.py    # three minutes; writes results/baseline.csv and figures/baseline.png

A completion's policy gradient is (R - b) s, where s is the gradient of the log-prob of the whole
completion. Its mean does not depend on the baseline b, but its noise does, E[(R - b)^2 |s|^2]. Before
training and after 20 iterations of dr_grpo.py, three seeds sample 8 answers to each of 128 held-out
problems. A model that has a row is not measured again; to repeat it, delete the file and runs/baseline.
"""

import itertools
import json
import statistics
import subprocess
import sys

import stats
import torch
from scripts import ROOT, command_line
from sweep import append

import common
import dr_grpo

PATH = ROOT / "study" / "figures" / "baseline.png"
FLAGS = "--iterations 20 --eval_every 0 --save_every 0"
SEEDS = (1, 2, 3)
NUM_PROMPTS = 128
COLORS = {"before": "#0072b2", "after": "#d55e00"}


def train(seed):
    """The folder of dr_grpo.py's run with this seed."""
    folder = ROOT / "runs" / "baseline" / f"seed{seed}"
    if not folder.exists():
        command = [sys.executable, "dr_grpo.py", *FLAGS.split(), "--seed", str(seed)]
        subprocess.run([*command, "--run_dir", folder], cwd=ROOT, check=True)
    return folder


def score(policy, completion):
    """s of a completion, as one vector."""
    prompt_ids = completion.problem.prompt_ids
    tokens_1S = torch.tensor([prompt_ids + completion.ids])
    logits_SV = policy.model(tokens_1S, use_cache=False).logits[0].float()
    logprobs_TV = logits_SV[len(prompt_ids) - 1 : -1].log_softmax(-1)
    response_T1 = torch.tensor(completion.ids)[:, None]
    logprob = logprobs_TV.gather(1, response_T1).sum()
    parameters = list(policy.model.parameters())
    gradients = torch.autograd.grad(logprob, parameters, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def noise(rewards_PG, squares_PG):
    """The columns of a row: E[R], b*, |s|^2 of right and of wrong answers, and E[(R - b)^2 |s|^2] for
    each baseline. squares_PG: |s|^2."""
    G = rewards_PG.shape[1]
    sum_P1 = rewards_PG.sum(1, keepdim=True)
    best = (rewards_PG * squares_PG).mean() / squares_PG.mean()
    baselines = {
        "none": 0,
        "mean": rewards_PG.mean(),
        "loo": (sum_P1 - rewards_PG) / (G - 1),
        "group": sum_P1 / G,
        "best": best,
    }
    found = {
        "reward": rewards_PG.mean().item(),
        "best_baseline": best.item(),
        "square_right": squares_PG[rewards_PG == 1].mean().item(),
        "square_wrong": squares_PG[rewards_PG == 0].mean().item(),
    }
    for name, baseline in baselines.items():
        found[name] = ((rewards_PG - baseline) ** 2 * squares_PG).mean().item()
    return found


def measure(model, seed):
    """The columns of a row, from completions of this model."""
    args = dr_grpo.Args(model=model, seed=seed)
    policy = common.load_policy(args)
    grade = common.load_grader(args)
    _, held_out = common.load_problems(args, policy, grade)
    generator = torch.Generator().manual_seed(seed)
    completions = common.sample(policy, held_out[:NUM_PROMPTS], args.group_size, args, generator)
    completions = grade(completions)
    rewards_PG = torch.tensor([c.reward for c in completions], dtype=torch.float64)
    rewards_PG = rewards_PG.view(-1, args.group_size)
    squares = []
    rewarded = []  # R s, summed over each group
    plain = []  # s, summed over each group
    for p, rewards_G in enumerate(rewards_PG):
        group = completions[p * args.group_size : (p + 1) * args.group_size]
        scores_GN = torch.stack([score(policy, completion) for completion in group]).double()
        squares.append(scores_GN.square().sum(1))
        rewarded.append(rewards_G @ scores_GN)
        plain.append(scores_GN.sum(0))
    squares_PG = torch.stack(squares)
    found = noise(rewards_PG, squares_PG)
    # |E[g]|^2 from products of different groups alone, which are independent; with the best baseline,
    # since that has the least noise.
    groups_PN = torch.stack(rewarded) - found["best_baseline"] * torch.stack(plain)
    groups_PN = groups_PN / args.group_size
    P = len(groups_PN)
    total = groups_PN.sum(0).square().sum() - groups_PN.square().sum()
    found["squared_gradient"] = (total / (P * (P - 1))).item()
    lengths = [len(c.ids) for c in completions]
    found["length_correlation"] = statistics.correlation(squares_PG.flatten().tolist(), lengths)
    return found


def measure_all():
    done = {(row["variant"], int(row["seed"])) for row in stats.read_csv("baseline")}
    for seed, variant in itertools.product(SEEDS, COLORS):
        if (variant, seed) in done:
            continue
        folder = train(seed)
        settings = json.loads((folder / "settings.json").read_text())
        commit = settings["versions"].get("commit", "")[:7]
        model = "tiny-moe" if variant == "before" else next(folder.glob("checkpoint-*"))
        row = {"script": "dr_grpo", "variant": variant, "seed": seed}
        append("baseline", row | measure(model, seed) | {"commit": commit, "flags": FLAGS})


def draw():
    """The noise of a constant baseline, one line for each seed; dots: none, E[R] and b*."""
    import matplotlib.pyplot as plt  # here, since the tests need no picture

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    xs = torch.linspace(0, 1, 101)
    for axis, (variant, color) in zip(axes, COLORS.items(), strict=True):
        for row in stats.runs("baseline")["dr_grpo", variant]:
            right = row["reward"] * row["square_right"]
            wrong = (1 - row["reward"]) * row["square_wrong"]
            axis.plot(xs, (1 - xs) ** 2 * right + xs**2 * wrong, color=color, linewidth=1)
            axis.plot(0, row["none"], "o", color="black", markersize=4)
            axis.plot(row["reward"], row["mean"], "s", color="black", markersize=4)
            axis.plot(row["best_baseline"], row["best"], "v", color="black", markersize=4)
        axis.set(title=f"{variant} training", xlabel="baseline b", yscale="log")
    axes[0].set_ylabel("noise, E[(R − b)² |s|²]")
    marks = {"b = 0": "o", "b = E[R]": "s", "b = b*": "v"}
    for label, mark in marks.items():
        axes[0].plot([], [], mark, color="black", markersize=4, label=label)
    axes[0].legend(frameon=False)
    return figure


def main():
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    measure_all()
    draw().savefig(PATH, dpi=150, metadata={"Software": None})
    print(PATH)


if __name__ == "__main__":
    main()
