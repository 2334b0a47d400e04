"""Writes the generated parts of README.md and of benchmarks/README.md.

    python benchmarks/readme.py           # write
    python benchmarks/readme.py --check   # exit code 1 if a file is not what it would write

What the tables say comes from the scripts' headers, from their diffs, and from the CSVs in results/.
A verdict is a rule, not an opinion: "shown" if the 95 % interval of the differences between two variants,
paired by seed, is on the predicted side of zero, "the opposite" if it is on the other, else "not shown".
"""

import ast
import difflib
import itertools
import math
import re
import statistics
import sys
import textwrap
from pathlib import Path

import evidence

ROOT = Path(__file__).parent.parent
SCRIPTS = evidence.SCRIPTS
END = 14_000  # completions that every run of the nine has generated


def read(name):
    """(header docstring, lines after it) of a script."""
    text = (ROOT / f"{name}.py").read_text()
    tree = ast.parse(text)
    return ast.get_docstring(tree), text.splitlines()[tree.body[0].end_lineno :]


def unified(parent, child):
    (_, old), (_, new) = read(parent), read(child)
    return list(difflib.unified_diff(old, new, f"{parent}.py", f"{child}.py", lineterm="", n=1))


def changed(parent, child):
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in unified(parent, child))


def differences(header):
    """What stands before the colon in each item of the header's numbered list."""
    numbered = header.split("Differs only in:\n")[1].split("\n\n")[0] if "Differs only in" in header else ""
    items = re.split(r"\n?  \d\. ", re.sub(r"\n     ", " ", numbered))[1:]
    leads = [item.split(":")[0] for item in items]
    return ", ".join(lead if lead.startswith("KL") else lead[0].lower() + lead[1:] for lead in leads)


def markdown(header, rows, align=""):
    """`align`: a letter per column, r for right."""
    cells = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, cells, *rows)]


def nine():
    rows = []
    for name in SCRIPTS:
        header, _ = read(name)
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        parent = re.search(r"Parent: (\w+)\.py", header)
        parent = parent.group(1) if parent else None
        what = differences(header) if parent else "(the root: a critic, GAE, KL in the reward)"
        link = f"[{header.split(':')[0]}, {arxiv}](https://arxiv.org/abs/{arxiv})"
        rows.append([f"`{name}.py`", link, what, parent or "", changed(parent, name) if parent else ""])
    return markdown(
        ["script", "paper", "differs from its parent in", "parent", "changed lines"], rows, "llllr"
    )


def rollout_points(rows):
    """[(completions generated, accuracy of the rollouts, trailing mean of five iterations)] of a run."""
    values = [row["accuracy"] for row in rows]
    means = [statistics.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    return [(0.0, values[0])] + [(row["x"], mean) for row, mean in zip(rows, means, strict=True)]


def curve_table():
    runs, curves, rows = evidence.runs("nine"), evidence.curves("nine"), []
    for name in SCRIPTS:
        mine, lines = runs[name, "default"], curves[name, "default"]
        points = {seed: rollout_points(x) for seed, x in lines.items()}
        greedy = [
            evidence.area(evidence.held_out(lines[int(row["seed"])], row["before_greedy_accuracy"]), END)
            for row in mine
        ]
        reached = [evidence.reaches(x, 0.9) for x in points.values()]
        rows.append(
            [
                f"`{name}.py`",
                evidence.mean_std([row["after_greedy_accuracy"] for row in mine]),
                evidence.mean_std([row["after_sampled_accuracy"] for row in mine]),
                evidence.mean_std(greedy),
                evidence.mean_std([evidence.area(x, END) for x in points.values()]),
                "not all" if None in reached else evidence.mean_std([x / 1000 for x in reached], 1),
                round(statistics.median(row["seconds"] for row in mine)),
            ]
        )
    header = ["script", "greedy", "temperature 1", "area, greedy", "area, temperature 1"]
    return markdown([*header, "thousand completions to 0.9", "seconds"], rows, "lrrrrrr")


def default_run():
    rows = evidence.runs("nine")["grpo", "default"]
    lines = []
    for text, how, key, digits in (
        ("greedy accuracy on held-out sums", "greedy", "accuracy", 3),
        ("accuracy at temperature 1", "sampled", "accuracy", 3),
        ("answers without working (temperature 1)", "sampled", "direct", 3),
        ("response length in tokens (temperature 1)", "sampled", "response", 1),
    ):
        last = " / ".join(f"{row[f'after_{how}_{key}']:.{digits}f}" for row in rows)
        lines.append([text, f"{rows[0][f'before_{how}_{key}']:.{digits}f}", last])
    seeds = " / ".join(f"{row['seed']:.0f}" for row in rows)
    return markdown(["`grpo.py`", "before", f"after, seeds {seeds}"], lines)


def smollm2():
    rows = [row for row in evidence.table("smollm2") if row["greedy_held_out"] is not None]
    cells = [
        ["greedy accuracy, 128 held-out sums", *(f"{row['greedy_held_out']:.3f}" for row in rows)],
        ["minutes of rollouts and updates", *(f"{row['seconds'] / 60:.0f}" for row in rows)],
    ]
    return markdown(["iteration", *(f"{row['iteration']:.0f}" for row in rows)], cells, "l" + "r" * len(rows))


def lesson():
    return ["```diff", *unified("grpo", "dr_grpo"), "```"]


def three(values, digits=2):
    low, middle, high = min(values), statistics.median(values), max(values)
    return [f"{value:.{digits}f}" for value in (low, middle, high)]


def sampler():
    rows = evidence.table("sampler")
    ours, theirs = ([row[f"{name}_tokens_per_second"] for row in rows] for name in ("sampler", "generate"))
    ratios = three([a / b for a, b in zip(ours, theirs, strict=True)])
    text = "ratio     min {}  median {}  max {}".format(*ratios)
    count = f"tokens/s (median of {len(rows)})"
    both = [
        f"{name:10}{statistics.median(x):10.0f} {count}"
        for name, x in (("sampler", ours), ("generate", theirs))
    ]
    return ["```", *both, text, "```"]


def speed():
    table, lines = evidence.table("trl_speed"), []
    for lr, words in ((1e-9, "weights stay"), (2e-4, "while it learns")):
        rows = [row for row in table if row["lr"] == lr]
        pairs = {"iteration": [(row["ours_seconds"], row["trl_seconds"]) for row in rows]}
        pairs["sampling"] = [(row["ours_sampling"], row["trl_sampling"]) for row in rows]
        both = zip(pairs["iteration"], pairs["sampling"], strict=True)
        pairs["the rest"] = [(a - c, b - d) for (a, b), (c, d) in both]
        for name, values in pairs.items():
            ours, theirs = (statistics.median(side) for side in zip(*values, strict=True))
            ratios = " / ".join(three([a / b for a, b in values]))
            lines.append([f"{words}: {name}", f"{ours:.3f} s", f"{theirs:.3f} s", ratios])
        peaks = [max(row[f"{side}_peak_mib"] for row in rows) for side in ("ours", "trl")]
        cells = [f"{words}: peak memory", *(f"{peak:.0f} MiB" for peak in peaks)]
        lines.append([*cells, f"{peaks[0] / peaks[1]:.2f}"])
        tokens = [statistics.mean(row[f"{side}_tokens"] for row in rows) for side in ("ours", "trl")]
        cells = [f"{words}: tokens sampled", *(f"{count:.0f}" for count in tokens)]
        lines.append([*cells, f"{tokens[0] / tokens[1]:.2f}"])
    header = [f"2 x {len(table) // 2} interleaved pairs", "`grpo.py`", "TRL", "ratio (min / median / max)"]
    return markdown(header, lines, "lrrr")


def scaling():
    rows, lines = evidence.table("scaling"), []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        mine = [row for row in rows if row["axis"] == axis]
        for row in mine:
            share = f"{row['products']:.0%}", f"{row['attention']:.0%}"
            times = f"{row['rollout_seconds']:.2f}", f"{row['update_seconds']:.2f}"
            lines.append([f"{axis} {row['value']:.0f}", f"{row['parameters'] / 1e6:.2f} M", *times, *share])
        x = [row["value"] for row in mine]
        slopes = (
            evidence.exponent(x, [row[f"{key}_seconds"] for row in mine]) for key in ("rollout", "update")
        )
        lines.append([f"**exponent**, {axis}", "", *(f"**{slope:.2f}**" for slope in slopes), "", ""])
    header = ["", "parameters", "rollout, s", "update, s", "matrix products", "attention"]
    return markdown(header, lines, "lrrrrr")


# ------------------------------------------------------------------------------------ the papers' claims


def per_seed(name, key, column, count=10):
    """Mean of a column over the last `count` iterations, for each seed in order."""
    lines = evidence.curves(name)[key]
    return [evidence.tail(lines[seed], column, count) for seed in sorted(lines)]


def whole(name, key, column):
    return per_seed(name, key, column, 10_000)


def one_step():
    curves, runs, lines = evidence.curves("one_step"), evidence.runs("one_step"), []
    base = curves["grpo", "one"]
    for script in ("grpo", "gspo", "gmpo", "rspo", "sapo", "dr_grpo", "cispo"):
        mine = curves[script, "one"]
        same, gaps = [], []
        for seed, rows in mine.items():
            pairs = [(a["reward"], b["reward"]) for a, b in zip(rows, base[seed], strict=True)]
            same.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
            gaps += [abs(a - b) for a, b in pairs]
        final = [row["after_sampled_accuracy"] for row in runs[script, "one"]]
        cells = ["/".join(map(str, same)), f"{max(gaps):.3f}", evidence.mean_std(final)]
        lines.append([script + (" (no KL)" if script == "grpo" else ""), *cells])
    header = ["script", "first iterations with grpo's mean reward to the digit, by seed"]
    header += ["largest difference of a mean reward", "held-out accuracy after the run"]
    return markdown(header, lines, "lrrr")


def compared(name, keys, columns, reference, count=10):
    """Rows of means over the last iterations, and a verdict against the reference for each column."""
    lines = []
    for words, key in keys.items():
        cells = [words]
        for column, (digits, sign) in columns.items():
            mine = per_seed(name, key, column, count)
            cell = evidence.mean_std(mine, digits)
            if key != reference and sign:
                other = per_seed(name, reference, column, count)
                pair = (mine, other) if sign > 0 else (other, mine)
                cell += f"<br>{evidence.verdict(*pair)}"
            cells.append(cell)
        lines.append(cells)
    return lines


def clip_higher():
    lines = []
    for steps in ("4", "16"):
        keys = {
            f"{steps} steps, eps high {high}": ("dapo", f"steps{steps}-high{high}")
            for high in ("0.2", "0.28", "0.5", "1.0")
        }
        columns = {"entropy": (4, 1), "clip_high": (4, 0), "accuracy": (3, 0)}
        lines += compared("clip_higher", keys, columns, ("dapo", f"steps{steps}-high0.2"))
    keys = {
        f"16 steps, eps low 0.02, high {high}": ("dapo", f"high{high}") for high in ("0.02", "0.028", "0.1")
    }
    lines += compared("clip_higher_narrow", keys, columns, ("dapo", "high0.02"))
    return markdown(
        ["dapo", "entropy (higher than in the first row of its kind?)", "clipped above", "accuracy"], lines
    )


def wrong_length():
    keys, lines = {"Dr. GRPO": ("dr_grpo", "default"), "GRPO, no KL": ("grpo", "kl0")}, []
    for words, key in keys.items():
        runs = evidence.curves("wrong_length")[key].values()
        first = [evidence.tail(rows[:3], "len_wrong", 3) for rows in runs]
        last, right, accuracy = (
            per_seed("wrong_length", key, x) for x in ("len_wrong", "len_right", "accuracy")
        )
        cells = [evidence.mean_std(x, 1) for x in (first, last, right)]
        lines.append([words, *cells, evidence.mean_std(accuracy), evidence.verdict(last, first)])
    pair = [per_seed("wrong_length", key, "len_wrong") for key in (keys["GRPO, no KL"], keys["Dr. GRPO"])]
    lines.append(["GRPO's are longer than Dr. GRPO's?", "", evidence.verdict(*pair), "", "", ""])
    header = ["", "wrong, first 3 iterations", "wrong, last 10", "right, last 10", "accuracy, last 10"]
    return markdown([*header, "wrong answers grow?"], lines)


def dynamic_sampling():
    curves, runs = evidence.curves("dynamic_sampling"), evidence.runs("dynamic_sampling")
    lines, areas, equal = [], {}, {}
    for words, variant in {"without": "drop", "with dynamic sampling": "refill"}.items():
        mine = curves["dapo", variant].values()
        areas[variant] = [evidence.area(rollout_points(rows), 13_000) for rows in mine]
        equal[variant] = [evidence.tail(rows[:36], "accuracy", 5) for rows in mine]
        generated = [row["generated"] for row in runs["dapo", variant]]
        final = [row["after_sampled_accuracy"] for row in runs["dapo", variant]]
        cells = [f"{min(generated):.0f} to {max(generated):.0f}", evidence.mean_std(areas[variant])]
        lines.append([words, *cells, evidence.mean_std(equal[variant]), evidence.mean_std(final)])
    verdicts = [evidence.verdict(x["refill"], x["drop"]) for x in (areas, equal)]
    lines.append(["higher with it?", "", *verdicts, ""])
    header = ["", "completions generated", "area, 13,000 completions", "accuracy, iterations 32 to 36"]
    return markdown([*header, "held-out, after the run"], lines)


def overlong():
    keys = {name: ("dapo", name) for name in ("none", "filter", "soft")}
    columns = {"truncated": (4, -1), "len": (1, -1), "accuracy": (3, 1), "direct": (3, 0)}
    lines = compared("overlong", keys, columns, ("dapo", "none"))
    for line, key in zip(lines, keys.values(), strict=True):
        areas = [evidence.area(rollout_points(x), 13_000) for x in evidence.curves("overlong")[key].values()]
        line.append(evidence.mean_std(areas))
    header = [
        "",
        "cut off (fewer than without?)",
        "length (shorter?)",
        "accuracy (higher?)",
        "direct answers",
    ]
    return markdown([*header, "area, 13,000 completions"], lines)


def gradient_share():
    lines = []
    for steps in ("4", "16"):
        for words, script in {"CISPO": "cispo", "GRPO, no KL": "grpo"}.items():
            key = (script, f"steps{steps}")
            tokens, gradient = (whole("gradient_share", key, x) for x in ("outside", "outside_gradient"))
            chance = [math.sqrt(share) for share in tokens]
            cells = [f"{statistics.mean(x):.2%}" for x in (tokens, chance, gradient)]
            shown = evidence.verdict(gradient, chance) if script == "cispo" else ""
            lines.append([f"{words}, {steps} steps", *cells, shown])
    header = ["", "tokens outside PPO's range", "norm expected of as many random tokens"]
    return markdown(
        [*header, "their share of the gradient's norm", "more than random tokens?"], lines, "lrrrl"
    )


def stale_ratio():
    columns = {"log_ratio_p99": (4, -1), "log_ratio_up_max": (2, -1), "log_ratio_down_max": (2, -1)}
    columns |= {"accuracy": (3, 0)}
    lines = []
    for rate in ("1e-4", "3e-4", "1e-3"):
        for script in ("grpo", "cispo", "gspo", "gmpo", "rspo"):
            # grpo without KL and everything at 1e-4 have runs of their own, the rest is in the stability map
            reference = ("grpo", "stale" if rate == "1e-4" else f"lr{rate}")
            ours = ("stale_ratio", (script, "stale")) if rate == "1e-4" else None
            ours = ours or ("stability", (script, f"lr{rate}-steps16"))
            ours = ("stale_ratio", reference) if script == "grpo" else ours
            cells = [f"{'GRPO, no KL' if script == 'grpo' else script.upper()}, lr {rate}"]
            for column, (digits, sign) in columns.items():
                mine = whole(*ours, column)
                cell = evidence.mean_std(mine, digits)
                if sign and script != "grpo":
                    cell += f"<br>{evidence.verdict(whole('stale_ratio', reference, column), mine)}"
                cells.append(cell)
            lines.append(cells)
    header = ["", "99 % of \\|log r\\| below (narrower than GRPO's?)", "largest log r", "largest -log r"]
    return markdown([*header, "accuracy, mean of all iterations"], lines)


def router_shift():
    lines = []
    for rate in ("3e-4", "1e-3"):
        keys = {f"{script}, lr {rate}": (script, f"lr{rate}") for script in ("gmpo", "rspo")}
        columns = {"accuracy": (3, 1), "flips": (3, -1), "shift": (3, 0), "log_ratio_p99": (3, -1)}
        for words, key in keys.items():
            cells = []
            for column, (digits, sign) in columns.items():
                mine = per_seed("router_shift", key, column)
                if None in mine:
                    cells.append("")
                    continue
                cell = evidence.mean_std(mine, digits)
                if key[0] == "rspo" and sign:
                    other = per_seed("router_shift", ("gmpo", f"lr{rate}"), column)
                    cell += f"<br>{evidence.verdict(*((mine, other) if sign > 0 else (other, mine)))}"
                cells.append(cell)
            following, with_gamma = [], []
            for rows in evidence.curves("router_shift")[key].values():
                changes = [b["accuracy"] - a["accuracy"] for a, b in zip(rows, rows[1:], strict=False)]
                flips = [row["flips"] for row in rows]
                following.append(statistics.correlation(flips[:-1], changes))
                if key[0] == "rspo":
                    with_gamma.append(statistics.correlation(flips, [row["shift"] for row in rows]))
            zeros = [0.0] * len(following)
            word = evidence.verdict(zeros, following).split(" (")[0]  # is the correlation negative?
            cells.append(f"{evidence.mean_std(following, 2)}<br>{word}")
            cells.append(evidence.mean_std(with_gamma, 2) if with_gamma else "")
            lines.append([words, *cells])
    header = ["64 steps per rollout", "accuracy (higher?)", "experts changed (fewer?)", "gamma"]
    header += ["99 % of \\|log r\\| below (narrower?)", "correlation of changed experts with the next change"]
    header[-1] += " of accuracy (negative?)"
    return markdown([*header, "correlation of changed experts with gamma"], lines)


def sapo_taus():
    lines, names = [], {"1.0 / 1.0": "equal", "1.0 / 1.05 (paper)": "paper", "1.05 / 1.0": "reversed"}
    names |= {"1.0 / 2.0": "strong", "2.0 / 1.0": "strong-reversed"}
    for rate in ("3e-4", "1e-3"):
        for words, name in names.items():
            sign = -1 if name.endswith("reversed") else 1  # reversed is predicted to be worse
            columns = {"accuracy": (3, sign), "entropy": (4, 0), "log_ratio_p99": (3, 0)}
            keys = {f"{words}, lr {rate}": ("sapo", f"{name}-lr{rate}")}
            lines += compared("sapo_taus", keys, columns, ("sapo", f"equal-lr{rate}"))
    header = ["tau_pos / tau_neg", "accuracy (higher than with equal ones, lower if reversed?)", "entropy"]
    return markdown([*header, "99 % of \\|log r\\| below"], lines)


def drops(rows):
    """How far the accuracy of each iteration is below the highest one so far."""
    highest = itertools.accumulate((row["accuracy"] for row in rows), max)
    return [high - row["accuracy"] for high, row in zip(highest, rows, strict=True)]


def falls(name):
    """Of the runs at each setting: how many had an iteration 0.2 or more below an earlier one."""
    curves, lines = evidence.curves(name), []
    settings = sorted({key[1] for key in curves}, key=lambda v: (int(v.split("steps")[1]), float(v[2:6])))

    for script in SCRIPTS:
        groups = [curves[script, v].values() for v in settings if (script, v) in curves]
        if groups:
            lines.append(
                [
                    script,
                    *(f"{sum(max(drops(rows)) >= 0.2 for rows in runs)} of {len(runs)}" for runs in groups),
                ]
            )
    words = [v.replace("lr", "").replace("-steps", ", ") for v in settings]
    return markdown(["lr, steps", *words], lines, "l" + "r" * len(words))


def stability():
    return falls("stability")


def during_the_fall():
    """Means over iterations 2 to 6 at the highest learning rate with 16 steps, and how the runs end."""
    curves, runs, table = evidence.curves("stability"), evidence.runs("stability"), []
    key = "lr1e-3-steps16"
    for script in SCRIPTS:
        lines = curves[script, key].values()
        early = [
            row | {"clipped": (row["clip_low"] or 0) + (row["clip_high"] or 0)}
            for x in lines
            for row in x[1:6]
        ]
        columns = ("log_ratio_p99", "outside", "clipped", "flips", "grad_norm")
        drop = statistics.mean(max(drops(rows)) for rows in lines)
        final = statistics.mean(row["after_sampled_accuracy"] or 0 for row in runs[script, key])
        table.append([*(statistics.mean(row[x] for row in early) for x in columns), drop, final])
    digits = (2, 3, 3, 3, 2, 2, 2)
    rows = [
        [script, *(f"{value:.{n}f}" for value, n in zip(values, digits, strict=True))]
        for script, values in zip(SCRIPTS, table, strict=True)
    ]
    *columns, _, final = zip(*table, strict=True)
    ranks = (f"{evidence.rank_correlation(column, final):+.2f}" for column in columns)
    rows.append(["rank correlation with the last column", *ranks, "", ""])
    header = ["script", "99 % of \\|log r\\| below", "tokens outside PPO's range", "clipped"]
    header += [
        "experts changed",
        "gradient norm",
        "largest drop of the accuracy",
        "held-out accuracy after the run",
    ]
    return markdown(header, rows, "lrrrrrrr")


def stability_calibrated():
    return falls("stability_calibrated")


def calibrate():
    rows = [row for row in evidence.table("calibrate") if row["chosen"]]
    first = {}
    for row in evidence.table("calibrate"):
        first.setdefault(row["script"], row)
    lines = [
        [row["script"], f"{first[row['script']]['share']:.2%}", f"`{row['flags']}`", f"{row['share']:.2%}"]
        for row in rows
    ]
    return markdown(["script", "clipped with its own range", "calibrated range", "clipped"], lines, "lrlr")


def departures():
    """Measured numbers that the table of departures cites."""
    clip = {}
    for variant in ("paper", "own"):
        low, high = (whole("ranges", ("gspo", variant), f"clip_{side}") for side in ("low", "high"))
        clip[variant] = statistics.mean(a + b for a, b in zip(low, high, strict=True))
    slow, own = (
        [row["explained_variance_last10"] for row in evidence.runs(name)[key]]
        for name, key in (("ranges", ("ppo", "slow-critic")), ("nine", ("ppo", "default")))
    )
    errors = max(row["first_step_ratio_error_max"] for row in evidence.table("nine"))
    return textwrap.wrap(
        f"The largest |r - 1| at the first step of an iteration is {errors:g} in the 45 runs of the figure."
        f" gspo clips {clip['paper']:.0%} of the tokens with the paper's range and {clip['own']:.0%} with"
        f" ours, in the first ten iterations. ppo's critic explains {min(own):.0%} to {max(own):.0%} of the"
        f" variance of the returns in the last ten iterations, and {min(slow):.0%} to {max(slow):.0%} with"
        " the policy's learning rate (`python benchmarks/sweep.py ranges nine`).",
        width=118,
    )


def soak():
    rows = evidence.table("soak")
    second, last = rows[len(rows) // 4 : len(rows) // 2], rows[3 * len(rows) // 4 :]
    memory = [max(row["resident_mib"] for row in part) for part in (second, last)]
    files = max(row["open_files"] for row in rows)
    return textwrap.wrap(
        f"{rows[-1]['iteration']:.0f} iterations of a very small configuration: at most {memory[0]:.0f} MiB"
        f" in the second quarter and {memory[1]:.0f} MiB in the last, and never more than {files:.0f}"
        " open files (`python benchmarks/soak.py`).",
        width=118,
    )


PARTS = {
    "README.md": [default_run, curve_table, nine, lesson, speed, sampler, smollm2, departures, soak],
    "benchmarks/README.md": [
        *(
            curve_table,
            stability,
            during_the_fall,
            calibrate,
            stability_calibrated,
            one_step,
            clip_higher,
            wrong_length,
        ),
        *(dynamic_sampling, overlong, gradient_share, stale_ratio, router_shift, sapo_taus, speed, scaling),
    ],
}


def main():
    stale = []
    for name, makers in PARTS.items():
        path = ROOT / name
        old = new = path.read_text()
        for make in makers:
            title = make.__name__.replace("_", " ")
            begin, end = f"<!-- generated: {title} -->", f"<!-- end: {title} -->"
            if begin not in new:
                sys.exit(f"{name} has no part '{title}'")
            before, rest = new.split(begin)
            new = before + begin + "\n" + "\n".join(make()) + "\n" + end + rest.split(end)[1]
        if new != old:
            stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(new)
    if "--check" in sys.argv and stale:
        sys.exit(f"{', '.join(stale)}: stale, run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
