"""Plots several runs together.

    python study/curves.py runs/grpo-seed1 runs/sapo-seed1     # --out: instead of runs/curves.png
    python study/curves.py runs/grpo-seed1 --keys losses/ratio_max rollout/truncated_frac
    python study/curves.py runs/grpo-seed1 runs/bug_7-seed1 --first     # a table instead

The first panel has the held-out accuracy: greedy as a line, at temperature 1 as dots. If an evaluation
has none, since the reward gives no verdicts, it has the mean reward.
"""

import difflib
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from scripts import command_line, read_run

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


def held_out(evaluations, way, name):
    """The iterations that were evaluated this way, and the values that have this name."""
    lines = [line for line in evaluations if name in line.get(way, {})]
    return [line["iteration"] for line in lines], [line[way][name] for line in lines]


def keys_of(runs):
    """The keys that some run has in metrics.jsonl. `runs`: {folder: as from read_run}"""
    return {key for _, rows, _ in runs.values() for row in rows for key in row}


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
    summaries = [line["greedy"] for _, _, evaluations in runs.values() for line in evaluations]
    name = "accuracy" if all("accuracy" in summary for summary in summaries) else "reward_mean"
    first.set_title(f"held-out {name} (dots: sampled)")
    for folder, (_, rows, evaluations) in runs.items():
        (line,) = first.plot(*held_out(evaluations, "greedy", name), ".-", label=folder)
        first.plot(*held_out(evaluations, "sampled", name), "o", color=line.get_color(), markersize=4)
        for axis, (title, keys) in zip(others, panels.items(), strict=False):
            found = [row for row in rows if row.keys() >= set(keys)]
            ys = [sum(row[key] for key in keys) for row in found]
            style = "-" if len(found) == len(rows) > 1 else ".-"
            axis.plot([row["iteration"] for row in found], ys, style)
            axis.set_title(title)
    for axis in axes.flat:
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    for axis in others[len(panels) :]:
        axis.set_visible(False)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def first_lines(runs):
    """A table of what differs in six digits between the runs' first iterations, without times."""
    firsts = [rows[0] if rows else {} for _, rows, _ in runs.values()]
    lines = [f"{'':32}" + "".join(f"  {Path(folder).name:>16}" for folder in runs)]
    keys = dict.fromkeys(key for first in firsts for key in first)
    for key in keys:
        cells = [f"{first[key]:.6g}" if key in first else "" for first in firsts]
        if len(set(cells)) > 1 and "second" not in key:
            lines.append(f"{key:32}" + "".join(f"  {cell:>16}" for cell in cells))
    return "\n".join(lines) if len(lines) > 1 else "the first lines do not differ"


def main():
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--keys", nargs="+", default=[], help="draw these keys of metrics.jsonl instead"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/curves.png"))
    parser.add_argument(
        "--first", action="store_true", help="print what differs in the first lines of metrics.jsonl"
    )
    args = parser.parse_args()
    runs = {folder: read_run(folder) for folder in args.folders}
    if args.first:
        print(first_lines(runs))
        return
    known = sorted(keys_of(runs))
    for key in args.keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, 5, 0)
            sys.exit(f"--keys: no run has {key}; the closest are {', '.join(close)}")
    panels = {key: [key] for key in args.keys} or PANELS
    figure = draw(runs, panels)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        sys.exit(f"--out {args.out}: {error}")
    print(args.out)


if __name__ == "__main__":
    main()
