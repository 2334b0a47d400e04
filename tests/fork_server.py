"""Runs scripts in processes that it forks, since imports take longer than a small run: conftest.forked.

A line of JSON on stdin is a job, and is answered with a line on stdout. Its processes end as under
torchrun: when one of them fails, the others get SIGTERM.
"""

import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from plumbing import ranks
from plumbing.args import launch
from plumbing.folder import RunFolder
from plumbing.run import Run

# ------------------------------------------------------------------------------- what may go wrong


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_save(saved, path):
    path.write_bytes(b"PK" + bytes(1000))
    kill()


def kill_in_a_removal(path, **_):
    next(Path(path).glob("*.safetensors")).unlink()
    kill()


def kill_in_a_line(run):
    with open(run.folder.path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 2, "rollout/acc')
    kill()


def points(module):
    """{trouble: (object, its function, what happens before it is called)}."""
    return {
        "kill before a file is in place": (Path, "replace", kill),
        "kill in a save": (torch, "save", kill_in_a_save),
        "kill before a rename": (Path, "rename", kill),
        "kill in a removal": (shutil, "rmtree", kill_in_a_removal),
        "kill in a line": (Run, "write_log", kill_in_a_line),
        "kill after a line": (Run, "save", kill),  # before its checkpoint
        "kill in an evaluation": (module, "evaluate", kill),
        "kill in a rollout": (module, "sample", kill),
        "kill before a step": (torch.optim.AdamW, "step", kill),
        "SIGTERM": (module, "sample", lambda: os.kill(os.getpid(), signal.SIGTERM)),
        "two SIGINT": (module, "sample", lambda: [signal.raise_signal(signal.SIGINT) for _ in "12"]),
        "SIGINT in an evaluation": (module, "evaluate", lambda: signal.raise_signal(signal.SIGINT)),
        "bug": (module, "collate", lambda: 1 / 0),
    }


def make_trouble(module, kind, n):
    """It comes at the n-th call of its function."""
    if kind == "NaN":
        original = module.policy_loss
        module.policy_loss = lambda *args, **rest: (original(*args, **rest)[0] * torch.nan, {})
        return
    if kind == "no shared folder":
        RunFolder.checkpoints = lambda folder: []
        return
    owner, name, action = points(module)[kind]
    original = getattr(owner, name)
    takes_arguments = action.__code__.co_argcount > 0
    calls = []

    def function(*args, **keywords):
        is_other = name == "rmtree" and "checkpoint-" not in str(args[0])
        if not is_other:
            calls.append(None)
            if len(calls) == n:
                action(*args, **keywords) if takes_arguments else action()
        return original(*args, **keywords)

    setattr(owner, name, function)


# -------------------------------------------------------------------------------------- processes


def run_rank(rank, port, job, out, err):
    """What a forked process does; its exit code."""
    signal.alarm(150)  # a rank that waits for ever ends with a code that no test expects
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    if job["world"] > 1:
        os.environ |= {"WORLD_SIZE": str(job["world"]), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        ranks.WORLD, ranks.RANK, ranks.LOCAL_RANK = job["world"], rank, rank
    if job["stdout_is"] == "closed":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    if job["stdout_is"] == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        module = importlib.import_module(job["name"])
        sys.argv = [f"{job['name']}.py", *job["flags"]]
        if job["trouble"] and rank == job["rank"]:
            make_trouble(module, *job["trouble"])
        launch(module.main, module.Args)
        return 0
    except SystemExit as exit:
        return exit.code
    except BaseException:
        traceback.print_exc()
        return 1


def run_job(job):
    """(exit code of each process, stdout, stderr)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        processes = {}
        for rank in range(job["world"]):
            pid = os.fork()
            if pid == 0:
                code = run_rank(rank, port, job, out, err)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            processes[pid] = rank
        codes = {}
        while len(codes) < job["world"]:
            pid, status = os.wait()
            codes[processes.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:
                time.sleep(0.1)
                for other in processes:
                    os.kill(other, signal.SIGTERM)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return [codes[rank] for rank in range(job["world"])], *texts


def main():
    torch.set_num_threads(1)
    importlib.import_module("common")
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
