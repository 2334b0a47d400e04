"""Communication between the processes of a run, the ranks. `torchrun --nproc-per-node W` starts them.

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
    """Waits until all ranks have started. NCCL exchanges tensors on GPUs, gloo all others."""
    if WORLD > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))


def destroy():
    """Ends the communication of the ranks."""
    if WORLD > 1:
        dist.destroy_process_group()


def let_others_report(is_user_error):
    """Waits before this rank reports an error. What all ranks have is reported by rank 0. When another
    rank ends, an exchange with it fails here, which is worth no report. Meanwhile torchrun, which ends
    all ranks after the first, ends this one."""
    if WORLD > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3 * (RANK > 0) + 3 * (not is_user_error))


def wait_for_all():
    """Returns when all ranks have called it."""
    all_gather(None)


def even_slices(length, count):
    """[`count` slices of nearly equal size], which together are range(length)."""
    size, rest = divmod(length, count)
    ends = [i * size + min(i, rest) for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def local_slice(items):
    """This rank's part of a list, of a tensor's rows or of a batch."""
    return items[even_slices(len(items), WORLD)[RANK]]


def all_gather(item):
    """[the item of each rank], in their order, on every rank."""
    if WORLD == 1:
        return [item]
    items = [None] * WORLD
    dist.all_gather_object(items, item)
    return items


def all_gather_list(items):
    """The lists of all ranks as one, on every rank: the inverse of `local_slice`."""
    return [item for part in all_gather(items) for item in part]


def all_reduce(tensor):
    """The sum of the ranks' tensors, in place. The losses of micro-batches sum to a step's loss, so
    they and their gradients are added, not averaged."""
    if WORLD > 1 and tensor.numel() > 0:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_gradients(weights):
    """The sum of the ranks' gradients. A weight that no rank used keeps None, as in one process."""
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
    """This rank's results, a tensor for each of its micro-batches in the order of the minibatches ->
    one tensor with the rows of all ranks, on every rank. `sizes` are the minibatches' row counts."""
    mine = torch.cat(parts)
    if WORLD == 1:
        return mine
    numbers = torch.arange(sum(sizes), device=mine.device)
    rows = torch.cat([local_slice(part) for part in numbers.split(sizes)])
    tensor = mine.new_zeros(len(numbers), *mine.shape[1:]).index_copy(0, rows, mine)
    # The rows of others are 0, so that bytes can be added; not all dtypes can, in gloo or NCCL.
    all_reduce(tensor.view(torch.uint8))
    return tensor
