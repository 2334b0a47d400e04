"""Writes the generated parts of README.md: the table of the nine, the default run, the diff of dr_grpo.py.

    python benchmarks/readme.py           # write
    python benchmarks/readme.py --check   # exit code 1 if README.md is not what it would write

What the table says comes from the scripts' headers, from their diffs, and from results/default_runs.csv.
"""

import ast
import csv
import difflib
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]


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


def results():
    with open(ROOT / "benchmarks" / "results" / "default_runs.csv") as file:
        return list(csv.DictReader(file))


def spread(rows, key):
    values = [float(row[key]) for row in rows]
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table_of_the_nine():
    rows = results()
    lines = ["| script | paper | differs from its parent in | parent | changed lines | accuracy | seconds |"]
    lines += ["| --- | --- | --- | --- | ---: | --- | ---: |"]
    for name in SCRIPTS:
        header, _ = read(name)
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        title = header.split(":")[0]
        parent = re.search(r"Parent: (\w+)\.py", header)
        parent = parent.group(1) if parent else None
        mine = [row for row in rows if row["script"] == name]
        seconds = round(statistics.median(float(row["seconds"]) for row in mine))
        diff = changed(parent, name) if parent else ""
        what = differences(header) if parent else "(the root: a critic, GAE, KL in the reward)"
        link = f"[{title}, {arxiv}](https://arxiv.org/abs/{arxiv})"
        accuracy = spread(mine, "greedy")
        lines.append(f"| `{name}.py` | {link} | {what} | {parent or ''} | {diff} | {accuracy} | {seconds} |")
    return lines


def default_run():
    rows = [row for row in results() if row["script"] == "grpo"]
    seeds = " / ".join(row["seed"] for row in rows)
    lines = [f"| `grpo.py` | before | after, seeds {seeds} |", "| --- | --- | --- |"]
    for text, before, after in (
        ("greedy accuracy on held-out sums", "base_greedy", "greedy"),
        ("sampled accuracy", "base_sampled", "sampled"),
        ("answers without working (sampled)", "base_direct", "direct"),
        ("response length in tokens (sampled)", "base_len", "len"),
    ):
        digits = 1 if "len" in before else 3
        last = " / ".join(f"{float(row[after]):.{digits}f}" for row in rows)
        lines.append(f"| {text} | {float(rows[0][before]):.{digits}f} | {last} |")
    return lines


def smollm2():
    with open(ROOT / "benchmarks" / "results" / "smollm2.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["greedy_held_out"]]
    cells = [[row["iteration"] for row in rows], [f"{float(row['greedy_held_out']):.3f}" for row in rows]]
    cells.append([f"{float(row['seconds']) / 60:.0f}" for row in rows])
    names = ("iteration", "greedy accuracy, 128 held-out sums", "minutes of rollouts and updates")
    lines = [f"| {name} | {' | '.join(row)} |" for name, row in zip(names, cells, strict=True)]
    return [lines[0], "| --- |" + " ---: |" * len(rows), *lines[1:]]


def lesson():
    return ["```diff", *unified("grpo", "dr_grpo"), "```"]


def main():
    readme = ROOT / "README.md"
    old = new = readme.read_text()
    parts = {"nine": table_of_the_nine, "default run": default_run, "lesson": lesson, "smollm2": smollm2}
    for name, make in parts.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, rest = new.split(begin)
        new = before + begin + "\n" + "\n".join(make()) + "\n" + end + rest.split(end)[1]
    if "--check" in sys.argv:
        sys.exit("README.md is stale: run python benchmarks/readme.py" if new != old else 0)
    readme.write_text(new)


if __name__ == "__main__":
    main()
