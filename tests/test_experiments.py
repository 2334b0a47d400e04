"""The experiments of study/: their statistics, their CSVs, a sweep."""

import importlib

import pytest
from conftest import SUMS, write_lines

from plumbing.args import parse_args

import stats
import sweep
from experiments import EXPERIMENTS, Experiment, Job


def test_area_of_a_broken_line(monkeypatch):
    """The accuracies 0.2, 0.6 and 1.0 were reached after 0, 100 and 300 completions."""
    pairs = [(100, 0.2), (300, 0.6), (350, 1.0)]
    lines = [{"generated": x, "rollout/accuracy": y} for x, y in pairs]
    monkeypatch.setattr(sweep, "END", 100)
    assert sweep.area(lines) == pytest.approx(0.4)
    monkeypatch.setattr(sweep, "END", 200)
    assert sweep.area(lines) == pytest.approx((40 + 70) / 200)  # it ends between two points
    monkeypatch.setattr(sweep, "END", 351)
    assert sweep.area(lines) == ""


def test_completions_are_counted_with_those_that_dapo_threw_away():
    lines = [{"rollout/groups_generated": 6.0}, {"rollout/groups_generated": 4.0}]
    sweep.count_completions(lines, {"prompts_per_iteration": 4, "group_size": 8})
    assert [line["generated"] for line in lines] == [48, 80]


def test_the_largest_drop_may_take_several_iterations():
    lines = [{"rollout/accuracy": y} for y in (0.5, 0.7, 0.6, 0.4, 0.9, 0.8)]
    assert sweep.largest_drop(lines) == pytest.approx(0.3)


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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_scripts_take_the_flags_of_an_experiment_and_its_rows_are_of_them(name):
    """Each row names its commit."""
    for job in EXPERIMENTS[name].jobs:
        words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags.split()]
        parse_args(importlib.import_module(job.script).Args, words)
    missing = {job[:3]: job.flags for job in EXPERIMENTS[name].jobs}
    for row in stats.read_csv(name):
        assert missing.pop(sweep.key_of(row)) == row["flags"] and len(row["commit"]) == 7


def test_run_a_sweep(monkeypatch, tmp_path):
    """One run ends normally, the other one fails."""
    flags = f"--iterations 3 --dataset {SUMS} --prompts_per_iteration 4 --num_held_out 8"
    whole = Job("dapo", "whole", 1, f"{flags} --max_sampling_rounds 2", "dapo.py")
    fails = Job("grpo", "fails", 1, f"{flags} --lr 1e9", "grpo.py")
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(stats, "RESULTS", tmp_path)
    small = Experiment([fails, whole], {"groups": ("rollout/groups_generated", 0)})
    monkeypatch.setattr(sweep, "EXPERIMENTS", {"small": small})
    assert sweep.sweep("small", 1) == 1
    (row,) = stats.read_csv("small")
    assert (row["variant"], row["flags"]) == ("whole", whole.flags)
    assert 0 <= float(row["after_sampled_accuracy"]) <= 1
    assert float(row["groups"]) > 4
    assert "is not finite" in (tmp_path / "runs" / "small" / "grpo-fails-1" / "log").read_text()
    assert not (tmp_path / "runs" / "small" / "dapo-whole-1" / "run").exists()
    small.jobs[:] = [whole]
    monkeypatch.setattr(sweep, "run", None)
    assert sweep.sweep("small", 1) == 0  # nothing is run again
