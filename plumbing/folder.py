"""A run's folder: what it holds, what a resume checks, and how checkpoints are written."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from plumbing.errors import UserError, one_line

LOGS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
STATE = "trainer_state.pt"  # in a checkpoint: everything except the policy
CHECKPOINT = "checkpoint-" + 6 * "[0-9]"  # a copy such as checkpoint-best-2 belongs to the user
# What may change when a run is resumed. If model or data have moved, they must still be the same.
MAY_CHANGE = "run_dir resume iterations eval_every save_every model dataset eval_dataset".split()
# These change results only by rounding (and an MoE's load-balancing loss, which is a product of means
# over a micro-batch, by a few percent if micro-batches change).
MAY_CHANGE += "device micro_batch_tokens rollout_batch_size gradient_checkpointing".split()

# What settings.json has besides the flags
RECORDED = {"versions", "problems_hash", "model_hash", "reward_hash"}


def checkpoints_in(folder):
    """The checkpoints in a run's folder, oldest first."""
    return sorted(folder.glob(CHECKPOINT))


def check_same(args, saved):
    """UserError if the flags differ from the saved settings of the run to be resumed."""
    for name, value in args.settings().items():
        found = saved.get(name)
        if name == "reward" and Path(str(value)).name == Path(str(found)).name:
            continue  # its file may have moved, and it may change: Run prints a note
        if name not in MAY_CHANGE and found != value:
            raise UserError(f"--resume: {args.folder} has {name} {found}, not {value}")


def check_folder(args):
    """The settings of the run to be resumed; {} for a new run. UserError if `--run_dir` holds a
    different run, one that cannot be resumed, or anything that a new run would erase."""
    folder = args.folder
    if folder.match(CHECKPOINT):
        raise UserError(f"--run_dir {folder} is a checkpoint: pass the folder that contains it")
    saved = args.saved_settings()
    with one_line(f"--run_dir {folder} cannot be used"):
        checkpoints = checkpoints_in(folder)
    if args.resume:
        if not saved:
            raise UserError(f"--resume: {folder} holds no run, since it has no settings.json")
        check_same(args, saved)
        for name in sorted(saved.keys() - args.settings().keys() - RECORDED):
            message = f"has --{name}, which {args.script}.py does not have"
            raise UserError(f"--resume: {folder} {message}; the commit in its settings.json has it")
        if checkpoints:
            return saved
    # A run that logged nothing may leave settings and checkpoint 0, which a new run replaces.
    for path in [*(folder / name for name in LOGS), *checkpoints]:
        is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
        is_spare = is_empty or (saved and path.name == "checkpoint-000000")
        if os.path.lexists(path) and not is_spare:
            message = "a new run needs an empty folder; --resume continues one from its checkpoint"
            raise UserError(f"--run_dir {folder} already has {path.name}: {message}")
    return saved if args.resume else {}


def check_hashes(args, saved, hashes):
    """UserError if the run to be resumed had different problems or a different model."""
    if saved and saved.get("problems_hash") != hashes["problems_hash"]:
        message = "have different prompts or gold answers than when the run started"
        raise UserError(f"--resume: --dataset or --eval_dataset {message}")
    if saved and saved.get("model_hash") != hashes["model_hash"]:  # the reference is loaded from it
        message = "has different weights than when the run started, or an older version started it"
        advice = "(settings.json names its commit, which can resume it)"
        raise UserError(f"--resume: --model {args.model} {message} {advice}")


def lock_folder(args, hashes):
    """Creates `--run_dir` if needed, and checks and locks it. Returns (lock, settings of the run to be
    resumed, or {}). UserError if another process uses it."""
    folder = args.folder
    check_folder(args)  # a refused run leaves neither folder nor lock
    # A singleton for all threads, since a run that failed in this process may still hold the lock.
    lock = FileLock(folder / "lock", is_singleton=True, thread_local=False)
    with one_line(f"--run_dir {folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            message = "another process uses it; scripts run in one (several GPUs: examples/)"
            raise UserError(message) from error
    saved = check_folder(args)  # again, since another run may have come and gone before the lock
    check_hashes(args, saved, hashes)
    return lock, saved


def write_settings(folder, settings, is_resumed):
    """Writes settings.json and, for a new run, empty logs."""
    scratch = folder / "settings.json.tmp"
    with one_line(f"--run_dir {folder} cannot be written"):
        if not is_resumed:
            # A run that ended before its first iteration may have left checkpoint 0.
            shutil.rmtree(folder / "checkpoint-000000", ignore_errors=True)
            for name in LOGS:
                (folder / name).touch()
        scratch.write_text(json.dumps(settings, indent=1))
        scratch.replace(folder / "settings.json")  # so it is never half written


def restore(run, checkpoint):
    """Loads a checkpoint into a `Run`, and cuts what was logged after it."""
    with one_line(f"--resume: {checkpoint} cannot be read"):  # a damaged file may raise anything
        saved = torch.load(checkpoint / STATE, weights_only=True, map_location="cpu")
        run.policy.load_pretrained(checkpoint)
        run.load_state(saved)
        settings = saved["settings"]
        logs = {run.folder / name: saved["logs"][name] for name in LOGS}
    check_same(run.args, settings)  # the optimizer, for example, keeps its lr
    sizes = {}
    for path, (size, digest) in logs.items():
        with one_line(f"--resume: {path} cannot be continued"):
            with open(path, "rb+") as file:  # fails if it may not be written
                content = file.read()
            if hashlib.sha256(content[:size]).hexdigest() != digest:
                raise UserError("lines that it had are lost or changed")
        # Checkpoint 0 is older than the evaluation before training.
        if run.iteration == 0 and path.name == "evaluations.jsonl":
            size = content.find(b"\n") + 1
        sizes[path] = size
    for path, size in sizes.items():
        os.truncate(path, size)  # later lines will be written again


def write_checkpoint(checkpoint, policy, state):
    """Writes a checkpoint and, once it is on disk, removes the previous one."""
    folder = checkpoint.parent
    scratch = folder / "checkpoint.tmp"
    with one_line(f"{checkpoint} cannot be written; existing checkpoints are intact"):
        contents = {name: (folder / name).read_bytes() for name in LOGS}
        logs = {name: (len(x), hashlib.sha256(x).hexdigest()) for name, x in contents.items()}
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            policy.save_pretrained(scratch)
            with open(scratch / STATE, "wb") as file:  # given a path, torch would not say why it fails
                torch.save({**state, "logs": logs}, file)
            for path in [*scratch.rglob("*"), scratch, *(folder / name for name in LOGS)]:
                sync(path)
            scratch.rename(checkpoint)
        except Exception:
            shutil.rmtree(scratch, ignore_errors=True)  # it may fill the disk
            raise
        sync(folder)
    for path in checkpoints_in(folder)[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def sync(path):
    """Waits until a file or folder is on disk."""
    if os.name == "posix":  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
