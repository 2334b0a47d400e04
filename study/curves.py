"""Plots several runs together.

    python study/curves.py runs/grpo-seed1 runs/sapo-seed1     # --out: instead of runs/curves.png
    python study/curves.py runs/grpo-seed1 --keys losses/ratio_max rollout/truncated_frac

The first panel has the held-out accuracy: greedy as a line, at temperature 1 as dots. If an evaluation
has none, since the reward gives no verdicts, it has the mean reward.
"""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from scripts import command_line, read_lines

PANELS = {  # title: keys in metrics.jsonl, whose values are added
    "reward": ["rollout/reward_mean"],
    "accuracy": ["rollout/accuracy"],
    "answers without work": ["rollout/direct_frac"],
    "length (tokens)": ["rollout/response_len_mean"],
    "entropy (nats)": ["losses/entropy"],
    "KL to the old policy": ["losses/approx_kl"],
    "KL to the reference": ["losses/kl_ref"],
    "clipped (fraction)": ["losses/clipfrac_low", "losses/clipfrac_high"],
}


def read(folder):
    """(metrics of each iteration, evaluations) of a run."""
    return read_lines(folder, "metrics.jsonl"), read_lines(folder, "evaluations.jsonl")


def held_out(evaluations, way, name):
    """The iterations that were evaluated this way, and the values that have this name."""
    lines = [line for line in evaluations if name in line.get(way, {})]
    return [line["iteration"] for line in lines], [line[way][name] for line in lines]


def keys_of(runs):
    """The keys that some run has in metrics.jsonl."""
    return {key for rows, _ in runs.values() for row in rows for key in row}


def draw(runs, panels):
    """A figure with the held-out accuracy, and those panels whose keys some run has."""
    known = keys_of(runs)
    panels = {title: keys for title, keys in panels.items() if known.issuperset(keys)}
    plt.rcParams |= {"font.size": 9, "axes.titlesize": 9, "legend.frameon": False}
    num_columns = min(3, len(panels) + 1)
    num_rows = math.ceil((len(panels) + 1) / num_columns)
    size = (2.7 * num_columns, 2 * num_rows + 0.5)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=size, layout="constrained", squeeze=False
    )
    first, *others = axes.flat
    summaries = [line["greedy"] for _, evaluations in runs.values() for line in evaluations]
    name = "accuracy" if all("accuracy" in summary for summary in summaries) else "reward_mean"
    first.set_title(f"held-out {name} (line: greedy, dots: sampled)")
    for folder, (rows, evaluations) in runs.items():
        (line,) = first.plot(*held_out(evaluations, "greedy", name), label=folder)
        first.plot(*held_out(evaluations, "sampled", name), "o", color=line.get_color(), markersize=4)
        for axis, (title, keys) in zip(others, panels.items(), strict=False):
            ys = [sum(row.get(key, math.nan) for key in keys) for row in rows]
            axis.plot([row["iteration"] for row in rows], ys)
            axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in others[len(panels) :]:
        axis.set_visible(False)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main():
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--keys", nargs="+", default=[], help="draw these keys of metrics.jsonl instead"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/curves.png"))
    args = parser.parse_args()
    runs = {folder: read(folder) for folder in args.folders}
    known = keys_of(runs)
    for key in args.keys:
        if key not in known:
            sys.exit(f"--keys: no run has {key}; they have {', '.join(sorted(known))}")
    panels = {key: [key] for key in args.keys} or PANELS
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, panels).savefig(args.out, dpi=150, bbox_inches="tight")
    print(args.out)


if __name__ == "__main__":
    main()
