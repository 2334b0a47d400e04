"""A run's folder, `--run_dir`. It holds one run and its settings, and is locked while in use."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from filelock import FileLock

from plumbing import UserError, one_line, ranks

CHECKPOINT = re.compile(r"checkpoint-\d{6}")  # a copy such as checkpoint-best-2 belongs to the user
LOGS = ("metrics.jsonl", "samples.jsonl")
# What may change when a run is resumed. The last four change results only by rounding.
MAY_CHANGE = """run_dir resume iterations eval_every save_every
device micro_batch_size rollout_batch_size gradient_checkpointing""".split()


def folder_of(args):
    return Path(args.run_dir or f"runs/{Path(sys.argv[0]).stem}-seed{args.seed}")


def saved_settings(folder):
    """What is in settings.json: flags, script, versions, and hashes; {} if there is no such file."""
    path = folder / "settings.json"
    return json.loads(path.read_text()) if path.exists() else {}


def writing(path):
    """Wraps code that writes files, so that a full disk is one line."""
    return one_line(f"{path} cannot be written; existing checkpoints are intact")


class RunFolder:
    """`--run_dir`, locked by this process until `close`."""

    def __init__(self, args):
        self.script = Path(sys.argv[0]).stem
        self.path = folder_of(args)
        if CHECKPOINT.fullmatch(self.path.name):
            raise UserError(f"--run_dir {self.path} is a checkpoint: pass the folder that contains it")
        if ranks.RANK == 0:
            self.open(args)
        ranks.wait_for_all()

    def open(self, args):
        """Locks the folder. UserError if it is in use, or holds a different run."""
        with writing(f"--run_dir {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            # A process may acquire its lock twice: first in `launch`, then in `Run`.
            self.lock = FileLock(self.path.absolute() / "lock", is_singleton=True)
            try:
                self.lock.acquire(timeout=0)
            except TimeoutError as error:
                raise UserError(f"--run_dir {self.path} is used by another process") from error
            saved = {"versions": versions()}
            if args.resume and self.checkpoints():
                saved = saved_settings(self.path)
            else:
                self.make_empty()
            self.write_settings(saved, {"script": self.script, **dataclasses.asdict(args)})
            for name in LOGS:
                (self.path / name).touch()

    def checkpoints(self):
        """The checkpoints in the folder, oldest first."""
        paths = self.path.glob("checkpoint-*")
        return sorted(path for path in paths if CHECKPOINT.fullmatch(path.name))

    def make_empty(self):
        """Removes checkpoint 0 of a run that ended before its first iteration was done. UserError if an
        iteration was logged or saved."""
        log = self.path / LOGS[0]
        is_logged = log.exists() and log.stat().st_size > 0
        if is_logged or any(path.name > "checkpoint-000000" for path in self.checkpoints()):
            raise UserError(
                f"--run_dir {self.path} holds a run: --resume continues it from its newest checkpoint; "
                "a different --run_dir starts a new one"
            )
        shutil.rmtree(self.path / "checkpoint-000000", ignore_errors=True)

    def write_settings(self, saved, now):
        """Adds to the saved settings. UserError if one that must not change differs. The file is
        renamed into place, so it is never half written."""
        for name, value in now.items():
            if name not in MAY_CHANGE and saved.get(name, value) != value:
                raise UserError(f"--resume: {self.path} has {name} {saved[name]}, not {value}")
        scratch = self.path / "settings.json.tmp"
        scratch.write_text(json.dumps(saved | now, indent=1))
        scratch.replace(self.path / "settings.json")

    def check_hashes(self, problems, prompts, weights):
        """Compares hashes with those at the start. Rendered prompts may differ, since a template may
        insert the date."""
        saved = saved_settings(self.path)
        if saved.setdefault("prompts_hash", prompts) != prompts:
            message = "the chat template renders prompts differently than when the run started"
            print(f"warning: --resume: {message}", file=sys.stderr)
        self.write_settings(saved, {"problems_hash": problems, "weights_hash": weights})

    def close(self):
        if ranks.RANK == 0:
            self.lock.release(force=True)


def versions():
    """The software that a run uses: {name: version or commit}."""
    found = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if shutil.which("git"):
        command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        if done.stdout:
            found["commit"] = done.stdout.strip()
    return found
