"""Communication between a run's processes, the ranks. `torchrun --nproc-per-node W` starts them.

With one process these functions do nothing.
"""

import os
import signal
import time
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist


# torchrun sets these variables.
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


def init(device):
    """Waits until all ranks have started. NCCL exchanges tensors on GPUs, gloo everything else."""
    if WORLD > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))


def destroy():
    if WORLD > 1:
        dist.destroy_process_group()


def let_others_report(is_user_error):
    """Waits before this rank reports an error. If all ranks have the same error, rank 0 reports it. If
    a different rank has ended, exchanges with it fail here, which needs no report: torchrun ends all
    ranks after the first, and so this one while it waits."""
    if WORLD > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3 * (RANK > 0) + 3 * (not is_user_error))


def wait_for_all():
    """Returns when all ranks have called it."""
    all_gather(None)


def even_slices(length, count):
    """[`count` slices of nearly equal size] that together cover range(length)."""
    size, rest = divmod(length, count)
    ends = [i * size + min(i, rest) for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def local_slice(items):
    """This rank's part of a list, a tensor's rows, or a batch."""
    return items[even_slices(len(items), WORLD)[RANK]]


def all_gather(item):
    """[each rank's item], in rank order, on every rank."""
    if WORLD == 1:
        return [item]
    items = [None] * WORLD
    dist.all_gather_object(items, item)
    return items


def all_gather_list(items):
    """The lists of all ranks, joined, on every rank: the inverse of `local_slice`."""
    return [item for part in all_gather(items) for item in part]


def all_reduce(tensor):
    """Sums a tensor over all ranks, in place. Micro-batch losses sum to the step's loss, so losses and
    gradients are added, not averaged."""
    if WORLD > 1 and tensor.numel() > 0:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_gradients(weights):
    """Sums gradients over all ranks. A weight that no rank used keeps None, as in one process."""
    if WORLD == 1:
        return
    weights = list(weights)
    is_used = torch.tensor([weight.grad is not None for weight in weights], device=weights[0].device)
    for weight, num_ranks in zip(weights, all_reduce(is_used.long()).tolist(), strict=True):
        if num_ranks > 0:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            all_reduce(weight.grad)


def all_rows(parts, sizes):
    """This rank's results, one tensor per micro-batch in minibatch order -> one tensor with the rows
    of all ranks, on every rank. `sizes` are the minibatches' row counts."""
    mine = torch.cat(parts)
    if WORLD == 1:
        return mine
    numbers = torch.arange(sum(sizes), device=mine.device)
    rows = torch.cat([local_slice(part) for part in numbers.split(sizes)])
    tensor = mine.new_zeros(len(numbers), *mine.shape[1:]).index_copy(0, rows, mine)
    # Other ranks' rows are 0, so we can add bytes. gloo and NCCL cannot add every dtype.
    all_reduce(tensor.view(torch.uint8))
    return tensor
