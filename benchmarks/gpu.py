"""What a run on one GPU needs: computed, and allocated by models with random weights.

    python benchmarks/gpu.py
    python benchmarks/gpu.py measure OUT.json    # on a GPU, what it really takes: gpu_kit.py

The first prints the memory table and the recipe of benchmarks/README.md. Memory comes from
plumbing/memory.py, as every run computes it before it starts; the models are built without weights,
from the numbers in their published configs.
"""

import dataclasses
import functools
import gc
import sys
import textwrap
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo
from common import Completion, Problem, collate, sample, score, token_logprobs
from plumbing.args import TINY_MOE
from plumbing.memory import memory_parts, memory_peak
from plumbing.models import checkpoint_layers
from plumbing.policy import Policy

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


def without_weights(config):
    """A model on the device "meta"."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


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
        model = without_weights(MODELS[name])
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


# ------------------------------------------- what is allocated, by models with random weights


def random_policy(config, job):
    """(policy, optimizer); there is no token that would end a completion."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in plumbing/models.py
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if job.gradient_checkpointing:
        checkpoint_layers(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MOE)
    tokenizer.eos_token = None
    policy = Policy(model, tokenizer, job.dtype)
    return policy, torch.optim.AdamW(policy.parameters(), lr=job.lr, weight_decay=0.0, fused=True)


def problem_of(length):
    return Problem("1" * length, "", [1] * length)


def update(policy, optimizer, batch, job):
    """The update of an iteration as in grpo.py, with advantages of 1 and without metrics."""
    minibatches = batch.minibatches(job.num_minibatches)
    old = score(policy, batch, minibatches, job)
    for minibatch in minibatches:
        for rows, micro in batch.micro_batches(minibatch, job.micro_batch_size):
            outputs = token_logprobs(policy, micro, job.temperature)
            loss, _ = grpo.policy_loss(
                outputs.logprobs_BT,
                old.logprobs_NT[rows],
                torch.ones(len(rows), 1, device=job.device),
                micro.mask_BT,
                kl_coef=0.0,
                num_sequences=len(minibatch),
            )
            (loss + job.router_aux_coef * outputs.aux_loss).backward()
        policy.clip_gradients(job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        policy.refresh()


def peak(work):
    """Bytes that are allocated at most while `work` is done, beyond those before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def allocated_parts(config, job):
    """{part: bytes}, where the update has its gradients beside it."""
    gc.collect()  # the model before this one has hooks that refer to it
    before = torch.cuda.memory_allocated()
    policy, optimizer = random_policy(config, job)
    ids = [1] * job.max_new_tokens
    completion = Completion(problem_of(LONGEST_PROMPT), ids, [0.0] * len(ids))
    # The gradients are there when the second micro-batch comes.
    batch = collate([completion] * 2 * job.micro_batch_size, job)
    work = functools.partial(update, policy, optimizer, batch, job)
    work()  # from here on the moments are there
    stays = torch.cuda.memory_allocated() - before
    in_update = peak(work)
    # After a longer prompt and fewer tokens, which take less time, the cache is as wide.
    few = dataclasses.replace(job, max_new_tokens=8)
    length = LONGEST_PROMPT + job.max_new_tokens - few.max_new_tokens
    problems = [problem_of(length)] * (job.rollout_batch_size // job.group_size)
    in_rollout = peak(lambda: sample(policy, problems, job.group_size, few))
    return {"stays": stays, "rollout": in_rollout, "update": in_update}


# --------------------------------------------------------------------------------- the recipe

# GSM8K on one H100.
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
    return memory_parts(without_weights(MODELS["Qwen2.5-0.5B"]), args, LONGEST_PROMPT, num_references=1)


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
    if len(sys.argv) > 1:
        import gpu_kit  # it takes its models from here

        gpu_kit.main()
    else:
        main()
