"""The script that made the base model in this folder, by supervised learning from demonstrations.

    python tiny_moe/train.py FOLDER

Expect: a transformers folder for --model, in a minute on one core. Its weights depend on the processor,
which is why the base model is shipped: see README.md.
"""

import argparse
import math
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, Problem, addition_problems, collate, token_logprobs
from plumbing.args import RunArgs
from plumbing.metrics import mean_over
from plumbing.model import Policy

ARCHITECTURE = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    bos_token_id=None,
    initializer_range=0.1,  # transformers' 0.02 is for widths in the thousands
)


STEPS = 1200
BATCH_SIZE = 64  # demonstrations in a step
LR = 8e-3  # the highest learning rate, after 50 steps; then a cosine
DIRECT = 0.5  # fraction of demonstrations that answer without work
WORKED = 0.4  # fraction that work the sum out; the rest rambles
WRONG_STEP = 0.02  # probability of a wrong step, per column
CAP = 48  # tokens of a demonstration, the rest is cut off
SEED = 0  # of weights and demonstrations


def character_tokenizer():
    """Every character is a token."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+=# "]
    ids = {token: i for i, token in enumerate(vocabulary)}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def step_text(x, y, carry, total):
    """A column of a sum: '7+8=15', or '5+0+1=6' with a carry."""
    return f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}"


def demonstration(prompt, rng):
    """An answer without work ('#### 365'), or worked out ('7+8=15 5+0+1=6 0+3=3 #### 365' for
    57+308), or with each step two or three times, so that the cap cuts off the answer of a long sum.
    Now and then a step's result is random, and the rest uses its carry and digit."""
    a, b = [int(number) for number in prompt[:-1].split("+")]
    style = rng.random()
    if style < DIRECT:
        return f"#### {a + b}"
    repeats = (1, 1) if style < DIRECT + WORKED else (2, 3)
    steps = []
    digits = ""
    carry = 0
    for column in range(max(len(str(a)), len(str(b)))):
        x = a // 10**column % 10
        y = b // 10**column % 10
        total = x + y + carry
        if rng.random() < WRONG_STEP:
            total = rng.randrange(20)
        steps += [step_text(x, y, carry, total)] * rng.randint(*repeats)
        digits = str(total % 10) + digits
        carry = total // 10
    return " ".join(steps) + f" #### {int(str(carry) + digits)}"


def train(folder, prompts):
    """Fits a new tiny MoE to demonstrations for the prompts, and saves it with its tokenizer."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    rng = random.Random(SEED)
    tokenizer = character_tokenizer()
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **ARCHITECTURE,
    )
    torch.manual_seed(SEED)
    model = transformers.Qwen3MoeForCausalLM(config)
    policy = Policy(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    for step in tqdm(range(STEPS), unit="step", mininterval=0.5):
        chosen = rng.choices(prompts, k=BATCH_SIZE)
        answers = [demonstration(prompt, rng) for prompt in chosen]
        prompt_ids = tokenizer(chosen).input_ids
        answer_ids = tokenizer([answer + tokenizer.eos_token for answer in answers]).input_ids
        completions = []
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True):
            completions.append(Completion(Problem("", "", prompt), answer[:CAP], logprobs=[]))
        batch = collate(completions, prompt_ids[0][0], SimpleNamespace(torch_device="cpu"))
        outputs = token_logprobs(policy, batch, temperature=1.0)
        loss = 0.001 * outputs.aux_loss - mean_over([outputs.logprobs_BT], [batch.mask_BT])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm_up = min(1, (step + 1) / 50)
        cosine = math.cos(math.pi / 2 * step / STEPS) ** 2
        optimizer.param_groups[0]["lr"] = LR * (warm_up * cosine)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where the model is written to")
    folder = parser.parse_args().folder
    # The first ones are held out by default, and not learned.
    prompts = [prompt for prompt, _ in addition_problems(20_256)]
    train(folder, prompts[RunArgs.num_held_out :])


if __name__ == "__main__":
    main()
