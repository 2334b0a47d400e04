"""What the evidence rests on: statistics, the list of claims, the experiments, the probe, a run."""

import csv
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import cispo
import dr_grpo
from plumbing.args import parse_args

sys.path.append(str(ROOT / "benchmarks"))
import claims
import experiments
import gradients
import stats
import sweep

RESULTS = ROOT / "benchmarks" / "results"


def test_area_of_a_broken_line():
    points = [(0, 0.2), (100, 0.6), (300, 1.0)]
    assert stats.area(points, 100) == pytest.approx(0.4)
    assert stats.area(points, 200) == pytest.approx((40 + 70) / 200)  # it ends between two points


def test_the_largest_drop_is_below_the_highest_value_before_it():
    rows = [{"accuracy": value} for value in (0.5, 0.8, 0.3, 0.9, 0.7)]
    assert stats.drops(rows) == pytest.approx([0, 0, 0.5, 0, 0.2])


def test_a_column_at_an_accuracy_is_interpolated_where_it_is_first_reached():
    """Trailing means of five are 0.2, 0.4, 0.3 and 1.0, 2.0, 3.0."""
    accuracy = [0.0, 0.2, 0.2, 0.4, 0.2, 1.0, -0.3]
    entropy = [1.0, 1.0, 1.0, 1.0, 1.0, 6.0, 6.0]
    rows = [{"accuracy": a, "entropy": e} for a, e in zip(accuracy, entropy, strict=True)]
    assert stats.at_accuracy(rows, "entropy", 0.35) == pytest.approx(1.75)
    assert stats.at_accuracy(rows, "entropy", 0.1) == pytest.approx(1.0)  # from the beginning
    assert stats.at_accuracy(rows, "entropy", 0.5) is None


def test_accuracy_is_that_of_the_weights_before_the_update():
    rows = [
        {"x": 100, "generated": 100, "accuracy": 0.2},
        {"x": 250, "generated": 150, "accuracy": 0.6},
    ]
    assert stats.rollout_points(rows) == [(0, 0.2), (100, 0.6)]


def write(path, rows):
    with open(path, "w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_runs_are_read_when_all_are_there_and_one_that_broke_off_counts(monkeypatch, tmp_path):
    """As accuracy 0 from there on; its other columns are the mean of what there is."""
    monkeypatch.setattr(stats, "RESULTS", tmp_path)
    tiny = experiments.Experiment(2, "", {("grpo", "x"): ""})
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", tiny)
    key = {"script": "grpo", "variant": "x"}
    rows = [key | {"seed": seed, "after_sampled_accuracy": seed or ""} for seed in (1, 2)]
    curve = [{"iteration": i, "generated": 10, "accuracy": 0.8, "entropy": 2.0} for i in (1, 2, 3)]
    short = [key | {"seed": 2} | row for row in curve[:1]]
    write(tmp_path / "tiny_curves.csv", [*(key | {"seed": 1} | row for row in curve), *short])
    with pytest.raises(stats.NotRunYet):
        stats.curves("tiny")
    write(tmp_path / "tiny.csv", rows[:1])
    with pytest.raises(stats.NotRunYet):
        stats.curves("tiny")
    write(tmp_path / "tiny.csv", rows)
    broken = stats.curves("tiny")["grpo", "x"][2]
    assert [row["accuracy"] for row in broken] == [0.8, 0, 0]
    assert [row["x"] for row in broken] == [10, 20, 30]
    assert stats.tail(broken, "accuracy") == pytest.approx(0.8 / 3)
    assert stats.tail(broken, "entropy") == 2.0


@pytest.mark.parametrize(
    "freedom, quantile", [(1, 12.706205), (2, 4.302653), (4, 2.776445), (7, 2.364624), (39, 2.022691)]
)
def test_students_t(freedom, quantile):
    assert stats.t_tail(quantile, freedom) == pytest.approx(0.05, abs=1e-6)
    assert stats.t_quantile(freedom) == pytest.approx(quantile, abs=1e-5)


def test_interval_and_p_value_are_those_of_paired_differences():
    low = [0.1, 0.5, 0.9, 0.3, 0.7]
    high = [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 more, give or take 0.01
    mean, half = stats.difference(high, low)
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(2.776445 * 0.01 / 5**0.5, rel=1e-5)
    assert stats.interval(high, low) == "+0.100 ± 0.012"
    assert stats.p_value(high, low) == stats.p_value(low, high) < 1e-4
    assert stats.p_value(low, low) == 1


def test_holm_multiplies_by_the_number_that_is_left_and_never_falls():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.6, 0.7]) == [1, 1]


# ---------------------------------------------------------------------------------------- the claims


LOW, HIGH = [0.50, 0.52, 0.51, 0.50, 0.53], [0.60, 0.63, 0.61, 0.61, 0.62]


def found(monkeypatch, *comparisons):
    monkeypatch.setattr(claims, "COMPARISONS", list(comparisons))
    return claims.findings()


def comparison(ours, theirs, **more):
    keywords = {"claim": "k", "regime": "x", "words": "y", "sign": 1} | more
    return claims.Comparison(values=lambda: (ours, theirs), **keywords)


def not_run():
    raise stats.NotRunYet("x")


def test_verdicts_are_four_words(monkeypatch):
    shut = claims.Gate("tokens", lambda: 0.001, 0.003)
    opened = claims.Gate("tokens", lambda: 0.01, 0.003)
    results = found(
        monkeypatch,
        comparison(HIGH, LOW),
        comparison(HIGH, LOW, sign=-1),
        comparison([0.1, 0.3, 0.2], [0.2, 0.1, 0.25]),
        comparison(HIGH, LOW, gate=shut),
        comparison(HIGH, LOW, gate=opened),
        comparison(HIGH, LOW, is_primary=False),
    )
    words = [result.verdict for result in results]
    assert words[:3] == ["holds", "contradicted", "no difference seen"]
    assert words[3] == "not tested here (tokens: 0.10%)" and results[3].interval == ""
    assert words[4] == "holds"
    assert words[5] == "" and results[5].p is None and results[5].interval  # secondary: no verdict


def test_a_verdict_depends_on_how_many_primaries_there_are(monkeypatch):
    """p = 0.04 alone. Secondary ones do not count; those that a gate shuts out, or without runs, do."""
    ours, theirs = [0.1, 0.2, 0.15, 0.3], [0.0, 0.11, 0.1, 0.1]
    assert 0.02 < stats.p_value(ours, theirs) < 0.05
    alone = comparison(ours, theirs)
    equal = comparison(LOW, HIGH[::-1], is_primary=False)
    shut = comparison(LOW, LOW, gate=claims.Gate("", lambda: 0, 1))
    missing = comparison(LOW, LOW)._replace(values=not_run)
    assert found(monkeypatch, alone, equal)[0].verdict == "holds"
    for other in (comparison(LOW, LOW), shut, missing):
        assert found(monkeypatch, alone, other)[0].verdict == "no difference seen"
    assert found(monkeypatch, missing)[0].verdict == "not run yet"


def test_runs_that_do_not_reach_an_accuracy_are_not_compared_there(monkeypatch):
    rows = {1: [{"accuracy": 0.2, "entropy": 1.0}] * 9}
    monkeypatch.setattr(stats, "read_curves", lambda name: {("dapo", "x"): rows})
    values = claims.against(claims.at_equal_accuracy, "hard", ("dapo", "x"), ("dapo", "x"), "entropy")
    (result,) = found(monkeypatch, comparison(LOW, LOW)._replace(values=values))
    assert result.verdict.startswith("not tested here (not all runs reach")


def test_every_claim_has_one_primary_comparison_in_a_regime():
    primaries = [(c.claim, c.regime) for c in claims.COMPARISONS if c.is_primary]
    assert len(primaries) == len(set(primaries))
    assert {claim for claim, _ in primaries} == set(claims.CLAIMS) - {"a"}  # (a) is an identity
    assert all(each.claim in claims.CLAIMS for each in claims.COMPARISONS)


def test_every_verdict_that_is_printed_is_that_of_a_primary():
    rows = claims.table()[2:]
    for row, each in zip(rows[1:], claims.findings(), strict=True):  # the first is (a)
        *_, verdict = row.removesuffix(" |").split(" | ")
        if not each.comparison.is_primary:
            assert verdict.strip() in ("", "not run yet"), row


def test_an_identity_is_seen_where_ten_iterations_agree_exactly(monkeypatch):
    rewards = {script: [0.1 * i for i in range(20)] for script in ("grpo", *claims.ONE, *claims.OTHERS)}
    rewards["cispo"][3] = 0.9
    rewards["gspo"][15] += 0.004  # rounding, after ten

    def read_curves(name):
        return {(k, "one"): {1: [{"reward": value} for value in rewards[k]]} for k in rewards}

    monkeypatch.setattr(stats, "read_curves", read_curves)
    word, largest = claims.identity()
    assert word == "an identity, seen" and largest["gspo"] == pytest.approx(0.004)
    rewards["sapo"][2] += 1e-9
    assert claims.identity()[0] == "an identity, not seen"


# ------------------------------------------------------------------------------------------- the CSVs


def sweep_names():
    return sorted(path.stem for path in RESULTS.glob("*.csv") if path.stem in experiments.EXPERIMENTS)


def test_every_csv_has_a_writer():
    """An experiment, or a script in benchmarks/ that names it."""
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    for path in RESULTS.glob("*.csv"):
        name = path.stem.removesuffix("_curves")
        if name not in experiments.EXPERIMENTS:
            assert f"{name}.csv" in scripts, path.name


@pytest.mark.parametrize("name", sweep_names())
def test_every_row_is_of_an_experiment_and_names_its_code(name):
    jobs = {(job.script, job.variant, str(job.seed)): job for job in sweep.jobs_of(name)}
    with open(RESULTS / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert jobs[row["script"], row["variant"], row["seed"]].flags == row["flags"]
        assert len(row["commit"]) >= 7 and len(row["code"]) == 12
    assert len({(row["script"], row["variant"], row["seed"]) for row in rows}) == len(rows)


def test_the_code_hash_sees_a_script_and_the_plumbing(monkeypatch, tmp_path):
    (tmp_path / "plumbing").mkdir()
    for name in ("grpo.py", "common.py", "plumbing/run.py"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    hashes = {sweep.code_hash("grpo")}
    for name in ("grpo.py", "common.py", "plumbing/run.py"):
        (tmp_path / name).write_text("changed")
        hashes.add(sweep.code_hash("grpo"))
    assert len(hashes) == 4


def test_the_picture_of_the_nine_is_what_the_scripts_give():
    drawn = gradients.read()
    found = gradients.columns()
    assert list(drawn) == list(found)
    for column, values in found.items():
        assert drawn[column] == pytest.approx(values, rel=1e-3, abs=1e-6), column
    for name in gradients.PANELS:  # dotted: only where all tokens together are another matter
        parts = drawn[f"{name} +1 1"] != drawn[f"{name} +1 10"]
        assert parts == (name in ("gspo", "gmpo", "rspo"))


def test_every_experiment_has_arguments_that_its_scripts_take(monkeypatch):
    folders = []
    for name in experiments.EXPERIMENTS:
        for job in sweep.jobs_of(name):
            folders.append(job.folder)
            words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags.split()]
            monkeypatch.setattr(sys, "argv", [f"{job.script}.py", *words])
            parse_args(importlib.import_module(job.script).Args)
    assert len(folders) == len(set(folders)) > 400


def test_of_two_values_of_a_flag_the_later_one_counts():
    text = sweep.merged("--lr 1e-4 --ppo_mask --eval_every 2", "", "--eval_every 1 --kl_coef 0")
    assert text == "--lr 1e-4 --ppo_mask --eval_every 1 --kl_coef 0"


def test_what_runs_need_is_made_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    commands = []

    def make(command, check):
        commands.append(command[1:])
        (tmp_path / command[-1]).mkdir(parents=True)

    monkeypatch.setattr(sweep.subprocess, "run", make)
    sweep.make_what_is_needed(sweep.jobs_of("nine"))
    assert commands == []
    for _ in range(2):
        sweep.make_what_is_needed([*sweep.jobs_of("overlong"), *sweep.jobs_of("replay")])
    long_addition = ["benchmarks/long_addition.py", "runs/long_addition.tmp"]
    rambling = ["tiny_moe/train.py", "--direct", "0.1", "--worked", "0.3", "runs/rambling.tmp"]
    assert commands == [rambling, long_addition]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"rambling", "long_addition"}


def test_equally_improbable_tokens_are_inside_of_the_same_sign_and_near():
    outside = torch.tensor([[True, False, False, False], [False, True, False, False]])
    logprobs = torch.tensor([[-2.0, -1.9, -0.1, -2.5], [-1.0, -3.0, -1.2, -2.8]])
    advantages = torch.tensor([[1.0], [-1.0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    matched = sweep.equally_improbable(outside, logprobs, advantages, mask)
    assert matched.nonzero().tolist() == [[0, 1], [1, 3]]
    mask[1, 3] = False
    matched = sweep.equally_improbable(outside, logprobs, advantages, mask)
    assert matched.nonzero().tolist() == [[0, 1], [1, 2]]
    matched = sweep.equally_improbable(mask, logprobs, advantages, mask)  # nothing is left inside
    assert not matched.any()


def test_the_probe_changes_no_gradient_and_finds_what_the_clip_drops():
    """The dropped tokens' share of the gradient is 0 under GRPO's clip, and between 0 and 1 where
    nothing is clipped."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6, generator=generator) * 0.5)
    model = SimpleNamespace(parameters=lambda: [weight])
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    mask = torch.ones(4, 6, dtype=torch.bool)
    inputs = (weight * 1.0, torch.zeros(4, 6), advantages, mask)
    plain_loss, _ = dr_grpo.policy_loss(*inputs, max_new_tokens=6)
    loss, stats_of = sweep.probe(dr_grpo.policy_loss, [model])(*inputs, max_new_tokens=6)
    (plain_gradient,) = torch.autograd.grad(plain_loss, weight, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert torch.equal(gradient, plain_gradient)
    outside = (weight.exp() - 1) * advantages > 0.2
    assert stats_of["outside"] == outside.float().mean() > 0
    assert stats_of["outside_gradient"] == 0 < stats_of["matched_gradient"]
    _, stats_of = sweep.probe(cispo.policy_loss, [model])(*inputs)
    assert 0 < stats_of["outside_gradient"] < 1
    # The control drops as many other tokens, and keeps these.
    loss, _ = sweep.probe(cispo.policy_loss, leaves_out_matched=True)(*inputs)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert (gradient[outside] != 0).all() and (gradient == 0).sum() == outside.sum()


def test_runs_are_collected_with_what_no_script_logs(monkeypatch, tmp_path):
    """A run that ends as it should, and one that breaks off: that is a result too."""
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setattr(stats, "RESULTS", tmp_path)
    flags = "--device cpu --iterations 2 --prompts_per_iteration 4 --num_held_out 8"
    whole = sweep.Job("tiny", "grpo", "whole", 1, flags)
    broken = sweep.Job("tiny", "grpo", "broken", 1, f"{flags} --lr 1e9")
    assert sweep.run_all("tiny", [whole, broken], 1, "abc1234") == 0
    sweep.collect("tiny", [whole, broken])
    first, second = stats.table("tiny")
    assert first["ended"] == ""
    assert 0 <= first["after_sampled_accuracy"] <= 1
    assert first["generated"] == 64
    assert first["commit"] == "abc1234"
    assert first["code"] == sweep.code_hash("grpo")
    assert second["ended"].startswith("grpo.py: error: iteration 1: ")
    assert second["after_sampled_accuracy"] is None
    tiny = experiments.Experiment(1, "", {("grpo", "whole"): "", ("grpo", "broken"): ""})
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", tiny)
    rows = stats.curves("tiny")["grpo", "whole"][1]
    assert [row["x"] for row in rows] == [32, 64]
    for column in ("len_wrong", "log_ratio_p99", "outside"):
        assert all(row[column] is not None for row in rows)
    # Another machine has the rows and not the folders: nothing is run again, and the rows stay.
    before = {path.name: path.read_text() for path in tmp_path.glob("*.csv")}
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "elsewhere")
    sweep.run_all("tiny", [whole, broken], 1, "another")
    sweep.collect("tiny", [whole, broken])
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == before
    # What has ended with other flags is another run.
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    assert whole.result() and not whole._replace(flags=whole.flags + " --lr 1e-4").result()
    rows, curves = sweep.kept("tiny", [whole._replace(flags=whole.flags + " --lr 1e-4")])
    assert rows == curves == {}


def test_a_run_that_fails_for_another_reason_is_no_result(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    job = sweep.Job("tiny", "grpo", "x", 1, "--model nowhere")
    assert sweep.run_all("tiny", [job], 1, "abc1234") == 1
    assert job.result() is None
