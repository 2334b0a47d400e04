"""study/microscope.py shows what the scripts do."""

import statistics

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
