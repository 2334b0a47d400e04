"""Writes the generated parts of README.md and study/README.md.

    python study/report.py           # write
    python study/report.py --check   # exit code 1 if a part is stale, or in neither file

A part is whatever stands between the comments <!-- generated: NAME --> and <!-- end: NAME -->. Its
content comes from the scripts' headers, their diffs, and results/.
"""

import ast
import difflib
import importlib
import re
import statistics
import sys
import textwrap
import tomllib
from pathlib import Path

import microscope as panels
import pictures
import stats
import symptoms as planted_bugs
import torch
from experiments import ACTED, MORE, SCRIPTS, STABILITY, file_of
from stats import column, markdown, mean_std

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


def objectives():
    """The objectives, copied from the headers."""
    lines = ["```"]
    for name in SCRIPTS + MORE:
        header, _ = read(name)
        _, formula, *_ = header.split("\n\n")
        for i, line in enumerate(formula.splitlines()):
            label = name.split(".")[-1] if i == 0 else ""
            lines.append(f"{label:9}{line}")
    return [*lines, "```"]


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


def which():
    """The last table of the_nine.md. Its links work on both pages."""
    text = (ROOT / "study" / "the_nine.md").read_text()
    _, _, table = text.partition("## Which one should I use?\n\n")
    return table.splitlines()


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
    return "" if ours == theirs else stats.interval(ours, theirs)


def curves():
    """The accuracies that runs of the default job reach, how soon, and how they differ from grpo."""
    names = [("nine", script, "default") for script in SCRIPTS]
    names.insert(2, ("nine", "grpo", "free"))
    names += [("more", script, "default") for script in MORE]
    grpo = column("nine", ("grpo", "default"), "area")
    free = column("nine", ("grpo", "free"), "area")
    rows = []
    for name, script, variant in names:
        key = (script, variant)
        area = column(name, key, "area")
        label = f"`{file_of(script)}`"
        rows.append(
            [
                f"{label}, no KL" if variant == "free" else label,
                mean_std(column(name, key, "after_greedy_accuracy")),
                mean_std(column(name, key, "after_sampled_accuracy")),
                mean_std(area),
                difference(area, grpo),
                difference(area, free),
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


def runs_of(name, script, variant):
    """The rows of an experiment's runs, ordered by seed."""
    runs = stats.runs(name)[script, variant]
    if not runs:
        sys.exit(f"results/{name}.csv has no {script} {variant}: run python study/sweep.py {name}")
    return runs


def acted():
    """What each mechanism did in the default job, and the results."""
    first = stats.runs("nine")["grpo", "default"][0]
    before = [f"{first[f'before_{way}']:.3f}" for way in HELD_OUT]
    rows = [["base model", "", *before, "", ""]]
    for script in SCRIPTS:
        runs = runs_of("nine", script, "default")
        names = [name for name in ACTED if all(run[name] is not None for run in runs)]
        means = {name: statistics.mean(run[name] for run in runs) for name in names}
        words = MECHANISMS[script].format(**means)
        after = [f"{statistics.mean(run[f'after_{way}'] for run in runs):.3f}" for way in HELD_OUT]
        rows.append(
            [f"`{script}`", words, *after, f"{means['end_entropy']:.3f}", f"{means['end_len']:.1f}"]
        )
    header = ["script", "what acted", "greedy", "pass@1", "pass@8", "entropy", "length"]
    return markdown(header, rows, "llrrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many fell: an iteration was 0.2 or more below an
    earlier one, or the run broke off."""
    kinds = [(script, "") for script in SCRIPTS]
    kinds.insert(2, ("grpo", "-free"))
    rows = []
    for script, kind in kinds:
        cells = []
        for setting in STABILITY:
            key = (script, f"{setting}{kind}")
            runs = runs_of("stability", *key)
            fell = sum(run["largest_drop"] >= 0.2 or run["ended"] is not None for run in runs)
            accuracy = mean_std(column("stability", key, "after_sampled_accuracy"))
            cells.append(f"{accuracy}; {fell} of {len(runs)} fell" if fell else accuracy)
        rows.append([f"{script}, no KL" if kind else script, *cells])
    words = [setting.replace("lr", "lr ").replace("-steps", ", steps ") for setting in STABILITY]
    return markdown(["script", *words], rows, "lrrr")


def mean_of(runs, name):
    """The mean of a column over runs, None if a run does not have it."""
    values = [run[name] for run in runs]
    return None if None in values else statistics.mean(values)


def routing():
    """The effect of replaying an MoE's experts, with a sampler like the trainer or a stale one."""
    rows = []
    groups = stats.runs("routing").items()
    for (script, variant), runs in sorted(groups, key=lambda group: SCRIPTS.index(group[0][0])):
        sampler, _, replay = variant.partition("-")
        accuracy = column("routing", (script, variant), "mean_accuracy")
        clipped = [mean_of(runs, "clip_low"), mean_of(runs, "clip_high")]
        gamma = mean_of(runs, "gamma")
        rows.append(
            [
                script,
                sampler,
                replay,
                mean_std(accuracy),
                mean_std(column("routing", (script, variant), "after_sampled_accuracy")),
                "" if None in clipped else f"{sum(clipped):.2%}",
                f"{mean_of(runs, 'ratio_max'):.2f}",
                f"{mean_of(runs, 'flipped'):.2%}",
                "" if gamma is None else f"{gamma:.3f}",
            ]
        )
    names = ["accuracy", "held-out", "clipped", "largest ratio", "flipped", "gamma"]
    return markdown(["script", "sampler", "replay", *names], rows, "lllrrrrrr")


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
    rows = []
    for key, (words, paper) in CHAIN.items():
        runs = stats.runs("dapo_chain")[key]
        rows.append(
            [
                words,
                mean_std(column("dapo_chain", key, "after_sampled_accuracy")),
                mean_std(column("dapo_chain", key, "area")),
                f"{mean_of(runs, 'clip_high'):.3%}",
                f"{mean_of(runs, 'mean_truncated'):.1%}",
                f"{mean_of(runs, 'end_entropy'):.4f}",
                f"{mean_of(runs, 'end_len_wrong'):.1f}",
                f"{mean_of(runs, 'generated'):,.0f}",
                paper,
            ]
        )
    names = ["held-out", "area", "clipped above", "cut off", "entropy", "wrong length", "completions"]
    return markdown(["runs", *names, "the paper's AIME"], rows, "lrrrrrrrl")


def symptoms():
    return planted_bugs.table()


def smollm2():
    """Greedy held-out accuracy during the SmolLM2 runs, one seed."""
    iterations = (5, 10, 15, 20)
    rows = []
    for run in stats.table("smollm2"):
        accuracies = [run["before_greedy_accuracy"], *(run[f"held_out_{i}"] for i in iterations)]
        cells = [f"{accuracy:.3f}" for accuracy in accuracies]
        rows.append([run["script"], *cells, f"{run['generated']:,.0f}", f"{run['seconds'] / 60:.0f}"])
    header = ["after iteration", 0, *iterations, "completions", "minutes"]
    return markdown(header, rows, "lrrrrrrr")


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, objectives, which, example, microscope]
MAKERS += [acted, curves, stability, routing, dapo_chain, symptoms, smollm2]
PARTS = {make.__name__: make for make in MAKERS}
BEGIN = "<!-- generated: "
PART = re.compile(BEGIN + r"(\w+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """(the text with its parts brought up to date, the names of these parts)."""

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
            complaints.append(f"{path}: stale, run python study/report.py")
        if not check:
            path.write_text(new)
    complaints += [f"part '{name}' is in no file" for name in PARTS if name not in found]
    complaints += [f"part '{name}' is unknown" for name in found if name not in PARTS]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
