"""examples/: they run, and a loss inside TRL or verl is the script's.

Tests marked `extras` need examples/requirements.txt. verl needs a separate environment: here the losses
are called as its actor does; conformance/engines.md tells of the real one."""

import functools
import importlib
import inspect
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, SUMS, batch_of_ids, save, script_args
from test_losses import data, gradient_of, loss_of
from tokenizers.processors import TemplateProcessing

import common
from common import UserError
from examples import format_and_accuracy
from plumbing.data import read_rows

# --------------------------------------------------------------------------- data, models and rewards


def test_run_own_dataset_writes_rows_that_the_scripts_read(tmp_path):
    command = [sys.executable, "examples/own_dataset.py", tmp_path / "sums.jsonl"]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = read_rows(script_args("grpo", dataset=str(tmp_path / "sums.jsonl"))[1], "dataset")
    assert len(rows) == 4000
    for row in rows:
        a, b = row["question"][-1]["content"].split(" + ")
        assert int(a) + int(b) == int(row["answer"])


class Table(torch.nn.Embedding):
    """A policy with a weight for each log-prob. Because of **kwargs Trainer passes the labels."""

    def forward(self, rows, **kwargs):
        return super().forward(rows)


class Trainer(transformers.Trainer):
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, **_):
        rows = inputs["rows"]
        _, old, adv, mask = data()
        count = {"num_sequences": 12}
        return loss_of("grpo", model(rows), old[rows], adv[rows], mask[rows], count)[0]


@pytest.mark.extras
@pytest.mark.parametrize("batch", [{"rows"}, {"rows", "labels"}])
def test_in_hf_trainer_accumulation_divides_nothing(batch, tmp_path):
    """As the losses' docstrings say. Four micro-batches of three rows make one step of SGD."""
    lp, old, adv, mask = data()
    expected = lp - gradient_of(loss_of("grpo", lp, old, adv, mask)[0], lp)
    settings = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=1,
        max_grad_norm=0,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        remove_unused_columns=False,
    )
    model = Table.from_pretrained(lp.detach().clone(), freeze=False)
    examples = [dict.fromkeys(batch, i) for i in range(12)]
    Trainer(model, settings, train_dataset=examples).train()
    torch.testing.assert_close(model.weight, expected, rtol=1e-12, atol=0)


@pytest.mark.extras
def test_algebra_is_left_to_math_verify():
    from examples.algebra import grade

    for gold, found in [("0.5", r"\frac{2}{4}"), ("x^2+x", "x(x+1)"), (r"\{1,2\}", r"\{2,1\}")]:
        assert grade(f"so #### {found}", gold, False) == (1.0, "correct")
        assert grade(f"so #### {found}", gold, True) == (0.0, "truncated")
    for gold, found in [("x^2+x", "x^2"), ("(1,2)", "(2,1)"), ("5", "9**9**9**9"), ("5", "{{{")]:
        assert grade(f"so \nAnswer: {found}", gold, False) == (0.0, "wrong")
    assert grade("0.5", "0.5", False) == (0.0, "no_answer")


def test_format_and_accuracy_are_added():
    rows = [
        ("7+5=12 #### 12", 1.2, "correct"),
        ("#### 12", 1.0, "correct"),
        ("7+5=13 #### 13", 0.2, "wrong"),
        ("7+5=12", 0.0, "no_answer"),
        ("7+5=12 #### 1 7+5=", 0.0, "truncated"),
    ]
    for text, reward, verdict in rows:
        assert format_and_accuracy.grade(text, "12", verdict == "truncated") == (reward, verdict)


# ----------------------------------------------------------------------------------------------- TRL


@pytest.fixture
def trl_trainer(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return importlib.import_module("examples.trl_trainer")


@pytest.mark.extras
def test_the_scripts_flags_set_those_of_trl(trl_trainer):
    """Those that are not seen in the steps that two processes take."""
    flags = """--use_cpu --num_minibatches 2 --update_epochs 3 --iterations 4 --save_every 5
    --max_new_tokens 20 --temperature 0.5 --dtype bfloat16"""
    _, _, config = trl_trainer.parse(flags.split())
    assert (config.max_steps, config.save_steps) == (24, 30)
    assert (config.max_completion_length, config.temperature, config.bf16) == (20, 0.5, True)


@pytest.mark.extras
@pytest.mark.parametrize(
    "words, line",
    [
        ("--loss_type=dapo", "--loss_type has no effect here: use the flags of grpo.py"),
        ("--learning-rate 1", "--learning_rate has no effect here: use the flags of grpo.py"),
        ("--rollout_cap 3", "unknown argument --rollout_cap"),
        ("--no_flag 1", "unknown argument --no_flag"),
        ("--per_device_train_batch_size 3", "--per_device_train_batch_size 3 does not divide 16"),
        ("", "--num_minibatches: 3 processes cannot share a step of 16"),
    ],
)
def test_what_trl_cannot_use_is_one_line(trl_trainer, monkeypatch, words, line):
    if "3 processes" in line:
        monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        trl_trainer.parse(["--use_cpu", *words.split()])


def launched(file, *words):
    """Runs a file in two processes, as the example's header says. Returns what it prints."""
    command = [Path(sys.executable).parent / "accelerate", "launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--main_process_port", "0", file, "--use_cpu", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.extras
def test_run_trl_trains_the_default_job(tmp_path):
    """The command in the header, with a quarter of the iterations."""
    flags = ["--algorithm", "gspo", "--iterations", "10", "--output_dir", tmp_path / "trl"]
    found = launched("examples/trl_trainer.py", *flags)
    assert found.count("problems: ") == 2  # one for each process
    (greedy,) = re.findall(r"2 processes, held-out accuracy {'greedy': ([0-9.]+)", found)
    assert float(greedy) >= 0.9


STEP = """
import random
import sys

sys.path.insert(0, {root!r})
from examples import trl_trainer


{function}

class Fixed(trl_trainer.PluggedTrainer):
    def _generate_single_turn(self, prompts, *_):
        first = len(prompts) * self.accelerator.process_index
        rows = enumerate(prompts, first)
        return [fixed_completion(ids, row % 8) for row, ids in rows], None

trl_trainer.PluggedTrainer = Fixed
for name in trl_trainer.ALGORITHMS:
    trl_trainer.main(["--algorithm", name, "--output_dir", "{folder}/" + name, *sys.argv[1:]])
"""


def fixed_completion(prompt_ids, i):
    """The i-th completion of a group: ids that are the same in every process."""
    rng = random.Random(f"{prompt_ids} {i}")
    return [rng.randrange(2, 17) for _ in range(rng.randint(1, 11))] + [1]


def weights_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.extras
def test_two_processes_take_the_scripts_steps(tmp_path, tiny_model, trl_trainer):
    """Two epochs over three groups of eight, the middle one split between the processes, in three
    micro-batches each: the weights are those of plain SGD on the whole loss."""
    function = inspect.getsource(fixed_completion)
    code = STEP.format(root=str(ROOT), folder=tmp_path, function=function)
    (tmp_path / "step.py").write_text(code)
    (tmp_path / "rewards.py").write_text("def f(text): return text.count('1') / 7")
    (tmp_path / "data.jsonl").write_text("\n".join(SUMS.read_text().splitlines()[:7]))
    # Like many chat models: the template begins with BOS, and the tokenizer adds it to plain text.
    model = save(tiny_model[0], tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "<pad>{{ messages[0]['content'] }}"
    add_bos = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = add_bos
    tokenizer.save_pretrained(model)
    flags = f"""--model {model} --dataset {tmp_path}/data.jsonl --reward {tmp_path}/rewards.py:f
    --num_held_out 4 --prompts_per_iteration 3 --group_size 8 --max_new_tokens 12 --num_minibatches 1
    --update_epochs 2 --iterations 1 --per_device_train_batch_size 4 --router_aux_coef 0 --optim sgd
    --lr 0.1 --max_grad_norm 1e9 --disable_tqdm True""".split()
    launched(tmp_path / "step.py", *flags)
    data = str(tmp_path / "data.jsonl")
    args = script_args("grpo", model=str(model), dataset=data, num_held_out=4)[1]
    policy = common.load_policy(args)
    stream, _ = common.load_problems(args, policy, common.load_grader(args))
    prompts = [problem.prompt_ids for problem in stream.problems]
    assert [ids.count(0) for ids in prompts] == [1, 1, 1]
    rows = [(ids, fixed_completion(ids, i)) for ids in prompts for i in range(8)]
    rewards = [tokenizer.decode(ids).count("1") / 7 for _, ids in rows]
    batch = batch_of_ids(rows)
    for name in trl_trainer.ALGORITHMS:
        script = importlib.import_module(name)
        advantages_B = script.compute_advantages(torch.tensor(rewards).view(3, 8)).flatten()
        policy = common.load_policy(args)
        start = weights_of(policy)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        old_BT = common.token_logprobs(policy, batch, 1.0).logprobs_BT.detach()
        own = {"grpo": {"ref_logprobs_BT": old_BT}, "dr_grpo": {"max_new_tokens": 12}}
        for _ in range(2):
            new_BT = common.token_logprobs(policy, batch, 1.0).logprobs_BT
            tensors = new_BT, old_BT, advantages_B, batch.mask_BT
            loss, _ = script.policy_loss(*tensors, **own.get(name, {}))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = weights_of(policy) - start
        trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        gap = weights_of(trained) - weights_of(policy)
        assert moved.norm() > 0.01 and gap.norm() < 1e-4 * moved.norm(), name


# ---------------------------------------------------------------------------------------------- verl


VERL = {  # the settings that match the scripts, as in the example's header
    "grpo": {},
    "dr_grpo": {"loss_scale_factor": 48},
    "dapo": {"clip_ratio_high": 0.28},
    "gspo": {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3},
    "cispo": {"clip_ratio_high": 4.0},
    "gmpo": {"clip_ratio_high": 0.4},
    "sapo": {},
}


@pytest.fixture(scope="module")
def verl_losses():
    """{name: loss}, as the example registers them in a stand-in for verl."""
    losses = {}
    stand_in = SimpleNamespace()
    stand_in.register_policy_loss = lambda name: functools.partial(losses.setdefault, name)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"):
            patch.setitem(sys.modules, name, stand_in)
        importlib.import_module("examples.verl_losses")
    return losses


def verl_config(**changes):
    defaults = dict(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    defaults |= dict(tau_pos=1.0, tau_neg=1.05, loss_scale_factor=None, global_batch_info={})
    return SimpleNamespace(**defaults | changes)


def verl_batch():
    new_BT, old_BT, advantages_B1, mask_BT = data()
    old_BT = old_BT - torch.arange(12)[:, None] / 5  # ratios up to 9 times as large: cispo's cap is 5
    return old_BT, new_BT, advantages_B1 * mask_BT, mask_BT


@pytest.mark.parametrize("name", VERL)
def test_a_step_in_verl_is_the_scripts(name, verl_losses):
    """In two processes with three micro-batches each."""
    batch = verl_batch()
    old_BT, new_BT, advantages_BT, mask_BT = batch
    info = {"dp_size": 2, "batch_num_tokens": mask_BT.sum().item(), "global_batch_size": 12}
    config = verl_config(**VERL[name], global_batch_info=info)
    value = 0.0
    for rows in torch.arange(12).chunk(6):
        tensors = [x[rows] for x in batch]
        share, _ = verl_losses[f"nine_{name}"](*tensors, "token-mean", config)
        value += share / 2
    expected, _ = loss_of(name, new_BT, old_BT, advantages_BT[:, :1], mask_BT)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    pair = gradient_of(value, new_BT), gradient_of(expected, new_BT)
    torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-15)


def test_what_verl_cannot_give_is_refused(verl_losses):
    batch = verl_batch()
    with pytest.raises(ValueError, match="loss_scale_factor"):
        verl_losses["nine_dr_grpo"](*batch, config=verl_config())
    with pytest.raises(ValueError, match="rollout_is_weights"):
        verl_losses["nine_gmpo"](*batch, config=verl_config(), rollout_is_weights=torch.ones(12, 9))
    with pytest.raises(ValueError, match="nine_gmpo does not read actor.clip_ratio_low"):
        verl_losses["nine_gmpo"](*batch, config=verl_config(clip_ratio_low=0.3))


def test_a_rollout_weight_of_2_in_verl_doubles_the_loss(verl_losses):
    batch = verl_batch()
    loss = verl_losses["nine_grpo"]
    plain, _ = loss(*batch, config=verl_config())
    doubled, _ = loss(*batch, config=verl_config(), rollout_is_weights=torch.full((12, 9), 2.0))
    assert doubled.item() == pytest.approx(2 * plain.item(), abs=1e-12)
