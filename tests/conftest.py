import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
from common import Completion, Problem, collate  # noqa: E402
from plumbing.args import launch  # noqa: E402
from plumbing.model import Policy  # noqa: E402
from scripts import MORE, SCRIPTS  # noqa: E402, F401

ROOT = Path(__file__).parent.parent
TINY_MOE = ROOT / "tiny_moe"
torch.set_num_threads(1)  # as the scripts do with the tiny model
transformers.utils.logging.disable_progress_bar()


def path_of(name):
    """more.rloo -> .../more/rloo.py"""
    return ROOT / f"{name.replace('.', '/')}.py"


def functions_of(name):
    """{name of a top-level function: its text}"""
    text = path_of(name).read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def loss_of(name):
    """The code of a script's policy_loss, without comments."""
    return ast.unparse(ast.parse(functions_of(name)["policy_loss"]))


@functools.cache
def copied(name):
    """What a reader copies from a script: `import torch`, and all functions except main."""
    parts = [text for function, text in functions_of(name).items() if function != "main"]
    module = types.ModuleType(f"copy_of_{name}")
    exec("import torch\n\n\n" + "\n\n\n".join(parts), module.__dict__)
    return module


def script_args(name, **changes):
    """(the script's module, its default Args with changes)."""
    module = importlib.import_module(name)
    return module, module.Args(**{"device": "cpu"} | changes)


def fields_of(name):
    return {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}


def has_one_ratio(name):
    """Whether a loss has one ratio, and so one advantage, per completion; its docstring says so."""
    return "one per completion" in importlib.import_module(name).policy_loss.__doc__


def flags_it_has(name, flags):
    """The pairs `--flag value` that a script has: ppo has no groups, reinforce takes one step."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [word for pair in pairs if pair[0][2:] in fields_of(name) for word in pair]


def on_cpu(flags):
    """The flags with `--device cpu`, unless they name a device: a test is about the CPU, also on a
    machine with a GPU."""
    return flags if "--device" in flags else ("--device", "cpu", *flags)


def run(name, *flags):
    """Runs a script as from its command line, but in this process, which saves the imports. The dataset
    is a small one, and the device the CPU, unless a flag names another."""
    module = importlib.import_module(name)
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    data = [] if "--resume" in flags else ["--dataset", SUMS, "--num_held_out", 8]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(path_of(name)), *map(str, (*data, *on_cpu(flags)))])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                launch(module.main, module.Args)
        except SystemExit as exit:
            code = exit.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(name, code or 0, out.getvalue(), err.getvalue())


SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()


OWN_LR = ("--lr", "1e-6")  # with --model; without it there is a warning, a second line


def completes(name, *flags):
    """Runs a script on a small job, which must succeed. Returns what it prints."""
    result = run(name, *flags_it_has(name, SMALL), *flags)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def refused(name, *flags, expected=""):
    """Runs a script, which must end with exit code 2 and one line that contains the expected words.
    Returns that line."""
    own = OWN_LR if "--model" in flags else ()
    result = run(name, *flags_it_has(name, SMALL), *own, *flags)
    assert result.returncode == 2, (result.stdout, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path_of(name).name}: error: ") and expected in line, line
    assert len(line) < 450
    assert result.stdout == "" or result.stdout.startswith(("--dataset: ", "problems: "))
    return line


def started(name, *flags):
    """A script in a process of its own, as a user starts it. It computes with one thread, as `run`."""
    command = [sys.executable, "-m", name, *map(str, on_cpu(flags))]
    options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # One that waits for ever ends by this signal.
    return subprocess.Popen(command, preexec_fn=lambda: signal.alarm(600), **options)


def interfere(patch, owner, name, action, n=1):
    """Calls the action, with the same arguments, before the n-th and each later call of a function."""
    original = getattr(owner, name)
    calls = []

    def function(*args, **keywords):
        calls.append(None)
        if len(calls) >= n:
            action(*args, **keywords)
        return original(*args, **keywords)

    patch.setattr(owner, name, function)


def metrics(folder):
    """The lines of metrics.jsonl. NaN and infinity, which are not JSON, fail."""
    return read_lines(folder / "metrics.jsonl")


def read_lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FOLDER = tempfile.TemporaryDirectory()
SUMS = write_lines(  # read faster than the default dataset
    Path(FOLDER.name) / "sums.jsonl",
    [{"question": q, "answer": a} for q, a in common.addition_problems(300)],
)


# The same job for a script that is called from Python
SMALL_ARGS = {name[2:]: int(value) for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
SMALL_ARGS |= {"dataset": SUMS, "num_held_out": 8, "device": "cpu"}


def checkpoint_of(folder):
    """The only checkpoint in a run's folder."""
    (checkpoint,) = folder.glob("checkpoint-*")
    return checkpoint


def resume(folder, *flags):
    return ("--resume", "--run_dir", folder, *flags)


@pytest.fixture(scope="session")
def tiny_model():
    """The base model, with its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(TINY_MOE)


@pytest.fixture
def tiny_policy(tiny_model):
    """The base model as a policy. All tests share its model: to change it, use `own_policy`."""
    return Policy(*tiny_model)


@pytest.fixture
def own_policy(tiny_policy):
    """A policy that the test may change."""
    return copy.deepcopy(tiny_policy)


FILE_NUMBERS = itertools.count()


@pytest.fixture
def python_file(tmp_path):
    """Writes a file -> its path. Each has its own name, since a process imports only one of the same
    name."""

    def write(source):
        path = tmp_path / f"file{next(FILE_NUMBERS)}.py"
        path.write_text(source)
        return path

    return write


@pytest.fixture
def reward_file(python_file):
    """Writes a reward function: the body of `def reward(text, answer, truncated)` -> the value of
    `--reward`."""

    def write(*lines):
        path = python_file("def reward(text, answer, truncated):\n    " + "\n    ".join(lines) + "\n")
        return f"{path}:reward"

    return write


# ---------------------------------------------------------------------------------- problems, models

MIXED = ("57+308=", "12+34=", "999+999=", "5=", "100+20=")


def problems_of(policy, *texts):
    return [Problem(text, "", policy.tokenizer(text).input_ids) for text in texts]


def batch_of_ids(rows):
    """[(prompt ids, response ids)] -> a batch."""
    completions = [Completion(Problem("", "", prompt), ids, [0.0] * len(ids)) for prompt, ids in rows]
    return collate(completions, rows[0][0][0], script_args("grpo")[1])


def save(model, folder):
    """Saves a model with the tokenizer of the tiny MoE; returns the folder."""
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(folder)
    return folder
