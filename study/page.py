"""Builds a page that shows any two of the scripts side by side, and opens it.

    python study/page.py

The page is a single file, runs/study.html, and needs no server and no network. Its numbers come from
the scripts and from results/.
"""

import argparse
import difflib
import html
import itertools
import json
import re
import webbrowser
from pathlib import Path

import microscope
import pictures
import stats
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment, String
from scripts import MORE, ROOT, SCRIPTS, differences_of, flags_of, parent_of, read

FOLDER = Path(__file__).parent
PLAIN = ("", "n", "o", "p", "w")  # Pygments' token types that get no color


# -------------------------------------------------------------------------------------------- lines


def colored(code):
    """Lines of HTML words. A number such as [1] in a comment or docstring becomes a link."""
    lines = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens(code):
        for word in re.findall(r"\[[1-9]\]|\w+|\n|[^\S\n]+|[^\w\s]", text):
            css = STANDARD_TYPES[kind]
            if word == "\n":
                lines.append([])
            elif re.fullmatch(r"\[\d\]", word) and (kind in Comment or kind in String):
                lines[-1].append(f'<a class="ref">{word}</a>')
            elif css in PLAIN or word.isspace():
                lines[-1].append(html.escape(word, quote=False))
            else:
                lines[-1].append(f'<i class="{css}">{html.escape(word, quote=False)}</i>')
    return lines[:-1]


def side_by_side(left, right):
    """[left line number, right line number] for each row, None where a side has no line. In a block
    that differs, similar lines share a row."""
    rows = []
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    for kind, start, end, right_start, right_end in blocks:
        if kind == "equal":
            rows += zip(range(start, end), range(right_start, right_end), strict=True)
            continue
        next_right = right_start
        for i in range(start, end):
            similar = difflib.get_close_matches(left[i], right[next_right:right_end], 1, 0.7)
            if not similar:
                rows.append([i, None])
                continue
            j = right.index(similar[0], next_right)
            rows += [[None, skipped] for skipped in range(next_right, j)]
            rows.append([i, j])
            next_right = j + 1
        rows += [[None, skipped] for skipped in range(next_right, right_end)]
    return rows


def changed_words(left, right):
    """(positions of the words that only the left line has, the same for the right line)."""
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    lefts = [i for _, start, end, _, _ in changed for i in range(start, end)]
    rights = [j for _, _, _, start, end in changed for j in range(start, end)]
    return lefts, rights


def compared(a, b, words):
    """The rows of two scripts. A row with two different lines also has the words that differ."""
    _, left = read(a)
    _, right = read(b)
    rows = []
    for i, j in side_by_side(left, right):
        row = [i, j]
        if i is not None and j is not None and left[i] != right[j]:
            row += changed_words(words[a][i], words[b][j])
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------- the parts


def script(name):
    """A script's header in parts, its flags and its lines. The page reflows paragraphs, but no
    indented lines."""
    header, code = read(name)
    title, formula, symbols, *rest = header.split("\n\n")
    notes = [text for text in rest if not text.startswith(("Parent:", "Run:"))]
    return {
        "title": title,
        "objective": f"{formula}\n\n{symbols}",
        "differences": differences_of(name),
        "notes": [re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text) for text in notes],
        "flags": {flag: str(default) for flag, default in flags_of(name).items()},
        "words": colored("\n".join(code)),
        "first": header.count("\n") + 3,  # line number of the first line after the closing quotes
    }


def tree(parents, parent=None):
    """The family as nested lists of links."""
    items = []
    for name in parents:
        if parents[name] == parent:
            items.append(f'<li><a href="#{name}">{name.split(".")[-1]}</a>{tree(parents, name)}</li>')
    return f"<ul>{''.join(items)}</ul>" if items else ""


def curve(name):
    """[completions generated, rollout accuracy: mean over the seeds and over six iterations]; empty if
    it was not measured."""
    runs = stats.curves("more" if name in MORE else "nine").get((name, "default"))
    return [(x, mean) for x, mean, _ in stats.curve(runs, "accuracy")] if runs else []


def panels():
    """The microscope's questions, with the lines of each plot."""
    found = []
    for name, words in microscope.WORDS.items():
        plots = []
        for plot, lines in zip(words["plots"], microscope.read(name), strict=True):
            plots.append({**plot, "lines": lines})
        found.append({**words, "plots": plots})
    return found


def build():
    names = SCRIPTS + MORE
    parents = {name: parent_of(name) for name in names}
    scripts = {name: script(name) for name in names}
    words = {name: scripts[name]["words"] for name in names}
    pairs = itertools.combinations(names, 2)
    data = {
        "parents": parents,
        "scripts": scripts,
        "pairs": {f"{a},{b}": compared(a, b, words) for a, b in pairs},
        "gradients": pictures.gradients(names),
        "prompts": pictures.prompts(names),
        "tokens": pictures.tokens(names),
        "curves": {name: curve(name) for name in names},
        "microscope": panels(),
    }
    parts = {
        "CSS": (FOLDER / "page.css").read_text(),
        "TREE": tree(parents),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", r"<\/"),
        "JS": (FOLDER / "page.js").read_text(),
    }
    page = (FOLDER / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    path = ROOT / "runs" / "study.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(build())
    print(path)
    webbrowser.open(path.as_uri())


if __name__ == "__main__":
    main()
