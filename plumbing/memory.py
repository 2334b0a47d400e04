"""Estimates the memory that a run needs on its device, from the model's config, before it starts."""

import math
import os
import sys
from dataclasses import replace

import torch
from tqdm import tqdm

from plumbing import ranks

MICRO_BATCH_TOKENS = 16_384  # in a pass of an update, where --micro_batch_size is 0
MAX_LOGITS = 2**26  # more are made in chunks: common.token_logprobs


def attention_sizes(config):
    """Numbers per token and layer: (queries, keys), as many values as keys; 0 without heads."""
    num_heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    return num_heads * head_dim, getattr(config, "num_key_value_heads", num_heads) * head_dim


def layer_bytes(model, width, size):
    """Bytes per token that a layer keeps for the backward pass, in rows of `width` tokens and numbers
    of `size` bytes: the tensors that autograd saves in Llama, Qwen and Mixtral models."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    queries, keys = attention_sizes(config)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # Two norms: the input in float32, the output without and with its weight.
    norms = 2 * (4 * hidden + 2 * size * hidden)
    # Queries, keys and values (these for each head), the output, and the mask, a row for each token.
    attention = size * (4 * queries + width)
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        attention += (4 + size) * (queries + keys)
    # Gate, its activation, up, and their product.
    mlp = size * 4 * inner
    num_active = getattr(config, "num_experts_per_tok", None) or 0
    if num_active > 0:
        inner = getattr(config, "moe_intermediate_size", None) or inner
        # The same of each active expert, its input and output, and the order of the tokens.
        mlp = num_active * (size * (4 * inner + 2 * hidden) + 24)
    return norms + attention + mlp


def memory_parts(model, args, longest_prompt, num_critics=0, num_references=0):
    """{part: bytes} that a run needs on its device, from the model's config. The weights are only
    counted, and may be on "meta".

    "rollout" is the KV cache of `--rollout_batch_size` completions and their logits, "update" the
    activations of `--micro_batch_size` completions and their logits; a run never needs both at once.
    """
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    _, keys = attention_sizes(config)
    size = 2 if args.dtype == "bfloat16" else 4
    width = longest_prompt + args.max_new_tokens

    # One layer's keys exist twice while they grow by a token. There are four copies of the logits: the
    # last token's logits and log-probs in float32, the next token's in float32 and as they come.
    copy_size = {"float32": 4, "bfloat16": 2}.get(args.rollout_dtype, size)
    rollout_size = max(size, copy_size)  # a copy samples, except in evaluations
    cache = args.rollout_batch_size * width * num_layers * 2 * keys * rollout_size
    logits = args.rollout_batch_size * config.vocab_size * (rollout_size + 12)
    rollout = cache + cache // (2 * num_layers) + logits

    num_tokens = args.micro_batch_size * width
    of_layer = num_tokens * layer_bytes(model, width, size)
    num_logits = min(args.micro_batch_size * args.max_new_tokens * config.vocab_size, MAX_LOGITS)
    of_logits = 12 * num_logits  # three in float32: log-probs, probs, and their product or gradient
    of_norm = num_tokens * config.hidden_size * (4 + 3 * size)  # the last norm, and the head's input
    update = num_layers * of_layer + of_norm + of_logits
    if args.gradient_checkpointing:
        # Each layer's input, and either the logits or, later, one layer and a quarter more for the
        # gradients that pass through it.
        of_inputs = num_tokens * num_layers * config.hidden_size * size
        update = of_inputs + of_norm + max(1.25 * of_layer, of_logits)
    update += num_critics * (update - of_logits)

    if args.head_dtype == "float32" and size == 2:  # its weights once more, and their gradient
        of_head = 4 * config.vocab_size * config.hidden_size
        rollout += of_head
        update += 2 * of_head

    num_weights = sum(weight.numel() for weight in model.parameters())
    num_trained = num_weights * (1 + num_critics)
    return {
        "weights": size * (num_trained + num_references * num_weights),
        "rollout copy": copy_size * num_weights if args.has_rollout_copy else 0,
        "masters": 4 * num_trained if args.dtype == "bfloat16" else 0,
        "gradients": 4 * num_trained,
        "moments": 8 * num_trained,
        "rollout": rollout,
        "update": update,
    }


def memory_peak(parts):
    """Bytes at an iteration's larger peak, the rollout, which has no gradients yet, or the update."""
    kept = parts["weights"] + parts["rollout copy"] + parts["masters"] + parts["moments"]
    return kept + max(parts["rollout"], parts["gradients"] + parts["update"])


def free_memory(device):
    """Bytes that are free on the device or are this process's already; on a CPU, the share of a rank in
    all of its memory; infinite if unknown."""
    if device.startswith("cuda") and torch.cuda.cudart() is not None:  # None: torch lacks CUDA
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks.WORLD
    return math.inf


def estimate_memory(args, model, longest_prompt):
    """(`args`, {part: bytes that a rank needs}): `--rollout_batch_size` and `--micro_batch_size` are
    chosen if they are 0, and reduced to the number of completions. Warns if less memory is free."""
    my_prompts = math.ceil(args.prompts_per_iteration / ranks.WORLD)
    rollout_size = min(args.rollout_batch_size or math.inf, my_prompts * args.group_size)
    rollout_size = max(rollout_size, args.group_size, args.eval_samples)  # a prompt's are together
    completions = args.prompts_per_iteration * args.group_size
    of_minibatch = math.ceil(completions // args.num_minibatches / ranks.WORLD)
    fitting = MICRO_BATCH_TOKENS // (longest_prompt + args.max_new_tokens)
    micro_size = min(args.micro_batch_size or max(1, fitting), of_minibatch)
    args = replace(args, rollout_batch_size=rollout_size, micro_batch_size=micro_size)
    num_critics = int(hasattr(args, "critic_lr"))  # what only scripts with a critic have
    num_references = int(getattr(args, "kl_coef", 0) > 0)
    needed = memory_parts(model, args, longest_prompt, num_critics, num_references)
    needed |= {"at most": memory_peak(needed), "free": free_memory(args.device)}
    if needed["at most"] > needed["free"] and ranks.RANK == 0:
        tqdm.write(
            f"warning: --model {args.model} needs about {needed['at most'] / 2**30:.1f} GiB, and "
            f"{args.device} has {needed['free'] / 2**30:.1f} free; less: --dtype bfloat16, "
            f"--gradient_checkpointing, or a smaller --micro_batch_size (now {micro_size}) or "
            f"--rollout_batch_size (now {rollout_size})",
            file=sys.stderr,
        )
    return args, needed


def plan_memory(args, policy, problem_stream, held_out):
    """`args` with its batch sizes chosen. Prints the memory that a rank needs."""
    longest_prompt = max(len(p.prompt_ids) for p in problem_stream.problems + held_out)
    args, needed = estimate_memory(args, policy.master, longest_prompt)
    listed = [f"{part} {count / 2**20:,.1f}" for part, count in needed.items() if count > 0]
    if ranks.RANK == 0:
        tqdm.write(f"memory in MiB, computed: {', '.join(listed)}")
    return args
