"""examples/: they run, and a loss inside TRL or verl is the script's.

Tests marked `extras` need examples/requirements.txt. verl needs a separate environment: here the losses
are called as its actor does; conformance/engines.md tells of the real one."""

import dataclasses
import functools
import importlib
import inspect
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
import transformers
from conftest import ROOT, SMALL, SUMS, TINY_MOE, checkpoint_of, run, save
from test_losses import data, gradient_of, loss_of
from tokenizers.processors import TemplateProcessing

import common
from common import UserError
from examples import format_and_accuracy, own_dataset

# --------------------------------------------------------------------------- data, models and rewards


def test_own_dataset_has_sums():
    rows = list(own_dataset.sums())
    assert len(rows) == 4000
    for row in rows:
        a, b = row["question"][-1]["content"].split(" + ")
        assert int(a) + int(b) == row["answer"]


class Trainer(transformers.Trainer):
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, **_):
        rows = inputs["rows"]
        _, old, adv, mask = data()
        count = {"num_sequences": 12}
        return loss_of("grpo", model(rows), old[rows], adv[rows], mask[rows], count)[0]


@pytest.mark.extras
def test_in_hf_trainer_accumulation_divides_nothing(tmp_path):
    """As the losses' docstrings say. Four micro-batches of three rows make one step of SGD. The policy
    has a weight for each log-prob."""
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
    model = torch.nn.Embedding.from_pretrained(lp.detach().clone(), freeze=False)
    examples = [{"rows": i} for i in range(12)]
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
def trl_trainer(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)  # a run without --output_dir writes here
    return importlib.import_module("examples.trl_trainer")


@pytest.mark.extras
def test_the_scripts_flags_set_those_of_trl(trl_trainer):
    """Those that are not seen in the steps that two processes take."""
    flags = """--use_cpu --num_minibatches 2 --update_epochs 3 --iterations 4 --save_every 5
    --max_new_tokens 20 --temperature 0.5 --dtype bfloat16 --seed 7 --gradient_checkpointing"""
    _, args, config = trl_trainer.parse(flags.split())
    assert (config.max_steps, config.save_steps, config.save_total_limit) == (24, 30, 1)
    assert (config.max_completion_length, config.temperature, config.bf16) == (20, 0.5, True)
    assert (args.seed, config.seed, config.activation_checkpointing) == (7, 7, True)
    assert args.folder == Path("runs/trl-grpo").absolute()


@pytest.mark.extras
def test_each_flag_of_trl_is_allowed_or_the_scripts_or_refused(trl_trainer):
    flags = {field.name for field in dataclasses.fields(trl_trainer.GRPOConfig)}
    allowed = {*trl_trainer.TRL_FLAGS}
    shared = flags & {*trl_trainer.FLAGS}
    assert allowed < flags and not allowed & shared
    own = {"chat_template_kwargs", "gradient_checkpointing", "max_grad_norm", "seed", "temperature"}
    assert shared == own
    for name in flags - allowed - own:
        with pytest.raises(UserError, match=f"^not used here: --{name}=1. TRL has --output_dir, "):
            trl_trainer.parse([f"--{name}=1"])


SIZE = "--per_device_train_batch_size"


@pytest.mark.extras
@pytest.mark.parametrize(
    "words, line",
    [
        ("--run_dir=x --resume", "not used here: --run_dir=x --resume. TRL has --output_dir, "),
        ("--overlong filter", "not used here: --overlong filter. TRL has "),
        ("--lr x", "argument --lr: invalid float value: 'x'"),
        ("--lr 0", "--lr must be from 1e-09 to 1e+09, not 0.0"),
        ("--warmup_steps -1", "TRL: ValueError Got warmup_steps = -1.0"),
        (f"{SIZE} 3", f"{SIZE} 3 does not divide 16, a process's part of a step"),
        (f"{SIZE} -2", f"{SIZE} -2 does not divide 16, a process's part of a step"),
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
    assert "trained in 2 processes" in found
    ((before, after),) = re.findall(r"accuracy +([0-9.]+) +([0-9.]+)", found)
    assert 0.4 < float(before) < 0.5 and float(after) >= 0.9


STEP = """
import random
import sys

sys.path.insert(0, {root!r})
from examples import trl_trainer


{function}

def fixed(self, prompts, *_):
    first = len(prompts) * self.accelerator.process_index
    rows = enumerate(prompts, first)
    return [fixed_completion(ids, row % 8) for row, ids in rows], None


trl_trainer.GRPOTrainer._generate_single_turn = fixed
for name in {names}:
    trl_trainer.main(["--algorithm", name, "--output_dir", "{folder}/" + name, *sys.argv[1:]])
"""


def fixed_completion(prompt_ids, i):
    """The i-th completion of a group: ids that are the same in every process."""
    rng = random.Random(f"{prompt_ids} {i}")
    ids = [rng.randrange(2, 17) for _ in range(rng.randint(4, 12))]
    return ids if len(ids) == 12 else [*ids, 1]


def fixed_sample(policy, problems, group_size, *_):
    """Stands in for a script's `sample`."""
    completions = []
    for problem in problems:
        for i in range(group_size):
            ids = fixed_completion(problem.prompt_ids, i)
            truncated = ids[-1] != 1
            text = policy.tokenizer.decode(ids if truncated else ids[:-1])
            completion = common.Completion(problem, ids, [0.0] * len(ids), truncated, text)
            completions.append(completion)
    return completions


def weights_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


# Three groups of eight, the middle one split between two processes. The group of the one odd answer is
# all right.
STEPS = """--num_held_out 4 --prompts_per_iteration 3 --group_size 8 --max_new_tokens 12
--num_minibatches 1 --update_epochs 2 --iterations 1 --router_aux_coef 0 --lr 0.03
--max_grad_norm 1e9""".split()
REWARD = "return 1.0 if int(answer) % 2 else text.count('3') / 7"


@pytest.fixture
def takes_the_scripts_steps(tmp_path, tiny_model, reward_file, monkeypatch):
    """Two epochs in two processes with three micro-batches each: the weights are those of the script,
    which takes the same steps with plain SGD. Returns what the example prints."""
    (tmp_path / "data.jsonl").write_text("\n".join(SUMS.read_text().splitlines()[:7]))
    # Like many chat models: the template begins with BOS, and the tokenizer adds it to plain text.
    model = save(tiny_model[0], tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "<pad>{{ messages[0]['content'] }}"
    add_bos = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = add_bos
    tokenizer.save_pretrained(model)
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr, **_: torch.optim.SGD(weights, lr))

    def check(names, *flags):
        function = inspect.getsource(fixed_completion)
        code = STEP.format(root=str(ROOT), folder=tmp_path, function=function, names=names)
        (tmp_path / "step.py").write_text(code)
        files = ["--model", model, "--dataset", tmp_path / "data.jsonl"]
        shared = [*files, "--reward", reward_file(REWARD), *STEPS, *flags]
        own = ["--per_device_train_batch_size", "4", "--optim", "sgd", "--disable_tqdm", "True"]
        printed = launched(tmp_path / "step.py", *shared, *own)
        for name in names:
            monkeypatch.setattr(importlib.import_module(name), "sample", fixed_sample)
            folder = tmp_path / f"script-{name}"
            assert run(name, *shared, "--run_dir", folder).returncode == 0
            expected = weights_of(checkpoint_of(folder))
            moved = expected - weights_of(model)
            gap = weights_of(tmp_path / name) - expected
            assert moved.norm() > 0.01 and gap.norm() < 1e-4 * moved.norm(), name
        return printed

    return check


@pytest.mark.extras
def test_two_processes_take_the_scripts_steps(takes_the_scripts_steps, trl_trainer):
    takes_the_scripts_steps(trl_trainer.ALGORITHMS)


@pytest.mark.extras
@pytest.mark.parametrize("flags", ["--overlong filter", "--overlong none --max_sampling_rounds 1"])
def test_dapo_samples_until_three_groups_are_mixed(takes_the_scripts_steps, flags):
    printed = takes_the_scripts_steps(["dapo"], *flags.split())
    is_short = "1 mixed groups missing after 1 rounds" in printed
    assert is_short == ("max_sampling_rounds" in flags)
    counts = {"generated": 3 if is_short else 4, "kept": 2 if is_short else 3, "dropped_all_right": 1}
    for name, count in counts.items():
        assert f"'rollout/groups_{name}': '{count}'" in printed


@pytest.mark.extras
def test_rspo_in_trl_needs_routers_with_a_softmax(trl_trainer, tmp_path):
    sizes = dict(vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=1)
    folder = save(transformers.LlamaForCausalLM(config), tmp_path / "dense")
    with pytest.raises(UserError, match="dense has no experts chosen by a softmax: use gmpo.py$"):
        trl_trainer.main(["--use_cpu", "--algorithm", "rspo", "--model", str(folder)])


def trained(trl_trainer, folder, *flags):
    """The weights of a small job in this process."""
    job = ["--algorithm", "dapo", "--dataset", SUMS, "--num_held_out", 8, *SMALL, "--save_every", 1]
    others = ["--output_dir", folder, "--use_cpu", "--disable_tqdm", "True"]
    trl_trainer.main([str(word) for word in (*job, *others, *flags)])
    return weights_of(folder)


@pytest.mark.extras
def test_a_resumed_run_is_the_same(trl_trainer, tmp_path, reward_file):
    """Prompts, noise and optimizer."""
    reward = reward_file("return text.count('1') / 7")
    flags = ["--reward", reward, "--iterations", 3, "--save_total_limit", 3]
    expected = trained(trl_trainer, tmp_path / "whole", *flags)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    found = trained(trl_trainer, tmp_path / "rest", *flags, "--resume_from_checkpoint", checkpoint)
    assert torch.equal(found, expected)
    assert not torch.equal(weights_of(checkpoint), expected)


@pytest.mark.extras
def test_an_earlier_run_in_trl_is_kept_or_resumed(trl_trainer, tmp_path, reward_file):
    folder = tmp_path / "run"
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    trained(trl_trainer, folder, *reward)
    before = sorted(folder.rglob("*"))
    resume = "--resume_from_checkpoint"
    in_use = f"--output_dir {folder} cannot be used: a new run needs an empty one"
    wrong = {
        "": in_use,
        f"{resume} nowhere": in_use,
        f"{resume} {folder}/checkpoint-9": f"{resume} {folder}/checkpoint-9 cannot be read: FileNot",
        f"{resume} true --output_dir {tmp_path}": f"{resume} {tmp_path}/checkpoint-* cannot be read: ",
        f"{resume} true --algorithm gspo": f"--resume: {folder}/checkpoint-2 has script dapo, not gspo",
        f"{resume} true --lr 1": f"--resume: {folder}/checkpoint-2 has lr 0.0002, not 1.0",
    }
    for flags, line in wrong.items():
        with pytest.raises(UserError, match=f"^{re.escape(line)}"):
            trained(trl_trainer, folder, *reward, *flags.split())
    assert sorted(folder.rglob("*")) == before
    trained(trl_trainer, folder, *reward, "--iterations", 2, resume, "true")
    assert checkpoint_of(folder).name == "checkpoint-4"


@pytest.mark.extras
def test_trl_logs_the_scripts_advantages(trl_trainer, tmp_path, reward_file):
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    trained(trl_trainer, tmp_path / "run", *reward, "--algorithm", "dr_grpo", "--log_completions")
    (path,) = (tmp_path / "run" / "completions").iterdir()
    table = pyarrow.parquet.read_table(path).to_pydict()
    rewards_PG = torch.tensor(table["reward"]).view(-1, 4)
    expected = importlib.import_module("dr_grpo").compute_advantages(rewards_PG).flatten()
    torch.testing.assert_close(torch.tensor(table["advantage"]), expected, rtol=0, atol=1e-6)


@pytest.mark.extras
def test_trl_without_iterations_evaluates_only(trl_trainer, tmp_path, reward_file, capsys):
    flags = ["--reward", reward_file("return text.count('1') / 7"), "--iterations", 0]
    assert torch.equal(trained(trl_trainer, tmp_path / "run", *flags), weights_of(TINY_MOE))
    ((before, after),) = re.findall(r"reward_mean +([0-9.]+) +([0-9.]+)", capsys.readouterr().out)
    assert before == after


@pytest.mark.extras
def test_a_run_in_trl_ends_before_a_step_that_is_not_finite(trl_trainer, tmp_path, reward_file):
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    with pytest.raises(UserError, match="^step 2: grad_norm is not finite: "):
        trained(trl_trainer, tmp_path / "run", *reward, "--lr", 1e9)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.extras
def test_what_trl_lacks_is_one_line(trl_trainer, tmp_path):
    with pytest.raises(UserError, match="^TRL: ValueError paper is not supported, only "):
        trained(trl_trainer, tmp_path / "run", "--report_to", "paper")


@pytest.mark.extras
def test_dapo_without_a_mixed_group_ends_before_the_step(trl_trainer, tmp_path, reward_file, capsys):
    """Here in the second iteration, when Adam has a momentum. The evaluation before training grades 16
    completions, and so does an iteration."""
    lines = ["reward.calls = getattr(reward, 'calls', 0) + 1"]
    lines += ["return text.count('1') / 7 if reward.calls <= 32 else 0.0"]
    flags = ["--reward", reward_file(*lines), "--iterations", 3, "--max_sampling_rounds", 1]
    found = trained(trl_trainer, tmp_path / "run", *flags)
    assert torch.equal(found, weights_of(checkpoint_of(tmp_path / "run")))
    assert not torch.equal(found, weights_of(TINY_MOE))
    assert capsys.readouterr().out.count("training ends: too few mixed groups") == 1


# ---------------------------------------------------------------------------------------------- verl


VERL = {  # the settings that match the scripts, as in the example's header
    "ppo": {},
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
