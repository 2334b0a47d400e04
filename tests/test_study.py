"""study/: the pictures show what the scripts do, the page shows the scripts, and the repair shop tells
a fixed script from a broken one."""

import functools
import html
import json
import re
import sys

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of, write_lines

import curves
import repair
import report
import scripts

NAMES = SCRIPTS + MORE
BUGS = repair.load_bugs()


def test_the_keys_that_differ_in_the_first_iteration():
    first = {"iteration": 1, "rollout/accuracy": 0.5, "charts/update_seconds": 2.0}
    old = [{**first, "losses/kl_ref": 0.125}, {"iteration": 2, "rollout/accuracy": 0.6}]
    new = [{**first, "charts/update_seconds": 3.0}]
    assert curves.table({"old": old, "new": new})[2:] == ["| losses/kl_ref | 0.125 | absent |"]


def test_the_scripts_are_found_and_ordered_by_paper():
    found = {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("more/*.py")]} - {"common"}
    assert {name.split(".")[-1] for name in NAMES} == found
    papers = [scripts.paper_of(name) for name in SCRIPTS]
    assert papers == sorted(papers) and SCRIPTS[:2] == ["ppo", "grpo"]
    for name in NAMES[1:]:
        assert scripts.parent_of(name) in NAMES, name
    assert scripts.changes_of("dr_grpo") == ["No std", "Constant normalizer"]


@pytest.mark.extras
def test_curves_draw_the_evaluations_and_any_key(tmp_path):
    rows = [{"iteration": i, "losses/ratio_max": 1.5} for i in (1, 2)]
    evaluations = [{"iteration": 0, "greedy": {"accuracy": 0.4}, "sampled": {"accuracy": 0.3}}]
    evaluations.append({"iteration": 2, "greedy": {"accuracy": 0.9}})
    write_lines(tmp_path / "evaluations.jsonl", evaluations)
    figure = curves.draw({tmp_path: rows}, {"losses/ratio_max": ["losses/ratio_max"]})
    held_out, ratio = figure.axes
    assert held_out.lines[0].get_xydata().tolist() == [[0, 0.4], [2, 0.9]]
    assert held_out.lines[1].get_ydata()[0] == 0.3
    assert ratio.lines[0].get_ydata().tolist() == [1.5, 1.5]


# ------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def page():
    """The page, and its data."""
    import page

    text = page.build()
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    return text, json.loads(data)


def plain(line):
    """The text of a line in HTML."""
    return html.unescape(re.sub(r"<[^>]+>", "", line))


@pytest.mark.extras
@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_lines_of_a_script(page, name):
    _, data = page
    script = data["scripts"][name]
    text = path_of(name).read_text()
    lines = [plain(line) for line in script["lines"]]
    assert lines == text.splitlines()[script["first"] - 1 :]
    marked = set(re.findall(r'class="ref">\[(\d)\]', "".join(script["lines"])))
    assert marked <= {str(i + 1) for i in range(len(script["differences"]))}
    assert len(script["differences"]) == len(re.findall(r"^  \d\. ", text, re.MULTILINE))
    assert script["objective"] in text and script["objective"].startswith("  J = ")
    assert script["notes"] and set(script["flags"]) >= {"lr", "temperature"}


@pytest.mark.extras
def test_the_page_has_all_pairs(page):
    """Each line once and in its order."""
    _, data = page
    assert len(data["pairs"]) == len(NAMES) * (len(NAMES) - 1) / 2
    for pair, rows in data["pairs"].items():
        for side, name in enumerate(pair.split(",")):
            shown = [row[side] for row in rows if row[side] is not None]
            assert shown == list(range(len(data["scripts"][name]["lines"]))), pair


@pytest.mark.extras
def test_the_page_needs_no_network(page):
    text, _ = page
    assert "default-src 'none'" in text and not re.search(r"://|\ssrc=|@import|url\(", text)
    assert set(re.findall(r'<a href="#([\w.]+)">', text)) == set(NAMES)


# ------------------------------------------------------------------------------------------ symptoms


@pytest.mark.parametrize("values, expected", [([20, 21, 19.5], ["length ↑"]), ([-1, -0.5, 20], [])])
def test_a_bug_shows_where_all_its_runs_lie_outside(values, expected):
    sick = [{"length": value, "reward": 1.0} for value in values]
    healthy = [{"length": value} for value in range(20)]
    assert report.shows(sick, healthy) == expected


def test_the_main_page_has_the_summary_of_the_symptoms():
    assert report.symptoms_summary() in " ".join((ROOT / "README.md").read_text().split())


# --------------------------------------------------------------------------------------- repair shop


def test_each_bug_applies_exactly_once():
    for bug in BUGS.values():
        original = bug["original"].read_text()
        assert original.count(bug["old"]) == 1, bug["title"]
        assert bug["broken"] != original
        compile(bug["broken"], bug["title"], "exec")
    assert f"has {len(BUGS)} bugs, one per entry" in (ROOT / "study" / "README.md").read_text()


def shop(monkeypatch, capsys, *arguments):
    """What the command prints, or the words with which it exits."""
    monkeypatch.setattr(sys, "argv", ["repair.py", *map(str, arguments)])
    try:
        repair.main()
    except SystemExit as exit:
        return exit.code
    return capsys.readouterr().out


def test_a_bug_from_the_shop_is_found_and_fixed(monkeypatch, capsys, tmp_path):
    """Fixed in other words than the original's, which differ from it by rounding."""
    monkeypatch.setattr(repair, "SHOP", tmp_path)
    (number,) = [number for number, bug in BUGS.items() if bug["title"] == "Broadcast over the batch"]
    path = tmp_path / f"bug_{number}.py"
    assert str(path) in shop(monkeypatch, capsys, number)
    text = path.read_text().replace(".sum(1) / length_B1", ".sum(1) / length_B1[:, 0]")
    text = text.replace("-objective_B1.sum() / num_sequences", "-(objective_B1 / num_sequences).sum()")
    path.write_text(text)
    assert shop(monkeypatch, capsys, number, "--check").startswith("fixed: Broadcast over the batch.")


@functools.cache
def expected_of(script):
    return repair.behavior(path_of(script))


@pytest.mark.slow
@pytest.mark.parametrize("number", BUGS, ids=lambda number: BUGS[number]["title"])
def test_the_check_refuses_each_bug(number, tmp_path):
    bug = BUGS[number]
    path = tmp_path / "script.py"
    path.write_text(bug["broken"])
    found = repair.behavior(path)
    assert repair.differences(found, expected_of(bug["script"])) != []
