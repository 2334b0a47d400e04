"""Without any learning signal no weight moves, to the bit: all rewards are equal, and the KL to the
reference is exactly 0, not rounding, which AdamW would turn into full steps. Only a baseline that has
to be learned makes a signal of equal rewards, unless they are 0."""

import pytest
import torch
from conftest import MORE, SCRIPTS, TINY_MOE, checkpoint_of, completes, fields_of, flags_it_has
from conftest import metrics, script_args
from safetensors.torch import load_file

import ppo
from common import load_policy

WEIGHTS = "model.safetensors"
# In float32 the mean of eight 0.1 is not 0.1.
STEPS = """--micro_batch_tokens 40 --router_aux_coef 0 --iterations 3 --eval_every 0
--pretraining_iterations 1 --overlong none --group_size 8""".split()
LEARNED_BASELINES = {"critic_lr", "baseline_decay"}  # a critic, or a mean of earlier rewards


def moved_weights(name, reward, folder, reward_file, *flags):
    """The weights that change in a run where each completion has this reward."""
    verdict = '"wrong"'
    if "max_sampling_rounds" in fields_of(name):  # it learns only from groups with both verdicts
        verdict = '"correct" if text[-1:] in "02468" else "wrong"'
    function = reward_file(f"return {reward}, {verdict}")
    completes(name, *flags_it_has(name, STEPS), *flags, "--reward", function, "--run_dir", folder)
    trained = load_file(checkpoint_of(folder) / WEIGHTS)
    before = load_file(TINY_MOE / WEIGHTS)
    return [key for key, weight in before.items() if not torch.equal(trained[key], weight)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_no_weight_moves(name, dtype, tmp_path, reward_file):
    reward = 0.0 if LEARNED_BASELINES & fields_of(name) else 0.1
    assert moved_weights(name, reward, tmp_path, reward_file, "--dtype", dtype) == []
    for line in metrics(tmp_path):
        assert line.get("losses/kl_ref", 0) == line.get("losses/approx_kl", 0) == 0


@pytest.mark.parametrize("name", ["ppo", "more.reinforce"])
def test_a_baseline_that_is_learned_makes_a_signal_of_equal_rewards(name, tmp_path, reward_file):
    assert moved_weights(name, 0.1, tmp_path, reward_file) != []


def test_weights_lie_in_memory_as_those_of_a_copy():
    """In the file they begin anywhere. Used from there, they would make products of one row round
    differently than with the reference's, which torch aligns to 64 bytes."""
    policy = load_policy(script_args("grpo")[1])
    assert all(weight.data_ptr() % 64 == 0 for weight in policy.parameters())


@pytest.mark.parametrize("middle", [0, 0.5])
def test_whitening_does_not_amplify_rounding(middle):
    """Advantages that are equal up to rounding do not become 1 and -1."""
    x_BT = middle + 1e-7 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert ppo.whiten(x_BT, torch.ones_like(x_BT)).abs().max() <= max(1e-3, x_BT.abs().max())
