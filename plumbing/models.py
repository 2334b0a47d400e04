"""Loads a model, and refuses what transformers would accept silently: weights that do not fit."""

import functools
import os

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from plumbing.args import TINY_MOE, UserError
from plumbing.routing import routing_contexts


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer). No code of its folder is run."""
    source = args.model
    if args.model == "tiny-moe":
        source = TINY_MOE
        if not source.is_dir():
            raise UserError(f"--model tiny-moe: its folder {source} does not exist")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    loader = transformers.AutoModelForCausalLM
    model, report = loader.from_pretrained(source, dtype=torch.float32, **options)
    # Where weights and architecture do not fit, transformers goes on with random ones.
    misfits = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if misfits:
        raise ValueError(f"its weights do not fit its config: {str(misfits):.200}")
    model = model.to(args.device).eval()
    # A tiny model's operators are so small that several threads mostly wait for each other, ten times
    # as long when another program occupies a core.
    is_tiny = sum(weight.numel() for weight in model.parameters()) < 10_000_000
    if is_tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    # In bfloat16 CUDA prefers cuDNN's attention, which makes a new plan for every shape, and so for
    # every sampled token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    return model, tokenizer


def checkpoint_layers(model):
    """Makes the layers keep only their inputs, and recompute the rest in the backward pass.
    transformers' own switch works only in train(), which would turn dropout on."""
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": routing_contexts}
    recompute = functools.partial(checkpoint, **options)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward)


def end_ids(model, tokenizer):
    """The ids that end a completion; chat models have several."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})
