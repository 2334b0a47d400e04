"""Writes the generated parts of README.md and study/README.md.

    python study/report.py

A part is whatever stands between the comments <!-- generated: NAME --> and <!-- end: NAME -->. Its
content comes from the scripts' headers, their diffs, and results/. A script without rows in results/ is
left out of the tables of results.
"""

import difflib
import re
import textwrap

import microscope as panels
import stats
from experiments import ACTED, BUG_JOBS, STABILITY, SYMPTOMS, bug_variant, shown_bugs
from experiments import exercises as all_exercises
from scripts import MORE, ROOT, SCRIPTS, changed_lines, changes_of, command_line, differences_of
from scripts import file_of, paper_of, parent_of, read, title_of
from stats import interval, mean, mean_std, values

FILES = [ROOT / "README.md", ROOT / "study" / "README.md"]


def markdown(header, rows, align=""):
    """A table. `align` has one letter per column, r for right."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows)]


# -------------------------------------------------------------------------------------- the scripts


def lower(words):
    """The words in lower case, except for abbreviations such as KL."""
    return words if words[1].isupper() else words[0].lower() + words[1:]


def compared_with(name):
    """The script whose diff with this one shows only its own idea; None for the root."""
    parent = parent_of(name)
    # dr_grpo leaves out grpo's KL, as the other children do.
    return "dr_grpo" if parent == "grpo" and name != "dr_grpo" else parent


def scripts():
    """The table of the scripts: what each one changes, and in how many lines. A script stands below the
    one that it is compared with."""
    names = []
    for name in SCRIPTS:
        names += [each for each in (compared_with(name), name) if each and each not in names]
    rows = []
    for name in names:
        path = file_of(name)
        paper = f"[{title_of(name)}](https://arxiv.org/abs/{paper_of(name)})"
        changes = ", ".join(lower(words) for words in changes_of(name))
        if not changes:
            changes = "the root: ratio, clip, critic"
        elif len(changes_of(name)) == 1:
            changes = lower(differences_of(name)[0].split(". ")[0].removesuffix("."))
        other = compared_with(name)
        size = f"{changed_lines(other, name)} lines ({other})" if other else ""
        rows.append([f"[`{path}`]({path})", paper, changes, size])
    return markdown(["script", "paper", "what it changes", "diff"], rows)


def lesson():
    """The diff of grpo's and sapo's objectives."""
    both = []
    for name in ("grpo", "sapo"):
        lines = read(name)[1]
        first = lines.index("    ratio_BT = logratio_BT.exp()")
        is_objective = [line.startswith("    objective_BT = ") for line in lines]
        both.append(lines[first : is_objective.index(True) + 1])
    diff = difflib.unified_diff(*both, "grpo.py", "sapo.py", lineterm="", n=0)
    # Line numbers would count from the first line above, not from that of the file.
    lines = [line for line in diff if not line.startswith("@@")]
    return ["```diff", *lines, "```"]


def microscope():
    """The panels of microscope.py."""
    lines = []
    for name, words in panels.WORDS.items():
        picture = f"![{words['question']}](figures/microscope_{name}.png)"
        seen = textwrap.wrap(f"*What you see:* {words['seen']}", 120, break_on_hyphens=False)
        paper = textwrap.wrap(f"*The paper:* {words['paper']}", 120, break_on_hyphens=False)
        lines += [f"### {words['question']}", "", picture, "", *seen, "", *paper, ""]
    return lines[:-1]


# ----------------------------------------------------------------------------------------- the runs


def label(script, is_free):
    return f"`{file_of(script)}`, no KL" if is_free else f"`{file_of(script)}`"


def by_script(runs):
    """[((script, variant), rows)] in the order of the scripts, then of the variants' names."""
    names = SCRIPTS + MORE
    return sorted(runs.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))


def what_acted(ours):
    """What each mechanism did, in words."""
    words = []
    for column, (_, form) in ACTED.items():
        if values(ours, column):
            words.append(form.format(mean(ours, column)))
    return "; ".join(words)


def nine():
    """The results of the default job, and how they differ from those of grpo without its KL."""
    runs = stats.runs("nine") | stats.runs("more")
    free = values(runs["grpo", "free"], "area")
    rows = []
    for (script, variant), ours in by_script(runs):
        is_free = variant == "free"
        rows.append(
            [
                label(script, is_free),
                mean_std(ours, "after_greedy_accuracy"),
                mean_std(ours, "after_sampled_accuracy"),
                mean_std(ours, "area"),
                "" if is_free else interval(values(ours, "area"), free),
                what_acted(ours),
            ]
        )
    header = ["script", "greedy", "temperature 1", "area", "area, minus that of grpo, no KL"]
    return markdown([*header, "what acted"], rows, "lrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many collapsed: an iteration was 0.2 or more
    below an earlier one."""
    runs = stats.runs("stability")
    rows = []
    for script in SCRIPTS:
        for ending in ("", "-free"):
            if (script, next(iter(STABILITY)) + ending) not in runs:
                continue
            cells = []
            for setting in STABILITY:
                ours = runs[script, setting + ending]
                fell = sum(drop >= 0.2 for drop in values(ours, "largest_drop"))
                cells.append(mean_std(ours, "after_sampled_accuracy"))
                if fell > 0:
                    cells[-1] += f"; {fell} of {len(ours)} collapsed"
            rows.append([label(script, ending == "-free"), *cells])
    words = [setting.replace("lr", "lr ").replace("-steps", ", steps ") for setting in STABILITY]
    return markdown(["script", *words], rows, "lrrr")


def exercises():
    """What to change, and what to ask."""
    rows = []
    for number, each in enumerate(all_exercises().values(), start=1):
        change = f"`- {each['old']}`<br>`+ {each['new']}`"
        rows.append([number, f"`{file_of(each['script'])}`", change, each["question"]])
    return markdown(["", "script", "change", "what do you expect?"], rows)


def answers():
    """What the curves show, and why."""
    runs = stats.runs("exercises")
    rows = []
    for (script, variant), ours in runs.items():
        theirs = values(runs[script, "original"], "mean_accuracy")
        delta = interval(values(ours, "mean_accuracy"), theirs) if variant != "original" else ""
        cells = [mean_std(ours, "mean_accuracy"), delta]
        for column in ("after_greedy_accuracy", "after_sampled_accuracy", "entropy"):
            cells.append(f"{mean(ours, column):.3f}")
        cells += [f"{mean(ours, 'ratio_max'):.2f}", f"{mean(ours, 'grad_norm'):.4f}"]
        rows.append([f"`{file_of(script)}`, {variant}", *cells])
    header = ["runs", "accuracy", "minus original", "greedy", "temperature 1", "entropy"]
    lines = [*markdown([*header, "largest ratio", "gradient norm"], rows, "lrrrrrrr"), ""]
    for number, each in enumerate(all_exercises().values(), start=1):
        words = f"{number}. **{each['title']}.** {each['answer']}"
        lines += textwrap.wrap(words, 120, subsequent_indent="   ", break_on_hyphens=False)
    return lines


# ------------------------------------------------------------------------------------- planted bugs

NUM_WORDS = 4  # maximum number of metrics in a cell of the table


def shows(sick, healthy):
    """["metric ↑" or "metric ↓"] where all of a bug's runs lie above or below all healthy ones."""
    found = []
    for metric in SYMPTOMS:
        own = values(sick, metric)
        usual = values(healthy, metric)
        if own and usual and min(own) > max(usual):
            found.append(f"{metric} ↑")
        if own and usual and max(own) < min(usual):
            found.append(f"{metric} ↓")
    return found


def symptoms_found():
    """[(bug, {job: the metrics in which it shows})]"""
    runs = stats.runs("symptoms")
    found = []
    for bug in shown_bugs().values():
        metrics = {}
        for job in BUG_JOBS:
            sick = runs[bug["script"], bug_variant(job, bug)]
            metrics[job] = shows(sick, runs[bug["script"], job])
        found.append((bug, metrics))
    return found


def symptoms_summary():
    """The table in a sentence, which the main page has."""
    found = [metrics["default"] for _, metrics in symptoms_found()]
    num_lower = sum("accuracy on average ↓" in metrics for metrics in found)
    num_higher = sum("accuracy on average ↑" in metrics for metrics in found)
    return (
        f"We ran {len(found)} planted bugs. In 25 iterations of the default job, only {num_lower} "
        f"hurt accuracy, {num_higher} improved it, and {found.count([])} left no trace in any of "
        f"{len(SYMPTOMS)} metrics."
    )


def symptoms():
    """Which bugs show in which metrics? Those that show in the fewest come first."""
    rows = []
    for bug, found in symptoms_found():
        cells = [f"{bug['script']}: {bug['title']}"]
        for metrics in found.values():
            words = ", ".join(metrics[:NUM_WORDS]) or "nowhere"
            rest = len(metrics) - NUM_WORDS
            cells.append(f"{words}, {rest} more" if rest > 0 else words)
        cells.append(bug["fix"])
        num_found = sum(len(metrics) for metrics in found.values())
        rows.append((num_found, cells))
    rows.sort()
    return markdown(["bug", *BUG_JOBS, "fix"], [row for _, row in rows])


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, exercises, answers, microscope, nine, stability, symptoms]
PARTS = {make.__name__: make for make in MAKERS}
PART = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """The text with its generated parts brought up to date."""

    def part(match):
        name = match[1]
        return "\n".join([f"<!-- generated: {name} -->", *PARTS[name](), f"<!-- end: {name} -->"])

    return PART.sub(part, text)


def main():
    command_line(__doc__).parse_args()
    for path in FILES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
