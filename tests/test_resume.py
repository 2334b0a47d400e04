"""A run that is killed at any moment and resumed has the same metrics and, bit for bit, the same
weights and optimizer state. A run that ends by a signal or NaN says so, and can go on."""

import pytest
import torch
from conftest import SUMS, checkpoint_of, flags_it_has, forked, metrics, resume, run
from safetensors.torch import load_file

import grpo

FLAGS = """--prompts_per_iteration 8 --group_size 4 --max_new_tokens 16 --num_minibatches 2
--eval_every 2 --iterations 5 --save_every 1 --num_held_out 8""".split()


def flags_of(name, folder, *more):
    own = ["--prompts_per_iteration", "32"] if name in ("ppo", "more.reinforce") else []
    own += ["--dataset", str(SUMS), "--run_dir", str(folder), *map(str, more)]
    return [*flags_it_has(name, FLAGS), *own]


def as_lists(part):
    """A state_dict with lists instead of tensors, which == compares bit for bit."""
    if isinstance(part, dict):
        return {key: as_lists(value) for key, value in part.items()}
    return part.tolist() if isinstance(part, torch.Tensor) else part


def outcome(folder):
    """(metrics without times, other logs, weights, the rest of the checkpoint)"""
    times = ("_seconds", "_per_second")
    rows = [{key: row[key] for key in row if not key.endswith(times)} for row in metrics(folder)]
    logs = [(folder / name).read_text() for name in ("samples.jsonl", "evaluations.jsonl")]
    checkpoint = checkpoint_of(folder)
    saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True)
    del saved["log_sizes"]  # times differ
    return rows, logs, as_lists(load_file(checkpoint / "model.safetensors")), as_lists(saved)


def check(name, troubles, tmp_path, *more):
    """A run with these troubles ends like one without. Once there is a settings.json, the folder alone
    says how the run goes on."""
    assert run(name, *flags_of(name, tmp_path / "whole", *more)).returncode == 0
    folder = tmp_path / "parts"
    for trouble in [*troubles, None]:
        flags = flags_of(name, folder, *more)
        if (folder / "settings.json").exists():
            flags = ["--run_dir", folder]
        result = forked(name, *flags, "--resume", trouble=trouble)
        assert result.code == (-9 if trouble else 0), (trouble, result.stderr)
    assert outcome(folder) == outcome(tmp_path / "whole")


MOMENTS = [
    ("kill in a save", 1),  # checkpoint 0
    ("kill in a rollout", 1),
    ("kill before a rename", 2),
    ("kill after a line", 2),
    ("kill in a line", 2),
    ("kill in a removal", 1),
]


def test_killed_at_every_kind_of_moment(tmp_path):
    """ppo has the most to save: a critic and a reference."""
    check("ppo", MOMENTS, tmp_path)
    assert [line["iteration"] for line in metrics(tmp_path / "parts")] == [1, 2, 3, 4, 5]


STATES = {  # what else is in a checkpoint
    "float32 weights, a stale sampler, a new reference": (
        "grpo",
        *("--dtype", "bfloat16", "--rollout_refresh_every", 2, "--ref_reset_every", 2),
    ),
    "a running baseline": ("more.reinforce",),
}


@pytest.mark.parametrize("state", STATES)
def test_killed_with_more_in_the_checkpoint(state, tmp_path):
    name, *flags = STATES[state]
    troubles = [("kill after a line", 3), ("kill in a rollout", 3)]  # in iterations 2 and 4
    check(name, troubles, tmp_path, *flags)


# ------------------------------------------------------------------------------- signals and errors


def test_run_a_signal_ends_the_run_after_a_checkpoint(tmp_path):
    """The iteration is finished and saved, and the run goes on from there. Resumed with nothing left to
    do, it prints the same results again, and changes nothing."""
    flags = flags_of("grpo", tmp_path, "--save_every", 0, "--iterations", 3)
    result = forked("grpo", *flags, trouble=("SIGTERM", 2))
    assert result.code == 130 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines.count("stopping after this iteration") == 1
    assert lines[-1] == f"saved; to continue: --resume --run_dir {tmp_path}"
    assert checkpoint_of(tmp_path).name == "checkpoint-000002"
    result = run("grpo", *resume(tmp_path, "--iterations", 4))
    assert [line["iteration"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    before = outcome(tmp_path)
    results = result.stdout[result.stdout.index("held-out problems") :]
    assert "after" in results
    assert run("grpo", *resume(tmp_path, "--iterations", 1)).stdout.endswith(results)
    assert outcome(tmp_path) == before


def test_run_a_signal_outside_of_an_iteration_or_a_second_one_ends_it_at_once(tmp_path):
    """In the first case the folder holds no run yet, so a run with other flags may use it."""
    flags = flags_of("grpo", tmp_path)
    result = forked("grpo", *flags, trouble=("SIGINT in an evaluation", 1))
    assert (result.code, result.stderr) == (130, "stopped\n")
    assert "held-out problems" not in result.stdout
    assert (tmp_path / "checkpoint-000000").exists()
    result = forked("grpo", *flags, "--lr", 1e-3, trouble=("two SIGINT", 2))
    assert result.code == -2 and result.stderr == ""
    assert [line["iteration"] for line in metrics(tmp_path)] == [1]


def test_run_a_loss_that_is_not_finite_ends_the_run_before_the_step(tmp_path, monkeypatch):
    original = grpo.policy_loss
    calls = []

    def policy_loss(*args, **keywords):
        loss, stats = original(*args, **keywords)
        calls.append(None)
        is_wrong = len(calls) == 4  # in the second iteration
        return (loss * float("nan") if is_wrong else loss), stats

    monkeypatch.setattr(grpo, "policy_loss", policy_loss)
    result = run("grpo", *flags_of("grpo", tmp_path))
    assert result.returncode == 2
    assert result.stderr == "grpo.py: error: iteration 2: loss is not finite\n"
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint.name == "checkpoint-000001"
    assert all(w.isfinite().all() for w in load_file(checkpoint / "model.safetensors").values())


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_run_without_a_learning_signal_warns_once_after_ten_iterations(name, tmp_path, reward_file):
    """All rewards are equal, in a group, or in the whole rollout if there are no groups."""
    small = ("--max_new_tokens", 4, "--save_every", 0, "--eval_every", 0, "--iterations", 12)
    flags = flags_of(name, tmp_path, *small, "--reward", reward_file("return 0.5"))
    result = run(name, *flags, "--prompts_per_iteration", 2 if name == "grpo" else 4)
    assert result.returncode == 0, result.stderr
    (warning,) = (line for line in result.stdout.splitlines() if line.startswith("warning: "))
    assert "no learning signal for 10 iterations" in warning
