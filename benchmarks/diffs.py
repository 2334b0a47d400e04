"""Writes benchmarks/diffs.html: each script beside its parent, a page to study by.

    python benchmarks/diffs.py

One file without scripts, for any browser. Of each child it has the header, whose numbered differences
lead to their lines, and the two scripts side by side, the headers aside.
"""

import difflib
import html
import re
from pathlib import Path

import report

PAGE = Path(__file__).parent / "diffs.html"
CONTEXT = 4  # lines around a change that are always shown
MARK = re.compile(r"(?<![\w\])])\[(\d)\]")  # [2], but not in shape[2]
# Differences that no comment can name, since they are lines that the child does not have, or arguments
# that every sibling has: (what the header says, how a line of parent or child begins).
UNMARKED = [
    ("No KL", "    ref_logprobs_BT=None"),
    ("Group baseline", "def compute_advantages("),
    ("Clip-higher", "    clip_eps_high: float = flag(0.28"),
    ("Token-level clip only", "    clip_level="),
]


def place_of(number, lead, old, new):
    """(side, index of the line) of a difference that the header lists."""
    beginnings = tuple(begins for words, begins in UNMARKED if lead.startswith(words))
    places = []
    for i, line in enumerate(new):
        names_it = number in MARK.findall(line) and f"see [{number}]" not in line
        if names_it or line.startswith(beginnings):
            places.append(("right", i))
    places += [("left", i) for i, line in enumerate(old) if line.startswith(beginnings)]
    return places[0]


def numbered(script, side, lines, first, marks):
    """[a line of code as HTML]; `first` is the number of the first one of them in its file, `marks`
    maps (side, index) to a number of the header. A [2] in the child leads back to its header."""
    found = []
    for i, line in enumerate(lines):
        anchor = f' id="{script}-{marks[side, i]}"' if (side, i) in marks else ""
        code = html.escape(line, quote=False)
        if side == "right":
            code = MARK.sub(rf'<a href="#{script}-header-\1">[\1]</a>', code)
        found.append(f'<i data-n="{first + i}"{anchor}>{code}</i>')
    return found


def pair(kind, left, right):
    return (
        f'<div class="{kind}"><pre class="left">{"".join(left)}</pre>'
        f'<pre class="right">{"".join(right)}</pre></div>'
    )


def unchanged(left, right):
    """A stretch without a change; what is far from every change is folded, and shown once."""
    folded = right[CONTEXT:-CONTEXT]
    if len(folded) <= CONTEXT:
        return [pair("same", left, right)]
    summary = f"<summary>{len(folded)} lines that both have</summary>"
    return [
        pair("same", left[:CONTEXT], right[:CONTEXT]),
        f"<details>{summary}<pre>{''.join(folded)}</pre></details>",
        pair("same", left[-CONTEXT:], right[-CONTEXT:]),
    ]


def first_line(script):
    """The number of the first line after the header docstring."""
    _, lines = report.read(script)
    return len(report.path_of(script).read_text().splitlines()) - len(lines) + 1


def section(child):
    parent = report.parent_of(child)
    script = child.removeprefix("more.")
    header, new = report.read(child)
    _, old = report.read(parent)
    marks = {}
    for number, lead in re.findall(r"(?m)^  (\d)\. ([^:]+):", header):
        marks[place_of(number, lead, old, new)] = number
    left = numbered(script, "left", old, first_line(parent), marks)
    right = numbered(script, "right", new, first_line(child), marks)
    parts = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            parts += unchanged(left[a:b], right[c:d])
        else:
            parts.append(pair("changed", left[a:b], right[c:d]))
    names = [report.path_of(name).relative_to(report.ROOT) for name in (parent, child)]
    count = report.changed_lines(parent, child)
    title = f"<h2>{names[1]}, from {names[0]}: {count} changed lines</h2>"
    link = rf'  <a id="{script}-header-\1" href="#{script}-\1">[\1]</a> '
    text = re.sub(r"(?m)^  (\d)\. ", link, html.escape(header.rstrip(), quote=False))
    top = f'<pre class="header">{text}</pre>'
    return "\n".join([f'<section id="{script}">', title, top, *parts, "</section>"])


STYLE = """
:root { color-scheme: light dark; }
body { margin: 1rem; font: 16px/1.5 system-ui, sans-serif; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12px/1.5 ui-monospace, monospace; }
.header { margin-bottom: 1rem; }
.same, .changed { display: grid; grid-template-columns: 1fr 1fr; }
.changed .left i { background: #f003; }
.changed .right i { background: #0a03; }
i { display: block; padding-left: 4em; font-style: normal; min-height: 1.5em; }
i::before { content: attr(data-n); float: left; width: 3em; margin-left: -4em; text-align: right;
  color: gray; user-select: none; }
i:target { outline: 2px solid; }
summary { color: gray; cursor: pointer; font-size: 12px; }
"""


def page():
    names = [name for name in (*report.SCRIPTS, *report.MORE) if report.parent_of(name)]
    scripts = [name.removeprefix("more.") for name in names]
    links = [f'<a href="#{script}">{script}</a>' for script in scripts]
    sections = "\n".join(section(name) for name in names)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Each script beside its parent</title>
<style>{STYLE}</style>
<h1>Each script beside its parent</h1>
<p>What only the parent has is red, what only the child has is green. A number in a header leads to its
line, and the number there leads back.</p>
<nav>{" ".join(links)}</nav>
{sections}
</html>
"""


if __name__ == "__main__":
    PAGE.write_text(page())
