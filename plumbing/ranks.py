"""Communication between the processes of a run, the ranks. `torchrun --nproc-per-node W` starts them.

With one process these functions do nothing.
"""

import os
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist


# torchrun sets these variables.
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


class LostRank(Exception):
    """Another rank cannot be found, has failed or has ended, so that this one cannot go on."""


def init():
    """Waits until all ranks have started. NCCL exchanges tensors on GPUs, gloo all others."""
    if WORLD > 1 and not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(LOCAL_RANK)
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        except (RuntimeError, ValueError) as error:
            raise LostRank(f"rank {RANK} cannot join the others") from error


def destroy():
    """Ends the communication of the ranks."""
    if WORLD > 1:
        dist.destroy_process_group()


def is_first_to_fail():
    """True for the first rank that asks: it alone prints the error."""
    if not dist.is_initialized():
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("failures", 1) == 1
    except (RuntimeError, ValueError):  # the store does not exist, or no longer
        return RANK == 0


def describe(error):
    """An exception and its cause in one line."""
    message = str(error) or type(error).__name__
    if error.__cause__ is not None:
        message += f": {type(error.__cause__).__name__} {error.__cause__}"
    return " ".join(message.split())


def on_rank_0(work, *arguments):
    """Calls a function on rank 0 alone. If it fails, all ranks end with the same line; otherwise the
    others would wait for rank 0 at their next exchange."""
    try:
        if RANK == 0:
            work(*arguments)
    except Exception as error:
        all_gather(describe(error))
        raise
    message = all_gather("")[0]
    if message:
        raise LostRank(message)


def call(collective, *arguments):
    """Calls a function of torch.distributed, which every rank has to call."""
    try:
        collective(*arguments)
    except RuntimeError as error:
        raise LostRank(f"rank {RANK} has lost another one") from error


def local_slice(items):
    """This rank's part of a list or of a tensor's rows. The parts are of nearly equal size."""
    size, rest = divmod(len(items), WORLD)
    start = RANK * size + min(RANK, rest)
    end = (RANK + 1) * size + min(RANK + 1, rest)
    return items[start:end]


def all_gather(item):
    """[the item of each rank], in their order, on every rank."""
    if WORLD == 1:
        return [item]
    items = [None] * WORLD
    call(dist.all_gather_object, items, item)
    return items


def all_gather_list(items):
    """The lists of all ranks as one, on every rank: the inverse of `local_slice`."""
    return [item for part in all_gather(items) for item in part]


def all_gather_interleaved(lists):
    """{key: list} of each rank -> {key: one list}: the first item of each rank, then the second, ...
    That is a single process's order if a step has one micro-batch per rank."""
    if WORLD == 1:
        return lists
    all_lists = all_gather(lists)
    merged = {}
    keys = dict.fromkeys(key for theirs in all_lists for key in theirs)
    for key in keys:
        rounds = zip_longest(*[theirs.get(key, []) for theirs in all_lists])
        merged[key] = [item for items in rounds for item in items if item is not None]
    return merged


def all_reduce(tensor):
    """The sum of the ranks' tensors, in place. The losses of micro-batches sum to a step's loss, so
    they and their gradients are added, not averaged."""
    if WORLD > 1 and tensor.numel() > 0:
        call(dist.all_reduce, tensor)
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


def all_rows(parts, minibatches):
    """This rank's results, a tensor for each of its micro-batches in the order of the minibatches ->
    one tensor with the rows of all ranks, on every rank; None if there are no results."""
    if not parts:
        return None
    mine = torch.cat(parts)
    if WORLD == 1:
        return mine
    rows = torch.cat([local_slice(minibatch) for minibatch in minibatches])
    num_rows = sum(len(minibatch) for minibatch in minibatches)
    tensor = mine.new_zeros(num_rows, *mine.shape[1:]).index_copy(0, rows, mine)
    # The rows of others are 0, so that bytes can be added; not all dtypes can, in gloo or NCCL.
    all_reduce(tensor.view(torch.uint8))
    return tensor
