"""The scripts as a user runs them, on a CPU and without a network."""

import dataclasses
import math

import pytest
import torch
from conftest import MORE, SCRIPTS, checkpoint_of, completes, interfere, metrics, read_lines
from conftest import resume, run

import dapo
import grpo
from plumbing.metrics import clock, pass_at_k
from plumbing.run import model_line


def keys(prefix, names):
    return {prefix + name for name in names.split()}


COMMON_KEYS = (
    keys("rollout/", "reward_mean reward_std accuracy truncated_frac response_len_mean")
    | keys("rollout/", "response_len_wrong no_answer_frac direct_frac")
    | keys("losses/", "policy_loss entropy approx_kl ratio_max")
    | keys("moe/", "aux_loss load_max")
    | keys("charts/", "grad_norm tokens_per_second rollout_seconds reward_seconds update_seconds")
    | keys("charts/", "evaluation_seconds")
    | keys("eval/", "accuracy response_len_mean")
)
OLD_POLICY = keys("losses/", "sequence_ratio_max first_step_ratio_error_max")
OLD_POLICY |= {"rollout/sampler_kl", "moe/expert_flip_frac"}
CLIPS = keys("losses/", "clipfrac_low clipfrac_high")
UNIFORM = {"rollout/frac_zero_std_groups"}
DAPO = "kept dropped_all_right dropped_all_wrong generated sampling_rounds"
VALUE = keys("losses/", "value_loss explained_variance kl_ref")
WEIGHTS = keys("rollout/weight_", "zero_frac mean effective_size")
EXTRA_KEYS = {
    "ppo": CLIPS | VALUE,
    "grpo": CLIPS | UNIFORM | {"losses/kl_ref"},
    "rspo": CLIPS | UNIFORM | keys("moe/", "router_shift router_floor_frac"),
    "sapo": UNIFORM | {"losses/gate_slope"},
    "dapo": CLIPS | UNIFORM | keys("rollout/groups_", DAPO),
    "more.deepseek_v32": CLIPS | UNIFORM | keys("losses/", "kl_ref offpolicy_mask_frac"),
    "more.mismatch": CLIPS | UNIFORM | {"losses/kl_ref"} | WEIGHTS,
    "more.reinforce": set(),
    "more.rloo": UNIFORM,
    "more.vapo": CLIPS | VALUE | {"losses/positive_lm_loss"},
}


def test_a_run_says_what_runs_where(tiny_policy, monkeypatch):
    """And why on the CPU, if nobody asked for it. On a GPU: test_gpu.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    line = "model: 223,680 parameters, float32, on cpu"
    assert model_line(grpo.Args(device="cpu"), tiny_policy, tiny_policy) == line
    assert model_line(grpo.Args(), tiny_policy, tiny_policy) == f"{line} (torch finds no GPU)"


def test_no_iterations_only_evaluate(tmp_path, monkeypatch):
    """Training may follow, if the run is resumed."""
    printed = completes("grpo", "--iterations", 0, "--run_dir", tmp_path)
    assert "before" in printed and "after" not in printed and metrics(tmp_path) == []
    (evaluation,) = read_lines(tmp_path / "evaluations.jsonl")
    assert evaluation["iteration"] == 0 and {"greedy", "sampled"} < set(evaluation)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "evaluate", lambda *_, **__: pytest.fail("evaluated again"))
        printed = completes("grpo", *resume(tmp_path, "--iterations", 0))
    assert "before" in printed
    assert read_lines(tmp_path / "evaluations.jsonl") == [evaluation]
    completes("grpo", *resume(tmp_path))
    first, last = read_lines(tmp_path / "evaluations.jsonl")
    assert first == evaluation and last["iteration"] == 1


def test_vapo_evaluates_without_pretraining_iterations(tmp_path):
    assert "before" in completes("more.vapo", "--iterations", 0, "--run_dir", tmp_path)
    assert metrics(tmp_path) == []


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_run_of_each_script_logs_sensible_numbers(name, tmp_path):
    flags = "--max_new_tokens 32 --eval_every 1 --iterations 2 --prompts_per_iteration 8".split()
    if name == "more.vapo":
        flags += ["--pretraining_iterations", 1]
    if name == "more.mismatch":
        flags += ["--rollout_dtype", "same"]
    completes(name, *flags, "--run_dir", tmp_path)
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [1, 2]
    evaluations = read_lines(tmp_path / "evaluations.jsonl")
    assert ["sampled" in line for line in evaluations] == [True, False, True]
    greedy = [line["greedy"]["accuracy"] for line in evaluations]
    assert greedy[1:] == [line["eval/accuracy"] for line in lines]
    for line in lines:
        expected = COMMON_KEYS | EXTRA_KEYS.get(name, CLIPS | UNIFORM) | {"iteration"}
        if name in ("more.reinforce", "more.rloo"):  # no ratio
            assert set(line) == expected
        else:
            assert set(line) == expected | OLD_POLICY
            # The first step's ratio is 1, since old log-probs and update share one forward.
            assert line["losses/first_step_ratio_error_max"] < 1e-4
            assert abs(line["rollout/sampler_kl"]) < 1e-4
        assert 0 < line["losses/entropy"] < math.log(17) and line["losses/approx_kl"] >= 0
        is_pretraining = name == "more.vapo" and line["iteration"] == 1  # of the critic alone
        assert (line["charts/grad_norm"] == 0) == is_pretraining
        assert 1 / 8 < line["moe/load_max"] <= 1 and line["moe/aux_loss"] >= 1.9
        if name == "dapo":
            kinds = ("dropped_all_right", "dropped_all_wrong", "kept", "generated")
            right, wrong, kept, generated = (line[f"rollout/groups_{kind}"] for kind in kinds)
            assert kept == 8 and generated == kept + right + wrong > kept


def test_dapo_ends_where_no_group_is_mixed(tmp_path, reward_file):
    """That iteration is logged, evaluated and saved, without an update; the last lines say why."""
    flags = ("--iterations", 3, "--max_sampling_rounds", 2, "--run_dir", tmp_path)
    printed = completes("dapo", *flags, "--reward", reward_file("return 0"))
    assert "\nended early, after iteration 1: too few mixed groups\n" in printed
    (line,) = metrics(tmp_path)
    assert line["rollout/groups_generated"] == 8 and "losses/policy_loss" not in line
    evaluations = read_lines(tmp_path / "evaluations.jsonl")
    assert [line["iteration"] for line in evaluations if "sampled" in line] == [0, 1]
    assert checkpoint_of(tmp_path).name == "checkpoint-000001"


def test_pass_at_k():
    """By hand: two of five answers to a problem are right, so three of ten pairs have no right one.
    No answer to another problem is right."""
    verdicts = ["correct", "wrong", "wrong", "correct", "wrong", *["wrong"] * 5]
    expected = {"pass@1": 2 / 5 / 2, "pass@2": 7 / 10 / 2, "pass@4": 1 / 2, "pass@5": 1 / 2}
    assert pass_at_k(verdicts, 5) == pytest.approx(expected, rel=1e-12)


def test_run_prints_each_of_the_first_five_iterations(tmp_path):
    printed = completes("grpo", "--iterations", 11, "--eval_every", 0, "--run_dir", tmp_path)
    lines = printed.partition("held-out\n")[2].splitlines()
    rows = [line.split() for line in lines if line.strip()]
    numbers = [row[0] for row in rows if row[0].isdigit()]
    assert numbers[:8] == ["0", "1", "2", "3", "4", "5", "10", "11"]
    (line,) = (line for line in metrics(tmp_path) if line["iteration"] == 11)
    seconds = sum(value for key, value in line.items() if key.endswith("_seconds"))
    assert ["11", f"{seconds:.1f}"] in [row[:2] for row in rows]


def test_run_without_a_terminal_says_after_one_iteration_how_long_the_others_will_take(
    tmp_path, monkeypatch
):
    interfere(monkeypatch, grpo.Run, "write_log", lambda *_: clock.seconds.update(rollout=90))
    printed = completes("grpo", "--iterations", 3, "--eval_every", 0, "--run_dir", tmp_path)
    assert printed.count("note: the other 2 iterations will take about 3 minutes") == 1


def test_run_help_explains_every_flag(monkeypatch):
    """Those of the script come first."""
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(run("dapo", "--help").stdout.split())
    assert f"Trains a language model with {dapo.__doc__.splitlines()[0]}" in text
    for field in dataclasses.fields(dapo.Args):
        assert field.metadata["help"] in text
        assert f"--{field.name} " in text or f"--{field.name}, --no-{field.name} " in text
    assert "[0: a quarter of the cap] (default: 0)" in text
    first = [text.index(f"--{name}") for name in dapo.Args.__annotations__]
    assert max(first) < text.index("--model ")


DEFAULT = ("--dataset", "addition", "--num_held_out", 256)


def accuracies(result):
    """Held-out accuracy from the table: greedy before and after, sampled before and after."""
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("accuracy"))
    return [float(number) for number in row[1:]]


def test_run_grpo_learns_in_five_iterations(tmp_path):
    flags = ("--eval_samples", 2, "--eval_every", 0, "--run_dir", tmp_path)
    result = run("grpo", *DEFAULT, "--iterations", 5, *flags)
    assert result.returncode == 0, result.stderr
    _, greedy_after, before, after = accuracies(result)
    assert after >= before + 0.2 and greedy_after >= 0.9
    last = read_lines(tmp_path / "evaluations.jsonl")[-1]
    assert last["sampled"]["pass@2"] > last["sampled"]["pass@1"] == pytest.approx(after, abs=1e-3)


LEARNING = [(name, "float32") for name in [*SCRIPTS, *MORE]]
LEARNING += [("grpo", "bfloat16"), ("ppo", "bfloat16"), ("rspo", "bfloat16")]  # own models and routers


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", LEARNING)
def test_run_every_script_learns_by_default(name, dtype, tmp_path):
    result = run(name, *DEFAULT, "--run_dir", tmp_path, "--dtype", dtype)
    assert result.returncode == 0, result.stderr
    greedy_before, greedy_after, _, _ = accuracies(result)
    assert greedy_after >= max(0.9, greedy_before + 0.4)
    assert max(line.get("losses/first_step_ratio_error_max", 0) for line in metrics(tmp_path)) < 1e-4
