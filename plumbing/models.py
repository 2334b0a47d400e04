"""Loads a model, and refuses what transformers would accept silently: weights that do not fit."""

import functools
import math
import os
import types
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from plumbing.errors import UserError
from plumbing.routing import routing_contexts

TINY_MOE = Path(__file__).parent.parent / "tiny_moe"  # the folder that --model tiny-moe means


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer). No code of its folder is run."""
    source = args.model
    if args.model == "tiny-moe":
        source = TINY_MOE
        if not source.is_dir():
            raise UserError(f"--model tiny-moe: its folder {source} does not exist")
    options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        loader = transformers.AutoModelForCausalLM
        model, report = loader.from_pretrained(source, dtype=torch.float32, **options)
    except Exception as error:  # damaged folders may raise anything
        raise UserError(f"--model {args.model} cannot be used") from error
    # Where weights and architecture do not fit, transformers goes on with random ones.
    misfits = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if misfits:
        message = f"its weights do not fit its config: {str(misfits):.200}"
        raise UserError(f"--model {args.model}: {message}")
    if not end_ids(model, tokenizer):
        raise UserError(f"--model {args.model}: neither it nor its tokenizer has an EOS token")
    if model.base_model is model:
        raise UserError(f"--model {args.model}: transformers does not tell its body from its head")
    model = model.to(args.device).eval()
    # The update asks for router logits itself; where they are always made, decoding fails.
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        model.config.get_text_config().output_router_logits = False
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
    if args.head_dtype == "float32":
        head = model.get_output_embeddings()
        head.forward = types.MethodType(float32_product, head)  # bound, so that copies have their own
    return model, tokenizer


def float32_product(head, hidden):
    """A linear layer's output in float32, whatever the dtype of its weights and inputs."""
    bias = None if head.bias is None else head.bias.float()
    return F.linear(hidden.float(), head.weight.float(), bias)


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


def attention_window(model):
    """The most tokens that layers with sliding or chunked attention see; infinite without any."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min([size for size in sizes if size], default=math.inf)


class LastHidden(tuple):
    """What a model's body returns, with nothing but its last hidden states."""

    @property
    def last_hidden_state(self):
        return self[0]

    def __getattr__(self, name):
        return None


def logits_of(model, hidden):
    """Last hidden states (tokens, H) -> logits (tokens, V), as the model computes them: its own forward
    runs, with a body that only returns these states. Architectures scale or cap logits in many ways."""
    body = model.base_model
    tokens = torch.zeros(hidden.shape[:1], dtype=torch.long, device=hidden.device)
    body.forward = lambda *inputs, **named: LastHidden([hidden[None]])
    try:
        # Its class's: a forward that a trainer has put on the object runs the original even in a copy.
        return type(model).forward(model, tokens[None], use_cache=False).logits[0]
    finally:
        del body.forward  # the method of its class remains
