"""Builds a page on which any two of the scripts stand side by side, and opens it.

    python study/page.py               # --no-open: only build it; --out: not in runs/study.html
    python study/page.py --screenshot  # also draw figures/page.png, with Chromium

The page is a single file and needs no server and no network. Its numbers come from the scripts and
from benchmarks/results/. Without JavaScript it shows the losses one after the other.
"""

import argparse
import difflib
import html
import importlib
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import webbrowser
from pathlib import Path

import latex2mathml.converter
import pictures
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment, String

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import report  # noqa: E402
import stats  # noqa: E402

FOLDER = Path(__file__).parent
PLAIN = ("", "n", "o", "p", "w")  # Pygments' kinds of text that get no colour


def math(latex, display="inline"):
    """MathML, which browsers draw without a script. HTML needs no namespace."""
    return re.sub(r' xmlns="[^"]*"', "", latex2mathml.converter.convert(latex, display=display))


def legend():
    """What the symbols of the formulas mean."""
    text = re.sub(r"(?<!\$)`(\w+)`", r"<code>\1</code>", report.FORMULAS["legend"])
    return re.sub(r"\$`(.+?)`\$", lambda match: math(match[1]), text)


# -------------------------------------------------------------------------------------------- lines


def colored(code):
    """Lines of words in HTML. A number such as [1] in a comment or docstring becomes a link."""
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
    """[line of the left, line of the right] for each row, None where a side has none. In a block that
    differs, similar lines meet."""
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
    """(numbers of the words that only the left line has, the same of the right)."""
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    lefts = [i for _, start, end, _, _ in changed for i in range(start, end)]
    rights = [j for _, _, _, start, end in changed for j in range(start, end)]
    return lefts, rights


def compared(a, b, words):
    """The rows of two scripts, with the words that differ where two lines meet."""
    _, left = report.read(a)
    _, right = report.read(b)
    rows = []
    for i, j in side_by_side(left, right):
        row = [i, j]
        if i is not None and j is not None and left[i] != right[j]:
            row += changed_words(words[a][i], words[b][j])
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------- the parts


def own_flags(name):
    """The flags of the algorithm, which follow those of the loop, with their defaults."""
    args_class = importlib.import_module(name).Args
    flags = list(args_class.__annotations__)
    own = flags[flags.index("router_aux_coef") + 1 :]
    return ", ".join(f"{flag} {getattr(args_class, flag)}" for flag in own)


def script(name):
    header, code = report.read(name)
    title, *_ = header.split("\n")
    differences = re.findall(r"^  \d\. (.+?)(?=\n  \d\. |\n\n)", header, re.DOTALL | re.MULTILINE)
    paragraphs = header.split("\n\n")
    choices = [text for text in paragraphs if "Left open" in text or "Departs from" in text]
    return {
        "title": title,
        "header": header,
        "differences": [" ".join(words.split()) for words in differences],
        # Sentences are broken by the page, lines that are indented stay as they are.
        "choices": [re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text) for text in choices],
        "formula": math(report.FORMULAS["objectives"][name], "block"),
        "axes": [cell or "nothing" for cell in [*report.FORMULAS["axes"][name], own_flags(name)]],
        "words": colored("\n".join(code)),
        "first": header.count("\n") + 3,  # number of the first line, after the closing quotes
    }


def loss(name, script):
    """A section for those who read without JavaScript: the formula and the function."""
    _, code = report.read(name)
    start = code.index("def policy_loss(")
    end = code.index("def main(args):")
    lines = ["".join(words) for words in script["words"][start:end]]
    title = f"<h2>{name}: {script['title']}</h2>"
    function = "\n".join(lines).rstrip()
    return f'<section id="{name}">{title}{script["formula"]}<pre>{function}</pre></section>'


def tree(parents, parent=None):
    """The family as nested lists of links."""
    items = []
    for name in parents:
        if parents[name] == parent:
            items.append(f'<li><a href="#{name}">{name.split(".")[-1]}</a>{tree(parents, name)}</li>')
    return f"<ul>{''.join(items)}</ul>" if items else ""


def curve(name):
    """[completions generated, mean accuracy of the seeds' rollouts over five iterations]."""
    runs = stats.curves("more" if name in report.MORE else "nine")[name, "default"].values()
    points = []
    for rows in zip(*runs, strict=False):  # iterations, as far as the shortest run
        x = statistics.mean(row["x"] for row in rows)
        points.append([x, statistics.mean(row["accuracy"] for row in rows)])
    smooth = stats.trailing([y for _, y in points], 5)
    return [[x, y] for (x, _), y in zip(points, smooth, strict=True)]


def build():
    names = report.SCRIPTS + report.MORE
    parents = {name: report.parent_of(name) for name in names}
    scripts = {name: script(name) for name in names}
    words = {name: scripts[name]["words"] for name in names}
    pairs = itertools.combinations(names, 2)
    losses = [loss(name, scripts[name]) for name in names]
    data = {
        "parents": parents,
        "scripts": scripts,
        "pairs": {f"{a},{b}": compared(a, b, words) for a, b in pairs},
        "axes": [*report.FORMULAS["axis_names"], "its own flags"],
        "gradients": pictures.gradients(names),
        "prompts": pictures.prompts(names),
        "tokens": pictures.tokens(names),
        "curves": {name: curve(name) for name in names},
    }
    parts = {
        "CSS": (FOLDER / "page.css").read_text(),
        "TREE": tree(parents),
        "LEGEND": legend(),
        "LOSSES": "\n".join(losses),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", r"<\/"),
        "JS": (FOLDER / "page.js").read_text(),
    }
    page = (FOLDER / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def browse(url, *flags):
    """What Chromium prints when it opens the page without a window."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed")
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study.html")
    parser.add_argument("--no-open", action="store_true", help="only write the page")
    parser.add_argument("--screenshot", action="store_true", help="also draw figures/page.png")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(build())
    url = args.out.resolve().as_uri()
    print(f"{args.out}: {args.out.stat().st_size / 1e3:,.0f} kB")
    if args.screenshot:
        picture = FOLDER / "figures" / "page.png"
        browse(f"{url}#sapo", f"--screenshot={picture}", "--window-size=1600,1600")
    elif not args.no_open:
        webbrowser.open(url)


if __name__ == "__main__":
    main()
