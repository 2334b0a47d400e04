"""study/microscope.py shows what the scripts do, and its words say what is seen."""

import statistics
import sys

import pytest
import torch

import microscope
import report


def test_a_group_in_numbers():
    """Rewards 1 0 0 0, answers of 3, 5, 4 and 2 tokens: A = 0.75 or -0.25, over a std of 0.5."""
    rows = {}
    for line in report.example()[2:]:
        name, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
        rows[name] = [float(number) for number in numbers]
    per_completion = [1 / 12, 1 / 20, 1 / 16, 1 / 8]
    for name in ("grpo", "gspo", "gmpo", "rspo", "sapo"):
        assert rows[name][:6] == pytest.approx([1.5, -0.5, *per_completion], rel=5e-3)
    for name in ("dapo", "cispo"):
        assert rows[name][:6] == pytest.approx([1.5, -0.5] + [1 / 14] * 4, rel=5e-3)
    assert rows["dr_grpo"][:6] == pytest.approx([0.75, -0.25] + [1 / 4 / 48] * 4, rel=5e-3)
    raw = [0.95**2, 0.95, 1.0] + [0.0] * 11  # ppo's, before they are whitened
    mean, std = statistics.mean(raw), statistics.pstdev(raw)
    expected = [(1 - mean) / std, (0 - mean) / std] + [1 / 14] * 4
    assert rows["ppo"][:6] == pytest.approx(expected, rel=5e-3)
    for numbers in rows.values():
        right, *wrong = numbers[6:]
        assert right == pytest.approx(numbers[0] * numbers[2], rel=1e-2)
        for pull, weight in zip(wrong, numbers[3:6], strict=True):
            assert pull == pytest.approx(numbers[1] * weight, rel=1e-2)


# ------------------------------------------------------------------------------------ the microscope


@pytest.mark.parametrize("name", ["negative", "clip", "group", "router"])
def test_a_panel_shows_the_numbers_of_the_scripts(name):
    found = microscope.PANELS[name]()
    drawn = microscope.read(name)
    for plot, lines in zip(drawn, found, strict=True):
        assert list(plot) == list(lines)
        for label, line in lines.items():
            assert len(plot[label]) == len(line)
            for point, expected in zip(plot[label], line, strict=True):
                assert point == pytest.approx(expected, rel=1e-3, abs=1e-6), label


@pytest.mark.extras
def test_the_command_prints_question_answer_and_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(microscope, "RESULTS", tmp_path)
    monkeypatch.setattr(microscope, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["microscope.py", "group"])
    microscope.main()
    printed = capsys.readouterr().out
    assert printed.startswith("Who is heard in a group?\nWith the mean alone")
    assert str(tmp_path / "microscope_group.png") in printed
    assert (tmp_path / "microscope_group.png").stat().st_size > 10_000


def test_an_unknown_panel_is_an_error_that_lists_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["microscope.py", "grup"])
    with pytest.raises(SystemExit):
        microscope.main()
    assert "no panel grup; there are rare, entropy," in capsys.readouterr().err


def test_a_policy_that_is_a_table_learns():
    """The first rollout of the panels `rare` and `entropy`. Without a clip the right answer grows most;
    with one it passes 1.2 times its probability, since wrong answers are pushed down."""
    probs, rewards = (torch.tensor(values, dtype=torch.float64) for values in microscope.RARE)
    drawn = microscope.read("rare")[0]
    grown = {}
    for label, (script, flags) in microscope.OBJECTIVES.items():
        grown[label] = microscope.train(script, flags, probs, rewards, rollouts=1, seed=0)[1, 0].item()
        assert drawn[label][1][1] == pytest.approx(grown[label], rel=0.2)
    sizes = list(grown.values())
    slowest = sizes.pop()
    assert 0.02 < slowest < 0.0225
    assert sizes == sorted(sizes) and 0.024 < sizes[0] < 0.03 and sizes[-1] > 0.5


def test_how_fast_a_rare_answer_grows():
    after_five = {label: line[5][1] for label, line in microscope.read("rare")[0].items()}
    assert [round(p, 2) for p in after_five.values()][:4] == [0.15, 0.29, 0.41, 0.65]
    assert min(after_five["sapo"], after_five["cispo"]) > 0.99
    assert after_five["0.02 x 1.2^n"] == pytest.approx(0.02 * 1.2**5, rel=1e-3)


def test_entropy_at_equal_success():
    """Interpolated, where one answer in twenty is wrong."""
    _, _, at_equal_success = microscope.read("entropy")
    left = []
    for label in ("clip at 1.2 (grpo)", "clip at 1.28 (dapo)", "clip at 1.4"):
        wrong, entropy = torch.tensor(at_equal_success[label]).T
        after = int((wrong < 0.05).nonzero()[0])
        share = (0.05 / wrong[after - 1]).log() / (wrong[after] / wrong[after - 1]).log()
        left.append(round(torch.lerp(entropy[after - 1], entropy[after], share).item(), 2))
    assert left == [0.9, 0.86, 0.81]
