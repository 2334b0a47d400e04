"""Where problems come from: the default job, or a dataset.

The default job is sums of two- and three-digit numbers, and a base model that sometimes gets them right: a
tiny mixture of experts after a short supervised warm start on mixed demonstrations, answers that are blurted
out, answers that are worked out, and a few that ramble. Only common.py imports this file.
"""

import hashlib
import json
import math
import random
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

import common

TINY_MODEL = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    tie_word_embeddings=True, bos_token_id=None, initializer_range=0.1,  # 0.02 is for widths in the thousands
)
# This share of the demonstrations blurts the answer out (direct) or works it out (worked); the rest rambles.
WARM_START = dict(seed=0, lr=8e-3, batch_size=64, direct=0.5, worked=0.4, wrong_step=0.02, cap=48)


def sums():
    """20,256 different sums of two- and three-digit numbers: [(prompt, answer)]."""
    rng, answers = random.Random(0), {}
    while len(answers) < 20_256:
        a, b = (rng.randint(*rng.choice([(10, 99), (100, 999)])) for _ in range(2))
        answers[f"{a}+{b}="] = str(a + b)
    return list(answers.items())


def read_dataset(args):
    r"""`--dataset` -> [(prompt, gold answer)] in random order, the same for all seeds. A prompt is text or a
    list of chat messages; gold is what follows '####' or fills a '\boxed{}' in its column, or all of it."""
    if args.dataset == "addition":
        return sums()
    import datasets  # takes a second, so only where it is needed
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, split, rows = args.dataset, args.dataset_split, []
    with common.one_line(f"--dataset {name} cannot be read"):
        if Path(name).is_file():
            kind = "parquet" if name.endswith(".parquet") else "json"
            table = datasets.load_dataset(kind, data_files={split: name}, split=split)
        else:
            table = datasets.load_dataset(name, args.dataset_config or None, split=split)
    found = f"the columns are {', '.join(table.column_names)}"
    for column in (args.prompt_column, args.answer_column):
        if column not in table.column_names:
            common.fail(f"--dataset {name} has no column {column}; {found}")
    pairs = zip(table[args.prompt_column], table[args.answer_column], strict=True)
    for number, (prompt, answer) in enumerate(pairs, 1):
        answer = "" if answer is None else str(answer).strip()
        gold = common.final_answer(answer) if "####" in answer or "\\boxed{" in answer else answer
        if not prompt or not gold:
            missing = "gold answer" if prompt else "prompt"
            common.fail(f"--dataset {name}, row {number}: no {missing}; {found}")
        rows.append((prompt, gold))
    return random.Random(0).sample(rows, len(rows))


def demonstration(prompt, rng):
    """An answer as people write them: blurted out, worked out ('7+8=15 5+0+1=6 0+3=3 #### 365' for 57+308) or
    with repetitions until there is no room for the answer. Now and then a step is wrong, and so the rest."""
    (a, b), style = map(int, prompt[:-1].split("+")), rng.random()
    if style < WARM_START["direct"]:
        return f"#### {a + b}"
    repeats = (1, 1) if style < WARM_START["direct"] + WARM_START["worked"] else (2, 3)
    steps, digits, carry = [], "", 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = rng.randrange(20) if rng.random() < WARM_START["wrong_step"] else x + y + carry
        steps += [f"{x}+{y}" + f"+{carry}" * (carry > 0) + f"={total}"] * rng.randint(*repeats)
        digits, carry = str(total % 10) + digits, total // 10
    return " ".join(steps) + f" #### {int(str(carry) + digits)}"


def base_model(steps):
    """Folder of the base model, the tiny MoE after `steps` of supervised warm start, trained once and cached.
    It is named by a hash of its settings, and renamed into place: it is there whole or not at all."""
    recipe = json.dumps([TINY_MODEL, WARM_START, steps], sort_keys=True)
    folder = Path("runs", f"base-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of two runs that need it, one trains and the other waits
        if not folder.exists():
            train_base_model(folder, steps)
    return folder


def train_base_model(folder, steps):
    """Fits the tiny MoE to demonstrations and saves it, with its character tokenizer."""
    rng, vocab = random.Random(WARM_START["seed"]), ["<pad>", "<eos>", "<unk>", *"0123456789+=# "]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = dict(eos_token="<eos>", pad_token="<pad>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    config = transformers.Qwen3MoeConfig(vocab_size=len(vocab), pad_token_id=0, eos_token_id=1, **TINY_MODEL)
    torch.manual_seed(WARM_START["seed"])
    model = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    prompts = [prompt for prompt, _ in sums()[256:]]  # the others are held out
    for step in tqdm(range(steps), desc="warm start (only once)", unit="step", mininterval=0.5):
        chosen = rng.choices(prompts, k=WARM_START["batch_size"])
        texts = [demonstration(prompt, rng) + tokenizer.eos_token for prompt in chosen]
        rows = zip(tokenizer(chosen).input_ids, tokenizer(texts).input_ids, strict=True)
        batch = common.collate([common.Completion(p, ids[: WARM_START["cap"]], []) for p, ids in rows], "cpu")
        outputs = common.token_logprobs(model, batch, temperature=1.0)
        (0.001 * outputs.aux_loss - common.masked_mean(outputs.logprobs_BT, batch.mask_NT)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        schedule = min(1, (step + 1) / 50) * math.cos(math.pi / 2 * step / steps) ** 2  # warm-up and cosine
        optimizer.param_groups[0]["lr"] = WARM_START["lr"] * schedule
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(f"{folder}.tmp")
    tokenizer.save_pretrained(f"{folder}.tmp")
    Path(f"{folder}.tmp").rename(folder)
