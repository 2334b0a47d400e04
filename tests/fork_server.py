"""What conftest.forked runs in other processes. They are forked from one that has imported this file,
since imports take longer than a small run."""

import importlib
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

import common  # noqa: F401
from plumbing.args import launch
from plumbing.run import Run

# ------------------------------------------------------------------------------- what may go wrong
#
# An action gets the arguments of the function before which it happens.


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_save(saved, path):
    path.write_bytes(b"PK" + bytes(1000))
    kill()


def kill_in_a_removal(path, **_):
    if "checkpoint-" in str(path):  # not checkpoint.tmp, which is unfinished
        next(Path(path).glob("*.safetensors")).unlink()
        kill()


def kill_in_a_line(run):
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 2, "rollout/acc')
    kill()


def terminate(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


def interrupt_twice(*_, **__):
    interrupt()
    interrupt()


def points(module):
    """{trouble: (object, its function, what happens before it is called)}."""
    return {
        "kill in a save": (torch, "save", kill_in_a_save),
        "kill before a rename": (Path, "rename", kill),
        "kill in a removal": (shutil, "rmtree", kill_in_a_removal),
        "kill in a line": (Run, "write_log", kill_in_a_line),
        "kill after a line": (Run, "save", kill),  # before its checkpoint
        "kill in a rollout": (module, "sample", kill),
        "SIGTERM": (module, "sample", terminate),
        "two SIGINT": (module, "sample", interrupt_twice),
        "SIGINT in an evaluation": (module, "evaluate", interrupt),
    }


def make_trouble(module, kind, n):
    """It comes at the n-th call of its function, and at each later one."""
    owner, name, action = points(module)[kind]
    original = getattr(owner, name)
    calls = []

    def function(*args, **keywords):
        calls.append(None)
        if len(calls) >= n:
            action(*args, **keywords)
        return original(*args, **keywords)

    setattr(owner, name, function)


# ---------------------------------------------------------------------------------------- a process


def run_script(name, flags, trouble, out, err):
    """Runs a script; the process ends with its exit code."""
    signal.alarm(150)  # a process that waits for ever ends with a code that no test expects
    torch.set_num_threads(1)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(out, append), 1)
    os.dup2(os.open(err, append), 2)
    sys.stdout = os.fdopen(1, "w")  # as a new process opens it
    module = importlib.import_module(name)
    sys.argv = [f"{name}.py", *flags]
    if trouble:
        make_trouble(module, *trouble)
    launch(module.main, module.Args)
