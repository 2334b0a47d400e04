"""The READMEs: generated parts are up to date, links point to something, the first is short, and no
result is typed by hand."""

import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT

import report

README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
PAGES = [README, BENCHMARKS]
PAGES += [ROOT / folder / "README.md" for folder in ("plumbing", "conformance", "study")]


def without_blocks(text):
    """The text without fenced blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces, and a
    number behind a name that was there before."""
    found = set()
    seen = Counter()
    for heading in re.findall(r"^#{1,6} +(.+)$", without_blocks(path.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link: its text
        name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(path):
    """The targets of links and images that are not on the web."""
    text = without_blocks(path.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)  # nothing in code is a link
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def test_generated_parts_are_up_to_date():
    command = [sys.executable, ROOT / "benchmarks" / "report.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("damage", ["stale", "missing", "unknown", "without an end"])
def test_check_sees(damage, tmp_path, monkeypatch):
    """--check passes before the damage and fails after it; writing mends what is stale."""
    path = tmp_path / "README.md"
    other = tmp_path / "other.md"
    parts = {"one": lambda: ["1"], "two": lambda: ["2"]}
    monkeypatch.setattr(report, "PARTS", parts)
    monkeypatch.setattr(report, "FILES", [path, other])
    good = "<!-- generated: one -->\n1\n<!-- end: one -->\n"
    path.write_text(good)
    other.write_text(good.replace("one", "two").replace("1", "2"))
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    report.main()
    bad = {
        "stale": good.replace("1", "3"),
        "missing": "nothing\n",
        "unknown": good + good.replace("one", "three"),
        "without an end": good + "<!-- generated: one -->\n",
    }
    path.write_text(bad[damage])
    with pytest.raises(SystemExit) as failure:
        report.main()
    assert failure.value.code not in (None, 0)
    assert path.read_text() == bad[damage]
    if damage == "stale":
        monkeypatch.setattr(sys, "argv", ["report.py"])
        report.main()
        assert path.read_text() == good


# Decimals that are no results: versions, and sizes in the names of models.
NO_RESULTS = [
    r"(?:torch|transformers|TRL|verl|Python|CUDA) \d+(?:\.\d+)+",
    r"Qwen2\.5-\d+(?:\.\d+)?B",
    r"arXiv[ :]\d{4}\.\d{5}",
]


def typed_decimals(text):
    """The decimals in prose: neither generated, nor in a table, in code, or in the target of a link."""
    text = report.PART.sub("", without_blocks(text))
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for pattern in (r"`[^`]*`", r"\]\([^)]*\)", *NO_RESULTS):
        text = re.sub(pattern, "", text)
    return re.findall(r"\b\d+\.\d+.*", text)


def test_no_result_is_typed_by_hand():
    assert typed_decimals(BENCHMARKS.read_text()) == []


def test_the_snippet_runs():
    """As it is copied: a finite loss, and gradients on response tokens alone."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(snippet, names)
    gradient_NT = names["logprobs_NT"].grad
    assert names["loss"].isfinite() and gradient_NT.isfinite().all()
    assert torch.equal(gradient_NT != 0, names["mask_NT"])


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
