"""What one studies beside a script: verifier, problems, the tiny model, sampler, log-probs, router
statistics.

The suffix of a tensor's name gives its axes: P prompts, G completions per prompt, N = P*G the
completions of a rollout, B the rows of the batch at hand (all N or a micro-batch), R the rows that the
sampler still works on, T response tokens, S prompt + response, V vocabulary, L layers, E experts, K
active experts, 1 a kept axis.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import re
import runpy
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from harness import UserError, read_rows

# ----------------------------------------------------------------------------------------- verifier


def final_answer(text):
    r"""The rest of the line after the last '####', or the inside of the last '\boxed{}' if later, or
    None."""
    marker, box = text.rfind("####"), text.rfind("\\boxed{")
    depth = 0
    for end in range(box + 6, len(text) if box > marker else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[box + 7 : end].strip() or None
    return text[marker + 4 :].split("\n", 1)[0].strip() or None if marker >= 0 else None


def canonical(answer):
    """A number ('$1,000.50', '42.0', '3/6', '7%', '42.') as a Fraction, anything else as folded
    text."""
    pattern = r"([+-]?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(\.[0-9]+)?(?:/([0-9]+))?%?\.?"
    number = re.fullmatch(pattern, answer) if len(answer) <= 100 else None
    try:
        sign, whole, decimals, denominator = number.groups("")
        return Fraction(sign + whole.replace(",", "") + decimals) / Fraction(denominator or 1)
    except (AttributeError, ValueError, ZeroDivisionError):
        return " ".join(answer.casefold().split())


def verify(text, answer, truncated=False):
    """(reward, why): 1.0 'correct'; 0.0 'wrong', 'no_answer' or 'truncated': what is cut off is not
    right."""
    found = final_answer(text)
    if truncated or found is None:
        return 0.0, "truncated" if truncated else "no_answer"
    return (1.0, "correct") if canonical(found) == canonical(answer) else (0.0, "wrong")


VERDICTS = ("correct", "wrong", "no_answer", "truncated")


def load_verifier(args):
    """`--reward FILE.py:FUNCTION` -> that function, to be called in the place of `verify`; without the
    flag `verify` itself. Its reward may be any finite number, its second result has to be one of
    VERDICTS."""
    if not args.reward:
        return verify
    path, _, name = args.reward.rpartition(":")
    try:
        function = runpy.run_path(path)[name]
    except Exception as error:  # the file may raise anything
        raise UserError(f"--reward {args.reward} cannot be loaded as FILE.py:FUNCTION") from error

    def checked(text, answer, truncated=False):
        reward, why = function(text, answer, truncated)
        if why not in VERDICTS or not math.isfinite(reward):
            expected = f"a finite number and one of {', '.join(VERDICTS)}"
            raise UserError(f"--reward {args.reward} returned {reward} and {why}, not {expected}")
        return float(reward), why

    return checked


# ----------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list


def addition_problems():
    """20,256 different sums of two- and three-digit numbers: [(prompt, gold answer)]."""
    rng = random.Random(0)

    def number():
        low, high = rng.choice([(10, 99), (100, 999)])
        return rng.randint(low, high)

    answers = {}
    while len(answers) < 20_256:
        a = number()
        b = number()
        answers[f"{a}+{b}="] = str(a + b)
    return list(answers.items())


def read_dataset(args):
    r"""`--dataset` -> [(prompt, gold answer)] in random order, the same for all seeds. A prompt is text
    or a list of chat messages; gold is what follows '####' or fills a '\boxed{}' in its column, or all
    of it."""
    if args.dataset == "addition":
        return addition_problems()
    rows = read_rows(args.dataset, args.dataset_config, args.dataset_split)
    columns = dict.fromkeys(column for row in rows for column in row)
    found = f"the columns are {', '.join(columns)}"
    for column in (args.prompt_column, args.answer_column):
        if column not in columns:
            raise UserError(f"--dataset {args.dataset} has no column {column}; {found}")
    pairs = []
    for number, row in enumerate(rows, 1):
        prompt = row.get(args.prompt_column)
        gold = gold_answer(row.get(args.answer_column))
        for part, value in (("prompt", prompt), ("gold answer", gold)):
            if not value:
                raise UserError(f"--dataset {args.dataset}, row {number}: no {part} to read; {found}")
        pairs.append((prompt, gold))
    return random.Random(0).sample(pairs, len(pairs))


def gold_answer(value):
    """The gold answer in a cell of the answer column, None if there is none that can be read
    exactly."""
    if isinstance(value, str) and ("####" in value or "\\boxed{" in value):
        return final_answer(value)
    text = str(value).strip()
    if isinstance(value, float) and len(text) > 16:  # rounded: 0.1 as float32 is 0.10000000149011612
        return None
    # Of what is not text, only plain numbers: no None, date, list, NaN or 1e+30.
    if isinstance(value, str) or re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        return text
    return None


def render(prompt, tokenizer, args):
    """A prompt as the model reads it: through the chat template, where there is one."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    if args.instruction:
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}\n{args.instruction}"}
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if len(messages) > 1:
        raise ValueError("chat messages and --system_prompt need a tokenizer with a chat template")
    return messages[0]["content"]


def load_problems(args, model, tokenizer):
    """`--dataset` -> (training, `--num_held_out` held-out) problems, disjoint and the same for all
    seeds."""
    answers = {}
    try:
        for prompt, answer in read_dataset(args):
            text = render(prompt, tokenizer, args)
            if canonical(answers.setdefault(text, answer)) != canonical(answer):
                raise ValueError(f"{text!r:.60} has two answers, {answers[text]} and {answer}")
        add_special_tokens = not tokenizer.chat_template  # a template writes its own
        ids = tokenizer(list(answers), add_special_tokens=add_special_tokens).input_ids
        check_token_ids(ids, model, tokenizer)
    except UserError:
        raise
    except Exception as error:  # templates and tokenizers may raise anything
        raise UserError(f"--dataset {args.dataset}: a prompt cannot be used") from error
    longest = max(len(row) for row in ids)
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    if longest + args.max_new_tokens > limit:
        raise UserError(
            f"--max_new_tokens {args.max_new_tokens}: with a prompt of {longest} tokens, "
            f"the model's limit of {limit} is exceeded"
        )
    problems = []
    for (prompt, answer), prompt_ids in zip(answers.items(), ids, strict=True):
        problems.append(Problem(prompt, answer, prompt_ids))
    if len(problems) <= args.num_held_out:
        raise UserError(
            f"--num_held_out {args.num_held_out} leaves none of {len(problems)} problems for training"
        )
    return problems[args.num_held_out :], problems[: args.num_held_out]


def check_token_ids(rows, model, tokenizer):
    """ValueError for prompts that the model has no embedding for, or that are mostly unknown to its
    tokenizer."""
    ids = [token for row in rows for token in row]
    size = model.get_input_embeddings().num_embeddings
    if max(ids, default=0) >= size:
        raise ValueError(
            f"the tokenizer makes token {max(ids)}, but the model has only {size} embeddings"
        )
    unknown = ids.count(tokenizer.unk_token_id)
    if unknown > len(ids) / 10:
        raise ValueError(f"the tokenizer does not know {unknown} of the prompts' {len(ids)} tokens")


def take_problems(problems, position, count, seed):
    """Problems `position` to `position + count` of an endless stream; each epoch is a shuffle of its
    own."""
    size = len(problems)
    first_epoch = position // size
    last_epoch = (position + count - 1) // size
    generator = torch.Generator()
    order = []
    for epoch in range(first_epoch, last_epoch + 1):
        generator.manual_seed((seed << 20) + epoch)
        order += torch.randperm(size, generator=generator).tolist()
    start = position % size
    return [problems[i] for i in order[start : start + count]]


# ---------------------------------------------------------------- the tiny model and its warm start

TINY_MODEL = dict(
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
WARM_START = dict(
    seed=0,
    lr=8e-3,
    batch_size=64,
    direct=0.5,  # share of demonstrations that answer at once
    worked=0.4,  # share that work the sum out; the rest rambles
    wrong_step=0.02,  # probability of a wrong step, per column
    cap=48,  # tokens of a demonstration
)


def demonstration(prompt, rng, recipe):
    """An answer as people write them: at once ('#### 365'), worked out ('7+8=15 5+0+1=6 0+3=3 #### 365'
    for 57+308), or with repetitions until there is no room for the answer. Now and then a step is
    wrong, and with it all that follows."""
    a, b = [int(number) for number in prompt[:-1].split("+")]
    style = rng.random()
    if style < recipe["direct"]:
        return f"#### {a + b}"
    most_repeats = 1 if style < recipe["direct"] + recipe["worked"] else 3
    least_repeats = 1 if most_repeats == 1 else 2
    steps = []
    digits = ""
    carry = 0
    for column in range(max(len(str(a)), len(str(b)))):
        x = a // 10**column % 10
        y = b // 10**column % 10
        total = x + y + carry
        if rng.random() < recipe["wrong_step"]:
            total = rng.randrange(20)
        step = f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}"
        steps += [step] * rng.randint(least_repeats, most_repeats)
        digits = str(total % 10) + digits
        carry = total // 10
    return " ".join(steps) + f" #### {int(str(carry) + digits)}"


def base_model(steps, recipe=WARM_START):
    """Folder of the tiny MoE after `steps` of supervised warm start, trained once and cached under
    runs/.

    It is named by a hash of its settings, and renamed into place: it is there whole or not at all."""
    settings = json.dumps([TINY_MODEL, recipe, steps], sort_keys=True)
    name = hashlib.sha256(settings.encode()).hexdigest()[:8]
    folder = Path("runs", f"base-{name}")
    try:
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):  # of two runs that need it, one trains and the other waits
            if not folder.exists():
                model, tokenizer = train_base_model(steps, recipe)
                scratch = folder.with_suffix(".tmp")
                model.save_pretrained(scratch)
                tokenizer.save_pretrained(scratch)
                scratch.rename(folder)
    except OSError as error:
        raise UserError(f"--model tiny-moe: its folder {folder} cannot be written") from error
    return folder


def character_tokenizer():
    """Every character a token of its own."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+=# "]
    ids = {token: i for i, token in enumerate(vocabulary)}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def train_base_model(steps, recipe):
    """Fits a new tiny MoE to demonstrations; returns it with its tokenizer."""
    rng = random.Random(recipe["seed"])
    tokenizer = character_tokenizer()
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **TINY_MODEL,
    )
    torch.manual_seed(recipe["seed"])
    model = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    prompts = [prompt for prompt, _ in addition_problems()[256:]]  # the others are held out
    for step in tqdm(range(steps), desc="warm start (only once)", unit="step", mininterval=0.5):
        chosen = rng.choices(prompts, k=recipe["batch_size"])
        answers = [demonstration(prompt, rng, recipe) + tokenizer.eos_token for prompt in chosen]
        prompt_ids = tokenizer(chosen).input_ids
        answer_ids = tokenizer(answers).input_ids
        rows = []
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True):
            rows.append(Completion(prompt, answer[: recipe["cap"]], logprobs=[]))
        batch = collate(rows, "cpu")
        outputs = token_logprobs(model, batch, temperature=1.0)
        loss = 0.001 * outputs.aux_loss - masked_mean(outputs.logprobs_BT, batch.mask_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm_up = min(1, (step + 1) / 50)
        cosine = math.cos(math.pi / 2 * step / steps) ** 2
        optimizer.param_groups[0]["lr"] = recipe["lr"] * (warm_up * cosine)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


# ------------------------------------------------------------------------------------------ loading


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer). Runs no code from a model
    folder."""
    source = args.model
    if args.model == "tiny-moe":
        # Its operators are too small for more than one thread: with several, each spends its time
        # waiting for the others, ten times as long when another program uses a core.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        source = base_model(args.warm_start_steps)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        check_loading(report)
        model = model.to(args.device).eval()
        if args.gradient_checkpointing:
            recompute_activations(model)
        check_logprobs(model, tokenizer, args)
    except Exception as error:  # damaged folders and strange architectures may raise anything
        raise UserError(f"--model {args.model} cannot be used") from error
    return model, tokenizer


def check_loading(report):
    """ValueError if weights and architecture do not fit: transformers would go on with random
    weights."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report[kind]))
        if names:
            raise ValueError(f"{len(names)} {kind.replace('_keys', '')} tensors, such as {names[0]}")


def recompute_activations(model):
    """`--gradient_checkpointing`: a layer's activations are computed again in the backward pass, not
    kept."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )


def check_logprobs(model, tokenizer, args):
    """Compares the two ways to a log-prob, that of the sampler and that of the update, on three prompts
    of different length. ValueError if they do not agree. Where only sequences that share a row go wrong
    (not every architecture keeps them apart), the model gets a row for each sequence from here on."""
    if not end_ids(model, tokenizer):
        raise ValueError("neither tokenizer nor generation config have an end-of-sequence token")
    prompts = tokenizer(["1", "2", "10+10="]).input_ids
    check_token_ids(prompts, model, tokenizer)
    settings = dataclasses.replace(args, max_new_tokens=2, temperature=1.0, dtype="float32")
    completions = sample(model, tokenizer, prompts, 2, settings, greedy=True)
    batch = collate(completions, model.device)
    for one_sequence_per_row in (False, True):
        model.base_model.one_sequence_per_row = one_sequence_per_row
        with torch.no_grad():
            logprobs_BT = token_logprobs(model, batch, temperature=1.0).logprobs_BT
        gap = (logprobs_BT - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max().item()
        if gap < 1e-3:
            return
    if not math.isfinite(gap):
        raise ValueError("its log-probs are not finite numbers")
    raise ValueError(
        f"the log-probs of the same tokens differ by {gap:.2g} between the sampler (cached keys and values) "
        "and the training forward; models that scale or cap the logits of their head are not supported"
    )


# ------------------------------------------------------------------------------------------ sampler


class Completion(NamedTuple):
    prompt_ids: list
    ids: list  # as sampled, never re-tokenized; the last one is the EOS unless truncated
    logprobs: list  # of ids, as the sampler saw them
    truncated: bool = False  # ran into the cap
    text: str = ""


def pad(rows, device, left=False):
    """List of lists -> tensor on the device, with zeros on the right, or on the left."""
    width = max(len(row) for row in rows)
    padded = []
    for row in rows:
        zeros = [0] * (width - len(row))
        padded.append(zeros + row if left else row + zeros)
    return torch.tensor(padded).to(device)


def end_ids(model, tokenizer):
    """The ids that end a completion; chat models have several."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


@torch.inference_mode()
def sample(model, tokenizer, prompts, group_size, args, generator=None, greedy=False, drop_every=None):
    """`group_size` completions for each prompt (a list of token ids), side by side: [Completion].

    They are drawn from the whole distribution at `--temperature` (no top-k, no top-p), or greedily.
    Each prompt is run once, and its cache copied to its group; rows leave the batch when they have
    ended. All noise is drawn in advance, so what a row becomes does not depend on which others are
    left.
    """
    device = model.device
    N = len(prompts) * group_size
    max_new_tokens = args.max_new_tokens
    ends = torch.tensor(end_ids(model, tokenizer), device=device, dtype=torch.long)
    if drop_every is None:
        drop_every = 16 if device.type == "cuda" else 1  # looking for ended rows makes a GPU wait
    noise_NT = torch.rand(N, max_new_tokens, generator=generator).to(device)
    ids_NT = torch.zeros_like(noise_NT, dtype=torch.long)
    logprobs_NT = torch.zeros_like(noise_NT)

    rows_R = torch.arange(N, device=device)  # which of the N completions are still being written
    ended_R = torch.zeros(N, dtype=torch.bool, device=device)
    cache = transformers.DynamicCache(config=model.config)
    tokens = pad(prompts, device, left=True)
    attention = pad([[1] * len(prompt) for prompt in prompts], device, left=True)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    for t in range(max_new_tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            output = model(
                tokens,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
        logits_RV = output.logits[:, -1].float()
        if t == 0:  # from a row for each prompt to a row for each completion
            cache.batch_repeat_interleave(group_size)
            logits_RV = logits_RV.repeat_interleave(group_size, dim=0)
            attention = attention.repeat_interleave(group_size, dim=0)
            positions = positions.repeat_interleave(group_size, dim=0)
        logprobs_RV = torch.log_softmax(logits_RV / args.temperature, dim=-1)
        if greedy:
            token_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
        else:
            token_R1 = draw(logprobs_RV, noise_NT[rows_R, t, None])
        ids_NT[rows_R, t] = token_R1[:, 0]
        logprobs_NT[rows_R, t] = logprobs_RV.gather(1, token_R1)[:, 0]

        ended_R |= torch.isin(token_R1[:, 0], ends)
        if (t + 1) % drop_every == 0 and ended_R.any():
            kept = (~ended_R).nonzero()[:, 0]
            if len(kept) == 0:
                break
            cache.batch_select_indices(kept)
            rows_R = rows_R[kept]
            ended_R = ended_R[kept]
            token_R1 = token_R1[kept]
            attention = attention[kept]
            positions = positions[kept]
        tokens = token_R1
        attention = F.pad(attention, (0, 1), value=1)
        positions = positions[:, -1:] + 1

    # A completion ends with its first EOS: a row may have run on until it was dropped.
    is_end_NT = torch.isin(ids_NT, ends)
    truncated = (~is_end_NT.any(1)).tolist()
    length_N = torch.where(is_end_NT.any(1), is_end_NT.int().argmax(1) + 1, max_new_tokens)
    completions = []
    rows = zip(ids_NT.tolist(), logprobs_NT.tolist(), length_N.tolist(), strict=True)
    for i, (ids, logprobs, length) in enumerate(rows):
        prompt_ids = prompts[i // group_size]
        completions.append(Completion(prompt_ids, ids[:length], logprobs[:length], truncated[i]))
    texts = tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
    return [c._replace(text=text) for c, text in zip(completions, texts, strict=True)]


def draw(logprobs_RV, noise_R1):
    """The first token at which the cumulative probability exceeds the noise, (R, 1)."""
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]  # 1 but for rounding
    token_R1 = torch.searchsorted(cumulative_RV, noise_R1 * total_R1, right=True)
    return token_R1.clamp(max=logprobs_RV.shape[1] - 1)


# ---------------------------------------------------------------------------------------- log-probs


class Batch(NamedTuple):
    """Completions as tensors. Masks come from lengths, never from token values: pad and EOS may be one
    id."""

    tokens_BS: torch.Tensor  # prompts padded on the left, responses on the right
    attention_BS: torch.Tensor  # 1 on prompt and response
    mask_BT: torch.Tensor  # True on the response, its EOS included
    sampler_logprobs_BT: torch.Tensor

    def rows(self, rows):
        """The batch of these rows alone."""
        return Batch(*(tensor[rows] for tensor in self))


def collate(completions, device):
    """List of `Completion`s -> `Batch` on the device."""
    prompts = pad([c.prompt_ids for c in completions], device, left=True)
    responses = pad([c.ids for c in completions], device)
    prompt_length_B1 = torch.tensor([[len(c.prompt_ids)] for c in completions], device=device)
    length_B1 = torch.tensor([[len(c.ids)] for c in completions], device=device)
    is_prompt = torch.arange(prompts.shape[1], device=device).flip(0) < prompt_length_B1
    mask_BT = torch.arange(responses.shape[1], device=device) < length_B1
    return Batch(
        tokens_BS=torch.cat([prompts, responses], dim=1),
        attention_BS=torch.cat([is_prompt, mask_BT], dim=1).long(),
        mask_BT=mask_BT,
        sampler_logprobs_BT=pad([c.logprobs for c in completions], device),
    )


def row_width(lengths):
    """How many tokens a packed row holds: the longest sequence, or two typical ones if that is more and
    the longest are few."""
    longest = max(lengths)
    typical = sorted(lengths)[len(lengths) * 3 // 4]  # three of four are no longer
    if longest > 1.3 * typical:
        return max(longest, 2 * typical)
    return longest


def first_fit(lengths, width):
    """Puts sequences into rows of `width` tokens, the longest first, each into the first row with room.

    Returns the place of each one's first token in the flattened rows, and the number of rows."""
    starts = [0] * len(lengths)
    room = []  # what is left in each row
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = 0
        while row < len(room) and room[row] < lengths[i]:
            row += 1
        if row == len(room):
            room.append(width)
        starts[i] = width * (row + 1) - room[row]
        room[row] -= lengths[i]
    return starts, len(room)


def forward_packed(body, batch, **inputs):
    """Runs `body`, a model without its head, on the batch's sequences laid side by side: half of a
    padded batch would be padding. position_ids that begin anew keep the sequences of a row apart.

    Returns the body's output over the packed rows, each token's place in the flattened rows, (B, S),
    and a mask of the tokens in the rows.
    """
    real_BS = batch.attention_BS.bool()
    lengths = batch.attention_BS.sum(1).tolist()
    if getattr(body, "one_sequence_per_row", False):  # see check_logprobs
        width = max(lengths)
        num_rows = len(lengths)
        starts = [width * i for i in range(num_rows)]
    else:
        width = row_width(lengths)
        starts, num_rows = first_fit(lengths, width)
    positions_BS = (batch.attention_BS.cumsum(1) - 1).clamp(min=0)
    place_BS = torch.tensor(starts, device=real_BS.device)[:, None] + positions_BS

    def packed(x_BS):
        flat = torch.zeros(num_rows * width, dtype=torch.long, device=real_BS.device)
        flat[place_BS[real_BS]] = x_BS[real_BS]
        return flat.view(num_rows, width)

    tokens = packed(batch.tokens_BS)
    output = body(tokens, position_ids=packed(positions_BS), use_cache=False, **inputs)
    return output, place_BS, packed(batch.attention_BS)


class TokenOutputs(NamedTuple):
    """What the training forward says of each response token. A dense model has L = 0."""

    logprobs_BT: torch.Tensor  # of the sampled tokens; 0 on padding
    entropy_BT: torch.Tensor  # in nats; 0 on padding
    aux_loss: torch.Tensor  # transformers' load-balancing loss over prompt and response; 0 if dense
    router_logits: tuple  # L tensors (B, T, E), raw, at the position that predicts the token
    experts_BTLK: torch.Tensor  # indices of the active experts there, ascending


def token_logprobs(model, batch, temperature, dtype="float32", chunk_numbers=2**26):
    """Log-probs and entropies of the response tokens at the sampling temperature, float32, with
    gradients.

    Only response tokens get logits, and no more than `chunk_numbers` of them exist at a time: if that
    takes several chunks, each is computed again in the backward pass.
    """
    mask_BT = batch.mask_BT
    T = mask_BT.shape[1]
    K = getattr(model.config, "num_experts_per_tok", 0)
    router_kwargs = {"output_router_logits": True} if K else {}
    head = model.get_output_embeddings()

    def logprob_and_entropy(hidden, tokens):
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy

    with torch.autocast(mask_BT.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        output, place_BS, real = forward_packed(model.base_model, batch, **router_kwargs)
        predicts_BT = place_BS[:, -T - 1 : -1]  # the token at s is predicted at s - 1
        hidden = output.last_hidden_state.flatten(0, 1)[predicts_BT[mask_BT]]
        tokens = batch.tokens_BS[:, -T:][mask_BT]
        chunk_size = max(1, chunk_numbers // model.config.vocab_size)
        if len(tokens) <= chunk_size:
            logprobs, entropy = logprob_and_entropy(hidden, tokens)
        else:
            parts = []
            for chunk in zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True):
                parts.append(checkpoint(logprob_and_entropy, *chunk, use_reentrant=False))
            logprobs = torch.cat([part[0] for part in parts])
            entropy = torch.cat([part[1] for part in parts])
    zeros_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    logprobs_BT = zeros_BT.masked_scatter(mask_BT, logprobs)
    entropy_BT = zeros_BT.masked_scatter(mask_BT, entropy)
    if not K:
        no_experts_BTLK = zeros_BT.new_empty(*mask_BT.shape, 0, 0)
        return TokenOutputs(logprobs_BT, entropy_BT, 0.0, (), no_experts_BTLK)

    layers = [logits.float() for logits in output.router_logits]  # each (packed tokens, E)
    num_experts = layers[0].shape[-1]
    aux_loss = load_balancing_loss_func(tuple(layers), num_experts, K, real)  # without padding
    router_logits = tuple(logits[predicts_BT] for logits in layers)
    experts = [logits.detach().topk(K).indices.sort().values for logits in router_logits]
    return TokenOutputs(logprobs_BT, entropy_BT, aux_loss, router_logits, torch.stack(experts, dim=2))


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 if it never is. What lies outside is ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


# --------------------------------------------------------------------------------------- statistics


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Of the response tokens, {} for a dense model:

    router_entropy    mean over layers, in nats
    expert_flip_frac  share of tokens whose active experts are not those of the old policy, mean over
                      layers
    load              share of its layer's load that each expert carries, (L*E,)
    """
    if not outputs.router_logits:
        return {}
    entropies = [torch.special.entr(logits.softmax(-1)).sum(-1) for logits in outputs.router_logits]
    entropy_BT = sum(entropies) / len(entropies)
    flips_BTL = (outputs.experts_BTLK != old_experts_BTLK).any(-1)
    num_experts = outputs.router_logits[0].shape[-1]
    count_LE = F.one_hot(outputs.experts_BTLK[mask_BT], num_experts).sum(dim=(0, 2))
    return {
        "router_entropy": masked_mean(entropy_BT, mask_BT),
        "expert_flip_frac": masked_mean(flips_BTL.float().mean(-1), mask_BT),
        "load": (count_LE / count_LE.sum(1, keepdim=True).clamp(min=1)).flatten(),
    }


def describe(completions, verdicts, group_size=1, prefix=""):
    """{prefix + name: number} for completions with their verdicts (reward, why). "direct" is an answer
    at once, with nothing before it; a "solved" group has at least one right completion (pass@G)."""
    count = len(completions)
    lengths = [len(c.ids) for c in completions]
    reasons = [why for _, why in verdicts]
    direct = [c.text.lstrip().startswith(("####", "\\box")) for c in completions]
    result = {
        "accuracy": reasons.count("correct") / count,
        "truncated_frac": reasons.count("truncated") / count,
        "no_answer_frac": reasons.count("no_answer") / count,
        "direct_frac": sum(direct) / count,
        "response_len_mean": sum(lengths) / count,
        "response_len_max": max(lengths),
    }
    if group_size > 1:
        groups = [reasons[i : i + group_size] for i in range(0, count, group_size)]
        result["frac_solved_groups"] = sum("correct" in group for group in groups) / len(groups)
    return {prefix + name: value for name, value in result.items()}


def transcripts(problems, completions, verdicts):
    """The first completion of each of the first four problems, to be read: [{prompt, completion,
    verdict}]."""
    group_size = len(completions) // len(problems)
    samples = []
    for i, problem in enumerate(problems[:4]):
        text = completions[i * group_size].text
        _, why = verdicts[i * group_size]
        samples.append({"prompt": problem.prompt, "completion": text, "verdict": why})
    return samples


def evaluate(model, tokenizer, problems, args, verify):
    """Held-out problems, answered once greedily and once at the training temperature with fixed noise.

    Returns {"greedy": ..., "sampled": ..., both as `describe` has them, "examples": [[prompt,
    text]]}."""
    results = {}
    batch_size = args.prompts_per_iteration * args.group_size
    for name in ("greedy", "sampled"):
        completions = []
        for start in range(0, len(problems), batch_size):
            prompts = [problem.prompt_ids for problem in problems[start : start + batch_size]]
            noise = torch.Generator().manual_seed(start)
            greedy = name == "greedy"
            completions += sample(model, tokenizer, prompts, 1, args, noise, greedy)
        verdicts = []
        for problem, c in zip(problems, completions, strict=True):
            verdicts.append(verify(c.text, problem.answer, c.truncated))
        results[name] = describe(completions, verdicts)
    results["examples"] = [[p.prompt, c.text] for p, c in zip(problems[:3], completions, strict=False)]
    return results
