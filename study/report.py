"""Writes the generated parts of README.md and study/README.md.

    python study/report.py

A part is whatever stands between the comments <!-- generated: NAME --> and <!-- end: NAME -->. Its
content comes from the scripts' headers, their diffs, and microscope.toml.
"""

import difflib
import re
import textwrap

import microscope as panels
from scripts import ROOT, SCRIPTS, changed_lines, changes_of, command_line, differences_of
from scripts import file_of, paper_of, parent_of, read, title_of

FILES = [ROOT / "README.md", ROOT / "study" / "README.md"]


def markdown(header, rows):
    rules = ["---"] * len(header)
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


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, scripts, microscope]
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
