"""Writes benchmarks/diffs.html: each script beside its parent, a page to study by.

    python benchmarks/diffs.py

One file without scripts, for any browser. Of each child it has the header, which numbers the
differences, and the two scripts side by side where they differ, the headers aside.
"""

import difflib
import html
from pathlib import Path

import report

PAGE = Path(__file__).parent / "diffs.html"
STYLE = """
:root { color-scheme: light dark; }
body { margin: 1rem; font: 16px/1.5 system-ui, sans-serif; }
pre, td { font: 12px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table { width: 100%; table-layout: fixed; border-collapse: collapse; }
tbody { border-top: 1px solid gray; }
td.diff_header, .diff_next, colgroup { display: none; }
td { padding: 0 0.5em; vertical-align: top; height: 1.5em; }
.diff_sub { background: #f003; }
.diff_chg { background: #fa04; }
.diff_add { background: #0a03; }
"""


def section(child):
    """A child beside its parent."""
    parent = report.parent_of(child)
    header, new = report.read(child)
    _, old = report.read(parent)
    names = [str(report.path_of(name).relative_to(report.ROOT)) for name in (parent, child)]
    count = report.changed_lines(parent, child)
    title = f"<h2>{names[1]}, from {names[0]}: {count} changed lines</h2>"
    header = f"<pre>{html.escape(header)}</pre>"
    table = difflib.HtmlDiff().make_table(old, new, context=True, numlines=4)
    table = table.replace("&nbsp;", " ").replace(' nowrap="nowrap"', "")  # so that lines can wrap
    return "\n".join([f'<section id="{child}">', title, header, table, "</section>"])


def page():
    children = [name for name in (*report.SCRIPTS, *report.MORE) if report.parent_of(name)]
    links = [f'<a href="#{child}">{child.removeprefix("more.")}</a>' for child in children]
    sections = "\n".join(section(child) for child in children)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Each script beside its parent</title>
<style>{STYLE}</style>
<h1>Each script beside its parent</h1>
<p>Only the parent has what is red, only the child what is green; yellow is what differs within a line.
A number in a comment, as in [2], is that of a difference in the header.</p>
<nav>{" ".join(links)}</nav>
{sections}
</html>
"""


if __name__ == "__main__":
    PAGE.write_text(page())
