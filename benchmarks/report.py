r"""Writes the generated parts of README.md, study/README.md and benchmarks/README.md.

    python benchmarks/report.py           # write
    python benchmarks/report.py --check   # exit code 1 if a part is stale, or in none of these

A part stands between <!-- generated: NAME --> and <!-- end: NAME -->, in the file that has these two
comments. Its content comes from the scripts' headers, from their diffs, and from results/.
"""

import ast
import difflib
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import gpu
import stats
from experiments import EXPERIMENTS, MORE, SCRIPTS, STABILITY
from stats import column, markdown, mean_std

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "study" / "README.md", ROOT / "benchmarks" / "README.md"]
FORMULAS = tomllib.loads((ROOT / "benchmarks" / "formulas.toml").read_text())
CLAIMS = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text())["claims"]
QUANTITIES = {  # of measured.toml: columns of a run in words
    "end_len_wrong": "tokens of wrong answers",
    "area": "area",
    "area_updates": "area by updates",
    "end_truncated": "share cut off",
    "end_accuracy": "accuracy",
    "end_accuracy_whole": "accuracy of whole answers",
    "log_ratio_range": "range of log-ratios",
    "after_sampled_accuracy": "held-out accuracy",
}
HELD_OUT = "after_sampled_accuracy"
END = 13_000  # completions over which an area is taken

# -------------------------------------------------------------------------------------- the scripts


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
    return sum(line.startswith(("+", "-")) for line in diff[2:])  # after the two names


def parent_of(name):
    """The script that the header names, None for the root."""
    header, _ = read(name)
    found = re.search(r"Parent: (\w+)\.py", header)
    if not found:
        return None
    return found[1] if found[1] in SCRIPTS else f"more.{found[1]}"


def scripts():
    """The table of the scripts by their design axes."""
    rows = []
    for name in SCRIPTS + MORE:
        header, _ = read(name)
        title = header.split(":")[0]
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        path = path_of(name).relative_to(ROOT)
        row = [f"[`{path}`]({path})", f"[{title}](https://arxiv.org/abs/{arxiv})"]
        row += FORMULAS["axes"][name]
        parent = parent_of(name)
        row.append(f"{changed_lines(parent, name)}, {parent.split('.')[-1]}" if parent else "")
        rows.append(row)
    header = ["script", "paper", *FORMULAS["axis_names"], "changed code lines, parent"]
    return markdown(header, rows)


def objectives():
    """A table of the objectives, which are maximised, and what their symbols mean."""
    formulas = FORMULAS["objectives"]
    rows = [[name.split(".")[-1], f"$`{formulas[name]}`$"] for name in SCRIPTS + MORE]
    table = markdown(["script", "objective, maximised"], rows)
    return [*table, "", *FORMULAS["legend"].splitlines()]


def policy_loss(name):
    """The lines of a script's `policy_loss` from its docstring to its statistics."""
    text = path_of(name).read_text()
    (function,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "policy_loss"]
    docstring = function.body[0]
    lines = text.splitlines()[docstring.end_lineno : function.end_lineno]
    return lines[: lines.index("    stats = {")]


def lesson():
    """The diff of grpo's and sapo's policy_loss."""
    both = [policy_loss("grpo"), policy_loss("sapo")]
    diff = difflib.unified_diff(*both, "grpo.py", "sapo.py", lineterm="", n=0)
    # Line numbers would count from the beginning of the function, not of the file.
    lines = ["@@ policy_loss @@" if line.startswith("@@") else line for line in diff]
    return ["```diff", *lines, "```"]


# ---------------------------------------------------------------------------------- runs of sweep.py


def areas(name, key):
    """{seed: mean height of the curve of the rollouts}"""
    return {seed: stats.area(rows, END) for seed, rows in stats.curves(name)[key].items()}


def paired(ours, theirs):
    """95 % interval of the difference, over the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    if ours == theirs:
        return ""
    return stats.interval([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def curves():
    """The accuracies that runs of the default job reach, how soon, and the difference from grpo."""
    names = [("nine", script, "default") for script in SCRIPTS]
    names.insert(2, ("nine", "grpo", "free"))
    names += [("more", script, "default") for script in MORE]
    grpo = areas("nine", ("grpo", "default"))
    free = areas("nine", ("grpo", "free"))
    lines = []
    for name, script, variant in names:
        key = (script, variant)
        own = areas(name, key)
        cells = [
            mean_std(column(name, key, "after_greedy_accuracy")),
            mean_std(column(name, key, "after_sampled_accuracy")),
            mean_std(own.values()),
            paired(own, grpo),
            paired(own, free),
        ]
        label = f"`{path_of(script).relative_to(ROOT)}`"
        lines.append([f"{label}, no KL" if variant == "free" else label, *cells])
    header = ["script", "greedy", "temperature 1", "area", "area, minus grpo's", "minus grpo's, no KL"]
    return markdown(header, lines, "lrrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many had an iteration 0.2 or more below an
    earlier one, or broke off."""
    lines = []
    for script in SCRIPTS:
        cells = []
        for setting in STABILITY:
            rows = stats.runs("stability")[script, setting]
            fell = sum(row["largest_drop"] >= 0.2 or row["ended"] != "" for row in rows)
            accuracy = mean_std(column("stability", (script, setting), "after_sampled_accuracy"))
            cells.append(f"{accuracy}; {fell} of {len(rows)} fell" if fell else accuracy)
        lines.append([script, *cells])
    return markdown(["script", *map(setting_words, STABILITY)], lines, "lrrr")


def setting_words(setting):
    """lr1e-3-steps4 -> lr 1e-3, steps 4"""
    return setting.replace("lr", "lr ").replace("-steps", ", steps ")


def acts_on(row, columns):
    """The share of a run's tokens on which the mechanism acts, by the columns of measured.toml."""
    if columns.startswith("-"):
        return 1 - row[columns[1:]]
    return sum(row[column] for column in columns.split())


def measured():
    """A row for each comparison of measured.toml."""
    lines = []
    for claim in CLAIMS:
        says = f'[{claim["source"]}]({claim["link"]}): "{claim["words"]}"'
        for pair in claim["pairs"]:
            keys = [tuple(pair[side].split()) for side in ("a", "b")]
            both = [column(claim["experiment"], key, pair["column"]) for key in keys]
            rows = stats.runs(claim["experiment"])[keys[0]]
            share = statistics.mean(acts_on(row, pair["acts"]) for row in rows)
            means = " : ".join(f"{statistics.mean(values):.3g}" for values in both)
            difference = f"{stats.interval(*both)} ({len(rows)})"
            cells = [QUANTITIES[pair["column"]], percent(share), means, difference]
            lines.append([says, pair["what"], *cells, stats.detectable(*both)])
            says = ""
    header = ["who says what", "a, or b", "measured", "acts on", "a : b", "a - b, 95 % (n)"]
    return markdown([*header, "would show"], lines, "lllrrrr")


def processors():
    """Runs of `nine` and `stability` again, with kernels for AVX2 and without: how many ended with the
    same weights, and how far apart their accuracies are."""
    lines = []
    for key in EXPERIMENTS["cpu_avx2"].runs:
        name = "nine" if key[1] == "default" else "stability"
        first = stats.runs(name)[key]
        cells = [mean_std([row[HELD_OUT] for row in first[:3]])]
        for again in ("cpu_avx2", "cpu_default"):
            pairs = list(zip(first, stats.runs(again)[key], strict=False))
            same = sum(old["weights"] == new["weights"] for old, new in pairs)
            largest = max(abs(old[HELD_OUT] - new[HELD_OUT]) for old, new in pairs)
            cells += [f"{same} of {len(pairs)}", f"{largest:.3f}"]
        words = "default" if key[1] == "default" else setting_words(key[1])
        lines.append([f"grpo, {words}", *cells])
    header = ["job", "accuracy", "AVX2 again: same weights", "largest difference"]
    header += ["without AVX2: same weights", "largest difference"]
    return markdown(header, lines, "lrrrrr")


def smollm2():
    """Greedy held-out accuracy during the runs of SmolLM2, one seed."""
    iterations = (5, 10, 15, 20)
    lines = []
    for (script, _), (run,) in stats.runs("smollm2").items():
        accuracies = [run["before_greedy_accuracy"], *(run[f"held_out_{i}"] for i in iterations)]
        cells = [f"{accuracy:.3f}" for accuracy in accuracies]
        lines.append([script, *cells, f"{run['generated']:,.0f}", f"{run['seconds'] / 60:.0f}"])
    header = ["after iteration", 0, *iterations, "completions", "minutes"]
    return markdown(header, lines, "lrrrrrrr")


def percent(value):
    return f"{float(f'{100 * value:.2g}'):g} %"  # not 1e+02


def mismatch():
    lines = []
    for row in stats.table("mismatch"):
        ends = [f"{row[f'sampler_sequence_ratio_{end}']:.2g}" for end in ("min", "max")]
        experts = row["sampler_expert_diff_frac"]
        cells = [
            f"{row['model']}, {row['precision']}",
            f"{max(row['sampler_kl'], 0):.2g}",
            f"{row['sampler_logratio_max']:.2g}",
            " to ".join(ends),
            "" if experts is None else percent(experts),
        ]
        cells += [percent(row[f"{rule}_zero"]) for rule in ("geo_mask", "sequence_mis", "icepop")]
        lines.append(cells)
    header = ["", "KL per token", r"largest \|log rho\|", "product of rho over a completion"]
    header += ["other experts", "geo_mask leaves out", "sequence_mis", "icepop"]
    return markdown(header, lines, "lrrrrrrr")


# ------------------------------------------------------------------------------- speed and memory


def pairs(name, ours, theirs, form):
    """A row for each case: medians of both sides, and lowest, middle and highest ratio of the pairs."""
    groups = defaultdict(list)
    for row in stats.table(name):
        groups[f"`{row['case']}`"].append(row)
    lines = []
    for case, rows in groups.items():
        medians = [
            format(statistics.median(row[side] for row in rows), form) for side in (ours, theirs)
        ]
        ratios = sorted(row[ours] / row[theirs] for row in rows)
        chosen = [f"{x:.2f}" for x in (ratios[0], statistics.median(ratios), ratios[-1])]
        lines.append([case, len(rows), *medians, ", ".join(chosen)])
    return lines


def sampler():
    lines = pairs("sampler", "sampler_tokens_per_second", "generate_tokens_per_second", ",.0f")
    header = ["case", "pairs", "sampler, tokens/s", "`generate()`, tokens/s"]
    return markdown([*header, "sampler / `generate()`: min, median, max"], lines, "lrrrr")


def speed():
    lines = pairs("trl_speed", "ours_seconds", "trl_seconds", ".2f")
    header = ["case", "pairs", "`grpo.py`, s", "TRL, s", "`grpo.py` / TRL: min, median, max"]
    return markdown(header, lines, "lrrrr")


def memory():
    header = ["model", "way", "stays", "a rollout", "an update", "at most", "GB card"]
    return markdown(header, gpu.memory_rows(), "llrrrrr")


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, objectives, curves, stability, measured, processors, mismatch, sampler]
MAKERS += [speed, memory, smollm2]
PARTS = {make.__name__.replace("_", " "): make for make in MAKERS}
BEGIN = "<!-- generated: "
PART = re.compile(BEGIN + r"([a-z0-9 ]+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """(the text with up-to-date parts, the names of these parts)."""

    def replaced(match):
        name = match[1]
        if name not in PARTS:
            return match[0]
        return "\n".join([f"{BEGIN}{name} -->", *PARTS[name](), f"<!-- end: {name} -->"])

    return PART.sub(replaced, text), PART.findall(text)


def main():
    check = "--check" in sys.argv
    complaints = []
    found = []
    for path in FILES:
        old = path.read_text()
        new, names = filled(old)
        found += names
        if old.count(BEGIN) != len(names):
            complaints.append(f"{path}: a part has no end")
        if check and new != old:
            complaints.append(f"{path}: stale, run python benchmarks/report.py")
        if not check:
            path.write_text(new)
    complaints += [f"part '{name}' is in no file" for name in PARTS if name not in found]
    complaints += [f"part '{name}' is unknown" for name in found if name not in PARTS]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
