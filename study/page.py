"""Builds a page that shows any two of the scripts side by side, and opens it.

    python study/page.py

The page is a single file, runs/study.html, and needs no server and no network.
"""

import argparse
import difflib
import itertools
import json
import re
import webbrowser
from pathlib import Path

import pictures
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from scripts import MORE, ROOT, SCRIPTS, differences_of, flags_of, parent_of, read

FOLDER = Path(__file__).parent


# -------------------------------------------------------------------------------------------- lines


def colored(code):
    """Lines of HTML. A number such as [1] in a comment or docstring becomes a link."""
    text = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    text = re.sub(r"\[[1-9]\]", r'<a class="ref">\g<0></a>', text)
    return text.splitlines()


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
        "lines": colored("\n".join(code)),
        "first": header.count("\n") + 3,  # line number of the first line after the closing quotes
    }


def tree(parents, parent=None):
    """The family as nested lists of links."""
    items = []
    for name in parents:
        if parents[name] == parent:
            items.append(f'<li><a href="#{name}">{name.split(".")[-1]}</a>{tree(parents, name)}</li>')
    return f"<ul>{''.join(items)}</ul>" if items else ""


def build():
    names = SCRIPTS + MORE
    parents = {name: parent_of(name) for name in names}
    scripts = {name: script(name) for name in names}
    code = {name: read(name)[1] for name in names}
    pairs = itertools.combinations(names, 2)
    data = {
        "parents": parents,
        "scripts": scripts,
        "pairs": {f"{a},{b}": side_by_side(code[a], code[b]) for a, b in pairs},
        "gradients": pictures.gradients(names),
        "tokens": pictures.tokens(names),
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
