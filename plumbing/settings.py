"""The settings that shape a run, and so must not change when it is resumed; versions and commits."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE

from plumbing.args import TINY_MOE, UserError

MAY_CHANGE = "iterations eval_every save_every device resume run_dir".split()


def file_hash(path):
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(path):
    """{name: path} of a file, or of all files in a folder except hidden ones; {} if it is neither."""
    path = Path(path)
    if path.is_file():
        return {path.name: path}
    files = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if file.is_file() and not is_hidden:
            files[str(name)] = file
    return files


def settings_of(args, script, run_folder):
    """{name: value} of the arguments that shape a run, and hashes of the files that they name, except
    files that the run itself writes."""
    settings = {"script": script, **vars(args)}
    for name in MAY_CHANGE:
        del settings[name]
    model = TINY_MOE if args.model == "tiny-moe" else args.model
    named = [("model", model)]
    named += [("reward", reward.rpartition(":")[0]) for reward in args.reward]  # FILE.py:FUNCTION
    if args.dataset != "addition":
        named.append(("dataset", args.dataset))
    for name, path in named:
        try:
            for file_name, file in files_of(path).items():
                if run_folder.absolute() in file.absolute().parents:
                    continue
                # A model's weights are in the checkpoints, and its README does not matter.
                if name != "model" or file.suffix in (".json", ".jinja", ".model", ".txt"):
                    settings[f"{name}'s {file_name}"] = file_hash(file)
        except OSError as error:
            raise UserError(f"--{name} {path} cannot be read") from error
    return settings


def versions_of(args):
    """What a run is made with, as far as it is known: {name: version or commit}."""
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if shutil.which("git"):
        command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        versions["commit"] = done.stdout.strip()
    for kind, name in (("model", args.model), ("dataset", args.dataset)):
        # The hub's cache notes here which commit was loaded last.
        note = Path(HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "refs", "main")
        if note.is_file() and not Path(name).exists():
            versions[f"{kind}'s revision"] = note.read_text()
    return {name: version for name, version in versions.items() if version}


def compare(settings, folder):
    """UserError if the run in this folder was started with other settings."""
    theirs = json.loads((folder / "settings.json").read_text())
    theirs.pop("versions", None)
    for name in [*settings, *theirs]:
        ours = settings.get(name)
        if ours != theirs.get(name):
            raise UserError(f"--resume: {folder} has {name} {theirs.get(name)}, not {ours}")
