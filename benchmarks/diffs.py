"""Writes benchmarks/diffs.html: each script beside its parent, a page to study by.

    python benchmarks/diffs.py

One file without scripts, for any browser. Of each child it has the objective as a formula, the header,
whose numbered differences lead to their lines, and the two scripts side by side, the headers aside.
"""

import ast
import difflib
import html
import re
from pathlib import Path

import readme

PAGE = Path(__file__).parent / "diffs.html"
CONTEXT = 4  # lines around a change that are always shown

# ------------------------------------------------------------------- from GitHub's math to MathML

WORDS = {  # of TeX
    "alpha": "<mi>α</mi>",
    "beta": "<mi>β</mi>",
    "gamma": "<mi>γ</mi>",
    "epsilon": "<mi>ε</mi>",
    "mu": "<mi>μ</mi>",
    "pi": "<mi>π</mi>",
    "sigma": "<mi>σ</mi>",
    "tau": "<mi>τ</mi>",
    "sum": "<mo>∑</mo>",
    "exp": "<mi>exp</mi>",
    "log": '<mi>log</mi><mspace width="0.17em"/>',
    "max": "<mi>max</mi>",
    "min": "<mi>min</mi>",
    "lvert": '<mo stretchy="false">|</mo>',
    "rvert": '<mo stretchy="false">|</mo>',
    "quad": '<mspace width="1em"/>',
    ",": '<mspace width="0.17em"/>',
}
TOKEN = re.compile(r"\\[a-z]+|\\,|\S")


def row(parts):
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"


def read_atom(tokens):
    """Takes one thing off the list of tokens: a letter, a group in braces, a fraction, ..."""
    token = tokens.pop(0)
    if token == "{":
        return row(read_until("}", tokens))
    if token == r"\frac":
        above = read_atom(tokens)
        below = read_atom(tokens)
        return f"<mfrac>{above}{below}</mfrac>"
    if token == r"\mathrm":
        tokens.pop(0)  # the brace
        end = tokens.index("}")
        word = "".join(tokens[:end])
        del tokens[: end + 1]
        return f"<mtext>{word}</mtext>"
    if token == r"\left":
        first = tokens.pop(0)
        inside = "".join(read_until(r"\right", tokens))
        last = tokens.pop(0)
        return f"<mrow><mo>{first}</mo>{inside}<mo>{last}</mo></mrow>"
    if token.startswith("\\"):
        return WORDS[token[1:]]
    if token.isalpha():
        return f"<mi>{token}</mi>"
    if token.isdigit():
        return f"<mn>{token}</mn>"
    return f'<mo stretchy="false">{token.replace("-", "−")}</mo>'


def read_until(end, tokens):
    """[MathML] of all that comes before the token `end`, which is taken off the list too."""
    parts = []
    while tokens and tokens[0] != end:
        atom = read_atom(tokens)
        if tokens and tokens[0] == "_":
            tokens.pop(0)
            # What a sum runs over stands below it.
            tag = "munder" if atom == WORDS["sum"] else "msub"
            atom = f"<{tag}>{atom}{read_atom(tokens)}</{tag}>"
        parts.append(atom)
    if tokens:
        tokens.pop(0)
    return parts


def mathml(tex):
    inside = row(read_until("", TOKEN.findall(tex)))
    return f'<div class="formula"><math display="block"><mi>J</mi><mo>=</mo>{inside}</math></div>'


# ------------------------------------------------------------------------- numbers and their lines

MARK = re.compile(r"(?<![\w\])])\[(\d)\]")  # [2], but not in shape[2]
# Differences that no comment can name, since they are lines that the child does not have, or arguments
# that every sibling has: (what the header says, how a line of parent or child begins).
UNMARKED = [
    ("No KL", "    ref_logprobs_BT=None"),
    ("Group baseline", "def compute_advantages("),
    ("Clip-higher", "    clip_eps_high: float = HfArg(default=0.28"),
    ("Token-level clip only", "    clip_level="),
]


def anchors(script, header, lines_by_side):
    """{number: (side, index of the line)} for each difference that the header lists."""
    found = {}
    for number, lead in re.findall(r"^  (\d)\. ([^:]+):", header, flags=re.MULTILINE):
        beginnings = tuple(begins for words, begins in UNMARKED if lead.startswith(words))
        for side, lines in lines_by_side.items():
            for i, line in enumerate(lines):
                names_it = number in MARK.findall(line) and f"see [{number}]" not in line
                is_it = line.startswith(beginnings) or (side == "right" and names_it)
                if number not in found and is_it:
                    found[number] = (side, i)
        assert number in found, f"{script}: nothing shows [{number}]"
    return found


# ---------------------------------------------------------------------------------------- the page


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


def header_as_html(script, header):
    """The docstring; the number of a difference leads to its line."""
    text = html.escape(header.rstrip(), quote=False)
    pattern = re.compile(r"^  (\d)\. ", flags=re.MULTILINE)
    return pattern.sub(rf'  <a id="{script}-header-\1" href="#{script}-\1">[\1]</a> ', text)


def pair(kind, left, right):
    return (
        f'<div class="{kind}"><pre class="left">{"".join(left)}</pre>'
        f'<pre class="right">{"".join(right)}</pre></div>'
    )


def unchanged(left, right, is_first, is_last):
    """A stretch without a change; what is far from every change is folded, and shown once."""
    before = 0 if is_first else CONTEXT
    after = 0 if is_last else CONTEXT
    middle = len(right) - before - after
    if middle <= CONTEXT:
        return [pair("same", left, right)]
    end = len(right) - after
    parts = []
    if before:
        parts.append(pair("same", left[:before], right[:before]))
    summary = f"<summary>{middle} lines that both have</summary>"
    parts.append(f"<details>{summary}<pre>{''.join(right[before:end])}</pre></details>")
    if after:
        parts.append(pair("same", left[end:], right[end:]))
    return parts


def first_line(script):
    """The number of the first line after the header docstring."""
    text = readme.path_of(script).read_text()
    return ast.parse(text).body[0].end_lineno + 1


def section(child, parent):
    script = child.removeprefix("more.")
    header, new = readme.read(child)
    _, old = readme.read(parent)
    marks = {}
    for number, place in anchors(script, header, {"right": new, "left": old}).items():
        marks[place] = number
    left = numbered(script, "left", old, first_line(parent), marks)
    right = numbered(script, "right", new, first_line(child), marks)
    parts = []
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for tag, a, b, c, d in changes:
        if tag == "equal":
            is_first = c == 0
            is_last = d == len(new)
            parts += unchanged(left[a:b], right[c:d], is_first, is_last)
        else:
            parts.append(pair("changed", left[a:b], right[c:d]))
    names = [str(readme.path_of(name).relative_to(readme.ROOT)) for name in (parent, child)]
    count = readme.changed_lines(parent, child)
    return "\n".join(
        [
            f'<section id="{script}">',
            f"<h2>{names[1]} <small>from {names[0]}, {count} changed lines</small></h2>",
            mathml(readme.OBJECTIVES[child]),
            f'<pre class="header">{header_as_html(script, header)}</pre>',
            '<div class="diff">',
            f'<div class="names"><b class="left">{names[0]}</b><b class="right">{names[1]}</b></div>',
            *parts,
            "</div>",
            "</section>",
        ]
    )


def tree(parents, root="ppo"):
    """The family as nested lists, each name a link to its section."""
    script = root.removeprefix("more.")
    name = f'<a href="#{script}">{script}</a>' if root in parents else script
    children = [child for child, parent in parents.items() if parent == root]
    inside = "".join(tree(parents, child) for child in children)
    return f"<li>{name}{f'<ul>{inside}</ul>' if inside else ''}</li>"


STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --page: #ffffff; --faint: #6b7280;
  --line: #d9dce1; --code: #f6f7f9; --gone: #ffe4e1; --come: #dcf5e0; --link: #0b57d0;
  --target: #fff1a8; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e5e8; --page: #15171a; --faint: #9aa1ab;
  --line: #363b42; --code: #1d2024; --gone: #4a2222; --come: #173a22; --link: #8ab4f8;
  --target: #5c4f10; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1800px; color: var(--text);
  background: var(--page); font: 16px/1.5 system-ui, sans-serif; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
h1 { font-size: 1.5rem; }
h2 { margin: 3rem 0 1rem; font: bold 1.25rem ui-monospace, monospace; }
small { color: var(--faint); font: 0.8rem system-ui, sans-serif; }
nav ul { list-style: none; margin: 0; padding-left: 1.25rem; border-left: 1px solid var(--line);
  font: 0.9rem/1.5 ui-monospace, monospace; }
nav > ul { border: 0; padding: 0; }
.formula { overflow-x: auto; padding: 0.5rem 0 1rem; font-size: 1.3rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12px/1.5 ui-monospace, monospace; }
.header { max-width: 112ch; margin-bottom: 1rem; padding: 0.75rem 1rem; background: var(--code);
  border: 1px solid var(--line); border-radius: 6px; }
.diff { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.names, .same, .changed { display: grid; grid-template-columns: 1fr 1fr; }
.right { border-left: 1px solid var(--line); }
.names b { padding: 0.4rem 0.75rem; background: var(--code); border-bottom: 1px solid var(--line);
  font: bold 13px/1.5 ui-monospace, monospace; }
.changed pre { background: var(--code); }
.changed .left i { background: var(--gone); }
.changed .right i { background: var(--come); }
i { position: relative; display: block; padding-left: 3.5em; min-height: 1.5em; font-style: normal; }
i::before { content: attr(data-n); position: absolute; left: 0; width: 2.75em; text-align: right;
  color: var(--faint); user-select: none; }
.diff i:target, .changed pre i:target { background: var(--target); }
i[id] { scroll-margin-top: 4rem; }
summary { padding: 0.15rem 0.75rem; color: var(--faint); background: var(--code); cursor: pointer;
  font-size: 12px; }
details { border-block: 1px solid var(--line); }
@media (max-width: 1100px) {
  .same, .changed { display: block; }
  .names { grid-template-columns: auto 1fr; }
  .same .left, .changed pre:empty { display: none; }
  .right { border-left: 0; }
  .header { white-space: pre; overflow-x: auto; }
  .formula { font-size: 1.1rem; }
}
"""
INTRODUCTION = """
What only the parent has is red, what only the child has is green. On a narrow screen the red lines
stand above the green ones. A number in a header leads to its line, and the number there leads back. The
headers explain the symbols.
"""


def page():
    parents = {}
    for name in (*readme.SCRIPTS, *readme.MORE):
        parent = readme.parent_of(name)
        if parent:
            parents[name] = parent
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>Each script beside its parent</title>",
            f"<style>{STYLE}</style>",
            "<h1>Each script beside its parent</h1>",
            f"<p>{INTRODUCTION.strip()}</p>",
            f"<nav><ul>{tree(parents)}</ul></nav>",
            *[section(child, parent) for child, parent in parents.items()],
            "</html>",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
