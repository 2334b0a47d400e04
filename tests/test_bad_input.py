"""What a user can get wrong: one line on stderr that names it, exit code 2, nothing lost, no
traceback."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import flags_it_has, path_of, run, run_process
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import common
from plumbing.run import Run

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()
OWN_LR = ("--lr", "1e-6")  # with --model; without it there is a warning, a second line


def refused(name, *flags, expected):
    own = OWN_LR if "--model" in flags else ()
    result = run(name, *flags_it_has(name, SMALL), *own, *flags, held_out=8)
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{path_of(name).name}: error: "), result.stderr
    for words in [expected] if isinstance(expected, str) else expected:
        assert words in lines[0], lines[0]
    assert result.stdout == ""


FLAGS = [row.strip().split(" | ") for row in (Path(__file__).parent / "bad_flags.txt").open()]


@pytest.mark.parametrize("name, flags, expected", FLAGS, ids=lambda x: x if x[:1] == "-" else "")
def test_flags(name, flags, expected, tmp_path, tiny_model):
    own = () if "--run_dir" in flags else ("--run_dir", tmp_path / "run")
    refused(name, *own, *flags.split(), expected=expected)


def line(**row):
    return json.dumps(row).encode() + b"\n"


GOOD = line(question="1+1=", answer="2")
ENOUGH = b"".join(line(question=f"{i}+1=", answer=str(i + 1)) for i in range(12))
DATASETS = [
    ("missing.jsonl", None, "missing.jsonl cannot be read"),
    ("empty.jsonl", b"", "empty.jsonl cannot be read"),
    ("blank.jsonl", b"\n\n", "blank.jsonl"),
    ("text.jsonl", GOOD + b"what?\n", ("text.jsonl cannot be read", "line 2")),
    ("half.jsonl", GOOD * 2 + GOOD[:12], ("half.jsonl cannot be read", "line 3")),
    ("latin.jsonl", "{'ü'}".encode("latin1"), "latin.jsonl cannot be read"),
    ("numbers.jsonl", b"1\n2\n", "numbers.jsonl"),
    ("bytes.parquet", b"PAR1 and no more", "bytes.parquet cannot be read"),
    (
        "columns.jsonl",
        line(text="a", label=3),
        ("has no column question", "the columns are text, label"),
    ),
    ("column.jsonl", line(question="a", label=3), ("has no column answer", "question, label")),
    (
        "null.jsonl",
        GOOD + line(question="a", answer=None),
        ("row 2: no readable gold answer", "question, answer"),
    ),
    ("absent.jsonl", GOOD * 2 + line(question="a"), ("absent.jsonl, row 3", "no readable gold answer")),
    ("marker.jsonl", line(question="a", answer="so it is ####"), "row 1: no readable gold answer"),
    ("box.jsonl", GOOD + line(question="a", answer="\\boxed{1"), "row 2: no readable gold answer"),
    ("prompt.jsonl", GOOD + line(question="", answer="1"), "row 2: no readable prompt"),
    ("chat.jsonl", line(question=[{"role": "user", "content": "a"}] * 2, answer="1"), "chat template"),
    (
        "roles.jsonl",
        line(question=[{"from": "user", "value": "a"}], answer="1"),
        ("--dataset: the prompt", "cannot be used"),
    ),
    ("number.jsonl", line(question=7, answer="1"), ("--dataset: the prompt 7", "cannot be used")),
    ("few.jsonl", GOOD * 20, "--num_held_out 8 leaves none of the 1 problems"),
    ("long.jsonl", line(question="1" * 40_000, answer="1") + ENOUGH, "the model's limit of 32768"),
]


@pytest.mark.parametrize("name, content, expected", DATASETS, ids=[row[0] for row in DATASETS])
def test_datasets(name, content, expected, tmp_path, tiny_model):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused("grpo", "--run_dir", tmp_path / "run", "--dataset", tmp_path / name, expected=expected)


def test_dataset_splits_and_hub_ids(tmp_path, tiny_model):
    flags = ("--run_dir", tmp_path, "--dataset", "no-such-house/no-such-data")
    refused("grpo", *flags, expected="cannot be read")


def damage(folder, how):
    """Makes a good model folder a bad one."""
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "config is not JSON":
        (folder / "config.json").write_text("{")
    elif how == "unknown architecture":
        (folder / "config.json").write_text('{"model_type": "perceptron"}')
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "truncated weights":
        os.truncate(folder / "model.safetensors", 1000)
    elif how == "pickled weights":
        weights = load_file(folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    elif how == "weights of another shape":
        weights = load_file(folder / "model.safetensors")
        doubled = {key: w.repeat_interleave(2, 0) for key, w in weights.items()}
        save_file(doubled, folder / "model.safetensors")
    elif how == "code in the folder":
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "model_type": "mine",
            "auto_map": {"AutoModelForCausalLM": "mine.M", "AutoConfig": "mine.C"},
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    elif how == "an encoder":
        (folder / "config.json").write_text('{"model_type": "vit"}')
    elif how == "a vocabulary that is too small":
        config = LlamaConfig(vocab_size=4, hidden_size=16, intermediate_size=16, num_attention_heads=2)
        LlamaForCausalLM(config).save_pretrained(folder)


MODELS = """no config; config is not JSON; unknown architecture; no tokenizer; no weights;
truncated weights; pickled weights; weights of another shape; code in the folder; an encoder;
a vocabulary that is too small"""


@pytest.mark.parametrize("how", [how.strip() for how in MODELS.split(";")])
def test_model_folders(how, tmp_path, tiny_model):
    folder = tmp_path / "model"
    for part in tiny_model:
        part.save_pretrained(folder)
    damage(folder, how)
    expected = f"--model {folder} cannot be used"
    if how == "a vocabulary that is too small":
        expected = ("--model", "4 embeddings")
    refused("grpo", "--run_dir", tmp_path / "run", "--model", folder, expected=expected)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "model", ["/nowhere", "tests", "requirements.txt", "no-such-house/no-such-model"]
)
def test_what_is_no_model(model, tmp_path):
    refused("grpo", "--run_dir", tmp_path, "--model", model, expected=f"--model {model} cannot be used")


def test_a_model_without_the_cache_that_sampling_needs(tmp_path, tiny_model):
    """State-space models keep another kind of state: refused when they are loaded, not later."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=17, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tiny_model[1].save_pretrained(tmp_path / "mamba")
    flags = ("--run_dir", tmp_path / "run", "--model", tmp_path / "mamba")
    refused("grpo", *flags, expected="cannot be used")


def test_run_a_prompt_that_does_not_fit_the_positions(tmp_path, tiny_model):
    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=12, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny_model[1].save_pretrained(tmp_path / "gpt2")
    flags = ("--run_dir", tmp_path / "run", "--model", tmp_path / "gpt2")
    refused("grpo", *flags, expected="with a prompt of 8 tokens, the model's limit of 12 is exceeded")
    own = (*flags, *OWN_LR, "--max_new_tokens", 4)
    assert run("grpo", *SMALL, *own, held_out=8).returncode == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """The folder of a run of one iteration."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert run("grpo", *SMALL, "--run_dir", folder, held_out=8).returncode == 0
    return folder


class Trap:
    """A pickle that would leave a file behind if it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def tamper(checkpoint, how):
    state, weights = checkpoint / "trainer_state.pt", checkpoint / "model.safetensors"
    if how == "truncated state":
        os.truncate(state, 100)
    elif how == "no state":
        state.unlink()
    elif how == "text for state":
        state.write_text("hello")
    elif how == "code in the state":
        torch.save(Trap(checkpoint / "ran"), state)
    elif how == "a state of something else":
        torch.save({"epoch": 3}, state)
    elif how == "a state as it was once":  # with what is now "iteration" inside of another entry
        saved = torch.load(state, weights_only=True)
        saved["state"] = {"iteration": saved.pop("iteration")}
        torch.save(saved, state)
    elif how == "a flipped bit in the weights":
        content = bytearray(weights.read_bytes())
        content[-9] ^= 1
        weights.write_bytes(content)
    elif how == "a flipped bit in the optimizer":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif how == "truncated weights":
        os.truncate(weights, 1000)
    elif how == "no weights":
        weights.unlink()
    elif how == "other weights":
        doubled = {key: 2 * tensor for key, tensor in load_file(weights).items()}
        save_file(doubled, weights, metadata={"format": "pt"})
    elif how == "no config":
        (checkpoint / "config.json").unlink()
    elif how == "a file":
        shutil.rmtree(checkpoint)
        checkpoint.write_text("")


CHECKPOINTS = """truncated state; no state; text for state; code in the state;
a state of something else; a state as it was once; a flipped bit in the weights;
a flipped bit in the optimizer; truncated weights; no weights; other weights; no config; a file"""


@pytest.mark.parametrize("how", [how.strip() for how in CHECKPOINTS.split(";")])
def test_checkpoints(how, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (checkpoint,) = folder.glob("checkpoint-*")
    tamper(checkpoint, how)
    before = (folder / "metrics.jsonl").read_bytes()
    flags = ("--run_dir", folder, "--resume", "--iterations", 2)
    refused("grpo", *flags, expected=f"--resume: {checkpoint} cannot be read")
    assert (folder / "metrics.jsonl").read_bytes() == before and not (checkpoint / "ran").exists()


def test_a_used_run_folder(finished, tmp_path, monkeypatch):
    """Refused without --resume; with it, only for the same script and the same arguments, which is
    found out before anything is loaded."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    for name in ("check_logprobs", "read_dataset"):
        monkeypatch.setattr(common, name, lambda *args: pytest.fail("loaded"))
    refused("grpo", "--run_dir", folder, expected="holds a run")
    refused("grpo", "--run_dir", folder, "--resume", "--lr", 1e-3, expected="has lr 0.0002, not 0.001")
    refused("sapo", "--run_dir", folder, "--resume", expected="has script grpo, not sapo")
    settings = folder / "settings.json"
    for content in (None, "", "[1]", "{no json}"):
        settings.unlink(missing_ok=True)
        if content is not None:
            settings.write_text(content)
        refused("grpo", "--run_dir", folder, "--resume", expected=("--resume: ", "settings.json"))
    older = json.loads((finished / "settings.json").read_text()) | {"warmup": 5}
    settings.write_text(json.dumps(older))
    refused("grpo", "--run_dir", folder, "--resume", expected="has warmup 5, not None")
    monkeypatch.undo()
    shutil.copy(finished / "settings.json", settings)
    (folder / "metrics.jsonl").write_bytes(b"{no json}\n" + before)
    expected = f"--resume: {folder / 'metrics.jsonl'} cannot be used"
    refused("grpo", "--run_dir", folder, "--resume", expected=expected)


def test_run_a_second_process(tmp_path, tiny_model):
    """Refused while the first one runs; not after it has died."""
    from filelock import FileLock

    (tmp_path / "run").mkdir()
    path = str(tmp_path / "run" / "lock")
    code = f"import filelock; lock = filelock.FileLock({path!r}); lock.acquire(); input()"
    command = [sys.executable, "-c", f"print('up', flush=True); {code}"]
    other = subprocess.Popen(command, stdin=-1, stdout=-1)
    try:
        other.stdout.readline()
        while True:  # until the other one has it
            try:
                FileLock(tmp_path / "run" / "lock").acquire(timeout=0).lock.release()
            except TimeoutError:
                break
        refused("grpo", "--run_dir", tmp_path / "run", expected="in use by another process")
    finally:
        other.kill()
        other.wait()
    assert run("grpo", *SMALL, "--run_dir", tmp_path / "run", held_out=8).returncode == 0


def test_run_a_full_disk(finished, tmp_path, tiny_model):
    """A file-size limit stands in for the full disk: the checkpoint cannot be written, the one before
    stays, and the run goes on from there."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (checkpoint,) = folder.glob("checkpoint-*")
    before = sorted((path.name, path.read_bytes()) for path in checkpoint.iterdir())
    flags = ("--run_dir", folder, "--resume", "--iterations", 2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limit[1]))  # the weights have 0.9 MB
    try:
        result = run("grpo", *SMALL, *flags, held_out=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert result.returncode == 2
    assert "cannot be written; the checkpoint before it is whole: SafetensorError" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in folder.glob("checkpoint-*[0-9]")] == [checkpoint.name]
    assert sorted((path.name, path.read_bytes()) for path in checkpoint.iterdir()) == before
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["iteration"] for x in lines] == [1, 2]


def test_run_a_folder_that_becomes_read_only(tmp_path, tiny_model, monkeypatch):
    """The metrics cannot be written any more: one line."""

    def log(self, *args):
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        (self.folder / "metrics.jsonl").mkdir()
        return original(self, *args)

    original = Run.log
    monkeypatch.setattr(Run, "log", log)
    result = run("grpo", *SMALL, "--run_dir", tmp_path / "run", held_out=8)
    assert result.returncode == 2 and "cannot be written; the last checkpoint is whole" in result.stderr


def test_run_the_process_ends_with_2_too():
    result = run_process("sapo", "--group_size", 1)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("sapo.py: error: --group_size must be at least 2")
    assert len(result.stderr.splitlines()) == 1
