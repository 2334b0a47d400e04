"""The folder of a run, `--run_dir`: one run, used by one process at a time, with its settings."""

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

from plumbing import ranks
from plumbing.errors import UserError

CHECKPOINT = re.compile(r"checkpoint-\d{6}")  # a copy such as checkpoint-best-2 belongs to the user
# What may change when a run is resumed. The last four change results by rounding.
MAY_CHANGE = """run_dir resume iterations eval_every save_every
device micro_batch_size rollout_batch_size gradient_checkpointing""".split()


def folder_of(args):
    return Path(args.run_dir or f"runs/{Path(sys.argv[0]).stem}-seed{args.seed}")


def saved_flags(args):
    """The flags of the run that --resume continues: {name: value}; {} if there is none."""
    path = folder_of(args) / "settings.json"
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} cannot be read") from error
    names = {field.name for field in dataclasses.fields(args)} - {"resume", "run_dir", "device"}
    return {name: value for name, value in settings.items() if name in names}


class RunFolder:
    """`--run_dir`, locked by this process until `close`."""

    def __init__(self, args):
        self.script = Path(sys.argv[0]).stem
        self.path = folder_of(args)
        if CHECKPOINT.fullmatch(self.path.name):
            raise UserError(f"--run_dir {self.path} is a checkpoint: name the folder that it is in")
        if ranks.RANK == 0:
            self.open(args)
        ranks.wait_for_all()

    def open(self, args):
        """Locks the folder. UserError if it is in use, or holds another run."""
        settings = {"script": self.script, **dataclasses.asdict(args)}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A process has one lock for a folder, and may take it again: first `launch`, then `Run`.
            self.lock = FileLock(self.path.absolute() / "lock", is_singleton=True)
            self.lock.acquire(timeout=0)
            checkpoints = self.checkpoints()
            if args.resume and checkpoints:
                self.compare(settings)
                settings = self.settings() | settings  # versions and hashes stay those of the start
            else:
                self.make_empty()
                settings["versions"] = versions()
            write_whole(self.path / "settings.json", json.dumps(settings, indent=1))
        except TimeoutError as error:
            raise UserError(f"--run_dir {self.path} is used by another process") from error
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--run_dir {self.path} cannot be written or read") from error

    def checkpoints(self):
        """The checkpoints in the folder, oldest first."""
        paths = self.path.glob("checkpoint-*")
        return sorted(path for path in paths if CHECKPOINT.fullmatch(path.name))

    def make_empty(self):
        """Removes checkpoint 0 of a run that ended before its first iteration did. UserError if an
        iteration was logged or saved."""
        log = self.path / "metrics.jsonl"
        checkpoints = self.checkpoints()
        is_logged = log.exists() and log.stat().st_size > 0
        if is_logged or any(path.name > "checkpoint-000000" for path in checkpoints):
            raise UserError(
                f"--run_dir {self.path} holds a run: --resume continues it from its newest checkpoint, "
                "another --run_dir starts a new one"
            )
        for path in checkpoints:
            shutil.rmtree(path)

    def compare(self, settings):
        """UserError if the run in the folder was started with other settings."""
        saved = self.settings()
        for name, value in settings.items():
            if name not in MAY_CHANGE and saved.get(name) != value:
                raise UserError(f"--resume: {self.path} has {name} {saved.get(name)}, not {value}")

    def settings(self):
        return json.loads((self.path / "settings.json").read_text())

    def warn_about_versions(self):
        now = versions()
        for name, version in self.settings()["versions"].items():
            if now.get(name) != version:
                message = f"{self.path} was started under {name} {version}, not {now.get(name)}"
                print(f"warning: --resume: {message}", file=sys.stderr)

    def check_hashes(self, problems, needs_weights, weights_hash):
        """UserError if a resumed run has other problems than at its start or, if it needs the weights
        that `--model` names (for a reference), other weights. Other prompts are a warning."""
        now = {
            "problems": problems.raw_hash,
            "prompts": problems.rendered_hash,
            "weights": weights_hash,
        }
        settings = self.settings()
        first = settings.setdefault("hashes", now)
        if first["problems"] != now["problems"]:
            raise UserError(f"--resume: {self.path} was started with different problems in --dataset")
        if needs_weights and first["weights"] != now["weights"]:
            message = "was started with different weights in --model, which its reference needs"
            raise UserError(f"--resume: {self.path} {message}")
        if first["prompts"] != now["prompts"]:
            message = "the chat template renders prompts differently than when the run started"
            print(f"warning: --resume: {message}", file=sys.stderr)
        write_whole(self.path / "settings.json", json.dumps(settings, indent=1))

    def close(self):
        if ranks.RANK == 0:
            self.lock.release(force=True)


def versions():
    """What a run is made with: {name: version or commit}."""
    found = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if shutil.which("git"):
        command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        if done.stdout:
            found["commit"] = done.stdout.strip()
    return found


def write_whole(path, text):
    """Writes a file under another name and renames it, so that it is never half written."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    scratch.replace(path)
