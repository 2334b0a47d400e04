"""What tests/test_ranks.py starts by torchrun: runs of scripts one after the other, in the same ranks.

    torchrun --nproc-per-node W tests/ranks_worker.py "none grpo --seed 1 ..." "nan ppo ..." ...

The first word is what happens: none; to the last rank in the second iteration signal, kill or nan, or
others, a start with other settings; to rank 0 log or save, which it cannot write.
"""

import importlib
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing import ranks
from plumbing.args import launch
from plumbing.settings import settings_of


def trouble(kind, module):
    """Makes something go wrong on the last rank alone, or what rank 0 writes."""
    rollouts = []
    real_sample = module.sample
    real_loss = module.policy_loss

    def sample(*args, **kwargs):
        rollouts.append(None)
        if len(rollouts) == 2 and kind in ("signal", "kill"):
            number = signal.SIGTERM if kind == "signal" else signal.SIGKILL
            os.kill(os.getpid(), number)
        return real_sample(*args, **kwargs)

    def policy_loss(*args, **kwargs):
        loss, stats = real_loss(*args, **kwargs)
        if len(rollouts) == 2 and kind == "nan":
            loss = loss * float("nan")
        return loss, stats

    def other_settings(args, *more):
        args.seed += 1
        return settings_of(args, *more) | {"dataset's sums.jsonl": "another hash"}

    def full_disk(*args):
        raise OSError("No space left on device")

    patches = ExitStack()
    if ranks.RANK == 0 and kind == "log":
        patches.enter_context(patch("plumbing.run.transcripts", full_disk))
    if ranks.RANK == 0 and kind == "save":
        patches.enter_context(patch("plumbing.run.checkpoint_hashes", full_disk))
    if ranks.RANK == ranks.WORLD - 1:
        if kind == "others":
            patches.enter_context(patch("plumbing.run.settings_of", other_settings))
        patches.enter_context(patch.object(module, "sample", sample))
        patches.enter_context(patch.object(module, "policy_loss", policy_loss))
    return patches


def gradients_of_few():
    """Added up over the ranks: of a weight that all have used, of one that the last has, of one that
    none has."""
    weights = [torch.zeros((), requires_grad=True) for _ in range(3)]
    weights[0].grad = torch.ones(())
    if ranks.RANK == ranks.WORLD - 1:
        weights[1].grad = torch.ones(())
    ranks.all_reduce_gradients(weights)
    return [None if weight.grad is None else weight.grad.item() for weight in weights]


def rows_of_all():
    """What each rank knows of its own rows, in integers that no backend adds up."""
    rows = torch.arange(5)
    mine = 1000 * (ranks.local_slice(rows) - 2)[:, None].to(torch.int16)
    return ranks.all_rows([mine], [rows])[:, 0].tolist()


def main():
    destroy = ranks.destroy
    ranks.destroy = lambda: None  # the ranks stay together until all runs are done
    ranks.init()
    gradients = ranks.all_gather(gradients_of_few())
    if ranks.RANK == 0:
        print("gradients", *gradients, flush=True)
    rows = ranks.all_gather(rows_of_all())
    if ranks.RANK == 0:
        print("rows", *rows, flush=True)
    for command in sys.argv[1:]:
        kind, name, *flags = shlex.split(command)
        module = importlib.import_module(name)
        sys.argv = [f"{name}.py", *flags]
        code = 0
        try:
            with trouble(kind, module):
                launch(module.main, module.Args)
        except SystemExit as exit:
            code = exit.code
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # these two keep the run, which keeps its lock
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ends = ranks.all_gather((code, time.time()))
        if ranks.RANK == 0:
            codes, times = zip(*ends, strict=True)
            assert max(times) - min(times) < 10
            print("ended with", *codes, flush=True)
            store = dist.distributed_c10d._get_default_store()
            store.set("failures", "0")  # a run that fails after this one has a line of its own
        ranks.all_gather("go on")
    destroy()


if __name__ == "__main__":
    main()
