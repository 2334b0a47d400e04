"""Without any learning signal no weight moves, to the bit: all rewards are equal, and the KL to the
reference is exactly 0, not rounding, which AdamW would turn into full steps."""

import shutil
import struct

import pytest
import torch
from conftest import MORE, OWN_LR, SCRIPTS, TINY_MOE, checkpoint_of, completes, metrics
from safetensors.torch import load_file

import ppo

WEIGHTS = "model.safetensors"


def check_that_nothing_moves(name, model, folder, *flags):
    steps = ("--router_aux_coef", 0, "--iterations", 3, "--eval_every", 0, "--run_dir", folder)
    completes(name, *steps, *flags)
    trained = load_file(checkpoint_of(folder) / WEIGHTS)
    for key, weight in load_file(model / WEIGHTS).items():
        assert torch.equal(trained[key], weight), f"{key} has moved"
    for line in metrics(folder):
        assert line.get("losses/kl_ref", 0) == line.get("losses/approx_kl", 0) == 0


CASES = []
for name in [*SCRIPTS, *MORE]:
    CASES.append((name, "float32"))
    CASES.append(pytest.param(name, "bfloat16", marks=pytest.mark.slow))


@pytest.mark.parametrize("name, dtype", CASES)
def test_no_weight_moves(name, dtype, tmp_path, reward_file):
    reward = reward_file("return 0.0")
    own = []
    if name == "dapo":  # without mixed groups it would make no update
        reward = reward_file('return 0.0, "correct" if text[-1:] in "02468" else "wrong"')
        own = ["--overlong", "none"]
    if name == "more.vapo":
        own = ["--pretraining_iterations", 1]
    flags = ("--reward", reward, "--dtype", dtype, "--micro_batch_size", 3)
    check_that_nothing_moves(name, TINY_MOE, tmp_path, *flags, *own)


def test_no_weight_moves_wherever_the_weights_lie_in_memory(tmp_path, reward_file):
    """Mapped from a file, they may begin 8 bytes after a multiple of 16. A product of one row is then
    rounded differently than with the reference's copy, which is aligned."""
    model = shutil.copytree(TINY_MOE, tmp_path / "model")
    data = (TINY_MOE / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + size] + b" " * (8 if size % 16 == 8 else 0)
    assert len(header) % 16 == 0
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    flags = ("--model", model, *OWN_LR, "--reward", reward_file("return 0.0"))
    rows = ("--prompts_per_iteration", 4, "--num_minibatches", 16, "--max_new_tokens", 1)
    check_that_nothing_moves("grpo", model, tmp_path / "run", *flags, *rows)


@pytest.mark.parametrize("middle", [0, 0.5])
def test_whitening_does_not_amplify_rounding(middle):
    """Advantages that are equal up to rounding do not become 1 and -1."""
    x_BT = middle + 1e-7 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert ppo.whiten(x_BT, torch.ones(16, 8)).abs().max() <= max(1e-3, x_BT.abs().max())
