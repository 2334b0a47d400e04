"""Input that looks right and is not: it must be read exactly, or be refused in one line."""

import copy
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, TINY_MOE, run, script_args
from safetensors.torch import load_file, save_file
from test_bad_input import SMALL, refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

import grpo
import plumbing.models
import plumbing.settings
from common import check_logprobs, load_policy, load_problems, load_verifier, verify
from plumbing.args import UserError, launch
from plumbing.data import read_dataset
from plumbing.memory import plan_memory
from plumbing.models import load_model
from plumbing.policy import Policy


def arguments(**changes):
    return script_args("grpo", device="cpu", **changes)[1]


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------ model folders


def misfit(folder, how):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    if how == "missing":
        del weights[name]
    elif how == "renamed":
        weights["model.layers.0.self_attn.query.weight"] = weights.pop(name)
    elif how == "surplus":
        weights["model.layers.7.self_attn.q_proj.weight"] = weights[name].clone()
    elif how == "more layers":
        edit_json(folder / "config.json", num_hidden_layers=3, layer_types=None)
    elif how == "fewer layers":
        edit_json(folder / "config.json", num_hidden_layers=1, layer_types=None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("how", ["missing", "renamed", "surplus", "more layers", "fewer layers"])
def test_weights_that_do_not_fit_the_config(how, tmp_path, tiny_model):
    """transformers would go on with random weights, and say so in a warning that is muted."""
    folder = save(tmp_path / "model", *tiny_model)
    misfit(folder, how)
    refused("grpo", "--run_dir", tmp_path / "run", "--model", folder, expected="do not fit its config")


def test_nan_weights(tmp_path, tiny_model):
    folder = save(tmp_path / "model", *tiny_model)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = ("differ by nan between the sampler", "NaN weights")
    refused("grpo", "--run_dir", tmp_path / "run", "--model", folder, expected=expected)


def test_no_eos_anywhere(tmp_path, tiny_model):
    """Every completion would run into the cap, and count as cut off."""
    model, tokenizer = copy.deepcopy(tiny_model[0]), copy.deepcopy(tiny_model[1])
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    folder = save(tmp_path / "model", model, tokenizer)
    refused("grpo", "--run_dir", tmp_path / "run", "--model", folder, expected="has an EOS token")


def word_tokenizer(*words):
    ids = {word: i for i, word in enumerate(["<unk>", "<eos>", *words])}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")


def test_token_ids_beyond_the_vocabulary(tmp_path, tiny_model):
    tokenizer = word_tokenizer(*(f"word{i}" for i in range(40)), "1", "2", "10", "+", "=")
    folder = save(tmp_path / "model", tiny_model[0], tokenizer)
    expected = "its tokenizer has token 46, but it has 17 embeddings"
    refused("grpo", "--run_dir", tmp_path / "run", "--model", folder, expected=expected)


def test_a_tokenizer_that_does_not_know_the_dataset(tmp_path, tiny_model):
    """The character tokenizer knows digits and little else."""
    rows = [{"question": f"How many are {i} and one?", "answer": str(i + 1)} for i in range(20)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(
        "grpo", "--run_dir", tmp_path / "run", "--dataset", path, expected="unknown to its tokenizer"
    )


def gpt_oss(**changes):
    shape = dict(vocab_size=17, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    shape |= dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**shape | ids | changes)).eval()


@pytest.mark.parametrize("name", ["grpo", "rspo"])
def test_run_an_architecture_that_mixes_packed_sequences(name, tmp_path, tiny_model, monkeypatch):
    """gpt-oss does not see from the positions where a sequence begins: it gets a row for each one, and
    so does its reference; then the log-probs of sampler and update agree."""
    folder = save(tmp_path / "model", gpt_oss(), tiny_model[1])
    policy = load_policy(arguments(model=str(folder)))
    assert policy.one_sequence_per_row and policy.frozen_copy().one_sequence_per_row
    flags = ("--model", folder, "--run_dir", tmp_path / "run", "--lr", 1e-3, "--iterations", 2)
    result = run(name, *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert abs(metrics["rollout/sampler_kl"]) < 1e-6
        assert metrics["losses/first_step_ratio_error_max"] == 0
    # The test can tell: packed all the same, the log-probs are other ones.
    always_packed = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Policy, "one_sequence_per_row", always_packed, raising=False)
    with pytest.raises(UserError, match="differ by"):
        check_logprobs(policy, arguments(model=str(folder)))


def test_the_tiny_model_shares_rows():
    assert not load_policy(arguments()).one_sequence_per_row


def test_the_base_model_is_not_there(tmp_path, monkeypatch):
    """As where a script was copied without it."""
    monkeypatch.setattr(plumbing.models, "TINY_MOE", tmp_path / "tiny_moe")
    with pytest.raises(UserError, match="--model tiny-moe: its folder .*tiny_moe does not exist"):
        load_model(arguments())


def test_run_a_base_model_that_has_changed(tmp_path, monkeypatch):
    """A run goes on with the files that it began with; what is no part of the model may change."""
    folder = shutil.copytree(TINY_MOE, tmp_path / "tiny_moe")
    for module in (plumbing.models, plumbing.settings):
        monkeypatch.setattr(module, "TINY_MOE", folder)
    flags = ("--run_dir", tmp_path / "run")
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    (folder / "README.md").write_text("another text")
    assert run("grpo", *SMALL, *flags, "--resume", held_out=8).returncode == 0
    for name in ("config.json", "tokenizer_config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        refused("grpo", *flags, "--resume", expected=f"has model's {name} ")
        (folder / name).write_bytes(content)


def test_run_a_model_folder_that_has_changed(tmp_path, tiny_model):
    """Another number of active experts, another chat template, another EOS: the run would go on to
    another end. Its weights are those of the checkpoint."""
    folder = save(tmp_path / "model", *tiny_model)
    flags = ("--model", folder, "--run_dir", tmp_path / "run", "--lr", 1e-3)
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("grpo", *SMALL, *flags, "--resume", held_out=8).returncode == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    edit_json(folder / "config.json", num_experts_per_tok=1)
    refused("grpo", *flags, "--resume", expected="has model's config.json ")
    (folder / "config.json").write_bytes(before[folder / "config.json"])
    edit_json(folder / "generation_config.json", eos_token_id=2)
    refused("grpo", *flags, "--resume", expected="has model's generation_config.json ")
    (folder / "generation_config.json").write_bytes(before[folder / "generation_config.json"])
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    refused("grpo", *flags, "--resume", expected="has model's chat_template.jinja None, not ")


@pytest.mark.parametrize("given, expected", [(None, [1]), ("2", [])])
def test_the_tiny_model_runs_on_one_thread(given, expected, monkeypatch):
    """Unless OMP_NUM_THREADS is set: its operators are too small for more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    load_model(arguments())
    assert counts == expected


# ------------------------------------------------------------------------------------------ datasets


def write_json(path, *answers):
    """Rows of which each has its answer as it is written here, in JSON."""
    rows = [f'{{"question": "{i}+1=", "answer": {answer}}}\n' for i, answer in enumerate(answers)]
    path.write_text("".join(rows))
    return path


def golds(path):
    return sorted(gold for _, gold in read_dataset(arguments(dataset=str(path))))


EXACT = [
    '"2024-01-31"',
    "9223372036854775809",
    "-18446744073709551616",
    "0.1",
    "4.50",
    '"1e+30"',
    "-0.5",
]


@pytest.mark.parametrize("answer", EXACT)
def test_gold_answers_are_read_as_they_are_written(answer, tmp_path):
    assert golds(write_json(tmp_path / "data.jsonl", answer)) == [answer.strip('"')]


INEXACT = ["1e30", "1E400", "NaN", "Infinity", "true", "[1, 2]", '{"a": 1}', "null", '""', '" "']


@pytest.mark.parametrize("answer", INEXACT)
def test_gold_answers_that_cannot_be_read_exactly(answer, tmp_path):
    path = write_json(tmp_path / "data.jsonl", "1", "2", answer)
    with pytest.raises(UserError, match="row 3: no readable gold answer"):
        read_dataset(arguments(dataset=str(path)))


@pytest.mark.parametrize(
    "value, gold",
    [
        (pyarrow.scalar(2**64 - 1, pyarrow.uint64()), "18446744073709551615"),
        (pyarrow.scalar(Decimal("1.50"), pyarrow.decimal128(10, 2)), "1.50"),
        (pyarrow.scalar(0.1, pyarrow.float64()), "0.1"),
        (pyarrow.scalar(3.0, pyarrow.float64()), "3.0"),
        (pyarrow.scalar("2024-01-31", pyarrow.string()), "2024-01-31"),
        (pyarrow.scalar(0.1, pyarrow.float32()), None),
        (pyarrow.scalar(1e30, pyarrow.float64()), None),
        (pyarrow.scalar(float("nan"), pyarrow.float64()), None),
        (pyarrow.scalar(date(2024, 1, 31), pyarrow.date32()), None),
        (pyarrow.scalar(b"365", pyarrow.binary()), None),
        (pyarrow.scalar(True, pyarrow.bool_()), None),
        (pyarrow.scalar([1], pyarrow.list_(pyarrow.int64())), None),
    ],
    ids=str,
)
def test_parquet_answers(value, gold, tmp_path):
    path = tmp_path / "data.parquet"
    answers = pyarrow.array([value.as_py()], value.type)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1+1="], "answer": answers}), path)
    if gold is None:
        with pytest.raises(UserError, match="row 1: no readable gold answer"):
            golds(path)
    else:
        assert golds(path) == [gold]


def test_a_file_name_means_nothing_but_itself(tmp_path):
    """No pattern, and no neighbour."""
    for name, answer in (
        ("d1.jsonl", "1"),
        ("d[1].jsonl", "2"),
        ("star.jsonl", "3"),
        ("s*r.jsonl", "4"),
    ):
        write_json(tmp_path / name, f'"{answer}"')
    assert golds(tmp_path / "d[1].jsonl") == ["2"]
    assert golds(tmp_path / "s*r.jsonl") == ["4"]
    (tmp_path / "d[1].jsonl").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        golds(tmp_path / "d[1].jsonl")


def test_a_file_that_is_written_again_within_a_second(tmp_path):
    path = tmp_path / "data.jsonl"
    for answer in ("1", "2", "3"):
        write_json(path, answer)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert golds(path) == [answer]


def test_other_line_separators_are_part_of_a_string(tmp_path):
    path = write_json(tmp_path / "data.jsonl", '"a\u2028b"', '"c\u0085d"')
    assert golds(path) == ["a\u2028b", "c\u0085d"]


def test_the_line_of_damaged_json_is_named(tmp_path):
    path = write_json(tmp_path / "data.jsonl", "1", "2")
    path.write_text(path.read_text() + "\nwhat?\n")
    with pytest.raises(UserError) as refusal:
        golds(path)
    assert "line 4" in str(refusal.value.__cause__)


ROW = '{"question": "1+1=", "answer": "2"}'


@pytest.mark.parametrize(
    "name, text",
    [
        ("data.jsonl", f"[{ROW}]"),  # must not be read as a row with one column
        ("data.json", "[1]"),
        ("data.json", f"[{ROW}, 1]"),
        ("data.json", f"[{ROW}"),
        ("data.json", "3"),
        ("data.json", '"question"'),
    ],
)
def test_what_holds_no_objects(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text + "\n")
    with pytest.raises(UserError, match="cannot be read"):
        golds(path)


@pytest.mark.parametrize("name, text", [("data.json", f"\n[\n{ROW}\n]"), ("data.jsonl", ROW)])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array_of_objects_and_a_byte_order_mark(mark, name, text, tmp_path):
    path = tmp_path / name
    path.write_text(mark + text, encoding="utf-8")
    assert read_dataset(arguments(dataset=str(path))) == [("1+1=", "2")]


@pytest.mark.parametrize("name, text", [("data.json", f"[{ROW},\n%s]"), ("data.jsonl", f"{ROW}\n%s")])
def test_half_of_a_surrogate_pair(name, text, tmp_path):
    """JSON can write it, and no tokenizer can read it: the row is named."""
    path = tmp_path / name
    path.write_text(text % '{"question": [{"role": "user", "content": "\\ud800"}], "answer": "2"}')
    with pytest.raises(UserError) as refusal:
        golds(path)
    assert re.match("(row|line) 2: .*surrogates not allowed", str(refusal.value.__cause__))


def test_the_same_prompt_with_two_gold_answers(tmp_path, tiny_model):
    rows = [("1+1=", "2"), ("2+2=", "4"), ("1+1=", "2.0"), ("2+2=", "5")]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    with pytest.raises(UserError, match="'2\\+2=' has two gold answers, . and ."):
        load_problems(arguments(dataset=str(path), num_held_out=1), Policy(*tiny_model))


# --------------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """(run folder, its dataset) after one iteration."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset", folder / "data.jsonl", "--run_dir", folder / "run")
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    return folder / "run", folder / "data.jsonl"


def copied(finished, tmp_path):
    """A copy of the run folder, and the flags to go on with it."""
    folder, dataset = finished
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", ("--dataset", dataset, "--run_dir", tmp_path / "run", "--resume")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "more.json"]
)
def test_every_file_of_a_checkpoint_is_checked(name, finished, tmp_path):
    folder, flags = copied(finished, tmp_path)
    (checkpoint,) = folder.glob("checkpoint-*")
    with open(checkpoint / name, "a") as file:
        file.write(" ")
    refused("grpo", *flags, expected=f"{name} has changed since it was written")


def test_a_dataset_that_changed(finished, tmp_path):
    """Training and held-out problems would mix."""
    folder, flags = copied(finished, tmp_path)
    changed = tmp_path / "data.jsonl"
    changed.write_text(finished[1].read_text() + '{"question": "1+1=", "answer": "2"}\n')
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {"dataset": str(changed)}))
    flags = ("--dataset", changed, "--run_dir", folder, "--resume")
    refused("grpo", *flags, expected="has dataset's data.jsonl")


def test_a_folder_of_data_that_changed(tmp_path):
    """All its files belong to the settings, with their names; what is hidden does not."""
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for path in (folder / "train.csv", folder / "more" / "train.csv", folder / ".index"):
        path.write_text("question,answer\n1+1=,2\n")

    def settings():
        settings = plumbing.settings.settings_of(args, "grpo", folder / "run").items()
        return {pair for pair in settings if pair[0].startswith("dataset's ")}

    args = arguments(dataset=str(folder))
    before = settings()
    assert {name for name, _ in before} == {"dataset's train.csv", "dataset's more/train.csv"}
    (folder / ".index").write_text("")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("of the run itself")
    assert settings() == before
    (folder / "more" / "train.csv").write_text("question,answer\n")
    assert settings() != before
    (folder / "more" / "test.csv").write_text("")
    assert len(settings()) == 3


@pytest.mark.parametrize("flag, value", [("dataset", "{}"), ("reward", "{}:f"), ("model", "{}")])
@pytest.mark.parametrize("why", ["too long", "forbidden"])
def test_a_file_that_cannot_be_read(why, flag, value, tmp_path, monkeypatch):
    """Its own flag is named, not --run_dir."""

    original = plumbing.settings.file_hash

    def file_hash(file):
        if file != path:
            return original(file)
        raise PermissionError(13, "Permission denied", str(file))

    path = tmp_path / ("x" * 300)
    if why == "forbidden":
        path = tmp_path / "config.json"
        path.write_text("{}")
        monkeypatch.setattr(plumbing.settings, "file_hash", file_hash)
    flags = ("--run_dir", tmp_path / "run", f"--{flag}", value.format(path))
    refused("grpo", *flags, expected=f"--{flag} {value.format(path)} cannot be read")


def test_run_a_copy_that_the_user_keeps(finished, tmp_path):
    """checkpoint-best-2 is not the newest checkpoint, and nobody deletes it."""
    folder, flags = copied(finished, tmp_path)
    (checkpoint,) = folder.glob("checkpoint-*")
    for name in ("checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak", "checkpoint-0000099"):
        shutil.copytree(checkpoint, folder / name)
        (folder / name / "config.json").write_text("mine")
    result = run("grpo", *SMALL, *flags, "--iterations", 2, held_out=8)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in folder.glob("checkpoint-*")}
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak", "checkpoint-0000099"}
    assert names == kept | {"checkpoint-000002"}


def test_run_resume_before_the_first_checkpoint_compares_settings(finished, tmp_path):
    folder, flags = copied(finished, tmp_path)
    (checkpoint,) = folder.glob("checkpoint-*")
    shutil.rmtree(checkpoint)
    before = (folder / "metrics.jsonl").read_bytes()
    refused("grpo", *flags, "--lr", 1e-3, expected="has lr 0.0002, not 0.001")
    refused("sapo", *flags, expected="has")
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1]


def test_run_that_fails_before_its_first_checkpoint_can_be_started_again(tmp_path, tiny_model):
    """Its metrics do not stand in the way, and are those of the new run."""
    flags = ("--iterations", 3, "--num_minibatches", 1, "--run_dir", tmp_path)
    assert "not finite" in run("grpo", *SMALL, *flags, "--lr", 1e9, held_out=8).stderr
    assert (tmp_path / "metrics.jsonl").read_text() and not list(tmp_path.glob("checkpoint-*"))
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert json.loads((tmp_path / "settings.json").read_text())["lr"] == 2e-4


def test_run_a_crash_in_the_first_iteration_leaves_nothing_in_the_way(
    tmp_path, tiny_model, monkeypatch
):
    """The same command, and another one, may start anew in the folder."""

    def crash(*args, **keywords):
        raise RuntimeError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "collate", crash)
        with pytest.raises(RuntimeError):
            run("grpo", *SMALL, "--run_dir", tmp_path / "run", held_out=8)
    for flags in ((), ("--lr", 1e-3)):
        shutil.copytree(tmp_path / "run", tmp_path / f"again{len(flags)}")
        result = run("grpo", *SMALL, *flags, "--run_dir", tmp_path / f"again{len(flags)}", held_out=8)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_run_a_line_that_was_cut_after_a_brace(name, finished, tmp_path):
    folder, flags = copied(finished, tmp_path)
    with open(folder / name, "a") as file:
        file.write('{"iteration": 2, "prompt": "f{x}')
    result = run("grpo", *SMALL, *flags, "--iterations", 2, held_out=8)
    assert result.returncode == 0, result.stderr
    for line in (folder / name).read_text().splitlines():
        json.loads(line)


# -------------------------------------------------------------------------------------------- reward


REWARD = """
BONUS = 0.5

def length(text, answer, truncated):
    return len(text) / 100 + BONUS, "truncated" if truncated else "correct"

def word(text, answer, truncated):
    return 1.0, "perfect"

def no_pair(text, answer, truncated):
    return 1.0

def no_reward(text, answer, truncated):
    return None, "wrong"

def not_a_number(text, answer, truncated):
    return float("nan"), "wrong"

def huge(text, answer, truncated):
    return 10**400, "correct"

def default_dtype(text, answer, truncated):
    import torch
    torch.set_default_dtype(torch.float64)
    return 1.0, "correct"

def gradients(text, answer, truncated):
    import torch
    torch.set_grad_enabled(False)
    return 1.0, "correct"

def folder(text, answer, truncated):
    import os
    os.chdir("/")
    return 1.0, "correct"

async def awaited(text, answer, truncated):
    return 1.0, "correct"

def two(text, answer):
    return 1.0, "correct"

def named(text, answer, *, truncated):
    return 1.0, "correct"

class Reward:
    def __init__(self, text, answer, truncated):
        pass
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my reward.py"
    path.write_text(REWARD)
    return path


def test_run_a_reward_of_ones_own(reward_file, tmp_path, tiny_model):
    """It is used in training and in evaluation, and its file belongs to the settings."""
    flags = ("--reward", f"{reward_file}:length", "--run_dir", tmp_path / "run")
    result = run("grpo", *SMALL, *flags, "--max_new_tokens", 30, held_out=8)
    assert result.returncode == 0, result.stderr
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["rollout/reward_mean"] > 0.5
    assert metrics["rollout/accuracy"] == 1 - metrics["rollout/truncated_frac"]
    assert metrics["eval/accuracy"] > 0.5
    reward_file.write_text(REWARD.replace("0.5", "0.6"))
    more = ("--max_new_tokens", 30, "--resume", "--iterations", 2)
    refused("grpo", *flags, *more, expected="has reward's my reward.py")


@pytest.mark.parametrize(
    "function, expected",
    [
        ("word", "returned (1.0, 'perfect'), not (a finite number, one of correct, wrong"),
        ("not_a_number", "returned (nan, 'wrong'), not (a finite number"),
        ("no_pair", "returned 1.0, not (a finite number"),
        ("no_reward", "returned (None, 'wrong'), not (a finite number"),
        ("huge", "returned (1000000000"),
        ("default_dtype", "changes torch's default dtype"),
        ("gradients", "changes whether torch computes gradients"),
        ("folder", "changes the working folder"),
    ],
)
def test_run_rewards_that_are_refused(function, expected, reward_file, tmp_path, tiny_model):
    flags = ("--reward", f"{reward_file}:{function}", "--run_dir", tmp_path / "run")
    try:
        result = run("grpo", *SMALL, *flags, held_out=8)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert result.returncode == 2 and expected in result.stderr
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "function, expected",
    [
        ("nothing", "cannot be loaded as FILE.py:FUNCTION: KeyError 'nothing'"),
        ("BONUS", "must be a function of (text, answer, truncated)"),
        ("__doc__", "must be a function of (text, answer, truncated)"),
        ("two", "must be a function of (text, answer, truncated): TypeError too many"),
        ("named", "must be a function of (text, answer, truncated)"),
        ("Reward", "not a class and not async"),
        ("awaited", "not a class and not async"),
    ],
)
def test_what_is_no_function_of_three_arguments(function, expected, reward_file, tmp_path, monkeypatch):
    """Refused before the model is loaded."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    flags = ("--reward", f"{reward_file}:{function}", "--run_dir", tmp_path / "run")
    refused("grpo", *flags, expected=expected)


@pytest.mark.parametrize("value", ["nowhere.py:f", "README.md:f", "grpo.py", "f"])
def test_what_is_no_reward(value, tmp_path):
    refused(
        "grpo", "--reward", value, "--run_dir", tmp_path / "run", expected=f"--reward {value} cannot"
    )


def test_run_a_bug_in_a_reward_keeps_its_traceback(tmp_path, tiny_model):
    path = tmp_path / "reward.py"
    path.write_text("def f(text, answer, truncated):\n    return 1 / 0, 'wrong'\n")
    with pytest.raises(ZeroDivisionError):
        run("grpo", *SMALL, "--reward", f"{path}:f", "--run_dir", tmp_path / "run", held_out=8)
    path.write_text("def f(text, answer, truncated):\n    exit()\n")
    with pytest.raises(RuntimeError, match=r"reward.py:f called exit\(None\)"):
        run("grpo", *SMALL, "--reward", f"{path}:f", "--run_dir", tmp_path / "run", held_out=8)
    path.write_text("import sys\nsys.exit()\n")
    expected = "cannot be loaded as FILE.py:FUNCTION: RuntimeError"
    refused("grpo", "--reward", f"{path}:f", "--run_dir", tmp_path / "run", expected=expected)


def test_without_the_flag_it_is_the_verifier():
    assert load_verifier(arguments()) is verify


# -------------------------------------------------------------------------------------- command line


def test_too_many_completions(tmp_path):
    flags = ("--group_size", 1_000_000_000, "--run_dir", tmp_path / "run")
    refused("grpo", *flags, expected="more than a million")


@pytest.mark.parametrize("value", [0, 1000, 1_000_000_000])
def test_run_batch_sizes_above_what_there_is(value, tmp_path, tiny_model):
    """They mean all of it, as 0 does where memory is no question."""
    flags = ("--micro_batch_size", value, "--rollout_batch_size", value, "--run_dir", tmp_path)
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    problem = SimpleNamespace(prompt_ids=[1] * 8)
    args = arguments(micro_batch_size=value, rollout_batch_size=value)
    policy = Policy(*tiny_model)
    planned = plan_memory(args, policy, SimpleNamespace(problems=[problem]), [problem])
    assert (planned.micro_batch_size, planned.rollout_batch_size) == (64, 256)


def test_run_one_prompt_and_one_token(tmp_path, tiny_model):
    """A single token has no variance that a critic could explain."""
    flags = "--prompts_per_iteration 1 --num_minibatches 1 --max_new_tokens 1 --iterations 1".split()
    result = run("ppo", *flags, "--run_dir", tmp_path, held_out=8)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert "losses/explained_variance" not in metrics


def test_run_a_model_of_ones_own_with_the_tiny_models_learning_rate(tmp_path, tiny_model):
    folder = save(tmp_path / "model", *tiny_model)
    flags = ("--model", folder, "--run_dir")
    warned = run("grpo", *SMALL, *flags, tmp_path / "a", held_out=8).stderr
    assert "warning: --lr 0.0002 suits tiny-moe; for your own model 1e-6 is typical\n" in warned
    assert "warning" not in run("grpo", *SMALL, *flags, tmp_path / "b", "--lr", 1e-6, held_out=8).stderr
    assert "warning" not in run("grpo", *SMALL, "--run_dir", tmp_path / "c", held_out=8).stderr


def test_a_prompt_that_the_terminal_cannot_show(monkeypatch):
    """An ASCII terminal gets the letter's code."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    launch(lambda args: print("Wie groß?"), script_args("grpo")[0].Args)
    terminal.flush()
    assert terminal.buffer.getvalue() == b"Wie gro\\xdf?\n"


def broken_stream(how):
    if how == "closed":
        return None  # what Python makes of it
    if how == "full":
        return open("/dev/full", "w")  # noqa: SIM115
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("how", ["closed", "full", "a pipe that ended"])
def test_output_that_breaks(how, sums, tmp_path, monkeypatch):
    """Metrics and checkpoints are what matters: the run is as it would have been."""
    flags = ["--dataset", str(sums), "--num_held_out", "8", "--run_dir", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["grpo.py", *SMALL, *flags])
        patch.setattr(sys, "stdout", broken_stream(how))
        patch.setattr(sys, "stderr", broken_stream(how))
        launch(grpo.main, grpo.Args)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert list((tmp_path / "run").glob("checkpoint-000001"))


def test_a_pipe_that_ends_leaves_no_traceback(tmp_path):
    """What is still to be printed at the end of the process is not printed by Python either."""
    code = "from grpo import *; launch(lambda args: print('a line'), Args)"
    command = f"{sys.executable} -c {shlex.quote(code)} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_only_what_the_user_can_mend_is_one_line(monkeypatch, capsys):
    """The cause goes into the line; anything else than a UserError keeps its traceback."""
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))

    def refuse(args):
        raise UserError("--flag is\nwrong") from ValueError("because\nof this")

    def fail(args):
        raise ValueError("a bug")

    with pytest.raises(SystemExit) as stop:
        launch(refuse, script_args("grpo")[0].Args)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "grpo.py: error: --flag is wrong: ValueError because of this\n"
    with pytest.raises(ValueError, match="a bug"):
        launch(fail, script_args("grpo")[0].Args)
