"""Several ranks are one process, to the bit where each has one micro-batch of a step; and what ends one
ends all, with one report."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import forked, path_of, run, script_args, untimed
from safetensors.torch import load_file

from plumbing import ranks
from plumbing.args import UserError, parse_args

SMALL = "--num_held_out 5 --max_new_tokens 32 --eval_every 1 --save_every 1"
SIZES = {
    "ppo": "--prompts_per_iteration 24 --num_minibatches 2",
    "more.reinforce": "--prompts_per_iteration 12",
    "more.rloo": "--prompts_per_iteration 3 --group_size 4",
    "more.vapo": "--prompts_per_iteration 3 --num_minibatches 2 --pretraining_iterations 1",
}
OTHERS = "--prompts_per_iteration 6 --group_size 4 --num_minibatches 2"


def flags_of(name, folder, sums, size=6, iterations=2):
    """Micro-batches of 6 are one for each of two ranks. The loss that balances experts is a mean over
    its micro-batch: it is left out where there are more of them."""
    flags = [*SMALL.split(), *SIZES.get(name, OTHERS).split(), "--micro_batch_size", size]
    flags += ["--dataset", sums, "--run_dir", folder, "--iterations", iterations]
    return flags if size == 6 else [*flags, "--router_aux_coef", 0]


def outcome(folder):
    """(weights, optimizer's tensors, metrics without times) at the end of a run."""
    (checkpoint,) = folder.glob("checkpoint-*")
    weights = load_file(checkpoint / "model.safetensors")
    state = torch.load(checkpoint / "trainer_state.pt", weights_only=True)["parts"]
    moments = {}
    for number, values in state["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[number, name] = values[name]
    return weights, moments, untimed(folder)


def same_metrics(one, other):
    """Means are added up in a different order. A sampler's log-probs depend, in their last bits, on how
    many rows are sampled together; a balance is a mean over its micro-batch."""
    for ours, theirs in zip(one, other, strict=True):
        left_out = {key for key in ours if key == "moe/aux_loss" or "sampler_" in key}
        left_out |= {key for key in theirs if "reward.reward" in key}  # one of the runs has --reward
        ours = {key: value for key, value in ours.items() if key not in left_out}
        theirs = {key: value for key, value in theirs.items() if key not in left_out}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def same_bits(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    same_metrics(one[2], other[2])


def close(one, other):
    for name, tensor in one[0].items():
        # Adam divides a gradient by its own size: where that is tiny, its rounding error is not. On one
        # processor 1.2e-6 has been seen, on another 7.4e-6, after steps of 2e-4.
        torch.testing.assert_close(tensor, other[0][name], atol=2e-5, rtol=0)
    same_metrics(one[2], other[2])


@pytest.fixture(scope="module")
def one(tmp_path_factory, sums):
    """one(name, micro batch size): the outcome of the same in one process."""
    known = {}

    def outcome_of(name, size=6):
        if (name, size) not in known:
            folder = tmp_path_factory.mktemp("one")
            result = run(name, *flags_of(name, folder, sums, size))
            assert result.returncode == 0, result.stderr
            known[name, size] = outcome(folder)
        return known[name, size]

    return outcome_of


# Those with more tensors or counts than grpo, which the next test runs.
SLOW = [
    pytest.param(n, marks=pytest.mark.slow) for n in ("dapo", "rspo", "more.reinforce", "more.vapo")
]


@pytest.mark.parametrize("name", ["ppo", *SLOW])
def test_two_ranks_are_one_process_to_the_bit(name, one, tmp_path, sums):
    """12 completions in a step: 6 and 6, which one process has as two micro-batches."""
    result = forked(name, *flags_of(name, tmp_path, sums), world=2)
    assert result.codes == [0, 0] and result.stderr == ""
    assert result.stdout.count("held-out problems") == 1
    same_bits(one(name), outcome(tmp_path))


COUNTED = """
import os
from common import verify

def reward(text, answer, truncated):
    with open(f"{folder}/calls-{{os.getpid()}}", "a") as file:
        file.write("x")
    return verify(text, answer, truncated)
"""


def test_each_completion_is_graded_once(one, tmp_path, sums):
    """By one of three ranks. Several micro-batches for each change only the order of a sum, also where
    the number of ranks does not divide that of the held-out problems."""
    (tmp_path / "reward.py").write_text(COUNTED.format(folder=tmp_path))
    reward = ("--reward", f"{tmp_path}/reward.py:reward")
    result = forked("grpo", *flags_of("grpo", tmp_path / "run", sums, size=2), *reward, world=3)
    assert result.codes == [0, 0, 0], result.stderr
    close(one("grpo", size=2), outcome(tmp_path / "run"))
    calls = [len(path.read_text()) for path in tmp_path.glob("calls-*")]
    rollouts = 2 * 6 * 4
    evaluations = 5 * (2 + 1 + 2)  # the first and the last of them also sampled
    assert len(calls) == 3 and sum(calls) == rollouts + evaluations


@pytest.mark.slow
def test_two_ranks_share_a_mismatch(tmp_path, sums):
    """Weights of completions, and experts, are those of one process, up to rounding."""
    more = "--rollout_dtype int4 --rollout_correction token_tis --routing_replay r3".split()
    assert run("grpo", *flags_of("grpo", tmp_path / "1", sums), *more).returncode == 0
    result = forked("grpo", *flags_of("grpo", tmp_path / "2", sums), *more, world=2)
    assert result.codes == [0, 0], result.stderr
    close(outcome(tmp_path / "1"), outcome(tmp_path / "2"))


# ------------------------------------------------------------------------------- what ends one ends all


def test_run_a_signal_to_one_rank_stops_all_and_resumed_it_is_exact(one, tmp_path, sums):
    """After the iteration in which it comes, with a checkpoint of it. A Ctrl-C comes twice, from the
    terminal and from torchrun."""
    flags = flags_of("grpo", tmp_path, sums)
    result = forked("grpo", *flags, world=2, rank=1, trouble=("two SIGINT", 1))
    assert result.codes == [130, 130] and result.stderr == ""
    assert result.stdout.count("saved; to continue: ") == 1
    assert (tmp_path / "checkpoint-000001").exists()
    assert forked("grpo", "--resume", "--run_dir", tmp_path, world=2).codes == [0, 0]
    same_bits(one("grpo"), outcome(tmp_path))


def test_run_dapo_ends_early_on_all_ranks(tmp_path, sums, reward_file):
    reward = ("--reward", reward_file('return 0.0, "wrong"'), "--max_sampling_rounds", 1)
    result = forked("dapo", *flags_of("dapo", tmp_path / "run", sums), *reward, world=2)
    assert result.codes == [0, 0] and result.stderr == ""
    assert result.stdout.count("ended early, after iteration 1: too few mixed groups") == 1
    assert [line["iteration"] for line in outcome(tmp_path / "run")[2]] == [1]


ENDS = {  # {what rank 1 does, the n-th time: (exit codes, what is printed)}; -15 is torchrun's doing
    ("bug", 2): ((-15, 1), "ZeroDivisionError"),
    ("no shared folder", 1): ((2, -15), "not all processes can see its newest checkpoint"),
}


@pytest.mark.parametrize("trouble", ENDS, ids=lambda trouble: trouble[0])
def test_run_what_ends_one_rank_ends_all(trouble, tmp_path, sums):
    """With one report, by that rank; by rank 0 if all know of it. The last checkpoint stays."""
    flags = flags_of("grpo", tmp_path, sums)
    if trouble[0] == "no shared folder":
        assert forked("grpo", *flags, trouble=("kill in a rollout", 1)).codes == [-9]
        flags = ["--resume", "--run_dir", tmp_path]
    result = forked("grpo", *flags, world=2, rank=1, trouble=trouble)
    codes, expected = ENDS[trouble]
    assert result.codes == [*codes], result.stderr
    assert expected in result.stderr.splitlines()[-1]
    is_traceback = trouble[0] == "bug"
    assert result.stderr.count("Traceback") == is_traceback
    assert is_traceback or len(result.stderr.splitlines()) == 1
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert load_file(checkpoint / "model.safetensors")


def test_run_under_torchrun_from_any_folder(tmp_path):
    """A mistake in the data is no traceback of ours. A file of more/ finds common, also where Python
    leaves its folder out."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    result = subprocess.run(
        [sys.executable, *launcher, path_of("more.rloo"), "--dataset", "nowhere.jsonl"],
        cwd=tmp_path,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1
    assert "rloo.py: error: --dataset nowhere.jsonl cannot be read" in result.stderr
    assert result.stderr.count("Traceback") == 1  # torchrun's own


# -------------------------------------------------------------------------------------- small parts


def test_a_gradient_that_one_rank_alone_has_counts(monkeypatch):
    """What none has used stays None."""
    weights = [torch.zeros((), requires_grad=True) for _ in range(3)]
    weights[0].grad = torch.ones(())
    theirs = iter([torch.tensor([1, 1, 0]), torch.ones(()), torch.ones(())])
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(ranks, "all_reduce", lambda x: x.add_(next(theirs)))
    ranks.all_reduce_gradients(weights)
    assert [None if w.grad is None else w.grad.item() for w in weights] == [2, 1, None]


def test_fewer_completions_than_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *OTHERS.split()[:-1], "24"])
    with pytest.raises(UserError, match="leaves fewer completions per minibatch than the 2 processes"):
        parse_args(script_args("grpo")[0].Args)
