"""What tests/test_ranks.py starts by torchrun: runs of scripts one after the other, in the same ranks.

    torchrun --nproc-per-node W tests/ranks_worker.py TROUBLE "grpo --seed 1 ..." "ppo ..." ...

TROUBLE happens to the last rank in the second iteration: "none", "signal", "kill" or "nan".
"""

import importlib
import os
import shlex
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import harness
import ranks


def trouble(kind, module):
    """Makes the second rollout, or the loss after it, go wrong on the last rank alone."""
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

    if ranks.RANK == ranks.WORLD - 1:
        module.sample = sample
        module.policy_loss = policy_loss


def main():
    leave = ranks.leave
    ranks.leave = lambda: None  # the ranks stay together until all runs are done
    _, kind, *commands = sys.argv
    for command in commands:
        name, *flags = shlex.split(command)
        module = importlib.import_module(name)
        trouble(kind, module)
        sys.argv = [f"{name}.py", *flags]
        harness.launch(module.main, module.Args)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # these two keep the run, which keeps its lock
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave()


if __name__ == "__main__":
    main()
