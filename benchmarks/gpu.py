"""What a run on one GPU needs: computed, since none of it was run on a GPU.

    python benchmarks/gpu.py

Prints the memory table and the recipe of benchmarks/README.md. Memory comes from plumbing/memory.py,
as every run computes it before it starts; the models are built without weights, from the numbers in
their published configs.
"""

import sys
import textwrap
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo
from plumbing.memory import memory_parts, memory_peak

CARDS = (24, 48, 80)  # GiB
FREE = 0.1  # of a card: kept for CUDA itself and for memory that lies in pieces too small to be used
LONGEST_PROMPT = 256
CAP = 512

# What memory depends on, as the published configs have it.
MODELS = {
    "Qwen2.5-0.5B": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-3B": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": transformers.Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "OLMoE-1B-7B": transformers.OlmoeConfig(
        vocab_size=50_304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
# How a user would make it fit, from the default to what needs least.
WAYS = {
    "grpo, float32": dict(dtype="float32"),
    "grpo, bfloat16": dict(dtype="bfloat16"),
    "grpo, no KL, bfloat16, recomputed layers": dict(
        dtype="bfloat16", gradient_checkpointing=True, kl_coef=0.0
    ),
    "ppo, bfloat16, recomputed layers": dict(dtype="bfloat16", gradient_checkpointing=True),
}


def without_weights(name):
    """The model of this name, on the device "meta"."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(MODELS[name])


def settings(**flags):
    """grpo.py's arguments, with 256 completions sampled at a time and updates of 16,384 tokens."""
    micro_batch_size = 16_384 // (LONGEST_PROMPT + CAP)
    sizes = {"rollout_batch_size": 256, "micro_batch_size": micro_batch_size, "max_new_tokens": CAP}
    return grpo.Args(**{**sizes, **flags})


def smallest_card(peak):
    """The smallest of the cards that has room for `peak` bytes, as text."""
    for card in CARDS:
        if peak <= (1 - FREE) * card * 2**30:
            return str(card)
    return "none"


def memory_rows():
    """[[model, way, GiB that stay, GiB of a rollout, of an update, at most, card]]"""
    rows = []
    for name in MODELS:
        model = without_weights(name)
        billions = sum(weight.numel() for weight in model.parameters()) / 1e9
        for way, flags in WAYS.items():
            args = settings(**flags)
            num_critics = 1 if way.startswith("ppo") else 0
            num_references = 1 if args.kl_coef > 0 else 0
            parts = memory_parts(model, args, LONGEST_PROMPT, num_critics, num_references)
            stays = sum(parts[part] for part in ("weights", "masters", "gradients", "moments"))
            peak = memory_peak(parts)
            sizes = [stays, parts["rollout"], parts["update"], peak]
            cells = [f"{size / 2**30:.1f}" for size in sizes]
            rows.append([f"{name}, {billions:.2f} B", way, *cells, smallest_card(peak)])
    return rows


# The recipe: GSM8K on one H100.
RECIPE = dict(
    dtype="bfloat16",
    max_new_tokens=CAP,
    prompts_per_iteration=64,
    group_size=8,
    rollout_batch_size=512,
    lr="1e-6",
)
COMMAND = """python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct \\
    --dataset openai/gsm8k --dataset_config main \\
    --instruction 'Think step by step, then write "####" and the answer as a plain number.' \\
    {flags}"""


def recipe_command():
    flags = " ".join(f"--{name} {value}" for name, value in RECIPE.items())
    return COMMAND.format(flags="\n".join(textwrap.wrap(flags, 84)).replace("\n", " \\\n    "))


def recipe_parts():
    """Memory of the recipe by part, in bytes."""
    args = settings(**RECIPE)
    return memory_parts(without_weights("Qwen2.5-0.5B"), args, LONGEST_PROMPT, num_references=1)


def main():
    for row in memory_rows():
        print("  ".join(row))
    print()
    print(recipe_command())
    parts = recipe_parts()
    for part, size in parts.items():
        print(f"{part:12} {size / 2**30:6.1f} GiB")
    print(f"{'at most':12} {memory_peak(parts) / 2**30:6.1f} GiB")


if __name__ == "__main__":
    main()
