"""Builds a page that shows any two of the scripts side by side, and opens it.

    python study/page.py

The page is a single file, runs/study.html, and needs no server and no network.
"""

import difflib
import itertools
import json
import re
import webbrowser
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from scripts import MORE, ROOT, SCRIPTS, command_line, file_of, parent_of

FOLDER = Path(__file__).parent
NAMES = SCRIPTS + MORE


def lines_of(name):
    return (ROOT / file_of(name)).read_text().splitlines()


def colored(name):
    """The lines in HTML. A difference in the header and its number in the code, such as [1], link to
    each other."""
    text = highlight("\n".join(lines_of(name)), PythonLexer(), HtmlFormatter(nowrap=True))
    for number in set(re.findall(r"\[([1-9])\]", text)):
        link = rf'\1<a id="{name}-{number}" href="#{name}-{number}-code">\2</a>'
        text = re.sub(rf"(?m)^(<span[^>]*>  )({number}\. [^:.]+)", link, text)
        link = f'<a id="{name}-{number}-code" href="#{name}-{number}">[{number}]</a>'
        text = text.replace(f"[{number}]", link)
    return text.splitlines()


def blocks(left, right):
    """[(kind, first line and end on the left, first line and end on the right)], kind as in difflib"""
    matcher = difflib.SequenceMatcher(None, lines_of(left), lines_of(right), autojunk=False)
    return matcher.get_opcodes()


def tree(parent=None):
    """The family as nested lists of links: a script beside its parent."""
    items = []
    for name in NAMES:
        if parent_of(name) == parent:
            link = f'<a href="?left={parent}&amp;right={name}">{name}</a>' if parent else name
            items.append(f"<li>{link}{tree(name)}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def build():
    data = {
        "lines": {name: colored(name) for name in NAMES},
        "blocks": {f"{a},{b}": blocks(a, b) for a, b in itertools.product(NAMES, repeat=2)},
    }
    parts = {
        "CSS": (FOLDER / "page.css").read_text(),
        "TREE": tree(),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", r"<\/"),
        "JS": (FOLDER / "page.js").read_text(),
    }
    page = (FOLDER / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def main():
    command_line(__doc__).parse_args()
    path = ROOT / "runs" / "study.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(build())
    print(path)
    webbrowser.open(path.as_uri())


if __name__ == "__main__":
    main()
