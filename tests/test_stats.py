"""study/stats.py compares runs by seed."""

import pytest
from conftest import write_lines

import stats

INTERVALS = [  # differences, and their mean with its interval
    # 0.1, give or take 0.01: 2.776 0.01 / sqrt(5)
    ([0.11, 0.09, 0.1, 0.11, 0.09], "+0.100 ± 0.012"),
    ([0.1, 0.3] * 10, "+0.200 ± 0.048"),  # 2.093 0.1026 / sqrt(20)
    ([0.0, 0.0], "+0.000 ± 0.000"),
    ([0.25], "+0.250"),
]


@pytest.mark.parametrize("deltas, expected", INTERVALS)
def test_the_interval_is_that_of_students_t(deltas, expected):
    assert stats.interval(deltas) == expected


GRPO = {"script": "grpo", "seed": 1, "iterations": 2, "lr": 0.1, "kl_coef": 0.04}
SAPO = {"script": "sapo", "seed": 1, "iterations": 2, "lr": 0.1, "tau_neg": 1.05}
RUNS = {  # folder: settings, accuracies of rollouts, when it was evaluated, held-out accuracy
    "a": (GRPO, (0.25, 0.75), (0, 2), 0.8),
    "a2": (GRPO | {"seed": 2}, (1.0, 0.8), (0, 2), 0.9),
    "b": (GRPO, (0.0, 0.5), (0, 2), 0.6),
    "b2": (GRPO | {"seed": 2}, (0.8, 0.9), (0, 2), 0.8),
    "b3": (GRPO | {"seed": 3}, (0.0, 0.0), (0, 2), 0.1),
    "sapo": (SAPO, (0.25, 0.75), (0, 2), 0.8),
    "longer": (GRPO | {"iterations": 4, "lr": 0.2}, (0.5,) * 4, (0, 2, 4), 0.6),
    "early": (GRPO | {"iterations": 4}, (0.0, 0.5), (0, 2), 0.6),
    "begun": (GRPO, (), (0,), 0.6),
    "running": (GRPO | {"iterations": 4}, (0.5,) * 2, (0, 2), 0.6),
    "resumed": (GRPO | {"iterations": 9}, (0.5,) * 3, (0, 2), 0.6),
}
IS_GREEDY = {"running"}  # its last evaluation is not the one at the end
ONE = "rollout accuracy     +0.250\nrollout reward       +0.500\ngreedy accuracy      +0.200\n"
TWO = "greedy accuracy      +0.15 ± 0.64\n"  # 0.2 and 0.1: 12.706 0.0707 / sqrt(2)
COMPARED = [  # runs, the runs that are subtracted, what is printed
    ("a", "b", f"difference, paired by seed: 1\n{ONE}"),
    ("a2 a", "b3 b b2", TWO),
    ("a", "longer", "different flags: iterations (2, not 4), lr (0.1, not 0.2)\n"),
    (
        "a",
        "sapo",
        "different flags: kl_coef (only grpo's), script (grpo, not sapo), tau_neg (only sapo's)\n",
    ),
    ("a", "early", "early ended after iteration 2 of 4\n"),
    ("a", "early", ONE),
    ("a longer", "b", "seed 1 twice: a and longer"),
    ("a2", "b", "no seed is in both"),
    ("a", "begun", "begun is not finished: 0 of 2 iterations"),
    ("a", "running", "running is not finished: 2 of 4 iterations"),
    ("a", "resumed", "resumed is not finished: 3 of 9 iterations"),
    ("a", "torn", "torn is not finished: 1 of 2 iterations"),
    ("a", "nowhere", "nowhere is not the folder of a run: [Errno 2]"),
]


def write_run(folder, settings, accuracies, evaluated, last):
    folder.mkdir()
    write_lines(folder / "settings.json", [settings | {"run_dir": folder.name}])
    rows = []
    for iteration, accuracy in enumerate(accuracies, start=1):
        numbers = {"rollout/accuracy": accuracy, "rollout/reward_mean": 2 * accuracy}
        rows.append({"iteration": iteration, **numbers})
    write_lines(folder / "metrics.jsonl", rows)
    ways = ["greedy"] if folder.name in IS_GREEDY else ["greedy", "sampled"]
    results = {way: {"accuracy": last} for way in ways}
    write_lines(folder / "evaluations.jsonl", [{"iteration": i, **results} for i in evaluated])


@pytest.mark.parametrize("ours, theirs, expected", COMPARED)
def test_two_sets_of_runs_are_compared_by_seed(ours, theirs, expected, tmp_path, monkeypatch, capsys):
    """Or refused in one line."""
    for name, run in RUNS.items():
        write_run(tmp_path / name, *run)
    write_run(tmp_path / "torn", *RUNS["b"])
    log = tmp_path / "torn" / "metrics.jsonl"
    log.write_text(log.read_text()[:-1])  # the last line is still being written
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["stats.py", *ours.split(), "--minus", *theirs.split()])
    text = ""
    try:
        stats.main()
    except SystemExit as refusal:
        text = f"{refusal.code}"
        assert "\n" not in text
    assert expected in capsys.readouterr().out + text
