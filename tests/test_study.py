"""study/: the tools run, the page shows the scripts, and the repair shop tells a fixed script from a
broken one."""

import functools
import html
import json
import re
import subprocess
import sys

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of, write_lines

import repair

NAMES = SCRIPTS + MORE
BUGS = repair.load_bugs()
TOOLS = "curves figures microscope page repair report speed stats".split()


def test_no_script_is_overlooked():
    """The tools and the tests take their names from scripts.py."""
    found = {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("more/*.py")]} - {"common"}
    assert {name.split(".")[-1] for name in NAMES} == found


@pytest.mark.extras
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_runs_from_anywhere(tool, tmp_path):
    command = [sys.executable, ROOT / "study" / f"{tool}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("usage:"), done.stderr


ROWS = [  # of metrics.jsonl; only the second iteration was evaluated
    {
        "iteration": 1,
        "losses/ratio_max": 1.5,
        "rollout/reward_mean": 40.0,
        "charts/rollout_seconds": 1.0,
    },
    {"iteration": 2, "losses/ratio_max": 1.5, "rollout/reward_mean": 40.0, "eval/accuracy": 0.9},
]


@pytest.mark.extras
def test_curves_draw_the_evaluations_and_any_key():
    """A key that not all rows have gets markers."""
    import curves

    evaluations = [{"iteration": 0, "greedy": {"accuracy": 0.4}, "sampled": {"accuracy": 0.3}}]
    evaluations.append({"iteration": 2, "greedy": {"accuracy": 0.9}})
    panels = {key: [key] for key in ("losses/ratio_max", "eval/accuracy")}
    held_out, ratio, sparse = curves.draw({"run": ({}, ROWS, evaluations)}, panels).axes
    assert held_out.lines[0].get_xydata().tolist() == [[0, 0.4], [2, 0.9]]
    assert held_out.lines[1].get_ydata()[0] == 0.3
    assert ratio.lines[0].get_ydata().tolist() == [1.5, 1.5]
    assert sparse.lines[0].get_xydata().tolist() == [[2, 0.9]]
    assert [axis.lines[0].get_marker() for axis in (held_out, ratio, sparse)] == [".", "None", "."]


@pytest.mark.extras
def test_curves_without_verdicts():
    """The mean reward stands in for the accuracy."""
    import curves

    mixed = {"greedy": {"reward_mean": 41.0}, "sampled": {"accuracy": 0.5, "reward_mean": 43.0}}
    figure = curves.draw({"run": ({}, ROWS, [{"iteration": 0, **mixed}])}, curves.PANELS)
    held_out, reward = [axis for axis in figure.axes if axis.get_visible()]
    assert "held-out reward_mean" in held_out.get_title() and reward.get_title() == "reward"
    assert [line.get_ydata().tolist() for line in held_out.lines] == [[41.0], [43.0]]


REFUSED = [  # arguments, beginning of the line
    ("run --keys eval/acuracy", "--keys: no run has eval/acuracy; the closest are eval/accuracy, "),
    ("run --out x.xyz", "--out x.xyz: Format 'xyz' is not supported"),
    ("run --out run/settings.json/x.png", "--out run/settings.json/x.png: [Errno "),
    ("trl", "trl is not the folder of a run: [Errno 2]"),
]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run whose last line is still being written, and a folder of another tool."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl" / "checkpoint-32").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "settings.json", [{}])
    write_lines(tmp_path / "run" / "evaluations.jsonl", [])
    with open(write_lines(tmp_path / "run" / "metrics.jsonl", ROWS), "a") as log:
        log.write('{"iteration": 3, "losses')


@pytest.mark.extras
@pytest.mark.parametrize("words, expected", REFUSED)
def test_curves_refuse_in_one_line(words, expected, run_folder, monkeypatch):
    import curves

    monkeypatch.setattr(sys, "argv", ["curves.py", *words.split()])
    with pytest.raises(SystemExit) as refusal:
        curves.main()
    assert str(refusal.value).startswith(expected) and "\n" not in str(refusal.value)


@pytest.mark.extras
def test_curves_draw_a_run_that_is_being_written(run_folder, monkeypatch, capsys):
    import curves

    monkeypatch.setattr(sys, "argv", ["curves.py", "run", "--out", "pictures/x.png"])
    curves.main()
    assert capsys.readouterr().out == "pictures/x.png\n"


@pytest.mark.extras
def test_first_lines_show_only_what_differs():
    import curves

    other = [ROWS[0] | {"losses/ratio_max": 1.25, "losses/kl_ref": 0.5, "charts/rollout_seconds": 2.0}]
    table = curves.first_lines({"runs/a": ({}, ROWS, []), "runs/b": ({}, other, [])})
    cells = [line.split() for line in table.splitlines()]
    assert cells == [["a", "b"], ["losses/ratio_max", "1.5", "1.25"], ["losses/kl_ref", "0.5"]]
    assert "do not differ" in curves.first_lines({"a": ({}, ROWS, []), "b": ({}, ROWS, [])})


# ------------------------------------------------------------------------------------------ the page


@pytest.mark.extras
def test_the_page_has_every_line_of_any_two_scripts():
    """And its links lead somewhere, without a network: a [1] in the code has a difference 1 in the
    header."""
    import page

    text = page.build()
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    data = json.loads(data)
    for name in NAMES:
        lines = [html.unescape(re.sub(r"<[^>]+>", "", line)) for line in data["lines"][name]]
        assert lines == path_of(name).read_text().splitlines()
        colored = "".join(data["lines"][name])
        targets = re.findall('href="#(.+?)"', colored)
        assert set(targets) == set(re.findall('id="(.+?)"', colored)), name
    for left in NAMES:
        for right in NAMES:
            _, _, left_end, _, right_end = data["blocks"][f"{left},{right}"][-1]
            assert left_end == len(data["lines"][left])
            assert right_end == len(data["lines"][right])
    assert set(re.findall(r"&amp;right=([\w.]+)", text)) == set(NAMES[1:])
    assert not re.search(r"://|\ssrc=|@import|url\(", text)


# --------------------------------------------------------------------------------------- repair shop


def test_each_bug_applies_exactly_once():
    for bug in BUGS.values():
        original = path_of(bug["script"]).read_text()
        assert original.count(bug["old"]) == 1, bug["title"]
        changed = repair.changed(bug)
        assert changed != original
        compile(changed, bug["title"], "exec")
        assert max(map(len, changed.splitlines())) <= 104, bug["title"]  # or it would stand out
    assert f"has {len(BUGS)} bugs, one per entry" in (ROOT / "study" / "README.md").read_text()


def test_each_exercise_changes_one_line():
    text = (ROOT / "study" / "README.md").read_text()
    row = r"^\| \d \| `(\w+)\.py` \| `- (.+?)`<br>`\+ (.+?)` \|"
    exercises = re.findall(row, text, re.MULTILINE)
    assert len(exercises) == 6
    for script, old, new in exercises:
        original = path_of(script).read_text()
        assert original.count(old) == 1, old
        compile(original.replace(old, new), old, "exec")


def test_the_shop_lists_its_bugs_without_their_titles(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["repair.py", "--list"])
    repair.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{number:2}  {bug['script']}.py" for number, bug in BUGS.items()]
    monkeypatch.setattr(sys, "argv", ["repair.py"])
    with pytest.raises(SystemExit, match="2"):
        repair.main()


def test_a_bug_from_the_shop_is_found_and_fixed(monkeypatch, capsys, tmp_path):
    """Fixed in other words than the original's, which differ from it by rounding."""
    monkeypatch.setattr(repair, "SHOP", tmp_path)
    (number,) = [number for number, bug in BUGS.items() if bug["title"] == "Broadcast over the batch"]
    path = tmp_path / f"bug_{number}.py"
    monkeypatch.setattr(sys, "argv", ["repair.py", str(number)])
    repair.main()
    assert str(path) in capsys.readouterr().out
    text = path.read_text().replace(".sum(1) / length_B1", ".sum(1) / length_B1[:, 0]")
    text = text.replace("-objective_B1.sum() / num_sequences", "-(objective_B1 / num_sequences).sum()")
    path.write_text(text)
    sys.argv.append("--check")
    repair.main()
    assert capsys.readouterr().out.startswith("fixed: Broadcast over the batch.")


@functools.cache
def expected_of(script):
    return repair.behavior(path_of(script))


@pytest.mark.slow
@pytest.mark.parametrize("number", BUGS, ids=lambda number: BUGS[number]["title"])
def test_the_check_refuses_each_bug(number, tmp_path):
    bug = BUGS[number]
    path = tmp_path / "script.py"
    path.write_text(repair.changed(bug))
    found = repair.behavior(path)
    assert repair.differences(found, expected_of(bug["script"])) != []
