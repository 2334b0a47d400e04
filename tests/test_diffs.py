"""benchmarks/diffs.html: up to date, complete, its links lead somewhere, and it needs no other file."""

import html
import re
import sys
from html.parser import HTMLParser

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of

sys.path.append(str(ROOT / "benchmarks"))
import diffs
import report

CHILDREN = [name for name in (*SCRIPTS, *MORE) if name != "ppo"]


@pytest.fixture(scope="module")
def page():
    return diffs.page()


def section(page, name):
    start = page.index(f'<section id="{name.removeprefix("more.")}">')
    return page[start : page.index("</section>", start)]


def text(fragment):
    """Of HTML without tags that stand inside a line."""
    return html.unescape(re.sub(r"<[^>]+>", "", fragment))


def test_the_page_is_up_to_date(page):
    assert diffs.PAGE.read_text() == page, "stale, run python benchmarks/diffs.py"


@pytest.mark.parametrize("name", CHILDREN)
def test_both_scripts_are_there(name, page):
    """Each line of the child once, in order, with its number; of the parent all lines that are not in
    the child, marked as gone. The two differ exactly where a line is marked."""
    body = section(page, name)
    line = r'<i data-n="(\d+)"[^>]*>(.*?)</i>'
    changed_left = []
    changed_right = []
    child = {}
    for kind, left, right, folded in re.findall(
        r'<div class="(same|changed)"><pre class="left">(.*?)</pre><pre class="right">(.*?)</pre></div>'
        r"|<details>.*?<pre>(.*?)</pre></details>",
        body,
        flags=re.DOTALL,
    ):
        for number, code in re.findall(line, right + folded):
            child[int(number)] = text(code)
        if kind == "changed":
            changed_left += [text(code) for _, code in re.findall(line, left)]
            changed_right += [text(code) for _, code in re.findall(line, right)]
        else:
            assert [text(code) for _, code in re.findall(line, left)] == [
                text(code) for _, code in re.findall(line, right)
            ]
    lines = path_of(name).read_text().splitlines()
    first = diffs.first_line(name)
    assert list(child) == list(range(first, len(lines) + 1))
    assert list(child.values()) == lines[first - 1 :]
    parent = report.parent_of(name)
    assert set(changed_left) <= set(path_of(parent).read_text().splitlines())
    kept = len(child) - len(changed_right)
    assert kept + len(changed_left) == len(report.read(parent)[1])
    assert changed_left or changed_right


@pytest.mark.parametrize("name", CHILDREN)
def test_numbers_lead_to_their_lines(name, page):
    """Each number of a header, once; its line names it, or is the one that such a difference has."""
    body = section(page, name)
    script = name.removeprefix("more.")
    header, _ = report.read(name)
    numbers = re.findall(r"^  (\d)\. ", header, flags=re.MULTILINE)
    assert numbers
    for number in numbers:
        assert body.count(f'href="#{script}-{number}"') == 1
        (line,) = re.findall(rf'<i data-n="\d+" id="{script}-{number}">(.*?)</i>', body)
        beginnings = tuple(begins for _, begins in diffs.UNMARKED)
        assert f"[{number}]" in text(line) or text(line).startswith(beginnings)


def test_links_and_tags(page):
    """Every link leads to an id that is there once; tags are closed; there is no script, and nothing
    comes from elsewhere."""
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r' href="([^"]+)"', page):
        assert target.startswith("#") and target[1:] in ids, target
    assert not re.search(r"<link|<img|url\(|@import|http", page.split("<section")[0])
    assert "<script" not in page and "src=" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    open_tags = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(page)
    assert open_tags == []
