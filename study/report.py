"""Writes the generated parts of README.md and study/README.md.

    python study/report.py           # write
    python study/report.py --check   # exit code 1 if a part is stale

A part is whatever stands between the comments <!-- generated: NAME --> and <!-- end: NAME -->. Its
content comes from the scripts' headers, their diffs, and results/. A script without rows in results/ is
left out of the tables of results.
"""

import argparse
import ast
import difflib
import importlib
import math
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import microscope as panels
import pictures
import stats
import torch
from experiments import ACTED, BUG_JOBS, HEALTHY_SEEDS, MORE, ROWS, SCRIPTS, SICK_SEEDS, STABILITY
from experiments import SYMPTOMS, bug_variant, shown_bugs
from repair import doctor, functions_of, load
from scripts import ROOT, changed_lines, changes_of, differences_of, file_of, paper_of, parent_of
from scripts import title_of
from stats import interval, markdown, mean, mean_std, values

FILES = [ROOT / "README.md", ROOT / "study" / "README.md"]
HELD_OUT = ["greedy_accuracy", "sampled_accuracy", "sampled_pass@8"]

# -------------------------------------------------------------------------------------- the scripts


def lower(words):
    """The words in lower case, but for abbreviations such as KL."""
    return words if words[1].isupper() else words[0].lower() + words[1:]


def scripts():
    """The table of the scripts: what each one changes, and in how many lines."""
    rows = []
    for name in SCRIPTS:
        path = file_of(name)
        paper = title_of(name)
        if paper_of(name):
            paper = f"[{paper}](https://arxiv.org/abs/{paper_of(name)})"
        parent = parent_of(name)
        changes = ", ".join(lower(words) for words in changes_of(name)) or "the root of the family"
        if len(changes_of(name)) == 1:
            changes = lower(differences_of(name)[0].split(". ")[0].removesuffix("."))
        size = f"{changed_lines(parent, name)} lines ({parent})" if parent else ""
        rows.append([f"[`{path}`]({path})", paper, changes, size])
    return markdown(["script", "paper", "what it changes", "diff from parent"], rows)


def objective_lines(name):
    """The lines of a script's `policy_loss` after its docstring, up to the objective."""
    text = (ROOT / file_of(name)).read_text()
    (function,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "policy_loss"]
    docstring = function.body[0]
    lines = text.splitlines()[docstring.end_lineno : function.end_lineno]
    is_objective = [line.startswith("    objective_BT = ") for line in lines]
    return lines[: is_objective.index(True) + 1]


def lesson():
    """The diff of grpo's and sapo's objectives."""
    both = [objective_lines("grpo"), objective_lines("sapo")]
    diff = difflib.unified_diff(*both, "grpo.py", "sapo.py", lineterm="", n=0)
    # Line numbers would count from the start of the function, not of the file.
    lines = [line for line in diff if not line.startswith("@@")]
    return ["```diff", *lines, "```"]


def example():
    """A group with rewards 1 0 0 0: each script's advantages, and its gradients at r = 1."""
    lengths_B1 = torch.tensor([[3], [5], [4], [2]])
    mask_BT = torch.arange(5) < lengths_B1
    rewards_B1 = torch.tensor([[1.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    zeros_BT = torch.zeros(4, 5, dtype=torch.float64)
    longest = importlib.import_module("grpo").Args().max_new_tokens
    rows = []
    for name in SCRIPTS:
        module = importlib.import_module(name)
        if hasattr(module, "compute_gae"):  # before its critic has learned anything
            token_rewards_BT = zeros_BT.scatter(1, lengths_B1 - 1, rewards_B1)
            gae = (module.Args().gamma, module.Args().gae_lambda)
            advantages_BT, _ = module.compute_gae(token_rewards_BT, zeros_BT, mask_BT, *gae)
            advantages_BT = module.whiten(advantages_BT, mask_BT)
        else:
            advantages_BT = module.compute_advantages(rewards_B1.T).T.expand(4, 5)
        # ppo's advantages differ from token to token; we show that of the last token.
        advantages_B1 = advantages_BT.gather(1, lengths_B1 - 1)
        pulls_BT = pictures.gradient(name, zeros_BT, mask_BT, advantages_B1, max_new_tokens=longest)
        pulls_B1 = pulls_BT[:, :1]
        numbers = [*advantages_B1[:2], *(pulls_B1 / advantages_B1), *pulls_B1]
        rows.append([f"`{name}`", *(f"{number.item():.3g}" for number in numbers)])
    lengths = ["3 (right)", "5", "4", "2"]
    header = ["script", "A, right", "A, wrong", *(f"weight, {length}" for length in lengths)]
    header += [f"pull, {length}" for length in lengths]
    return markdown(header, rows, "l" + 10 * "r")


def microscope():
    """The panels of microscope.py."""
    lines = []
    for name, words in panels.WORDS.items():
        picture = f"![{words['question']}](figures/microscope_{name}.png)"
        seen = textwrap.wrap(f"*Seen:* {words['seen']}", 120, break_on_hyphens=False)
        paper = textwrap.wrap(f"*The paper:* {words['paper']}", 120, break_on_hyphens=False)
        lines += [f"### {words['question']}", "", picture, "", *seen, "", *paper, ""]
    return lines[:-1]


# ----------------------------------------------------------------------------------------- the runs


def difference(ours, theirs):
    """The difference of two runs' areas."""
    return "" if ours is theirs else interval(values(ours, "area"), values(theirs, "area"))


def curves():
    """The accuracies that runs of the default job reach, how soon, and how they differ from grpo."""
    runs = stats.runs("nine") | stats.runs("more")
    rows = []
    for script, variant in [*ROWS, *((script, "default") for script in MORE)]:
        if (script, variant) not in runs:
            continue
        ours = runs[script, variant]
        label = f"`{file_of(script)}`"
        rows.append(
            [
                f"{label}, no KL" if variant == "free" else label,
                mean_std(ours, "after_greedy_accuracy"),
                mean_std(ours, "after_sampled_accuracy"),
                mean_std(ours, "area"),
                difference(ours, runs["grpo", "default"]),
                difference(ours, runs["grpo", "free"]),
            ]
        )
    header = ["script", "greedy", "temperature 1", "area", "area, minus grpo's", "minus grpo's, no KL"]
    return markdown(header, rows, "lrrrrr")


def acted():
    """What each mechanism did in the default job, and the results."""
    runs = stats.runs("nine")
    before = [f"{runs['grpo', 'default'][0][f'before_{way}']:.3f}" for way in HELD_OUT]
    rows = [["base model", "", *before, "", ""]]
    for script in SCRIPTS:
        if (script, "default") not in runs:
            continue
        ours = runs[script, "default"]
        means = {column: mean(ours, column) for column in ACTED}
        words = []
        for column, (_, _, form) in ACTED.items():
            if form and not math.isnan(means[column]):
                words.append(form.format(means[column]))
        after = [f"{mean(ours, f'after_{way}'):.3f}" for way in HELD_OUT]
        ends = [f"{means['end_entropy']:.3f}", f"{means['end_len']:.1f}"]
        rows.append([f"`{script}`", "; ".join(words), *after, *ends])
    header = ["script", "what acted", "greedy", "pass@1", "pass@8", "entropy", "length"]
    return markdown(header, rows, "llrrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many fell: an iteration was 0.2 or more below an
    earlier one."""
    runs = stats.runs("stability")
    rows = []
    for script, variant in ROWS:
        is_free = variant == "free"
        if not is_free and (script, next(iter(STABILITY))) not in runs:
            continue
        cells = []
        for setting in STABILITY:
            ours = runs[script, f"{setting}-free" if is_free else setting]
            fell = sum(drop >= 0.2 for drop in values(ours, "largest_drop"))
            accuracy = mean_std(ours, "after_sampled_accuracy")
            cells.append(f"{accuracy}; {fell} of {len(ours)} fell" if fell else accuracy)
        rows.append([f"{script}, no KL" if is_free else script, *cells])
    words = [setting.replace("lr", "lr ").replace("-steps", ", steps ") for setting in STABILITY]
    return markdown(["script", *words], rows, "lrrr")


def shown(number, form):
    """A cell, empty if no run has such a number."""
    return "" if math.isnan(number) else format(number, form)


def routing():
    """The effect of replaying an MoE's experts, with a sampler like the trainer or a stale one."""
    rows = []
    groups = stats.runs("routing").items()
    for (script, variant), ours in sorted(groups, key=lambda group: SCRIPTS.index(group[0][0])):
        sampler, _, replay = variant.partition("-")
        rows.append(
            [
                script,
                sampler,
                replay,
                mean_std(ours, "mean_accuracy"),
                mean_std(ours, "after_sampled_accuracy"),
                shown(mean(ours, "clip_low") + mean(ours, "clip_high"), ".2%"),
                f"{mean(ours, 'ratio_max'):.2f}",
                f"{mean(ours, 'flipped'):.2%}",
                shown(mean(ours, "sampler_flipped"), ".2%"),
                shown(mean(ours, "gamma"), ".3f"),
            ]
        )
    names = ["accuracy", "held-out", "clipped", "largest ratio", "flipped", "sampler's", "gamma"]
    return markdown(["script", "sampler", "replay", *names], rows, "lllrrrrrrr")


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


def diagnosis(bug):
    """What the doctor says about the script's functions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(bug["broken"])
        module = load(path)
    for _, function, section in functions_of(module, bug["script"]):
        _, _, lines = doctor.diagnosed(doctor.examine_shapes(function, section))
        for line in lines:
            kind, _, words = line.strip().partition(": ")
            if kind == "mistake" or kind.startswith("your gradient"):
                return words
    return ""


def symptoms_summary():
    """The table in a sentence."""
    runs = stats.runs("symptoms")
    found = []
    for bug in shown_bugs().values():
        sick = runs[bug["script"], bug_variant("default", bug)]
        found.append(shows(sick, runs[bug["script"], "default"]))
    num_lower = sum("accuracy on average ↓" in names for names in found)
    num_higher = sum("accuracy on average ↑" in names for names in found)
    return (
        f"We planted {len(found)} bugs. In 25 iterations of the default job, only {num_lower} "
        f"hurt accuracy, {num_higher} improved it, and {found.count([])} left no trace in any of "
        f"{len(SYMPTOMS)} metrics."
    )


def symptoms():
    """Which bugs show in which metrics? Those that show in the fewest come first."""
    runs = stats.runs("symptoms")
    rows = []
    num_compared = 0
    for bug in shown_bugs().values():
        cells = [f"{bug['script']}: {bug['title']}"]
        num_found = 0
        for job in BUG_JOBS:
            healthy = runs[bug["script"], job]
            found = shows(runs[bug["script"], bug_variant(job, bug)], healthy)
            words = found[:NUM_WORDS]
            if len(found) > NUM_WORDS:
                words.append(f"{len(found) - NUM_WORDS} more")
            cells.append(", ".join(words) or "nowhere")
            num_found += len(found)
            num_compared += sum(bool(values(healthy, metric)) for metric in SYMPTOMS)
        cells += [diagnosis(bug).replace("|", "\\|"), bug["fix"]]
        rows.append((num_found, cells))
    rows.sort()
    lines = markdown(["bug", *BUG_JOBS, "the doctor", "fix"], [row for _, row in rows])
    # If a change has no effect, its three runs are all above or all below twenty with this chance.
    ways = math.comb(len(HEALTHY_SEEDS) + len(SICK_SEEDS), len(SICK_SEEDS))
    expected = num_compared * 2 / ways
    chance = f"By chance alone, {expected:.1f} of these {num_compared} comparisons would show."
    return [*lines, "", f"{symptoms_summary()} {chance}"]


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, example, microscope, acted, curves, stability, routing, symptoms]
PARTS = {make.__name__: make for make in MAKERS}
PART = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """The text with its generated parts brought up to date."""

    def part(match):
        name = match[1]
        return "\n".join([f"<!-- generated: {name} -->", *PARTS[name](), f"<!-- end: {name} -->"])

    return PART.sub(part, text)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing; is everything up to date?")
    args = parser.parse_args()
    for path in FILES:
        text = path.read_text()
        new = filled(text)
        if not args.check:
            path.write_text(new)
        elif new != text:
            sys.exit(f"{path}: stale, run python study/report.py")


if __name__ == "__main__":
    main()
