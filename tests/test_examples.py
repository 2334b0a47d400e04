"""examples/: they run, and a loss inside TRL or verl is the script's.

Tests marked `extras` need examples/requirements.txt. verl needs a separate environment: here the losses
are called as its actor does; conformance/engines.md tells of the real one."""

import copy
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
from filelock import FileLock
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
    words = """--use_cpu --num_minibatches 2 --update_epochs 3 --iterations 4 --save_every 5
    --max_new_tokens 20 --temperature 0.5 --dtype bfloat16 --seed 7 --gradient_checkpointing"""
    _, args, flags = trl_trainer.parse(words.split())
    config = trl_trainer.GRPOConfig(**flags)
    assert (config.max_steps, config.save_steps, config.save_total_limit) == (24, 30, 1)
    assert (config.max_completion_length, config.temperature, config.bf16) == (20, 0.5, True)
    assert (args.seed, config.seed, config.activation_checkpointing) == (7, 7, True)
    assert config.output_dir == str(args.folder) == str(Path("runs/trl-grpo").absolute())
    _, _, flags = trl_trainer.parse([*words.split(), "--save_every", "0"])
    assert flags["save_steps"] == 24  # only at the end


@pytest.mark.extras
def test_each_flag_of_trl_is_allowed_or_set_by_us_or_refused(trl_trainer):
    names = {field.name for field in dataclasses.fields(trl_trainer.GRPOConfig)}
    allowed = {*trl_trainer.TRL_FLAGS, *trl_trainer.OPTIMIZER_FLAGS}
    assert allowed <= names
    for algorithm in trl_trainer.ALGORITHMS:
        script, args, flags = trl_trainer.parse(["--algorithm", algorithm])
        loss = inspect.signature(script.policy_loss).parameters
        own = names & {*trl_trainer.FLAGS, *loss}
        # chat_template_kwargs are used where prompts are rendered, and the first one sets another flag
        not_passed = {"gradient_checkpointing", "chat_template_kwargs"}
        assert own == not_passed | {"max_grad_norm", "seed", "temperature"}
        ours = trl_trainer.to_trl(args, 1, 0).keys()
        assert ours & allowed == {"output_dir", "per_device_train_batch_size"}
        assert flags.keys() == ours | allowed and own - ours == not_passed
        for name in names - allowed - own:
            with pytest.raises(UserError, match=f"^not used here: --{name}=1. TRL has --output_dir, "):
                trl_trainer.parse(["--algorithm", algorithm, f"--{name}=1"])


def cannot_share(size, processes=1):
    flag = f"--per_device_train_batch_size {size}"
    return f"{processes} processes with {flag} cannot share a step of 16 completions"


@pytest.mark.extras
@pytest.mark.parametrize(
    "words, line",
    [
        ("--run_dir=x --resume", "not used here: --run_dir=x --resume. TRL has --output_dir, "),
        ("--overlong filter", "not used here: --overlong filter. TRL has "),
        ("--lr x", "argument --lr: invalid float value: 'x'"),
        ("--lr 0", "--lr must be from 1e-09 to 1e+09, not 0.0"),
        ("--reward a.py:f --reward=b.py:f", "--reward was given twice: examples/format_and"),
        ("--per_device_train_batch_size 3", cannot_share(3)),
        ("--per_device_train_batch_size 32", cannot_share(32)),
        ("--per_device_train_batch_size -2", cannot_share(-2)),
        ("", cannot_share(5, 3)),
        ("", cannot_share(1, 32)),
    ],
)
def test_what_trl_cannot_use_is_one_line(trl_trainer, monkeypatch, words, line):
    monkeypatch.setenv("WORLD_SIZE", line.split()[0] if not words else "1")
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
    is_short = "max_sampling_rounds" in flags
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


@pytest.mark.extras
def test_a_run_resumed_in_two_processes_is_the_same(tmp_path, reward_file):
    """Prompts, noise and optimizer."""
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    flags = ["--algorithm", "dapo", *SMALL, *reward, "--num_held_out", "8", "--save_every", "1"]
    flags += ["--iterations", "3", "--save_total_limit", "3", "--output_dir"]
    launched("examples/trl_trainer.py", *flags, tmp_path / "whole")
    expected = weights_of(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert not torch.equal(weights_of(checkpoint), expected)
    flags += [tmp_path / "rest", "--resume_from_checkpoint", checkpoint]
    launched("examples/trl_trainer.py", *flags)
    assert torch.equal(weights_of(tmp_path / "rest"), expected)


RESUME = ["--resume_from_checkpoint", "true"]


def trained(trl_trainer, folder, *flags):
    """The weights of a small job in this process."""
    job = ["--algorithm", "dapo", "--dataset", SUMS, "--num_held_out", 8, *SMALL, "--save_every", 1]
    others = ["--output_dir", folder, "--use_cpu", "--disable_tqdm", "True"]
    trl_trainer.main([str(word) for word in (*job, *others, *flags)])
    return weights_of(folder)


@pytest.mark.extras
def test_an_earlier_run_in_trl_is_kept(trl_trainer, tmp_path, reward_file):
    folder = tmp_path / "run"
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    trained(trl_trainer, folder, *reward)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}
    in_use = (
        f"--output_dir {folder} cannot be used: a new run needs an empty one; to continue: --resume"
    )
    for flags in ([], ["--resume_from_checkpoint", "nowhere"]):
        with pytest.raises(UserError, match=f"^{re.escape(in_use)}"):
            trained(trl_trainer, folder, *reward, *flags)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.extras
def test_trl_goes_on_from_the_newest_complete_checkpoint(trl_trainer, tmp_path, reward_file):
    """The run was killed while it saved a later one. A run that is finished takes no step."""
    folder = tmp_path / "run"
    flags = ["--reward", reward_file("return text.count('1') / 7"), "--save_total_limit", 9]
    trained(trl_trainer, folder, *flags)
    expected = trained(trl_trainer, tmp_path / "whole", *flags, "--iterations", 2)
    # Six digits are also those of the scripts' checkpoints, which the model may have beside it.
    (folder / "checkpoint-100000").mkdir()
    for iterations in (2, 2, 1):
        found = trained(trl_trainer, folder, *flags, "--iterations", iterations, *RESUME)
        assert torch.equal(found, expected)


@pytest.mark.extras
def test_a_run_in_trl_goes_on_only_as_it_began(trl_trainer, tmp_path, tiny_model, reward_file):
    folder = tmp_path / "run"
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    trained(trl_trainer, folder, *reward)
    before = weights_of(folder)
    rows = SUMS.read_text().splitlines()
    (tmp_path / "others.jsonl").write_text("\n".join(rows[:-1]))
    model = copy.deepcopy(tiny_model[0])
    model.lm_head.weight.data *= 2
    save(model, tmp_path / "model")
    wrong = {
        "--algorithm gspo": "has script dapo, not gspo",
        "--lr 1": "has lr 0.0002, not 1.0",
        "--weight_decay 0.1": "has weight_decay 0.0, not 0.1",
        "--warmup_steps 3": "has warmup_steps 0, not 3.0",
        f"--dataset {tmp_path}/others.jsonl": "has problems_hash ",
        f"--model {tmp_path}/model": "has model_hash ",
    }
    for flags, difference in wrong.items():
        with pytest.raises(UserError, match=f"^--resume: {folder}/checkpoint-2 {difference}"):
            trained(trl_trainer, folder, *reward, *RESUME, *flags.split())
    assert torch.equal(weights_of(checkpoint_of(folder)), before)


@pytest.mark.extras
def test_a_folder_that_trl_cannot_continue_from_is_one_line(trl_trainer, tmp_path):
    (tmp_path / "completions").mkdir()
    advice = "it has no checkpoint to continue from: empty it, or name a different one$"
    for folder, flags in [(tmp_path, []), (tmp_path, RESUME), (tmp_path / "new", RESUME)]:
        with pytest.raises(UserError, match=f"^--output_dir {folder} cannot be used: {advice}"):
            trained(trl_trainer, folder, *flags)
    line = "--resume_from_checkpoint nowhere cannot be read: FileNotFoundError "
    with pytest.raises(UserError, match=f"^{line}"):
        trained(trl_trainer, tmp_path / "run", "--resume_from_checkpoint", "nowhere")


@pytest.mark.extras
def test_two_runs_in_trl_cannot_share_a_folder(trl_trainer, tmp_path):
    with (
        FileLock(tmp_path / "lock"),
        pytest.raises(UserError, match=f"^--output_dir {tmp_path} cannot be used: Timeout "),
    ):
        trained(trl_trainer, tmp_path)


@pytest.mark.extras
def test_trl_computes_in_the_scripts_dtype(trl_trainer, tmp_path, reward_file, monkeypatch):
    """Also if accelerate is configured for a different one."""
    reward = ["--reward", reward_file("return text.count('1') / 7")]
    expected = trained(trl_trainer, tmp_path / "float32", *reward)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert torch.equal(trained(trl_trainer, tmp_path / "run", *reward), expected)


@pytest.mark.extras
def test_trl_gets_the_scripts_advice(trl_trainer, tmp_path, tiny_model, capsys):
    model = save(tiny_model[0], tmp_path / "model")
    trained(trl_trainer, tmp_path / "run", "--model", model, "--iterations", 0)
    assert "warning: --max_new_tokens 48 suits tiny-moe" not in capsys.readouterr().err
    trained(trl_trainer, tmp_path / "run2", "--model", model)
    assert "warning: --lr 0.0002 suits tiny-moe" in capsys.readouterr().err


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
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.extras
def test_what_trl_refuses_is_one_line(trl_trainer, tmp_path):
    with pytest.raises(UserError, match="^TRL: ValueError Got warmup_steps = -1.0"):
        trained(trl_trainer, tmp_path / "config", "--warmup_steps", -1)
    with pytest.raises(UserError, match="^TRL: ValueError paper is not supported, only "):
        trained(trl_trainer, tmp_path / "trainer", "--report_to", "paper")


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
