"""The settings that shape a run, and so must not change when it is resumed."""

import hashlib
import json
from pathlib import Path

from plumbing.args import TINY_MOE, UserError

MAY_CHANGE = "iterations eval_every save_every device resume run_dir tensorboard".split()


def file_hash(path):
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(path):
    """{name: path} of a file, or of all files in a folder except hidden ones; {} if it is neither."""
    if path == "":
        return {}
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
    dataset = "" if args.dataset == "addition" else args.dataset
    named = [("model", model), ("dataset", dataset)]
    named += [("reward", reward.rpartition(":")[0]) for reward in args.reward]  # FILE.py:FUNCTION
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


def compare(settings, folder):
    """UserError if the run in this folder was started with other settings."""
    try:
        theirs = dict(json.loads((folder / "settings.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--resume: settings.json in {folder} cannot be read") from error
    for name in [*settings, *theirs]:
        ours = settings.get(name)
        if ours != theirs.get(name):
            raise UserError(f"--resume: {folder} has {name} {theirs.get(name)}, not {ours}")
