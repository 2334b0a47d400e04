"""study/stats.py compares runs by seed."""

import pytest
from conftest import write_lines

import stats

INTERVALS = [  # ours, theirs, and the mean of their differences with its interval
    # 0.1 more, give or take 0.01: 2.776 0.01 / sqrt(5)
    ([0.21, 0.59, 1.0, 0.41, 0.79], [0.1, 0.5, 0.9, 0.3, 0.7], "+0.100 ± 0.012"),
    ([0.1, 0.3] * 10, [0.0] * 20, "+0.200 ± 0.048"),  # 2.093 0.1026 / sqrt(20)
    ([0.5, 0.7], [0.5, 0.7], "+0.000 ± 0.000"),
    ([0.5], [0.25], "+0.250"),
]


@pytest.mark.parametrize("ours, theirs, expected", INTERVALS)
def test_the_interval_is_that_of_paired_differences(ours, theirs, expected):
    assert stats.interval(ours, theirs) == expected


RUNS = {  # folder: seed, iterations, lr, mean rewards and accuracies of two rollouts, last evaluation
    "a": (1, 2, 0.1, (0.5, 1.0), (0.25, 0.75), 2, 0.8),
    "b": (1, 2, 0.1, (0.25, 0.5), (0.0, 0.5), 2, 0.6),
    "c": (2, 2, 0.1, (0.0, 0.0), (0.0, 0.0), 2, 0.0),
    "longer": (1, 4, 0.2, (0.25, 0.5), (0.0, 0.5), 4, 0.6),
    "stopped": (1, 4, 0.1, (0.5, 1.0), (0.5, 0.5), 2, 0.8),
}
SAME = "paired by seed: 1\nrollout accuracy     +0.250\nrollout reward       +0.375\n"
COMPARED = [  # runs, the runs that are subtracted, what is printed
    ("a c", "b", SAME + "greedy accuracy      +0.200\n"),
    ("a", "longer", "different flags: iterations (2, not 4), lr (0.1, not 0.2)\n"),
    ("a longer", "b", "seed 1 twice: a and longer"),
    ("c", "b", "no seed is in both"),
    ("a", "stopped", "stopped is not finished: its last evaluation is after iteration 2 of 4"),
    ("a", "nowhere", "nowhere has no run, or only its beginning"),
]


@pytest.mark.parametrize("ours, theirs, expected", COMPARED)
def test_two_sets_of_runs_are_compared_by_seed(ours, theirs, expected, tmp_path, monkeypatch, capsys):
    """Or refused in one line."""
    for name, (seed, iterations, lr, rewards, accuracies, last, accuracy) in RUNS.items():
        folder = tmp_path / name
        folder.mkdir()
        settings = {"script": name, "run_dir": name, "seed": seed, "iterations": iterations, "lr": lr}
        write_lines(folder / "settings.json", [settings])
        pairs = zip(rewards, accuracies, strict=True)
        rows = [{"rollout/reward_mean": x, "rollout/accuracy": y} for x, y in pairs]
        write_lines(folder / "metrics.jsonl", rows)
        evaluation = {"iteration": last, "greedy": {"accuracy": accuracy}}
        write_lines(folder / "evaluations.jsonl", [evaluation])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["stats.py", *ours.split(), "--minus", *theirs.split()])
    text = ""
    try:
        stats.main()
    except SystemExit as refusal:
        text = f"{refusal.code}"
        assert "\n" not in text
    assert expected in capsys.readouterr().out + text
