"""The READMEs: generated parts are up to date, links point to something, and the snippet runs."""

import functools
import json
import re
import textwrap

import pytest
import torch
from conftest import ROOT, SMALL_ARGS

import grpo
import report

README = ROOT / "README.md"
FOLDERS = ("plumbing", "conformance", "study")
PAGES = [README, *(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "study" / "the_nine.md"]


def without_blocks(text):
    """The text without fenced blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#{1,6} +(.+)$", without_blocks(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-") for words in headings}


def links(path):
    """The targets of links and images that are not on the web."""
    text = without_blocks(path.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)  # nothing in code is a link
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("path", report.FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(path):
    text = path.read_text()
    assert report.filled(text) == text, "run: python study/report.py"


def test_the_snippet_runs():
    """As it is copied: a finite loss, and gradients on response tokens alone."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(snippet, names)
    gradient_BT = names["logprobs_BT"].grad
    assert names["loss"].isfinite() and gradient_BT.isfinite().all()
    assert torch.equal(gradient_BT != 0, names["mask_BT"])


def test_the_call_from_python_runs(monkeypatch, tmp_path):
    """As it is copied, but with a small job."""
    text = (ROOT / "plumbing" / "README.md").read_text()
    (snippet,) = re.findall(r"^  ```python\n(.*?)^  ```", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "Args", functools.partial(grpo.Args, **SMALL_ARGS))
    exec(textwrap.dedent(snippet), {"__name__": "__main__"})
    settings = json.loads((tmp_path / "runs" / "x" / "settings.json").read_text())
    assert settings["reward"] == "__main__:f"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_to_something(path):
    targets = links(path)
    assert targets
    for target in targets:
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        if anchor:
            assert file.suffix == ".md" and anchor in anchors(file), target
