"""Loads a model, and rejects what transformers would accept silently: weights that do not fit."""

import functools
import os
import re
import types
from pathlib import Path

import huggingface_hub
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from plumbing import UserError, one_line
from plumbing.routing import routing_contexts

TINY_MOE = Path(__file__).parent.parent / "tiny_moe"  # the folder that --model tiny-moe means


def read_config(source):
    """The config, changed so that quantized weights (FP8, MXFP4) are dequantized: the kernels for
    them pass no gradient, and nothing would reveal it."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None):
            part.quantization_config["dequantize"] = True
    return config


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer). Runs no code from the folder."""
    source = str(TINY_MOE) if args.model == "tiny-moe" else args.model
    if not Path(source).is_dir():
        with one_line(f"--model {args.model} is not a folder, and cannot be read from the hub"):
            # Fails at once if the hub does not have it; the loaders would retry for a minute.
            if not isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str):
                huggingface_hub.model_info(source, timeout=10)
    if (Path(source) / "adapter_config.json").exists():
        raise UserError(f"--model {args.model} is an adapter: merge it into its base model first")
    options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    with one_line(f"--model {args.model} cannot be used"):  # damaged folders may raise anything
        config = read_config(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        loader = transformers.AutoModelForCausalLM
        model, report = loader.from_pretrained(source, config=config, dtype=torch.float32, **options)
    check_model(model, tokenizer, report, args)
    model = model.float().to(args.device).eval()  # some dequantized weights are in bfloat16
    # The update asks for router logits itself; if they are always on, decoding fails.
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        model.config.get_text_config().output_router_logits = False
    # A tiny model's operators are so small that threads mostly wait for each other, ten times as long
    # if another program occupies a core.
    is_tiny = sum(weight.numel() for weight in model.parameters()) < 10_000_000
    if is_tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    # In bfloat16, CUDA prefers cuDNN's attention, which makes a new plan for every shape, so for every
    # sampled token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    if args.head_dtype == "float32":
        head = model.get_output_embeddings()
        head.forward = types.MethodType(float32_product, head)  # bound, so that copies have their own
    return model, tokenizer


def check_model(model, tokenizer, report, args):
    """UserError if transformers has loaded something that cannot be trained."""
    # If weights do not fit the architecture, it silently uses random ones.
    misfits = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    ids = end_ids(model, tokenizer)
    fault = ""
    if misfits:
        fault = f"its weights do not fit its config: {str(misfits):.200}"
    elif getattr(model, "is_quantized", False):
        fault = "its weights are quantized, and transformers cannot dequantize them"
    elif len(tokenizer) <= len(tokenizer.all_special_ids):
        fault = "it has no tokenizer"
    elif not ids or not all(isinstance(token, int) for token in ids):
        fault = f"its EOS ids must be integers, not {ids}"
    elif model.base_model is model:
        fault = "transformers does not separate its body from its head"
    if fault:
        raise UserError(f"--model {args.model}: {fault}")


def float32_product(head, hidden):
    """A linear layer's output in float32, whatever the dtype of its weights and inputs."""
    bias = None if head.bias is None else head.bias.float()
    return F.linear(hidden.float(), head.weight.float(), bias)


def checkpoint_layers(model):
    """Makes layers store only their inputs and recompute the rest in the backward pass. transformers'
    own switch works only in train(), which would turn dropout on."""
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
    return sorted({*ids, tokenizer.eos_token_id} - {None}, key=str)


# Names in configs for the length beyond which a token no longer sees all earlier ones, or rotary
# embeddings change.
LIMITS = "window|attention_chunk|local_attention|index_topk|original_max_position"


def context_limits(model):
    """The lengths in a model's config at which its attention or rotary embeddings change."""
    config = model.config.get_text_config().to_json_string(use_diff=False)
    found = re.findall(rf'"\w*(?:{LIMITS})\w*": ([1-9][0-9]*)\b(?!\.)', config)
    return sorted({int(length) for length in found})


class LastHidden(tuple):
    """A model body's output, with only its last hidden states."""

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
        # The class's forward: one that a trainer patched onto the object would run the original model.
        return type(model).forward(model, tokens[None], use_cache=False).logits[0]
    finally:
        del body.forward  # its class's method remains
