"""Writes the generated parts of README.md and study/README.md.

    python study/report.py           # write
    python study/report.py --check   # exit code 1 if a part is stale

A part is whatever stands between the comments <!-- generated: NAME --> and <!-- end: NAME -->. Its
content comes from the scripts' headers, their diffs, and results/.
"""

import ast
import difflib
import importlib
import math
import re
import sys
import textwrap
import tomllib
from pathlib import Path

import microscope as panels
import pictures
import stats
import symptoms
import torch
from experiments import ACTED, MORE, ROWS, SCRIPTS, STABILITY, file_of
from stats import interval, markdown, mean, mean_std, values

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "study" / "README.md"]
HELD_OUT = ["greedy_accuracy", "sampled_accuracy", "sampled_pass@8"]
AXES = tomllib.loads((ROOT / "study" / "axes.toml").read_text())

# -------------------------------------------------------------------------------------- the scripts


def read(name):
    """(header docstring, the lines after it) of a script."""
    text = (ROOT / file_of(name)).read_text()
    tree = ast.parse(text)
    return ast.get_docstring(tree), text.splitlines()[tree.body[0].end_lineno :]


def changed_lines(parent, child):
    """How many lines are added or removed, not counting the header docstring."""
    _, old = read(parent)
    _, new = read(child)
    diff = list(difflib.unified_diff(old, new, lineterm=""))
    return sum(line.startswith(("+", "-")) for line in diff[2:])  # after the two names


def parent_of(name):
    """The parent that the header names, None for the root."""
    header, _ = read(name)
    found = re.search(r"Parent: (\w+)\.py", header)
    if not found:
        return None
    return found[1] if found[1] in SCRIPTS else f"more.{found[1]}"


def scripts():
    """The table of the scripts: what each one changes, and in how many lines."""
    rows = []
    for name in SCRIPTS:
        header, _ = read(name)
        title = header.split(":")[0]
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        path = file_of(name)
        parent = parent_of(name)
        size = f"{changed_lines(parent, name)} lines ({parent.split('.')[-1]})" if parent else ""
        paper = f"[{title}](https://arxiv.org/abs/{arxiv})"
        rows.append([f"[`{path}`]({path})", paper, AXES["changes"][name], size])
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
        if name == "ppo":  # before its critic has learned anything
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


# What each mechanism did, as means over iterations and seeds. The names are columns in ACTED.
CLIPPED = "clipped: {clip_low:.2%} below, {clip_high:.2%} above"
MECHANISMS = {
    "ppo": f"tokens {CLIPPED}; the critic explains {{explained_variance:.0%}} of the returns' variance",
    "grpo": f"tokens {CLIPPED}; KL to the reference {{kl_ref:.3f}}",
    "dr_grpo": f"tokens {CLIPPED}; wrong answers at the end have {{end_len_wrong:.1f}} tokens",
    "dapo": f"tokens {CLIPPED}; groups replaced: {{all_right:.1f}} right, {{all_wrong:.1f}} wrong",
    "gspo": f"completions {CLIPPED}",
    "cispo": "tokens at the cap: {clip_high:.3%}; the largest ratio of an iteration is {ratio_max:.2f}",
    "gmpo": f"tokens {CLIPPED}",
    "rspo": f"tokens {CLIPPED}; mean gamma {{gamma:.3f}}, at its floor {{gamma_floor:.2%}} of tokens",
    "sapo": "mean slope of the gate {slope:.5f}",
}


def acted():
    """What each mechanism did in the default job, and the results."""
    runs = stats.runs("nine")
    before = [f"{runs['grpo', 'default'][0][f'before_{way}']:.3f}" for way in HELD_OUT]
    rows = [["base model", "", *before, "", ""]]
    for script in SCRIPTS:
        ours = runs[script, "default"]
        means = {column: mean(ours, column) for column in ACTED}
        words = MECHANISMS[script].format(**means)
        after = [f"{mean(ours, f'after_{way}'):.3f}" for way in HELD_OUT]
        rows.append(
            [f"`{script}`", words, *after, f"{means['end_entropy']:.3f}", f"{means['end_len']:.1f}"]
        )
    header = ["script", "what acted", "greedy", "pass@1", "pass@8", "entropy", "length"]
    return markdown(header, rows, "llrrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many fell: an iteration was 0.2 or more below an
    earlier one."""
    runs = stats.runs("stability")
    rows = []
    for script, variant in ROWS:
        is_free = variant == "free"
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


CHAIN = {  # variant of dapo_chain: what it is, and what the paper reports at that step
    ("grpo", "free"): ("grpo, no KL", "naive GRPO: 30"),
    ("grpo", "clip-higher"): ("with clip-higher", "filtering, then clip-higher: 38"),
    ("dapo", "drop-none"): ("dapo, groups dropped, not replaced; overlong none", ""),
    ("dapo", "drop-filter"): ("the same, overlong filter", "filtering alone: 36"),
    ("dapo", "drop-soft"): ("the same, overlong soft", "soft: 41; with token-mean: 42"),
    ("dapo", "default"): ("dapo", "with dynamic sampling: 50"),
}


def dapo_chain():
    """The parts of DAPO, as far as flags can separate them."""
    runs = stats.runs("dapo_chain")
    rows = []
    for key, (words, paper) in CHAIN.items():
        ours = runs[key]
        rows.append(
            [
                words,
                mean_std(ours, "after_sampled_accuracy"),
                mean_std(ours, "area"),
                f"{mean(ours, 'clip_high'):.3%}",
                f"{mean(ours, 'mean_truncated'):.1%}",
                f"{mean(ours, 'end_entropy'):.4f}",
                f"{mean(ours, 'end_len_wrong'):.1f}",
                f"{mean(ours, 'generated'):,.0f}",
                paper,
            ]
        )
    names = ["held-out", "area", "clipped above", "cut off", "entropy", "wrong length", "completions"]
    return markdown(["runs", *names, "the paper's AIME"], rows, "lrrrrrrrl")


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, example, microscope]
MAKERS += [acted, curves, stability, routing, dapo_chain]
PARTS = {make.__name__: make for make in MAKERS} | {"symptoms": symptoms.table}
PART = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """The text with its generated parts brought up to date."""

    def part(match):
        name = match[1]
        return "\n".join([f"<!-- generated: {name} -->", *PARTS[name](), f"<!-- end: {name} -->"])

    return PART.sub(part, text)


def main():
    for path in FILES:
        text = path.read_text()
        new = filled(text)
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != text:
            sys.exit(f"{path}: stale, run python study/report.py")


if __name__ == "__main__":
    main()
