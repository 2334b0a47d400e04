"""Limits the memory of a pass: batches of similar length, logits in chunks, recomputed layers."""

import functools

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from plumbing.routing import routing_contexts


def similar_lengths(completions, rows, max_tokens):
    """Splits some rows of the completions into batches of similar length, so that little is padding:
    [[row]]. A batch has at most `max_tokens` tokens, padding included, or one completion."""

    def total_length(row):
        return len(completions[row].problem.prompt_ids) + len(completions[row].ids)

    batches = []
    current = []
    for row in sorted(rows, key=total_length):
        num_tokens = (len(current) + 1) * total_length(row)  # this is the longest one so far
        if num_tokens > max_tokens and current:
            batches.append(current)
            current = []
        current.append(row)
    return [*batches, current]


# Logits that are in float32 at a time, on a CPU and on a GPU
CPU_CHUNK = 2**22
GPU_CHUNK = 2**26


def in_chunks(function, logits_NV, ids_N):
    """function(logits_NV, ids_N), a tuple of tensors (N,), computed from a part of the rows at a time.
    The backward pass computes each part again, so of all rows it keeps only the logits."""
    size = max(1, (CPU_CHUNK if logits_NV.is_cpu else GPU_CHUNK) // logits_NV.shape[1])
    if len(logits_NV) <= size:
        return function(logits_NV, ids_N)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    parts = []
    for inputs in zip(logits_NV.split(size), ids_N.split(size), strict=True):
        parts.append(checkpoint(function, *inputs, **options))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def checkpoint_layers(model):
    """Makes layers store only their inputs and recompute the rest in the backward pass. transformers'
    own switch works only in train(), which would turn dropout on."""
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": routing_contexts}
    recompute = functools.partial(checkpoint, **options)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward)
