"""Faults that once were in the code, one test or two for each, so that none comes back; and the two
things that came with their repair: --eval_dataset and evaluations.jsonl."""

import copy
import json
import os
import shutil
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import MORE, OWN_LR, SCRIPTS, SMALL, TINY_MOE, batch_of_ids, completes, flags_it_has
from conftest import metrics, problems_of, refused, run, save, script_args
from datasets import Dataset
from safetensors.torch import load_file, save_file
from test_architectures import new_model
from test_models import set_eos

import common
import grpo
import ppo
import sapo
from common import Completion, Problem, UserError, load_grader, load_problems, rollout_weights
from plumbing.args import parse_args
from plumbing.model import Policy

WEIGHTS = "model.safetensors"


def checkpoint_of(folder):
    (checkpoint,) = folder.glob("checkpoint-*")
    return checkpoint


def resume(folder, *flags):
    return ("--resume", "--run_dir", folder, *flags)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(numbers):
    return [{"question": f"{i}+1=", "answer": str(i + 1)} for i in numbers]


@pytest.fixture
def policy(tiny_policy):
    """A policy that the test may change."""
    return copy.deepcopy(tiny_policy)


@pytest.fixture
def small_args(sums):
    """What SMALL says, for Args(...)."""
    numbers = {name[2:]: int(value) for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
    return {"dataset": str(sums), "num_held_out": 8, **numbers}


# ------------------------------------------------------------------------------- 14. no signal, no move


def check_that_nothing_moves(name, model, folder, *flags):
    """After three iterations the weights are those of the model, to the bit, and no KL was measured."""
    steps = ("--router_aux_coef", 0, "--iterations", 3, "--eval_every", 0, "--run_dir", folder)
    result = run(name, *flags_it_has(name, SMALL), *steps, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    trained = load_file(checkpoint_of(folder) / WEIGHTS)
    for key, weight in load_file(model / WEIGHTS).items():
        assert torch.equal(trained[key], weight), f"{key} has moved"
    for line in metrics(folder):
        assert line.get("losses/kl_ref", 0) == line.get("losses/approx_kl", 0) == 0


QUIET = []
for name in [*SCRIPTS, *MORE]:
    QUIET.append((name, "float32"))
    QUIET.append(pytest.param(name, "bfloat16", marks=pytest.mark.slow))


@pytest.mark.parametrize("name, dtype", QUIET)
def test_14_without_a_signal_no_weight_moves(name, dtype, tmp_path, sums, reward_file):
    """All rewards are 0, and the KL to the reference is exactly 0, not rounding."""
    reward = reward_file("return 0.0")
    own = []
    if name == "dapo":  # without mixed groups it would make no update
        reward = reward_file('return 0.0, "correct" if text[-1:] in "02468" else "wrong"')
        own = ["--overlong", "none"]
    if name == "more.vapo":
        own = ["--pretraining_iterations", 1]
    flags = ("--reward", reward, "--dataset", sums, "--dtype", dtype)
    check_that_nothing_moves(name, TINY_MOE, tmp_path, *flags, *own)


LARGER = {  # several micro-batches or groups of lengths in a step, and one row in each
    "grpo": ("--prompts_per_iteration", 32, "--group_size", 8, "--num_minibatches", 16),
    "ppo": ("--prompts_per_iteration", 64, "--num_minibatches", 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_14_without_a_signal_no_weight_moves_in_a_larger_job(name, tmp_path, reward_file):
    flags = ("--max_new_tokens", 48, "--reward", reward_file("return 0.0"))
    check_that_nothing_moves(name, TINY_MOE, tmp_path, *LARGER[name], *flags)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_14_wherever_the_weights_lie_in_memory(name, tmp_path, sums, reward_file):
    """A file's weights stay where it is mapped, so they may begin at any multiple of 8 bytes, where a
    product of one row is rounded differently than with the reference's copy. Copies are aligned."""
    model = shutil.copytree(TINY_MOE, tmp_path / "model")
    data = (TINY_MOE / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + size] + b" " * (8 if size % 16 == 8 else 0)
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    assert len(header) % 16 == 0  # the weights follow at 8 bytes after a multiple of 16
    flags = ("--model", model, "--lr", 2e-4, "--dataset", sums, "--reward", reward_file("return 0.0"))
    prompts = 16 if name == "ppo" else 4
    rows = ("--prompts_per_iteration", prompts, "--num_minibatches", 16, "--max_new_tokens", 1)
    check_that_nothing_moves(name, model, tmp_path / "run", *flags, *rows)


@pytest.mark.parametrize("middle", [0, 0.5])
def test_14_whitening_does_not_amplify_rounding(middle):
    """Advantages that are equal up to rounding do not become 1 and -1."""
    x_BT = middle + 1e-7 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert ppo.whiten(x_BT, torch.ones(16, 8)).abs().max() <= max(1e-3, x_BT.abs().max())


# ------------------------------------------------------------------------------- runs and their folders


def test_1_resume_refuses_a_checkpoint_that_lacks_a_weight(tmp_path, sums):
    """It would train on a random one."""
    folder = tmp_path / "run"
    completes("--dataset", sums, "--run_dir", folder)
    path = checkpoint_of(folder) / WEIGHTS
    weights = load_file(path)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused("grpo", *resume(folder, "--iterations", 2), expected=f"--resume: {path.parent}")
    assert len(metrics(folder)) == 1


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"group_size": 1}, {"num_minibatches": 3}], ids=str)
def test_2_args_check_themselves(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"--{name} "):
        grpo.Args(**wrong)
    with pytest.raises(UserError, match=f"--{name} "):
        replace(grpo.Args(), **wrong)


def test_2_args_keep_what_was_given_and_resolve_it_when_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = grpo.Args()
    assert args.device == args.run_dir == ""
    assert args.torch_device in ("cpu", "cuda")
    assert args.folder == tmp_path / "runs" / "grpo-seed1"
    assert replace(args, seed=2).folder == tmp_path / "runs" / "grpo-seed2"
    assert ppo.Args().folder == tmp_path / "runs" / "ppo-seed1"
    assert grpo.Args(run_dir="mine").folder == tmp_path / "mine"
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "mine.py", raising=False)
    monkeypatch.setattr(grpo.Args, "__module__", "__main__")
    assert grpo.Args().folder == tmp_path / "runs" / "mine-seed1"


def test_2_two_scripts_run_in_threads_of_one_process(tmp_path, monkeypatch, small_args):
    """Called from Python: no signal handlers outside of the main thread, and a folder for each."""
    monkeypatch.chdir(tmp_path)
    for module in (grpo, sapo):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(module.main, module.Args(**small_args)).result()
        folder = tmp_path / "runs" / f"{module.__name__}-seed1"
        assert json.loads((folder / "settings.json").read_text())["script"] == module.__name__
        assert len(metrics(folder)) == 1


def test_a_refused_resume_leaves_settings_as_they_were(tmp_path, sums):
    folder = tmp_path / "run"
    completes("--dataset", sums, "--run_dir", folder)
    before = (folder / "settings.json").read_bytes()
    os.truncate(checkpoint_of(folder) / "trainer_state.pt", 100)
    refused("grpo", *resume(folder, "--iterations", 7, "--save_every", 3), expected="cannot be read")
    assert (folder / "settings.json").read_bytes() == before


def test_10_a_checkpoint_has_the_tokenizer_files_that_were_loaded(tmp_path, sums):
    """Byte for byte, since another version of transformers may not read what this one writes."""
    model = shutil.copytree(TINY_MOE, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "comment": "of an older version"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": config["eos_token"]}))
    completes("--model", model, *OWN_LR, "--dataset", sums, "--run_dir", tmp_path / "run")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (checkpoint_of(tmp_path / "run") / name).read_bytes() == (model / name).read_bytes()


# ------------------------------------------------------------------------------------ steps and numbers

STEPS = [(256, [16] * 16), (96, [16] * 6), (104, [18] * 2 + [17] * 4), (8, [8])]


@pytest.mark.parametrize("num_rows, sizes", STEPS, ids=[str(case[0]) for case in STEPS])
def test_3_a_batch_that_is_not_full_takes_fewer_steps(num_rows, sizes):
    """Of about the usual number of rows."""
    _, args = script_args("dapo", update_epochs=2)
    batch = batch_of_ids([([3], [4, 5])] * num_rows)
    assert [len(minibatch) for minibatch in batch.minibatches(args)] == sizes * 2


def test_5_an_evaluation_prefills_no_more_long_prompts_than_a_rollout(policy, monkeypatch):
    counts = []
    original = common.sample_batch

    def sample_batch(policy, problems, *args, **keywords):
        counts.append(len(problems))
        return original(policy, problems, *args, **keywords)

    monkeypatch.setattr(common, "sample_batch", sample_batch)
    _, args = script_args("grpo", prompts_per_iteration=4, max_new_tokens=4, eval_samples=2)
    problems = problems_of(policy, *["1+1="] * 40)
    common.evaluate(policy, problems, load_grader(args), args, sampled=True)
    assert max(counts) == 32  # they are short
    monkeypatch.setattr(common, "PROMPT_TOKENS", 7)
    counts.clear()
    common.evaluate(policy, problems, load_grader(args), args, sampled=True)
    assert sum(counts) == 2 * 40 and max(counts) == 4


def test_7_seeds_do_not_share_an_epoch():
    epochs = set()
    for seed in (1, 4097, 8193):
        stream = common.ProblemStream(list(range(50)), seed)
        epochs |= {tuple(stream.take(50)) for _ in range(3)}
    assert len(epochs) == 9


@pytest.mark.parametrize("rule", ["sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"])
def test_7_a_logprob_that_is_nan_stays_one(rule):
    """It must end the run, not weigh 0 or the cap. Other rows keep their weights."""
    sampler_BT = torch.zeros(2, 3)
    sampler_BT[0, 1] = torch.nan
    for per_sequence in (False, True):
        arguments = (torch.zeros(2, 3), sampler_BT, torch.ones(2, 3))
        weights, _ = rollout_weights(*arguments, rule=rule, per_sequence=per_sequence)
        assert weights[0].isnan().any() and (weights[1] == 1).all()


def test_13_a_dense_model_logs_nothing_about_experts(tmp_path, sums):
    model = save(new_model("llama"), tmp_path / "model")
    completes("--model", model, *OWN_LR, "--dataset", sums, "--run_dir", tmp_path / "run")
    (line,) = metrics(tmp_path / "run")
    assert [key for key in line if key.startswith("moe/")] == []


# ------------------------------------------------------------------------------------- flags and models


def test_4_two_reward_functions_are_refused(reward_file, tmp_path):
    """It names the example that adds several up."""
    two = ("--reward", reward_file("return 1.0"), "--reward", reward_file("return 0.0"))
    assert "examples/" in refused("grpo", *two, "--run_dir", tmp_path, expected="--reward")


def test_4_a_switch_may_have_a_value():
    for words, expected in (([], True), (["True"], True), (["false"], False)):
        args = parse_args(grpo.Args, ["--gradient_checkpointing", *words])
        assert args.gradient_checkpointing is expected
    with pytest.raises(common.UserError, match="--gradient_checkpointing"):
        parse_args(grpo.Args, ["--gradient_checkpointing", "7"])


@pytest.mark.parametrize("flag", ["dtype", "rollout_dtype"])
def test_6_the_check_at_loading_runs_the_copy_in_bfloat16(flag, tiny_policy):
    def fail(*_):
        raise RuntimeError("no kernel for BFloat16")

    master = copy.deepcopy(tiny_policy.master)
    policy = Policy(master, tiny_policy.tokenizer, **{flag: "bfloat16"})
    copied = policy.model if flag == "dtype" else policy.rollout_policy.model
    assert copied is not master
    copied.base_model.register_forward_pre_hook(fail)
    with pytest.raises(UserError, match="--model .*no kernel"):
        load_problems(script_args("grpo", **{flag: "bfloat16"})[1], policy)


def test_12_a_model_in_float32_on_a_gpu_is_told_of_bfloat16(monkeypatch, tmp_path):
    """Only one's own."""
    monkeypatch.setattr(grpo, "main", lambda args: None)
    monkeypatch.setattr(grpo.Args, "torch_device", "cuda", raising=False)
    own = ("--model", "mine", *OWN_LR)
    for flags, is_told in ((own, True), ((*own, "--dtype", "bfloat16"), False), ((), False)):
        result = run("grpo", *flags, "--run_dir", tmp_path)
        assert result.returncode == 0, result.stderr
        assert ("--dtype bfloat16" in result.stdout + result.stderr) == is_told


def test_eos_ids_in_nested_lists_are_one_line(tmp_path, sums):
    model = shutil.copytree(TINY_MOE, tmp_path / "model")
    set_eos(model, [[1]])
    flags = ("--model", model, "--dataset", sums, "--run_dir", tmp_path / "run")
    assert "EOS" in refused("grpo", *flags, expected=f"--model {model}")


# ------------------------------------------------------------------------------------- data and rewards


def test_7_a_text_part_without_text_is_a_row_that_is_left_out(tmp_path, policy, capsys):
    bad = [{"role": "user", "content": [{"type": "text"}]}]
    path = write_lines(tmp_path / "data.jsonl", [*rows_of(range(30)), {"question": bad, "answer": "2"}])
    stream, held_out = load_problems(script_args("grpo", dataset=str(path), num_held_out=8)[1], policy)
    assert len(stream.problems) + len(held_out) == 30
    assert "left out: 1 " in capsys.readouterr().out


def load_with_template(path, policy, template, rows):
    """(how often the chat template was rendered, what was refused, if anything)."""
    policy.tokenizer.chat_template = template
    render = policy.tokenizer.apply_chat_template = Mock(wraps=policy.tokenizer.apply_chat_template)
    args = script_args("grpo", dataset=str(write_lines(path, rows)), num_held_out=8)[1]
    try:
        load_problems(args, policy)
    except UserError as error:
        return render.call_count, str(error)
    return render.call_count, None


PICKY = "{{ raise_exception('no!') if messages[0].content[0] == '2' else messages[0].content }}"


def test_a_prompt_that_cannot_be_used_is_rendered_once(tmp_path, policy):
    """3,000 rows of 30 prompts, of which the template refuses one: 2+1=."""
    rows = rows_of([2, *range(30, 59)]) * 100
    count, _ = load_with_template(tmp_path / "data.jsonl", policy, PICKY, rows)
    assert count == 30


def test_a_template_that_always_fails_ends_the_run_after_a_few_rows(tmp_path, policy):
    template = "{{ raise_exception('no!') }}"
    rows = rows_of(range(3000))
    count, error = load_with_template(tmp_path / "data.jsonl", policy, template, rows)
    assert "no!" in error and count <= 100


def write_reward(tmp_path, name, source):
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    return f"{path}:f"


@pytest.mark.parametrize("kind", ["one", "lists"])
def test_8_a_reward_function_cannot_change_the_data(kind, tmp_path):
    """Each call gets copies of the dataset's cells."""
    one = "def f(nums):\n    nums.pop()\n    return len(nums)\n"
    lists = "def f(completions, nums):\n    return [row.pop() and len(row) for row in nums]\n"
    name = write_reward(tmp_path, f"pops_{kind}", one if kind == "one" else lists)
    problem = Problem("1+1=", "2", [4, 5], {"answer": "2", "prompts": "1+1=", "nums": [7, 8, 9]})
    completions = [Completion(problem, [1], [0.0], False, "2")] * 3
    grade = load_grader(script_args("grpo", reward=name)[1])
    for _ in range(2):
        assert [c.reward for c in grade(completions)] == [2, 2, 2]


def test_8_a_reward_function_may_change_the_working_folder(tmp_path, monkeypatch, small_args):
    (tmp_path / "other").mkdir()
    source = f"import os\ndef f(text):\n    os.chdir({str(tmp_path / 'other')!r})\n    return 0.0\n"
    reward = write_reward(tmp_path, "changes_folder", source)
    monkeypatch.chdir(tmp_path)
    grpo.main(grpo.Args(**small_args, device="cpu", reward=reward, run_dir="mine"))
    assert len(metrics(tmp_path / "mine")) == 1 and list((tmp_path / "other").iterdir()) == []


def test_positional_only_parameters_are_one_line_at_loading(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    reward = write_reward(tmp_path, "is_len", "f = len\n")
    refused("grpo", "--reward", reward, "--run_dir", tmp_path / "run", expected=f"--reward {reward}")


def texts_of(policy):
    _, args = script_args("grpo", max_new_tokens=32)
    problems = problems_of(policy, "57+308=", "12+34=")
    return common.sample(policy, problems, 8, args, torch.Generator().manual_seed(0))


def test_9_the_graded_text_has_no_end_token_even_if_that_is_not_special(policy):
    end = policy.tokenizer.convert_tokens_to_ids("#")
    policy.model.generation_config.eos_token_id = [1, end]
    ended = [c for c in texts_of(policy) if c.ids[-1] == end]
    assert ended and not any("#" in c.text for c in ended)


def test_9_the_graded_text_has_a_marker_even_if_that_is_special(policy):
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    assert any("####" in c.text for c in texts_of(policy))


# -------------------------------------------------------------------- --eval_dataset, evaluations.jsonl


def load_both(tmp_path, policy, **flags):
    """Problems of 40 rows for training, of which 3 are also among the 12 for evaluation."""
    training = write_lines(tmp_path / "training.jsonl", rows_of(range(40)))
    evaluation = write_lines(tmp_path / "evaluation.jsonl", rows_of(range(37, 49)))
    flags = {"dataset": str(training), "eval_dataset": str(evaluation)} | flags
    stream, held_out = load_problems(script_args("grpo", **flags)[1], policy)
    return len(stream.problems), [p.prompt for p in held_out]


@pytest.mark.parametrize("num_held_out, expected", [(8, 8), (256, 12)])
def test_eval_dataset_gives_the_held_out_problems(num_held_out, expected, tmp_path, policy, capsys):
    """Its first ones, or all if it has fewer. Nothing is held out from training; prompts that are in
    both are counted."""
    num_training, held_out = load_both(tmp_path, policy, num_held_out=num_held_out)
    assert num_training == 40
    assert held_out == [f"{i}+1=" for i in range(37, 37 + expected)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problems: ")]
    assert "40 to train on" in line and f"{expected} held out" in line and "3 " in line


def test_eval_split_is_test_if_there_is_one(tmp_path, policy):
    folder = tmp_path / "folder"
    folder.mkdir()
    Dataset.from_list(rows_of(range(60, 80))).to_parquet(folder / "train.parquet")
    Dataset.from_list(rows_of(range(50, 59))).to_parquet(folder / "test.parquet")
    for split, numbers in {"": range(50, 59), "test": range(50, 59), "train": range(60, 80)}.items():
        _, held_out = load_both(tmp_path, policy, eval_dataset=str(folder), eval_split=split)
        assert held_out == [f"{i}+1=" for i in numbers]


def evaluations(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_run_evaluations_are_logged_and_a_resume_cuts_them_back(tmp_path, sums):
    """All numbers of the table at the end; sampled answers before and after training only."""
    flags = ("--dataset", sums, "--run_dir", tmp_path, "--eval_every", 1, "--eval_samples", 2)
    completes(*flags, "--iterations", 2)
    lines = evaluations(tmp_path)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert ["sampled" in line for line in lines] == [True, False, True]
    for line, logged in zip(lines[1:], metrics(tmp_path), strict=True):
        assert line["greedy"]["accuracy"] == logged["eval/accuracy"]
    assert {"accuracy", "response_len_mean", "pass@1", "pass@2"} <= set(lines[0]["sampled"])
    with open(tmp_path / "evaluations.jsonl", "a") as file:
        file.write('{"iteration": 3, "gre')  # of a run that was killed
    completes(*resume(tmp_path, "--iterations", 3))
    assert [line["iteration"] for line in evaluations(tmp_path)] == [0, 1, 2, 3]
    assert evaluations(tmp_path)[:3] == lines
