r"""Writes the generated parts of README.md and of benchmarks/README.md.

    python benchmarks/readme.py           # write
    python benchmarks/readme.py --check   # exit code 1 if a part is stale, or in neither file

A part stands between <!-- generated: NAME --> and <!-- end: NAME -->, in whichever file has these
two comments. What it says comes from the scripts' headers, from their diffs, and from the CSVs in
results/. A verdict is a rule, not an opinion: "shown" if the 95% interval of the differences
between two variants, paired by seed, is on the predicted side of zero, "the opposite" if it is on
the other side, else "not shown".
"""

import ast
import difflib
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import evidence
import gpu
import second_regime
from evidence import (
    MORE,
    SCRIPTS,
    WIDTH,
    apart,
    directed,
    drops,
    first_word,
    held_out_of,
    markdown,
    overall,
    per_seed,
    read_curves,
    read_runs,
    shift_before_fall,
    whole,
)

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
END = 14_000  # completions that every run of the nine has generated


def anchor(heading):
    """What GitHub makes of a heading for links to it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# -------------------------------------------------------------------------------------- the scripts

# GitHub's math, to stand between $` and `$. No vertical bar: it would end a cell of the table.
CLIPPED = r"\min(r_{it}A_i,\,\mathrm{clip}(r_{it},1-\epsilon,1+\epsilon)A_i)"
SEQUENCE_MEAN = r"\frac1N\sum_i\frac1{\lvert o_i\rvert}\sum_t"
TOKEN_MEAN = r"\frac1{\sum_i\lvert o_i\rvert}\sum_i\sum_t"
OBJECTIVES = {
    "ppo": TOKEN_MEAN + CLIPPED.replace("A_i", "A_{it}") + r"-c_v L_V+c_e H",
    "grpo": SEQUENCE_MEAN + r"\left[" + CLIPPED + r"-\beta\,k_{it}\right]",
    "dr_grpo": r"\frac1{N L_{\max}}\sum_i\sum_t" + CLIPPED,
    "dapo": TOKEN_MEAN
    + r"\min(r_{it}A_i,\,\mathrm{clip}(r_{it},1-\epsilon_{\mathrm{low}},"
    + r"1+\epsilon_{\mathrm{high}})A_i)",
    "gspo": r"\frac1N\sum_i"
    + r"\min(s_iA_i,\,\mathrm{clip}(s_i,1-\epsilon_{\mathrm{low}},1+\epsilon_{\mathrm{high}})A_i)",
    "cispo": TOKEN_MEAN + r"\mathrm{sg}[\min(r_{it},\mathrm{cap})]\,A_i\log\pi(o_{it})",
    "gmpo": r"\frac1N\sum_iA_i\exp\left(\frac1{\lvert o_i\rvert}\sum_t c_{it}\right)",
    "rspo": r"\frac1N\sum_iA_i\exp\left(\frac1{\lvert o_i\rvert}"
    + r"\sum_t(c_{it}+\log\gamma_{it})\right)",
    "sapo": SEQUENCE_MEAN + r" f(r_{it})\,A_i,\quad f(r)=\frac4{\tau_i}\,\sigma(\tau_i(r-1))",
    "more.reinforce": r"\frac1N\sum_i(R_i-b)\sum_t\log\pi(o_{it})",
    "more.rloo": r"\frac1N\sum_iA_i\sum_t\log\pi(o_{it}),\quad A_i=\frac G{G-1}(R_i-\mathrm{mean}\,R)",
    "more.vapo": TOKEN_MEAN
    + r"\min(r_{it}A_{it},\,\mathrm{clip}(r_{it},1-\epsilon_{\mathrm{low}},"
    + r"1+\epsilon_{\mathrm{high}})A_{it})-\mu L_{\mathrm{LM}}-c_v L_V+c_e H",
}
LEGEND = r"""
A step has $`N`$ completions $`o_i`$; $`r_{it}=\pi(o_{it})/\pi_{\mathrm{old}}(o_{it})`$; $`A_i`$ is the
reward minus its group's mean, divided by the group's std (not in dr_grpo), ppo's $`A_{it}`$ whitened
GAE; $`L_V`$ the critic's loss, $`H`$ the entropy; $`k_{it}=x-\log x-1`$, $`x=\pi_{\mathrm{ref}}/\pi`$;
$`s_i=\exp(\frac1{\lvert o_i\rvert}\sum_t\log r_{it})`$; $`c_{it}`$ is $`\log r_{it}`$, at most
$`\epsilon`$ if $`A_i`$ is positive, else at least $`-\epsilon`$; $`\gamma_{it}`$ falls below 1 as the
router shifts; $`\mathrm{sg}`$ stops the gradient; $`\tau_i`$ is `tau_pos` or `tau_neg`.
"""


def path_of(name):
    """more.rloo -> .../more/rloo.py"""
    return ROOT / f"{name.replace('.', '/')}.py"


def read(name):
    """(header docstring, lines after it) of a script."""
    text = path_of(name).read_text()
    tree = ast.parse(text)
    return ast.get_docstring(tree), text.splitlines()[tree.body[0].end_lineno :]


def changed_lines(parent, child):
    """Lines added and lines removed, the header docstring aside."""
    _, old = read(parent)
    _, new = read(child)
    diff = list(difflib.unified_diff(old, new, lineterm=""))
    after_the_names = diff[2:]
    return sum(line.startswith(("+", "-")) for line in after_the_names)


def differences(header):
    """What stands before the colon in each item of the header's numbered list."""
    numbered = header.split("Differs only in:")[1].split("\n\n")[0]
    leads = []
    for item in re.split(r"\n\s*\d\. ", numbered)[1:]:
        lead = " ".join(item.split(":")[0].split())
        is_acronym = lead[:2].isupper()
        leads.append(lead if is_acronym else lead[0].lower() + lead[1:])
    return ", ".join(leads)


def parent_of(name):
    """The script that the header names, None for the root."""
    header, _ = read(name)
    found = re.search(r"Parent: (\w+)\.py", header)
    if not found:
        return None
    return found[1] if found[1] in SCRIPTS else f"more.{found[1]}"


def script_table(names, folder=""):
    """A table of scripts; `folder`: how to get to the repository's root from the page."""
    rows = []
    for name in names:
        header, _ = read(name)
        title = header.split(":")[0]
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        path = path_of(name).relative_to(ROOT)
        row = [f"[`{path}`]({folder}{path})", f"[{title}](https://arxiv.org/abs/{arxiv})"]
        parent = parent_of(name)
        if parent:
            row += [differences(header), f"{changed_lines(parent, name)}, {parent.split('.')[-1]}"]
        else:
            row += ["a critic, GAE, KL in the reward", ""]
        rows.append(row)
    header = ["script", "paper", "what differs from its parent", "changed lines, parent"]
    return markdown(header, rows)


def objectives(names):
    """A table of what is maximised."""
    rows = [[name.split(".")[-1], f"$`{OBJECTIVES[name]}`$"] for name in names]
    return markdown(["script", "objective, maximised"], rows)


def nine():
    return script_table(SCRIPTS)


def formulas():
    return objectives(SCRIPTS)


def more():
    return [*script_table(MORE, folder="../"), "", *objectives(MORE), *LEGEND.rstrip().splitlines()]


def policy_loss(name):
    """(signature, docstring, rest) of a script's `policy_loss`, each a list of lines."""
    text = (ROOT / f"{name}.py").read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == "policy_loss"]
    docstring = function.body[0]
    lines = text.splitlines()
    return (
        lines[function.lineno - 1 : docstring.lineno - 1],
        lines[docstring.lineno - 1 : docstring.end_lineno],
        lines[docstring.end_lineno : function.end_lineno],
    )


def lesson():
    """The diff of grpo's and sapo's policy_loss, between the docstring and the statistics."""
    _, _, old = policy_loss("grpo")
    _, _, new = policy_loss("sapo")
    old = old[: old.index("    stats = {")]
    new = new[: new.index("    stats = {")]
    lines = ["```diff"]
    for line in difflib.unified_diff(old, new, "grpo.py", "sapo.py", lineterm="", n=0):
        # Line numbers would count from the beginning of the function, not of the file.
        lines.append("@@ policy_loss @@" if line.startswith("@@") else line)
    return [*lines, "```"]


def departures():
    """Measured numbers that the table of departures cites."""
    own = [row["explained_variance_last10"] for row in read_runs("nine")["ppo", "default"]]
    errors = [row["first_step_ratio_error_max"] for row in evidence.table("nine")]
    text = (
        f"The largest |r - 1| at the first step of an iteration is {max(errors):g} in the"
        f" {len(errors)} runs of the figure. ppo's critic explains {min(own):.0%} to {max(own):.0%} of"
        " the variance of the returns in the last ten iterations."
    )
    return textwrap.wrap(text, WIDTH)


# ------------------------------------------------------------ benchmarks/README.md: the default job


def contents():
    """Links to the sections of benchmarks/README.md."""
    lines = []
    text = re.sub(r"^```.*?^```", "", FILES[1].read_text(), flags=re.DOTALL | re.MULTILINE)
    for level, heading in re.findall(r"^(##+) (.+)$", text, flags=re.MULTILINE):
        indent = "  " * (len(level) - 2)
        lines.append(f"{indent}- [{heading}](#{anchor(heading)})")
    return lines


def base_model():
    """The accuracy from which the runs of the tables start, unless a table says otherwise."""
    greedy = set()
    sampled = set()
    for path in evidence.RESULTS.glob("*_curves.csv"):
        for row in evidence.table(path.stem.removesuffix("_curves")):
            # Another model, or another cap on the length, has another accuracy.
            if "--model" not in row["flags"] and "--max_new_tokens" not in row["flags"]:
                greedy.add(f"{row['before_greedy_accuracy']:.3f}")
                sampled.add(f"{row['before_sampled_accuracy']:.3f}")
    text = (
        f"In the runs of this page the base model has an accuracy of {' or '.join(sorted(greedy))}"
        f" greedy and {' or '.join(sorted(sampled))} at temperature 1 on the 256 held-out sums."
    )
    return textwrap.wrap(text, WIDTH)


def rollout_points(rows):
    """[(completions generated, accuracy of the rollouts, trailing mean of five iterations)]."""
    values = [row["accuracy"] for row in rows]
    points = [(0.0, values[0])]
    for i, row in enumerate(rows):
        points.append((row["x"], statistics.mean(values[max(0, i - 4) : i + 1])))
    return points


def default_runs(experiment, scripts):
    """What the default runs of some scripts reach, and how soon."""
    lines = []
    for name in scripts:
        mine = read_runs(experiment)[name, "default"]
        curves = read_curves(experiment)[name, "default"]
        greedy = []
        for row in mine:
            curve = evidence.held_out(curves[int(row["seed"])], row["before_greedy_accuracy"])
            greedy.append(evidence.area(curve, END))
        points = [rollout_points(rows) for rows in curves.values()]
        reached = [evidence.reaches(curve, 0.9) for curve in points]
        thousands = "not all"
        if None not in reached:
            thousands = evidence.mean_std([x / 1000 for x in reached], 1)
        cells = [
            evidence.mean_std([row["after_greedy_accuracy"] for row in mine]),
            evidence.mean_std([row["after_sampled_accuracy"] for row in mine]),
            evidence.mean_std(greedy),
            evidence.mean_std([evidence.area(curve, END) for curve in points]),
            thousands,
            round(statistics.median(row["seconds"] for row in mine)),
        ]
        lines.append([f"`{path_of(name).relative_to(ROOT)}`", *cells])
    header = ["script", "greedy", "temperature 1", "area, greedy", "area, temperature 1"]
    return markdown([*header, "thousand completions to 0.9", "seconds"], lines, "lrrrrrr")


def curve_table():
    return default_runs("nine", SCRIPTS)


def more_runs():
    return default_runs("more", MORE)


def default_run():
    rows = read_runs("nine")["grpo", "default"]
    lines = []
    for text, column, digits in (
        ("greedy accuracy on held-out sums", "greedy_accuracy", 3),
        ("accuracy at temperature 1", "sampled_accuracy", 3),
        ("answers without working (temperature 1)", "sampled_direct", 3),
        ("response length in tokens (temperature 1)", "sampled_response", 1),
    ):
        before = f"{rows[0]['before_' + column]:.{digits}f}"
        after = " / ".join(f"{row['after_' + column]:.{digits}f}" for row in rows)
        lines.append([text, before, after])
    seeds = " / ".join(f"{row['seed']:.0f}" for row in rows)
    return markdown(["`grpo.py`", "before", f"after, seeds {seeds}"], lines)


# ---------------------------------------------------------------------------------------- stability


def stability():
    """Of the runs at each setting: how many had an iteration 0.2 or more below an earlier one."""

    def steps_and_rate(setting):
        rate, steps = re.fullmatch(r"lr(.+)-steps(.+)", setting).groups()
        return int(steps), float(rate)

    curves = read_curves("stability")
    settings = sorted({setting for _, setting in curves}, key=steps_and_rate)
    lines = []
    for script in SCRIPTS:
        cells = []
        for setting in settings:
            runs = curves[script, setting].values()
            fell = sum(max(drops(rows)) >= 0.2 for rows in runs)
            cells.append(f"{fell} of {len(runs)}")
        lines.append([script, *cells])
    words = [setting.replace("lr", "").replace("-steps", ", ") for setting in settings]
    return markdown(["lr, steps", *words], lines, "l" + "r" * len(words))


def during_the_fall():
    """Means over iterations 2 to 6 at the highest rate with 16 steps, and how the runs end."""
    setting = "lr1e-3-steps16"
    table = []
    for script in SCRIPTS:
        runs = read_curves("stability")[script, setting].values()
        early = [row for rows in runs for row in rows[1:6]]
        clipped = [(row["clip_low"] or 0) + (row["clip_high"] or 0) for row in early]
        after = [row["after_sampled_accuracy"] for row in read_runs("stability")[script, setting]]
        table.append(
            [
                statistics.mean(row["log_ratio_p99"] for row in early),
                statistics.mean(row["outside"] for row in early),
                statistics.mean(clipped),
                statistics.mean(row["flips"] for row in early),
                statistics.mean(row["grad_norm"] for row in early),
                statistics.mean(max(drops(rows)) for rows in runs),
                statistics.mean(accuracy or 0 for accuracy in after),
            ]
        )
    digits = (2, 3, 3, 3, 2, 2, 2)
    lines = []
    for script, values in zip(SCRIPTS, table, strict=True):
        cells = [f"{value:.{n}f}" for value, n in zip(values, digits, strict=True)]
        lines.append([script, *cells])
    *columns, _, final = zip(*table, strict=True)
    ranks = [f"{evidence.rank_correlation(column, final):+.2f}" for column in columns]
    lines.append(["rank correlation with the last column", *ranks, "", ""])
    header = [
        "script",
        r"99% of \|log r\| below",
        "tokens outside PPO's range",
        "clipped",
        "experts changed",
        "gradient norm",
        "largest drop of the accuracy",
        "held-out accuracy after the run",
    ]
    return markdown(header, lines, "lrrrrrrr")


# ------------------------------------------------------------------------------- the papers' claims


COMPARED = []  # (verdict, p value) of each comparison made so far, for `holm`


def verdict(ours, theirs, sign):
    """The same, and it is counted."""
    word = directed(ours, theirs, sign)
    COMPARED.append((word, evidence.p_value(ours, theirs)))
    return word


def compared(name, variants, columns, reference):
    """Rows of means over the last ten iterations, each with a verdict against the reference.

    `variants`: {words: key}. `columns`: {column: (digits, sign of the prediction, 0 for none)}.
    """
    lines = []
    for words, key in variants.items():
        cells = [words]
        for column, (digits, sign) in columns.items():
            mine = per_seed(name, key, column)
            cell = evidence.mean_std(mine, digits)
            if key != reference and sign:
                cell += f"<br>{verdict(mine, per_seed(name, reference, column), sign)}"
            cells.append(cell)
        lines.append(cells)
    return lines


SAME = ("gspo", "gmpo", "rspo", "sapo")  # as grpo without KL, with one step per rollout
OTHER = ("dr_grpo", "cispo")  # these have other normalisers


def reward_gaps(script):
    """Largest difference from grpo's mean reward in an iteration, for each seed."""
    curves = read_curves("one_step")
    gaps = []
    for seed, rows in curves[script, "one"].items():
        pairs = zip(rows, curves["grpo", "one"][seed], strict=True)
        gaps.append(max(abs(a["reward"] - b["reward"]) for a, b in pairs))
    return gaps


def one_step_verdict():
    """Is the one of OTHER that is nearest to grpo further from it than each of SAME, by seed?"""
    nearest = [min(gaps) for gaps in zip(*map(reward_gaps, OTHER), strict=True)]
    furthest = [max(gaps) for gaps in zip(*map(reward_gaps, SAME), strict=True)]
    return verdict(nearest, furthest, 1)


def one_step():
    curves = read_curves("one_step")
    base = curves["grpo", "one"]
    lines = []
    for script in ("grpo", *SAME, *OTHER):
        agreeing = []
        for seed, rows in curves[script, "one"].items():
            agrees = [a["reward"] == b["reward"] for a, b in zip(rows, base[seed], strict=True)]
            agreeing.append(agrees.index(False) if False in agrees else len(agrees))
        final = [row["after_sampled_accuracy"] for row in read_runs("one_step")[script, "one"]]
        cells = [
            script + (" (no KL)" if script == "grpo" else ""),
            "/".join(map(str, agreeing)),
            f"{max(reward_gaps(script)):.3f}",
            evidence.mean_std(final),
        ]
        lines.append(cells)
    question = "are the last two further from grpo than the four above?"
    lines.append([question, "", one_step_verdict(), ""])
    header = [
        "script",
        "iterations before the mean reward differs from grpo's, by seed (60: never)",
        "largest difference of a mean reward",
        "held-out accuracy after the run",
    ]
    return markdown(header, lines, "lrrr")


def clip_higher():
    columns = {"entropy": (4, 1), "clip_high": (4, 0), "accuracy": (3, 0)}
    lines = []
    for steps in ("4", "16"):
        variants = {}
        for high in ("0.2", "0.28", "0.5", "1.0"):
            variants[f"{steps} steps, eps high {high}"] = ("dapo", f"steps{steps}-high{high}")
        lines += compared("clip_higher", variants, columns, ("dapo", f"steps{steps}-high0.2"))
    variants = {}
    for high in ("0.02", "0.028", "0.1"):
        variants[f"16 steps, eps low 0.02, high {high}"] = ("dapo", f"high{high}")
    lines += compared("clip_higher_narrow", variants, columns, ("dapo", "high0.02"))
    entropy = "entropy (higher than in the first row of its kind?)"
    return markdown(["dapo", entropy, "clipped above", "accuracy"], lines)


def first_and_last(key, column):
    """Means over the first three and the last ten iterations, of the runs of wrong_length."""
    runs = read_curves("wrong_length")[key]
    first = [evidence.tail(runs[seed][:3], column, 3) for seed in sorted(runs)]
    return first, per_seed("wrong_length", key, column)


def wrong_length():
    lines = []
    last = {}
    for words, key in {"Dr. GRPO": ("dr_grpo", "default"), "GRPO, no KL": ("grpo", "kl0")}.items():
        first, last[words] = first_and_last(key, "len_wrong")
        cells = [
            evidence.mean_std(first, 1),
            evidence.mean_std(last[words], 1),
            evidence.mean_std(per_seed("wrong_length", key, "len_right"), 1),
            evidence.mean_std(per_seed("wrong_length", key, "accuracy")),
            verdict(last[words], first, 1),
        ]
        lines.append([words, *cells])
    longer = verdict(last["GRPO, no KL"], last["Dr. GRPO"], 1)
    lines.append(["GRPO's are longer than Dr. GRPO's?", "", longer, "", "", ""])
    header = ["", "wrong, first 3 iterations", "wrong, last 10", "right, last 10"]
    return markdown([*header, "accuracy, last 10", "wrong answers grow?"], lines)


def areas(name, key):
    """Of the rollouts' accuracy over the first 13,000 completions, for each seed."""
    return [evidence.area(rollout_points(rows), 13_000) for rows in read_curves(name)[key].values()]


def after_36_updates(key):
    runs = read_curves("dynamic_sampling")[key].values()
    return [evidence.tail(rows[:36], "accuracy", 5) for rows in runs]


def dynamic_sampling():
    name = "dynamic_sampling"
    without = ("dapo", "drop")
    refill = ("dapo", "refill")
    lines = []
    for words, key in {"without": without, "with dynamic sampling": refill}.items():
        generated = [row["generated"] for row in read_runs(name)[key]]
        final = [row["after_sampled_accuracy"] for row in read_runs(name)[key]]
        cells = [
            f"{min(generated):.0f} to {max(generated):.0f}",
            evidence.mean_std(areas(name, key)),
            evidence.mean_std(after_36_updates(key)),
            evidence.mean_std(final),
        ]
        lines.append([words, *cells])
    by_area = verdict(areas(name, refill), areas(name, without), 1)
    by_updates = verdict(after_36_updates(refill), after_36_updates(without), 1)
    lines.append(["higher with it?", "", by_area, by_updates, ""])
    header = [
        "",
        "completions generated",
        "area, 13,000 completions",
        "accuracy, iterations 32 to 36",
    ]
    return markdown([*header, "held-out, after the run"], lines)


def overlong():
    variants = {name: ("dapo", name) for name in ("none", "filter", "soft")}
    columns = {"truncated": (4, -1), "len": (1, -1), "accuracy": (3, 1), "direct": (3, 0)}
    lines = compared("overlong", variants, columns, ("dapo", "none"))
    for line, key in zip(lines, variants.values(), strict=True):
        line.append(evidence.mean_std(areas("overlong", key)))
    header = ["", "cut off (fewer than without?)", "length (shorter?)", "accuracy (higher?)"]
    return markdown([*header, "direct answers", "area, 13,000 completions"], lines)


def gradient_shares(script, steps):
    """By seed: share of tokens outside PPO's range, expected norm of as many, norm of theirs."""
    key = (script, f"steps{steps}")
    tokens = whole("gradient_share", key, "outside")
    gradient = whole("gradient_share", key, "outside_gradient")
    return tokens, [math.sqrt(share) for share in tokens], gradient


def gradient_share():
    lines = []
    for steps in ("4", "16"):
        for words, script in {"CISPO": "cispo", "GRPO, no KL": "grpo"}.items():
            tokens, chance, gradient = gradient_shares(script, steps)
            cells = [f"{statistics.mean(values):.2%}" for values in (tokens, chance, gradient)]
            shown = verdict(gradient, chance, 1) if script == "cispo" else ""
            lines.append([f"{words}, {steps} steps", *cells, shown])
    header = ["", "tokens outside PPO's range", "norm expected of as many random tokens"]
    header += ["their share of the gradient's norm", "more than random tokens?"]
    return markdown(header, lines, "lrrrl")


def stale(script, rate, column):
    """Mean over all iterations of a run with 16 steps per rollout, for each seed."""
    if rate == "1e-4":
        return whole("stale_ratio", (script, "stale"), column)
    if script == "grpo":  # without KL
        return whole("stale_ratio", (script, f"lr{rate}"), column)
    return whole("stability", (script, f"lr{rate}-steps16"), column)


RATES = ("1e-4", "3e-4", "1e-3")
SPREAD = ("log_ratio_p99", "log_ratio_up_max", "log_ratio_down_max")  # of the log-ratios


def stale_ratio():
    columns = {"log_ratio_p99": 4, "log_ratio_up_max": 2, "log_ratio_down_max": 2, "accuracy": 3}
    lines = []
    for rate in RATES:
        for script in ("grpo", "cispo", "gspo", "gmpo", "rspo"):
            words = "GRPO, no KL" if script == "grpo" else script.upper()
            cells = [f"{words}, lr {rate}"]
            for column, digits in columns.items():
                mine = stale(script, rate, column)
                cell = evidence.mean_std(mine, digits)
                if script != "grpo" and column in SPREAD:
                    cell += f"<br>{verdict(mine, stale('grpo', rate, column), -1)}"
                cells.append(cell)
            lines.append(cells)
    header = ["", r"99% of \|log r\| below (narrower than GRPO's?)", "largest log r"]
    return markdown([*header, "largest -log r", "accuracy, mean of all iterations"], lines)


def shift_and_gamma(key):
    correlations = []
    for rows in read_curves("router_shift")[key].values():
        flips = [row["flips"] for row in rows]
        correlations.append(statistics.correlation(flips, [row["shift"] for row in rows]))
    return correlations


def is_negative(values):
    return verdict(values, [0.0] * len(values), -1)


def router_shift():
    name = "router_shift"
    columns = {"accuracy": (3, 1), "flips": (3, -1), "shift": (3, 0), "log_ratio_p99": (3, -1)}
    lines = []
    for rate in ("3e-4", "1e-3"):
        gmpo = ("gmpo", f"lr{rate}")
        for script in ("gmpo", "rspo"):
            key = (script, f"lr{rate}")
            cells = [f"{script}, lr {rate}"]
            for column, (digits, sign) in columns.items():
                mine = per_seed(name, key, column)
                if None in mine:  # gmpo has no gamma
                    cells.append("")
                    continue
                cell = evidence.mean_std(mine, digits)
                if script == "rspo" and sign:
                    cell += f"<br>{verdict(mine, per_seed(name, gmpo, column), sign)}"
                cells.append(cell)
            following = shift_before_fall(name, key)
            word = first_word(is_negative(following))
            cells.append(f"{evidence.mean_std(following, 2)}<br>{word}")
            cells.append(evidence.mean_std(shift_and_gamma(key), 2) if script == "rspo" else "")
            lines.append(cells)
    header = [
        "64 steps per rollout",
        "accuracy (higher?)",
        "experts changed (fewer?)",
        "gamma",
        r"99% of \|log r\| below (narrower?)",
        "correlation of changed experts with the next change of accuracy (negative?)",
        "correlation of changed experts with gamma",
    ]
    return markdown(header, lines)


def sapo_taus():
    names = {
        "1.0 / 1.0": "equal",
        "1.0 / 1.05 (paper)": "paper",
        "1.05 / 1.0": "reversed",
        "1.0 / 2.0": "strong",
        "2.0 / 1.0": "strong-reversed",
    }
    lines = []
    for rate in ("3e-4", "1e-3"):
        for words, name in names.items():
            sign = -1 if name.endswith("reversed") else 1  # reversed is predicted to be worse
            columns = {"accuracy": (3, sign), "entropy": (4, 0), "log_ratio_p99": (3, 0)}
            variants = {f"{words}, lr {rate}": ("sapo", f"{name}-lr{rate}")}
            lines += compared("sapo_taus", variants, columns, ("sapo", f"equal-lr{rate}"))
    accuracy = "accuracy (higher than with equal ones, lower if reversed?)"
    header = ["tau_pos / tau_neg", accuracy, "entropy", r"99% of \|log r\| below"]
    return markdown(header, lines)


def replay_runs(script, steps, name):
    """(experiment, key) of a variant: two of grpo's are runs of rollout_correction."""
    of_correction = {"none": "same", "int4": "int4"}
    if (script, steps) == ("grpo", "16") and name in of_correction:
        return "rollout_correction", (script, of_correction[name])
    return "routing_replay", (script, f"steps{steps}-{name}")


def replay_accuracy(steps, name):
    """grpo's, without a KL: mean of all rollouts, for each seed."""
    return whole(*replay_runs("grpo", steps, name), "accuracy")


def replay():
    lines = []
    for steps in ("16", "64"):
        free, r2 = replay_accuracy(steps, "none"), replay_accuracy(steps, "r2")
        cells = evidence.mean_std(free), evidence.mean_std(r2), verdict(r2, free, 1)
        lines.append([f"grpo, no KL, {steps} steps", *cells])
    header = ["accuracy, mean of all rollouts", "without", "with r2", "higher with it?"]
    return markdown(header, lines, "lrrl")


def equal_steps(script):
    """Mean accuracy of the rollouts in the first 36 iterations of the default job, for each seed."""
    runs = read_curves("nine")[script, "default"]
    return [evidence.tail(runs[seed][:36], "accuracy", 36) for seed in sorted(runs)]


def cispo_and_dapo():
    cispo, dapo = equal_steps("cispo"), equal_steps("dapo")
    cells = evidence.mean_std(dapo), evidence.mean_std(cispo), verdict(cispo, dapo, 1)
    header = ["", "dapo", "cispo", "cispo's is higher?"]
    return markdown(header, [["accuracy, mean of 36 iterations", *cells]], "lrrl")


# ------------------------------------------------------------- when the sampler is not the trainer


def percent(value):
    return f"{100 * value:.1f} %"


def mismatch():
    lines = []
    for row in evidence.table("mismatch"):
        low = row["sampler_sequence_ratio_min"]
        high = row["sampler_sequence_ratio_max"]
        experts = row["sampler_expert_diff_frac"]
        lines.append(
            [
                f"{row['model']}, {row['precision']}",
                f"{max(row['sampler_kl'], 0):.2g}",
                f"{row['sampler_logratio_max']:.2g}",
                f"{low:.2g} to {high:.2g}",
                "" if experts is None else percent(experts),
                percent(row["geo_mask_zero"]),
                percent(row["sequence_mis_zero"]),
                percent(row["icepop_zero"]),
            ]
        )
    header = [
        "",
        "KL per token",
        r"largest \|log rho\|",
        "product of rho over a completion",
        "other experts",
        "geo_mask leaves out",
        "sequence_mis",
        "icepop",
    ]
    return markdown(header, lines, "lrrrrrrr")


def rollout_correction():
    name = "rollout_correction"
    lines = []
    groups = []
    for prefix, words in (
        ("", "16 steps, lr 3e-4"),
        ("steps4-", "4 steps, lr 3e-4"),
        ("lr1e-3-", "16 steps, lr 1e-3"),
    ):
        for script in ("grpo", "gspo", "cispo", "gmpo"):
            groups.append((script, prefix, f"{script}, {words}"))
    rules = ("token_tis", "sequence_tis", "sequence_mis", "geo_mask", "icepop")
    corrected = [f"int4-{rule}" for rule in rules]
    for script, prefix, words in groups:
        same = held_out_of(name, (script, f"{prefix}same"))
        uncorrected = held_out_of(name, (script, f"{prefix}int4"))
        for variant in ("same", "int8", "int4", *corrected):
            key = (script, prefix + variant)
            if key not in read_runs(name):
                continue
            mine = held_out_of(name, key)
            cells = [f"{words}: {variant.replace('-', ', ')}", evidence.mean_std(mine)]
            cells.append("" if variant == "same" else verdict(mine, same, -1))
            cells.append(verdict(mine, uncorrected, 1) if variant in corrected else "")
            cells.append(f"{max(0, statistics.mean(whole(name, key, 'sampler_kl'))):.2g}")
            for column, digits in (("weight_zero", 3), ("weight_effective", 2)):
                values = whole(name, key, column)
                cells.append("" if None in values else f"{statistics.mean(values):.{digits}f}")
            lines.append(cells)
    header = [
        "",
        "held-out accuracy",
        "lower than without a mismatch?",
        "higher than without a correction?",
        "KL of sampler and training forward",
        "tokens of weight 0",
        "effective sample size",
    ]
    return markdown(header, lines)


def mismatch_holm():
    """How many of the verdicts on training with a mismatch stay when their number is corrected for."""
    COMPARED.clear()
    for make in (rollout_correction, mismatch_losses, routing_replay):
        make()
    alone = [p for word, p in COMPARED if first_word(word) != "not shown"]
    adjusted = evidence.holm([p for _, p in COMPARED])
    stay = sum(p < 0.05 for p in adjusted)
    text = (
        f"Of the {len(COMPARED)} comparisons of this section and the next, {len(alone)} are *shown* or"
        f" *the opposite* by themselves; the smallest p is {min(alone):.2g}. After Holm's correction"
        f" {stay} stay."
    )
    return textwrap.wrap(text, WIDTH)


def mismatch_losses():
    """What an int4 sampler costs without a correction: is it more for token ratios than for means?"""
    lines = []
    for words, prefix in (
        ("16 steps, lr 3e-4", ""),
        ("4 steps, lr 3e-4", "steps4-"),
        ("16 steps, lr 1e-3", "lr1e-3-"),
    ):
        losses = {}
        for script in ("grpo", "cispo", "gspo", "gmpo"):
            same = held_out_of("rollout_correction", (script, f"{prefix}same"))
            int4 = held_out_of("rollout_correction", (script, f"{prefix}int4"))
            losses[script] = [a - b for a, b in zip(same, int4, strict=True)]
        tokens = [(a + b) / 2 for a, b in zip(losses["grpo"], losses["cispo"], strict=True)]
        means = [(a + b) / 2 for a, b in zip(losses["gspo"], losses["gmpo"], strict=True)]
        each = [evidence.mean_std(values) for values in losses.values()]
        lines.append([words, *each, verdict(tokens, means, 1)])
    header = ["accuracy lost", "grpo", "cispo", "gspo", "gmpo"]
    table = markdown([*header, "the first two lose more, on average?"], lines)
    rules = ("sequence_tis", "token_tis")
    ours, theirs = (
        held_out_of("rollout_correction", ("grpo", f"lr1e-3-int4-{rule}")) for rule in rules
    )
    question = "Is grpo's accuracy at 1e-3 higher with `sequence_tis` than with `token_tis`?"
    return [*table, "", f"{question} {verdict(ours, theirs, 1).capitalize()}."]


def routing_replay_row(script, steps, name):
    key = replay_runs(script, steps, name)
    reference = replay_runs("grpo", steps, "int4" if "int4" in name else "none")
    cells = [f"{script}, {steps} steps: {name.replace('-', ', ')}"]
    for column, digits in (("log_ratio_p99", 3), ("log_ratio_up_max", 2), ("flips", 3)):
        mine = whole(*key, column)
        cell = evidence.mean_std(mine, digits)
        if key != reference and column != "flips":
            cell += f"<br>{verdict(mine, whole(*reference, column), -1)}"
        cells.append(cell)
    mine = whole(*key, "sampler_kl")
    cell = f"{max(statistics.mean(mine), 0):.2g}"
    if name == "int4-r3":
        cell += f"<br>{verdict(mine, whole(*reference, 'sampler_kl'), -1)}"
    cells.append(cell)
    mine = held_out_of(*key)
    cell = evidence.mean_std(mine)
    if key != reference:
        cell += f"<br>{verdict(mine, held_out_of(*reference), 1)}"
    cells.append(cell)
    return cells


def routing_replay():
    lines = []
    names = {"grpo": ("none", "r2", "int4", "int4-r2", "int4-r3"), "rspo": ("none", "int4")}
    for steps, script in itertools.product(("16", "64"), names):
        for name in names[script]:
            lines.append(routing_replay_row(script, steps, name))
    header = [
        "",
        r"99% of \|log r\| below (narrower than grpo, free?)",
        "largest log r (smaller?)",
        "experts that would change",
        "KL of sampler and training forward (smaller?)",
        "held-out accuracy (higher?)",
    ]
    return markdown(header, lines)


# -------------------------------------------------------------------- the claims in the main README
#
# Each of the functions below returns [(verdict, what was measured)]. The words beside a verdict say
# how a number came out, whichever way that is, so that they stay true when the CSVs change.


def seen_one_step():
    gaps = {script: f"{script} {max(reward_gaps(script)):.3f}" for script in (*SAME, *OTHER)}
    same = ", ".join(gaps[script] for script in SAME)
    other = " and ".join(gaps[script] for script in OTHER)
    text = f"largest distance of a mean reward from grpo's: {same}, against {other}"
    return [(first_word(one_step_verdict()), text)]


def seen_clip_higher():
    def entropies(name, high, low):
        return [per_seed(name, ("dapo", variant), "entropy") for variant in (high, low)]

    four = entropies("clip_higher", "steps4-high0.28", "steps4-high0.2")
    sixteen = entropies("clip_higher", "steps16-high0.28", "steps16-high0.2")
    narrow = entropies("clip_higher_narrow", "high0.028", "high0.02")
    text = (
        f"with 0.28 in place of 0.2, the entropy is {apart(*four, 'higher', 'lower')} (4 steps per"
        f" rollout) and {apart(*sixteen, 'higher', 'lower')} (16 steps)"
    )
    more = (
        "with bounds a tenth as wide, so that the clip binds, it is"
        f" {apart(*narrow, 'higher', 'lower')}"
    )
    first = overall(verdict(*four, 1), verdict(*sixteen, 1))
    return [(first, text), (first_word(verdict(*narrow, 1)), more)]


def seen_wrong_length():
    _, grpo = first_and_last(("grpo", "kl0"), "len_wrong")
    first, dr_grpo = first_and_last(("dr_grpo", "default"), "len_wrong")
    against = apart(grpo, dr_grpo, "tokens longer", "tokens shorter")
    growth = apart(dr_grpo, first, "tokens longer", "tokens shorter")
    return [
        (
            first_word(verdict(grpo, dr_grpo, 1)),
            f"GRPO's wrong answers end {against} than Dr. GRPO's",
        ),
        (
            first_word(verdict(dr_grpo, first, -1)),
            f"Dr. GRPO's end {growth} than they began",
        ),
    ]


def seen_dynamic_sampling():
    refill = ("dapo", "refill")
    drop = ("dapo", "drop")
    by_area = areas("dynamic_sampling", refill), areas("dynamic_sampling", drop)
    by_updates = after_36_updates(refill), after_36_updates(drop)
    height = apart(*by_area, "higher", "lower")
    accuracy = apart(*by_updates, "higher", "lower")
    return [
        (
            first_word(verdict(*by_area, 1)),
            f"at equally many generated completions, the mean of the accuracy is {height} with it",
        ),
        (
            first_word(verdict(*by_updates, 1)),
            f"after equally many updates, the accuracy is {accuracy} with it",
        ),
    ]


def seen_overlong():
    def against_none(name, column):
        return [per_seed("overlong", ("dapo", variant), column) for variant in (name, "none")]

    items = []
    for name, words in {"soft": "soft punishment", "filter": "filtering"}.items():
        cut_off = against_none(name, "truncated")
        length = against_none(name, "len")
        accuracy = against_none(name, "accuracy")
        text = (
            f"{words}: the share cut off is {apart(*cut_off, 'higher', 'lower')} than with neither,"
            f" answers are {apart(*length, 'tokens longer', 'tokens shorter')}, the accuracy is"
            f" {apart(*accuracy, 'higher', 'lower')}"
        )
        items.append((overall(verdict(*cut_off, -1), verdict(*length, -1)), text))
    return items


def seen_gradient_share():
    verdicts = []
    texts = []
    for steps in ("4", "16"):
        tokens, chance, gradient = gradient_shares("cispo", steps)
        verdicts.append(verdict(gradient, chance, 1))
        texts.append(
            f"with {steps} steps per rollout, {statistics.mean(tokens):.2%} of the tokens have"
            f" {statistics.mean(gradient):.1%} of the gradient's norm, where as many random ones"
            f" would have {statistics.mean(chance):.1%}"
        )
    _, _, under_grpo = gradient_shares("grpo", "16")
    texts.append(f"under GRPO they have {max(under_grpo):.1%}")
    return [(overall(*verdicts), "; ".join(texts))]


def seen_stale_ratio():
    verdicts = []
    texts = []
    for rate in RATES:
        widths = []
        for script in ("grpo", "gspo", "gmpo"):
            mine = stale(script, rate, "log_ratio_p99")
            widths.append(f"{statistics.mean(mine):.3g}")
            if script != "grpo":
                verdicts.append(verdict(mine, stale("grpo", rate, "log_ratio_p99"), -1))
        texts.append(f"{' / '.join(widths)} (lr {rate})")
    text = rf"99% of \|log r\| are below, in grpo / gspo / gmpo: {', '.join(texts)}"
    return [(overall(*verdicts), text)]


def seen_router_shift():
    shifts = []
    following = []
    accuracies = []
    texts = []
    for rate in ("3e-4", "1e-3"):
        values = {}
        for script in ("gmpo", "rspo"):
            key = (script, f"lr{rate}")
            correlations = shift_before_fall("router_shift", key)
            shifts.append(is_negative(correlations))
            following.append(f"{statistics.mean(correlations):+.2f} ({script}, lr {rate})")
            values[script] = per_seed("router_shift", key, "accuracy")
        accuracies.append(verdict(values["rspo"], values["gmpo"], 1))
        difference = apart(values["rspo"], values["gmpo"], "higher", "lower")
        texts.append(f"{difference} (lr {rate})")
    text = f"changed experts correlate with the next change of accuracy by {', '.join(following)}"
    more = f"rspo's accuracy, compared with gmpo's: {', '.join(texts)}"
    return [(overall(*shifts), text), (overall(*accuracies), more)]


def seen_sapo_taus():
    items = []
    for name, words, sign in (
        ("paper", "tau_pos 1.0, tau_neg 1.05", 1),
        ("reversed", "tau_pos 1.05, tau_neg 1.0", -1),
    ):
        verdicts = []
        texts = []
        for rate in ("3e-4", "1e-3"):
            mine = per_seed("sapo_taus", ("sapo", f"{name}-lr{rate}"), "accuracy")
            equal = per_seed("sapo_taus", ("sapo", f"equal-lr{rate}"), "accuracy")
            verdicts.append(verdict(mine, equal, sign))
            texts.append(f"{apart(mine, equal, 'higher', 'lower')} (lr {rate})")
        text = f"accuracy with {words}, compared with equal ones: {', '.join(texts)}"
        items.append((overall(*verdicts), text))
    return items


def seen_routing_replay():
    verdicts = []
    texts = []
    for steps in ("16", "64"):
        free, r2 = replay_accuracy(steps, "none"), replay_accuracy(steps, "r2")
        verdicts.append(verdict(r2, free, 1))
        texts.append(f"{apart(r2, free, 'higher', 'lower')} ({steps} steps per rollout)")
    return [(overall(*verdicts), f"with replay (r2), grpo's accuracy is {', '.join(texts)}")]


def seen_equal_steps():
    pair = equal_steps("cispo"), equal_steps("dapo")
    text = f"in 36 iterations, cispo's mean accuracy is {apart(*pair, 'higher', 'lower')} than dapo's"
    return [(first_word(verdict(*pair, 1)), text)]


def not_asked():
    return []


CLAIMS = (  # heading of the section, what the paper says, what is seen, and in the second regime
    (
        "(a) One step per rollout",
        "(from the formulas) all ratios are 1, so grpo without KL, gspo, gmpo, rspo and sapo have"
        " one curve; dr_grpo and cispo do not",
        seen_one_step,
        not_asked,
    ),
    (
        "(b) Clip-higher and entropy",
        "DAPO: a wider range above 1 keeps the entropy higher",
        seen_clip_higher,
        second_regime.long_clip_higher,
    ),
    (
        "(c) The length of wrong answers",
        "Dr. GRPO: dividing by the length makes wrong answers grow; without it they do not",
        seen_wrong_length,
        not_asked,
    ),
    (
        "(d) Dynamic sampling",
        "DAPO: refilling the batch with mixed groups learns faster, even if what is thrown away"
        " is counted",
        seen_dynamic_sampling,
        not_asked,
    ),
    (
        "(e) Overlong answers",
        "DAPO: on a base that rambles, punishing or filtering what is cut off shortens answers"
        " and costs no accuracy",
        seen_overlong,
        not_asked,
    ),
    (
        "(f) Tokens that the clip drops",
        "MiniMax-M1: PPO's clip drops tokens that matter; CISPO keeps their gradient",
        seen_gradient_share,
        not_asked,
    ),
    (
        "(g) Log-ratios under stale data",
        "GSPO, GMPO: the log-ratios stay closer to 0 than GRPO's",
        seen_stale_ratio,
        second_regime.long_stale_ratio,
    ),
    (
        "(h) Router shift and collapse",
        "RSPO: experts change before the reward falls, and rspo is more stable than gmpo",
        seen_router_shift,
        second_regime.long_router_shift,
    ),
    (
        "(i) The two temperatures of SAPO",
        "SAPO: tau_neg above tau_pos is more stable than equal ones, and the reverse less",
        seen_sapo_taus,
        second_regime.long_sapo_taus,
    ),
    (
        "(j) Routing replay",
        "GSPO: GRPO needs routing replay on an MoE, GSPO does not",
        seen_routing_replay,
        second_regime.long_routing_replay,
    ),
    (
        "(k) CISPO and DAPO at equal steps",
        "MiniMax-M1: CISPO learns faster than DAPO in as many steps",
        seen_equal_steps,
        second_regime.long_equal_steps,
    ),
)


def claim_cell(items):
    """Verdicts with what was seen."""
    return "<br>".join(f"**{word}**: {text}" for word, text in items) or "(not asked)"


def claims():
    rows = []
    for heading, paper, seen, seen_long in CLAIMS:
        rows.append([heading, paper, claim_cell(seen()), claim_cell(seen_long())])
    header = ["claim", "what the paper says", "seen on the default job"]
    header.append("seen on long answers, lr 3e-4, 16 steps")
    return markdown(header, rows)


def claims_in_short():
    """Of the main README: the verdicts alone."""
    rows = []
    for heading, _, seen, seen_long in CLAIMS:
        row = [heading]
        for items in (seen(), seen_long()):
            words = dict.fromkeys(word for word, _ in items)
            row.append(", ".join(words) or "(not asked)")
        rows.append(row)
    return markdown(["claim", "default job", "long answers"], rows)


def holm():
    """The comparisons behind the table of claims, corrected for their number."""
    found = []
    for heading, _, seen, _ in CLAIMS:
        COMPARED.clear()
        seen()
        found += [(heading, word, p) for word, p in COMPARED]
    adjusted = evidence.holm([p for _, _, p in found])
    lines = []
    for (heading, word, p), corrected in zip(found, adjusted, strict=True):
        if first_word(word) != "not shown":
            stays = "stays" if corrected < 0.05 else "not shown"
            link = f"[{heading}](#{anchor(heading)})"
            lines.append([link, word, f"{p:.2g}", f"{corrected:.2g}", stays])
    count = f"Of {len(found)} comparisons, {len(lines)} are *shown* or *the opposite* by themselves:"
    header = ["claim", "by itself", "p", "p, corrected", "after the correction"]
    return [count, "", *markdown(header, lines, "llrrl")]


# -------------------------------------------------------------------------------------------- speed


def three(values):
    """The lowest, the middle and the highest."""
    chosen = min(values), statistics.median(values), max(values)
    return [f"{value:.2f}" for value in chosen]


def by_case(name):
    """{(case, threads): [row of results/<name>.csv, by pair]}."""
    groups = defaultdict(list)
    for row in evidence.table(name):
        groups[row["case"], f"{row['threads']:.0f}"].append(row)
    return groups


def sampler():
    lines = []
    for (case, threads), rows in by_case("sampler").items():
        rates = {}
        for name in ("sampler", "generate"):
            rates[name] = [row[f"{name}_tokens_per_second"] for row in rows]
        medians = [f"{statistics.median(values):,.0f}" for values in rates.values()]
        ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
        lines.append([f"`{case}`", threads, f"{len(rows)}", *medians, " / ".join(three(ratios))])
    header = ["case", "threads", "pairs", "sampler, tokens/s", "`generate()`, tokens/s"]
    return markdown([*header, "ratio (min / median / max)"], lines, "lrrrrr")


def speed():
    lines = []
    for (case, threads), rows in by_case("trl_speed").items():
        seconds = {}
        for side in ("ours", "trl"):
            iteration = [row[f"{side}_seconds"] for row in rows]
            sampling = [row[f"{side}_sampling"] for row in rows]
            rest = [row[f"{side}_seconds"] - row[f"{side}_sampling"] for row in rows]
            seconds[side] = [iteration, sampling, rest]
        medians = [f"{statistics.median(seconds[side][0]):.2f} s" for side in ("ours", "trl")]
        ratios = []
        for ours, theirs in zip(seconds["ours"], seconds["trl"], strict=True):
            ratios.append([a / b for a, b in zip(ours, theirs, strict=True)])
        iteration, sampling, rest = ratios
        parts = [f"{statistics.median(values):.2f}" for values in (sampling, rest)]
        peaks = [max(row[f"{side}_peak_mib"] for row in rows) for side in ("ours", "trl")]
        tokens = []
        for side in ("ours", "trl"):
            tokens.append(statistics.mean(row[f"{side}_tokens"] for row in rows))
        cells = [
            f"`{case}`",
            threads,
            f"{len(rows)}",
            *medians,
            " / ".join(three(iteration)),
            " / ".join(parts),
            " : ".join(f"{peak:,.0f}" for peak in peaks),
            " : ".join(f"{count:,.0f}" for count in tokens),
        ]
        lines.append(cells)
    header = ["case", "threads", "pairs", "`grpo.py`", "TRL", "ratio (min / median / max)"]
    header += ["ratio of sampling / of the rest", "peak MiB, ours : TRL", "tokens, ours : TRL"]
    return markdown(header, lines, "lrrrrrrrr")


# ---------------------------------------------------------------- the same losses in TRL and in verl

PLUGGED = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
# (engine, scripts, case in the CSV, what it does, what the paper has, how to have that)
ENGINE_DEPARTURES = [
    (
        "TRL",
        "dapo, cispo",
        "trl",
        "divides by the mean number of tokens of a rollout's optimizer steps",
        "the number of tokens that are averaged",
        "`steps_per_generation` equal to `gradient_accumulation_steps`: one step for a rollout",
    ),
    (
        "TRL",
        "grpo",
        "trl, its KL",
        "multiplies k3 by the ratio (`--kl_is_corrected` here)",
        "k3",
        "`use_bias_correction_kl=False`",
    ),
    ("TRL", "all but dr_grpo", "advantages", "adds 1e-4 to the std", "not specified; here 1e-6", ""),
    (
        "verl",
        "grpo, dr_grpo, dapo",
        "dual clip",
        "dual clip: where A < 0, no gradient once the ratio is above 3",
        "no such bound",
        "`clip_ratio_c=1e9`",
    ),
    ("verl", "grpo", "k3 clamped", "clamps k3 at 10, without a gradient from there", "k3", "(none)"),
    (
        "verl",
        "grpo, gspo",
        "token mean",
        "averages over tokens by default",
        "tokens of a completion, then completions",
        "`loss_agg_mode=seq-mean-token-mean`",
    ),
    (
        "verl",
        "gspo",
        "range",
        "clips at 0.2 by default",
        "3e-4 and 4e-4 (measured: 3e-3 and 4e-3)",
        "`clip_ratio_low`, `clip_ratio_high`",
    ),
    (
        "verl",
        "dr_grpo",
        "padded width",
        "divides by the padded width, by default: the longest response of a micro-batch",
        "a constant",
        "`loss_scale_factor`",
    ),
    (
        "verl",
        "cispo",
        "floor",
        "raises weights below 0.8, by default",
        "no lower bound in effect",
        "`clip_ratio_low=1`",
    ),
    (
        "verl",
        "cispo",
        "cap",
        "caps weights at 1.2, by default",
        "not printed (measured: 5)",
        "`clip_ratio_high=4`",
    ),
    (
        "verl",
        "gmpo",
        "range",
        "clips log r at 0.2 by default",
        "0.4",
        "`clip_ratio_low=0.4`, `clip_ratio_high=0.4`",
    ),
    (
        "verl",
        "gmpo",
        "mean of a micro-batch",
        "takes the mean of each micro-batch, and adds these up",
        "the mean of the step",
        "one micro-batch per process",
    ),
    (
        "verl",
        "all",
        "equal rewards",
        "rounding error over 1e-6 in a group of equal rewards",
        "0 (here exactly)",
        "(none)",
    ),
    (
        "(neither)",
        "dapo, cispo",
        "own tokens",
        "a well-known mistake: each process divides by its own tokens",
        "the number of tokens that are averaged",
        "",
    ),
]


def brief(value):
    """1.4e-06, 0.12, 3; what is no more than rounding in float64 is 0."""
    return "0" if value < 1e-15 else f"{value:.2g}"


def spread(values):
    low, high = brief(min(values)), brief(max(values))
    return high if low == high else f"{low} to {high}"


def engines():
    trl = evidence.table("trl_losses")
    verl = evidence.table("verl_losses")
    cells = []
    for name in PLUGGED:
        row = [f"`{name}`"]
        for table, column, kind in (
            (trl, "loss", "plugged"),
            (trl, "loss", "trl"),
            (verl, "kind", "plugged"),
            (verl, "kind", "verl"),
        ):
            found = [line for line in table if (line["script"], line[column]) == (name, kind)]
            value = brief(max(line["value_error"] for line in found))
            gradient = brief(max(line["gradient_error"] for line in found))
            row.append(f"{value} / {gradient}")
        cells.append(row)
    header = ["script", "ours in TRL", "TRL's own", "ours in verl", "verl's own"]
    return markdown(header, cells, "lrrrr")


def engine_departures():
    trl = evidence.table("trl_losses")
    verl = [row for row in evidence.table("verl_losses") if row["kind"] == "departure"]
    cells = []
    for engine, scripts, case, what, paper, remedy in ENGINE_DEPARTURES:
        names = scripts.split(", ")
        if case == "advantages":
            errors = [row["advantage_error"] for row in trl if row["loss"] == "trl"]
            found = f"A off by {brief(max(errors))}"
        elif case == "equal rewards":
            (row,) = [row for row in verl if row["case"] == case]
            found = f"A = {brief(row['value_error'])} for rewards of 0.1"
        elif case == "mean of a micro-batch":
            rows = [row for row in verl if row["case"] == case]
            ratios = {row["micro_batches"]: row["gradient_ratio"] for row in rows}
            pairs = [f"x {ratios[count]:.0f} with {count:.0f}" for count in sorted(ratios)]
            found = f"{', '.join(pairs)} micro-batches"
        elif engine == "verl":
            rows = [row for row in verl if row["case"] == case and row["script"] in names]
            found = spread([row["gradient_error"] for row in rows])
        else:
            rows = [row for row in trl if row["loss"] == case and row["script"] in names]
            found = spread([row["gradient_error"] for row in rows])
        cells.append([engine, scripts, what, paper, found, remedy])
    header = ["in", "script", "what it does", "the paper", "gradient off by", "to have the paper's"]
    return markdown(header, cells)


# --------------------------------------------------------------------------------- memory, SmolLM2


def memory():
    header = ["model", "way", "stays", "a rollout", "an update", "at most", "GB card"]
    return markdown(header, gpu.memory_rows(), "llrrrrr")


def recipe():
    lines = ["```", *gpu.recipe_command().split("\n"), "```", ""]
    parts = gpu.recipe_parts()
    listed = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts.items())
    peak = gpu.memory_peak(parts) / 2**30
    text = f"Memory in GiB: {listed}; at most {peak:.1f}."
    return lines + textwrap.wrap(text, WIDTH)


def measured_on_a_gpu():
    """What benchmarks/gpu_kit.py has found: a table for each check."""
    path = evidence.RESULTS / "gpu.json"
    if not path.exists():
        command = "python benchmarks/gpu.py measure benchmarks/results/gpu.json"
        return [
            "Nothing was measured on a GPU yet. To do it, in some ten minutes on one of 80 GB or more:",
            "",
            "```",
            command,
            "```",
        ]
    results = json.loads(path.read_text())
    versions = f"torch {results['torch']}, transformers {results['transformers']}"
    lines = [f"Measured on one {results['device']}, {versions}, commit {results['commit']}."]
    for name, result in results["checks"].items():
        rows = result["rows"]
        header = list(dict.fromkeys(column for columns in rows.values() for column in columns))
        ended = f": {result['ended']}" if result["ended"] else ""
        lines += ["", f"`{name}`, {result['seconds']:.0f} s{ended}"]
        if rows:
            cells = [
                [row, *(columns.get(name, "") for name in header)] for row, columns in rows.items()
            ]
            lines += ["", *markdown(["", *header], cells, "l" + "r" * len(header))]
    return lines


def smollm2():
    rows = [row for row in evidence.table("smollm2") if row["greedy_held_out"] is not None]
    iterations = [f"{row['iteration']:.0f}" for row in rows]
    accuracy = [f"{row['greedy_held_out']:.3f}" for row in rows]
    minutes = [f"{row['seconds'] / 60:.0f}" for row in rows]
    cells = [
        ["greedy accuracy, 128 held-out sums", *accuracy],
        ["minutes of rollouts and updates", *minutes],
    ]
    return markdown(["iteration", *iterations], cells, "l" + "r" * len(rows))


MAKERS = (
    nine,
    formulas,
    more,
    more_runs,
    lesson,
    claims,
    claims_in_short,
    holm,
    departures,
    contents,
    base_model,
    curve_table,
    default_run,
    stability,
    during_the_fall,
    one_step,
    clip_higher,
    wrong_length,
    dynamic_sampling,
    overlong,
    gradient_share,
    stale_ratio,
    router_shift,
    sapo_taus,
    replay,
    cispo_and_dapo,
    second_regime.long_nine,
    second_regime.long_high,
    second_regime.long_claims,
    second_regime.long_holm,
    mismatch,
    rollout_correction,
    mismatch_losses,
    mismatch_holm,
    routing_replay,
    sampler,
    speed,
    engines,
    engine_departures,
    memory,
    recipe,
    measured_on_a_gpu,
    smollm2,
)
PARTS = {make.__name__.replace("_", " "): make for make in MAKERS}
BEGIN = "<!-- generated: "
PART = re.compile(BEGIN + r"([a-z0-9 ]+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """(the text with its parts as they are made now, the names of these parts)."""
    names = PART.findall(text)

    def made(match):
        name = match[1]
        if name not in PARTS:
            return match[0]
        return "\n".join([f"{BEGIN}{name} -->", *PARTS[name](), f"<!-- end: {name} -->"])

    return PART.sub(made, text), names


def main():
    check = "--check" in sys.argv
    complaints = []
    there = []
    for path in FILES:
        old = path.read_text()
        new, names = filled(old)
        there += names
        if old.count(BEGIN) != len(names):
            complaints.append(f"{path}: a part has no end")
        if check and new != old:
            complaints.append(f"{path}: stale, run python benchmarks/readme.py")
        if not check:
            path.write_text(new)
    complaints += [f"part '{name}' is in neither file" for name in PARTS if name not in there]
    complaints += [f"there is no part '{name}'" for name in there if name not in PARTS]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
