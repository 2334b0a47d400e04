"""examples/: that they run, and that a loss inside TRL or verl is the script's.

Tests marked `extras` need examples/requirements.txt. verl needs a separate environment: here a stand-in
calls the losses as verl's actor does, with a step in unequal shares; the real one was called once, see
conformance/engines.md."""

import importlib.metadata
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, script_args
from rl_loss_vectors import doctor

from common import Completion, Problem, UserError, load_grader
from plumbing.data import read_rows

B = 16
T = 9


# --------------------------------------------------------------------------- data, models and rewards


def test_run_own_dataset(tmp_path):
    """The scripts read all rows, and each sum has its answer."""
    command = [sys.executable, "examples/own_dataset.py", tmp_path / "sums.jsonl"]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = read_rows(str(tmp_path / "sums.jsonl"), "", "train")
    assert len(rows) == 4000
    for row in rows:
        a, b = row["question"][-1]["content"].split(" + ")
        assert int(a) + int(b) == int(row["answer"])


@pytest.mark.extras
def test_algebra_is_left_to_math_verify():
    from examples.algebra import grade

    for gold, found in [("0.5", r"\frac{2}{4}"), ("x^2+x", "x(x+1)"), (r"\{1,2\}", r"\{2,1\}")]:
        assert grade(f"so #### {found}", gold, False) == (1.0, "correct")
        assert grade(f"so #### {found}", gold, True) == (0.0, "truncated")
    for gold, found in [("x^2+x", "x^2"), ("(1,2)", "(2,1)"), ("5", "9**9**9**9"), ("5", "{{{")]:
        assert grade(f"so \nAnswer: {found}", gold, False) == (0.0, "wrong")
    assert grade("0.5", "0.5", False) == (0.0, "no_answer")


TRL_REWARDS = """
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
overlong = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
"""


@pytest.mark.extras
def test_rewards_of_trl_work_as_they_are(tmp_path):
    (tmp_path / "mine.py").write_text(TRL_REWARDS)
    files = [f"{tmp_path}/mine.py:{name}" for name in ("accuracy_reward", "overlong")]
    grade = load_grader(script_args("grpo", reward=files)[1])
    question = [{"role": "user", "content": "How much is a half?"}]
    rows = [  # solution, completion, its length
        (r"\frac{1}{2}", r"It is \boxed{0.5}", 12),
        (r"\frac{1}{2}", r"It is \boxed{0.25}", 16),
        ("", r"It is \boxed{0.5}", 30),  # accuracy None, which is 0
    ]
    completions = []
    for solution, text, length in rows:
        problem = Problem("", "", [], {"solution": solution, "prompts": question})
        completions.append(Completion(problem, [3] * length, [], text=text))
    graded = grade(completions)
    assert [tuple(c.rewards.values()) for c in graded] == [(1.0, 0.0), (0.0, -0.5), (0.0, -1.0)]
    assert [c.verdict for c in graded] == ["correct", "wrong", "wrong"]


# ----------------------------------------------------------------------------------------------- TRL


NAN = [doctor.SPREADS]
TRL_LOSSES = [  # (function of doctor_trl.py, section, diagnosis), as conformance/engines.md says
    ("grpo", "grpo", NAN),
    ("grpo_default_kl", "grpo", ["variant: k3 times r, unasked [TRL: default]", *NAN]),
    ("dr_grpo", "dr_grpo", NAN),
    ("dapo", "dapo", NAN),
    ("dapo_default", "dapo", ["mistake: the lower eps for both bounds [TRL, verl: default]", *NAN]),
    ("gspo", "gspo", NAN),
    ("cispo", "cispo", NAN),
    ("cispo_default", "cispo", ["variant: a cap of 0.2 [TRL: default]", *NAN]),
    ("gmpo", "gmpo", NAN),
    ("sapo", "sapo", NAN),
]


@pytest.mark.extras
@pytest.mark.parametrize("name, section, expected", TRL_LOSSES)
def test_what_the_doctor_says_of_trl(name, section, expected):
    from examples import doctor_trl

    found = doctor.examine_shapes(getattr(doctor_trl, name), section)
    _, _, diagnosis = doctor.diagnosed(found)
    assert diagnosis == expected


REFUSED = {  # flags: the one that TRL would drop in silence
    "--lr 1e-6": "lr",  # of the scripts
    "--loss-type dapo": "loss_type",  # of TRL
}


@pytest.mark.extras
def test_flags_of_both_sides_arrive_or_are_refused():
    from examples import trl_trainer

    words = "--use_cpu True --learning_rate 1e-6 --max_completion_length 9 --temperature 0.5"
    words += " --kl_coef 0.1 --clip_eps_low 0.3"
    config, script, flags = trl_trainer.parse(words.split())
    assert (config.learning_rate, config.beta, script.__name__) == (1e-6, 0.1, "grpo")
    assert (flags.clip_eps_low, flags.kl_coef, flags.max_new_tokens) == (0.3, 0.1, 9)
    assert flags.temperature == 0.5
    for words, name in REFUSED.items():
        with pytest.raises(UserError, match=f"^--{name} does nothing"):
            trl_trainer.parse(["--use_cpu", "True", *words.split()])


@pytest.mark.extras
def test_run_trl_trains_the_default_job(tmp_path):
    """Two processes, the command of the header."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--algorithm", "gspo", "--use_cpu", "True", "--output_dir", tmp_path / "trl"]
    command = [*torchrun, "examples/trl_trainer.py", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-3000:]
    (greedy,) = re.findall(r"held-out accuracy: {'greedy': ([0-9.]+)", result.stdout)
    assert float(greedy) >= 0.9


# ---------------------------------------------------------------------------------------------- verl


VERL = {  # the actor's settings that match the scripts, as the example's header lists them
    "grpo": {},
    "dr_grpo": {"loss_scale_factor": T},
    "dapo": {"clip_ratio_high": 0.28},
    "gspo": {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3},
    "cispo": {"clip_ratio_high": 4.0},
    "gmpo": {"clip_ratio_high": 0.4},
    "sapo": {},
}


@pytest.fixture
def verl_losses(monkeypatch):
    """{name: loss}, as the example registers them."""
    registered = {}
    module = types.ModuleType("verl.trainer.ppo.core_algos")
    module.register_policy_loss = lambda name: lambda loss: registered.setdefault(name, loss)
    for package in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(ROOT)
    importlib.import_module("examples.verl_losses")
    del sys.modules["examples.verl_losses"]  # the next test has its own stand-ins
    return registered


def verl_config(**changes):
    defaults = dict(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    defaults |= dict(tau_pos=1.0, tau_neg=1.05)
    defaults |= dict(loss_scale_factor=None, global_batch_info={})
    return types.SimpleNamespace(**{**defaults, **changes})


def make_batch(name):
    """(old log-probs, new ones, advantages, mask) of completions of unequal lengths, in float64, far
    enough from the old policy for clips to bind."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask_BT = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    old_BT = -normal(B, T).abs()
    new_BT = old_BT + 0.4 * normal(B, T)
    rewards_PG = (normal(B // 4, 4) > 0).double()
    advantages_B1 = importlib.import_module(name).compute_advantages(rewards_PG).view(-1, 1)
    return old_BT, new_BT.requires_grad_(), advantages_B1 * mask_BT, mask_BT


@pytest.mark.parametrize("name", VERL)
def test_a_step_in_verl_is_the_scripts(name, verl_losses):
    """In two processes with four micro-batches each. verl's own KL is no part of the loss."""
    old_BT, new_BT, advantages_BT, mask_BT = make_batch(name)
    info = {"dp_size": 2, "batch_num_tokens": mask_BT.sum().item(), "global_batch_size": B}
    config = verl_config(**VERL[name], global_batch_info=info)
    value = 0.0
    for rows in torch.arange(B).chunk(8):
        tensors = [x[rows] for x in (old_BT, new_BT, advantages_BT, mask_BT)]
        share, _ = verl_losses[f"nine_{name}"](*tensors, "token-mean", config)
        value += share / 2
    (gradient,) = torch.autograd.grad(value, new_BT)
    keywords = {"max_new_tokens": T} if name == "dr_grpo" else {}
    given = (new_BT, old_BT, advantages_BT[:, :1], mask_BT)  # a completion has at least one token
    expected, _ = importlib.import_module(name).policy_loss(*given, **keywords)
    (expected_gradient,) = torch.autograd.grad(expected, new_BT)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    assert gradient.abs().sum() > 0


def test_what_verl_cannot_give_is_refused(verl_losses):
    batch = make_batch("grpo")
    with pytest.raises(ValueError, match="loss_scale_factor"):
        verl_losses["nine_dr_grpo"](*batch, config=verl_config())
    with pytest.raises(ValueError, match="rollout_is_weights"):
        verl_losses["nine_gmpo"](*batch, config=verl_config(), rollout_is_weights=torch.ones(B, T))
    with pytest.raises(ValueError, match="nine_gmpo does not read actor.clip_ratio_low"):
        verl_losses["nine_gmpo"](*batch, config=verl_config(clip_ratio_low=0.3))


def test_weights_of_verl_are_factors_of_the_tokens(verl_losses):
    """With the weight 2 for all tokens, the loss is twice as large."""
    batch = make_batch("grpo")
    loss = verl_losses["nine_grpo"]
    plain, _ = loss(*batch, config=verl_config())
    doubled, _ = loss(*batch, config=verl_config(), rollout_is_weights=torch.full((B, T), 2.0))
    assert doubled.item() == pytest.approx(2 * plain.item(), abs=1e-12)
