"""benchmarks/diffs.html: up to date, and of each child all lines that its parent does not have."""

import html
import re
import sys

import pytest
from conftest import MORE, ROOT, SCRIPTS

sys.path.append(str(ROOT / "benchmarks"))
import diffs
import report


@pytest.fixture(scope="module")
def page():
    return diffs.page()


def test_the_page_is_up_to_date(page):
    assert diffs.PAGE.read_text() == page, "stale, run python benchmarks/diffs.py"


@pytest.mark.parametrize("name", [name for name in (*SCRIPTS, *MORE) if name != "ppo"])
def test_what_only_one_of_the_two_has_is_there(name, page):
    start = page.index(f'<section id="{name}">')
    table = page[start : page.index("</section>", start)].split("<table")[1]
    cells = re.findall(r"<td>(.*?)</td>", table)
    shown = {html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in cells}
    _, child = report.read(name)
    _, parent = report.read(report.parent_of(name))
    assert set(child) ^ set(parent) <= shown


def test_it_is_one_file_without_scripts(page):
    assert "<script" not in page
    assert not re.search(r"<link|<img|@import|src=", page.split("<section")[0])
