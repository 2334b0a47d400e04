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


def test_two_sets_of_runs_are_compared_by_seed(tmp_path, monkeypatch, capsys):
    for name, seed, reward, accuracy in (("a", 1, 0.5, 0.8), ("b", 1, 0.25, 0.6), ("c", 2, 0.0, 0.0)):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder / "settings.json", [{"seed": seed}])
        write_lines(
            folder / "metrics.jsonl", [{"rollout/reward_mean": x} for x in (reward, 2 * reward)]
        )
        write_lines(folder / "evaluations.jsonl", [{"greedy": {"accuracy": accuracy}}])
    words = [str(tmp_path / name) for name in ("a", "c")]
    monkeypatch.setattr("sys.argv", ["stats.py", *words, "--minus", str(tmp_path / "b")])
    stats.main()
    lines = [line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines()[1:]]
    assert {name.strip(): x for name, x in lines} == {"reward": "+0.375", "greedy accuracy": "+0.200"}


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
