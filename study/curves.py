"""Plots several runs together, and prints the metrics that differ in the first iteration.

    python study/curves.py runs/grpo-seed1 runs/sapo-seed1     # --out: instead of runs/curves.png

With the same seed the first iteration has the same rollout, so whatever differs there is what you
changed. Later the runs drift apart anyway. Timings are left out.
"""

import argparse
import json
import math
import sys
from pathlib import Path

PANELS = {  # title: keys in metrics.jsonl, whose values are added
    "reward": ["rollout/reward_mean"],
    "accuracy": ["rollout/accuracy"],
    "answers without working": ["rollout/direct_frac"],
    "length (tokens)": ["rollout/response_len_mean"],
    "entropy (nats)": ["losses/entropy"],
    "KL to the old policy": ["losses/approx_kl"],
    "KL to the reference": ["losses/kl_ref"],
    "clipped (share)": ["losses/clipfrac_low", "losses/clipfrac_high"],
}


def read(folder):
    """[metrics of each iteration] of a run."""
    path = Path(folder, "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        sys.exit(f"{path} has no iterations: is {folder} the folder of a run?")
    return rows


def table(runs):
    """A table of the metrics that differ in the first iteration, by more than rounding."""
    firsts = [rows[0] for rows in runs.values()]
    keys = dict.fromkeys(key for first in firsts for key in first if "second" not in key)
    lines = ["| first iteration | " + " | ".join(runs) + " |", "| --- |" + " ---: |" * len(runs)]
    for key in keys:
        values = [first.get(key, math.nan) for first in firsts]
        if not all(math.isclose(value, values[0], rel_tol=1e-5) for value in values):
            cells = ["absent" if math.isnan(value) else f"{value:.6g}" for value in values]
            lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return lines


def draw(runs):
    import matplotlib  # imported here because the table does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 9, "axes.titlesize": 9, "legend.frameon": False}
    figure, axes = plt.subplots(2, 4, figsize=(8, 4), layout="constrained")
    for axis, (title, keys) in zip(axes.flat, PANELS.items(), strict=True):
        for name, rows in runs.items():
            xs = [row["iteration"] for row in rows]
            ys = [sum(row.get(key, math.nan) for key in keys) for row in rows]
            axis.plot(xs, ys, label=name)
        axis.set_title(title)
    for axis in axes[1]:
        axis.set_xlabel("iteration")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/curves.png"))
    args = parser.parse_args()
    runs = {folder: read(folder) for folder in args.folders}
    if len(runs) > 1:
        print("\n".join(table(runs)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(args.out, dpi=150)
    print(args.out)


if __name__ == "__main__":
    main()
