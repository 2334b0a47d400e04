"""What all scripts share: problems, tiny model, sampler, log-probs, statistics.

The suffix of a tensor's name gives its axes: P prompts, G completions per prompt, N = P*G completions
of a rollout, B rows of the batch at hand (all N or a micro-batch), R rows that are still being sampled,
T response tokens, S prompt + response, V vocabulary, L layers, E experts, K active experts, 1 a kept
axis.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import os
import random
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from harness import TINY_MOE, UserError, read_rows
from mismatch import Routing, experts_by_completion, find_routers, pad_experts, routing_contexts
from packing import forward_packed
from ranks import gather, share
from verifier import final_answer, is_same

# ----------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list


def addition_problems():
    """20,256 different sums of two- and three-digit numbers: [(prompt, gold answer)]."""
    rng = random.Random(0)
    ranges = [(10, 99), (100, 999)]
    answers = {}
    while len(answers) < 20_256:
        a = rng.randint(*rng.choice(ranges))
        b = rng.randint(*rng.choice(ranges))
        answers[f"{a}+{b}="] = str(a + b)
    return list(answers.items())


def read_dataset(args):
    r"""`--dataset` -> [(prompt, gold answer)] in random order, the same for all seeds. A prompt is text
    or a list of chat messages; gold follows '####', fills a '\boxed{}', or is the whole cell."""
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
                raise UserError(
                    f"--dataset {args.dataset}, row {number}: no {part} that can be read; {found}"
                )
        pairs.append((prompt, gold))
    return random.Random(0).sample(pairs, len(pairs))


def gold_answer(value):
    """The gold answer in a cell of the answer column; None if it cannot be read exactly."""
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
    try:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if args.instruction:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n{args.instruction}"}
        if args.system_prompt:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        if tokenizer.chat_template:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(messages) > 1:
            raise ValueError("chat messages and --system_prompt need a tokenizer with a chat template")
        return str(messages[0]["content"])
    except Exception as error:  # templates raise their own
        raise UserError(f"--dataset: the prompt {prompt!r:.60} cannot be used") from error


def load_problems(args, model, tokenizer):
    """`--dataset` -> (training, held-out) problems, disjoint, the same for all seeds."""
    answers = {}
    for prompt, answer in read_dataset(args):
        text = render(prompt, tokenizer, args)
        first = answers.setdefault(text, answer)
        if first != answer and not is_same(first, answer):
            raise UserError(f"--dataset: {text!r:.60} has two gold answers, {first} and {answer}")
    if len(answers) <= args.num_held_out:
        raise UserError(f"--num_held_out {args.num_held_out} leaves none of {len(answers)} problems")
    add_special_tokens = not tokenizer.chat_template  # a template writes its own
    ids = tokenizer(list(answers), add_special_tokens=add_special_tokens).input_ids
    check_token_ids(ids, model, tokenizer)
    longest = max(len(row) for row in ids)
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    if longest + args.max_new_tokens > limit:
        message = f"with a prompt of {longest} tokens, the model's limit of {limit} is exceeded"
        raise UserError(f"--max_new_tokens {args.max_new_tokens}: {message}")
    problems = [Problem(*pair, row) for pair, row in zip(answers.items(), ids, strict=True)]
    return problems[args.num_held_out :], problems[: args.num_held_out]


def check_token_ids(rows, model, tokenizer):
    """UserError if the model has no embedding for a token, or more than a tenth are unknown tokens."""
    ids = [token for row in rows for token in row]
    size = model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise UserError(f"--model: its tokenizer makes token {max(ids)}, it has {size} embeddings")
    unknown = ids.count(tokenizer.unk_token_id)
    if unknown > len(ids) / 10:
        raise UserError(
            f"--model: its tokenizer does not know {unknown} of {len(ids)} tokens of prompts"
        )


def take_problems(problems, position, count, seed):
    """Problems `position` to `position + count` of an endless stream, shuffled anew in each epoch."""
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


# -------------------------------------------------------------------------------------------- model


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer). Runs no code from its folder."""
    source = args.model
    if args.model == "tiny-moe":
        source = TINY_MOE
        if not source.is_dir():
            raise UserError(f"--model tiny-moe: its folder {source} is not there")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, **options
        )
        # Where weights and architecture do not fit, transformers goes on with random ones.
        misfits = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
        if misfits:
            raise ValueError(f"its weights do not fit its config: {str(misfits):.200}")
        model = model.to(args.device).eval()
        # The operators of a tiny model are so small that several threads mostly wait for each other,
        # and ten times longer when another program occupies a core.
        is_tiny = sum(weight.numel() for weight in model.parameters()) < 10_000_000
        if is_tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        # In bfloat16 CUDA would take cuDNN's attention, which plans anew for each shape, so for each
        # token sampled, and with masks is reported to be wrong (pytorch#193893, pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        if args.gradient_checkpointing:
            checkpoint_layers(model)
        check_logprobs(model, tokenizer, args)
        if args.routing_replay != "none" or args.rollout_dtype != "same":
            check_routing(model, tokenizer, args)
    except UserError:
        raise
    except Exception as error:  # damaged folders and strange architectures may raise anything
        raise UserError(f"--model {args.model} cannot be used") from error
    return model, tokenizer


def checkpoint_layers(model):
    """Makes the layers keep their inputs alone, and compute the rest again in the backward pass.
    transformers' own switch works in train() only, which would turn dropout on."""
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": routing_contexts}
    recompute = functools.partial(checkpoint, **options)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward)


def check_logprobs(model, tokenizer, args):
    """Compares the sampler's log-probs with the update's, on short prompts. Some architectures mix up
    sequences that share a row; for these, packing is turned off. UserError if they differ even then."""
    if not end_ids(model, tokenizer):
        raise UserError(f"--model {args.model} has no end-of-sequence token, nor has its tokenizer")
    prompts = tokenizer(["1", "2", "10+10="]).input_ids
    check_token_ids(prompts, model, tokenizer)
    settings = dataclasses.replace(args, max_new_tokens=2, temperature=1.0, rollout_batch_size=6)
    completions = sample(model, tokenizer, prompts, 2, settings, greedy=True)
    batch = collate(completions, model.device)
    for one_sequence_per_row in (False, True):
        model.base_model.one_sequence_per_row = one_sequence_per_row
        with torch.no_grad():
            logprobs_BT = token_logprobs(model, batch, temperature=1.0).logprobs_BT
        gap = (logprobs_BT - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max().item()
        if gap < 1e-3:
            return
    raise UserError(
        f"--model {args.model}: log-probs of the same tokens differ by {gap:.2g} between the sampler "
        "(with a cache) and the training forward; scaled or capped logits, or NaN weights, do that"
    )


def check_routing(model, tokenizer, args):
    """Finds out whether a forward pass that replays its own experts changes nothing, as it should, and
    so whether the sampler's experts can be noted. UserError if not, and --routing_replay is on."""
    model.base_model.notes_experts = False
    reason = "it is dense"
    if find_routers(model):
        ids = tokenizer("10+10=").input_ids
        batch = collate([Completion(ids[:1], ids[1:], [0.0] * len(ids[1:]))], model.device)
        try:
            with torch.no_grad():
                with Routing(model):
                    live = token_logprobs(model, batch, temperature=1.0)
                batch.replayed_experts_BSLK = live.experts_BSLK
                replayed = token_logprobs(model, batch, temperature=1.0)
            gap = (replayed.logprobs_BT - live.logprobs_BT).abs().max().item()
            model.base_model.notes_experts = gap < 1e-5
            reason = f"log-probs with its own experts differ by {gap:.2g}"
        except ValueError as error:
            reason = str(error)
    if args.routing_replay != "none" and not model.base_model.notes_experts:
        raise UserError(f"--routing_replay cannot be used with --model {args.model}: {reason}")


def working_copy(master, dtype):
    """The model that computes: `master` itself in float32, else a copy of it in `dtype`. The gradients
    of the copy are added to the master's, in float32, as they come, and not kept."""
    if dtype == "float32":
        return master

    def hand_over(weight, master_weight):
        if master_weight.grad is None:
            master_weight.grad = weight.grad.float()
        else:
            master_weight.grad += weight.grad
        weight.grad = None

    model = copy.deepcopy(master)
    # Weights only: positions are computed from buffers, which need their float32.
    for weight, master_weight in zip(model.parameters(), master.parameters(), strict=True):
        weight.data = weight.data.to(getattr(torch, dtype))
        hook = functools.partial(hand_over, master_weight=master_weight)
        weight.register_post_accumulate_grad_hook(hook)
    return model


@torch.no_grad()
def refresh(model, master):
    """Copies the master's weights into the model that computes, where these are two."""
    if model is not master:
        for weight, master_weight in zip(model.parameters(), master.parameters(), strict=True):
            weight.copy_(master_weight)


# ------------------------------------------------------------------------------------------ sampler


class Completion(NamedTuple):
    prompt_ids: list
    ids: list  # as sampled, never re-tokenized; the last one is the EOS unless truncated
    logprobs: list  # of ids, as the sampler saw them
    truncated: bool = False  # ran into the cap
    text: str = ""
    experts: torch.Tensor | None = None  # (prompt and response, L, K), where the sampler notes them


def pad(rows, device, left=False):
    """List of lists -> tensor on the device, with zeros on the right, or on the left."""
    width = max(len(row) for row in rows)
    zeros = [[0] * (width - len(row)) for row in rows]
    pairs = zip(zeros, rows, strict=True) if left else zip(rows, zeros, strict=True)
    return torch.tensor([first + second for first, second in pairs]).to(device)


def end_ids(model, tokenizer):
    """The ids that end a completion; chat models have several."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def sample(model, tokenizer, prompts, group_size, args, generator=None, greedy=False, drop_every=None):
    """[Completion], `group_size` for each prompt (a list of token ids), next to each other. They come
    from the whole distribution at `--temperature` (no top-k, no top-p), or greedily. All noise is drawn
    in advance: what a completion becomes does not depend on which others are sampled with it."""
    noise_PGT = torch.rand(len(prompts), group_size, args.max_new_tokens, generator=generator)
    my_prompts = share(prompts)
    my_noise_PGT = share(noise_PGT)
    rows_at_a_time = args.rollout_batch_size or len(prompts) * group_size
    prompts_at_a_time = max(1, rows_at_a_time // group_size)  # a group is sampled together
    notes_experts = args.routing_replay == "r3" or args.rollout_dtype != "same"
    notes_experts = notes_experts and getattr(model.base_model, "notes_experts", False)
    settings = (args.temperature, greedy, drop_every, notes_experts)
    completions = []
    for start in range(0, len(my_prompts), prompts_at_a_time):
        end = start + prompts_at_a_time
        noise_NT = my_noise_PGT[start:end].flatten(0, 1)
        completions += sample_batch(model, tokenizer, my_prompts[start:end], noise_NT, *settings)
    return [completion for part in gather(completions) for completion in part]


@torch.inference_mode()
def sample_batch(model, tokenizer, prompts, noise_NT, temperature, greedy, drop_every, notes_experts):
    """`sample` for as many prompts as are run together. A prompt is run once, and its cache copied to
    its group; rows leave the batch when they have ended."""
    device = model.device
    N, max_new_tokens = noise_NT.shape
    group_size = N // len(prompts)
    ends = torch.tensor(end_ids(model, tokenizer), device=device, dtype=torch.long)
    if drop_every is None:
        drop_every = 16 if device.type == "cuda" else 1  # looking for ended rows makes a GPU wait
    noise_NT = noise_NT.to(device)
    ids_NT = torch.zeros_like(noise_NT, dtype=torch.long)
    logprobs_NT = torch.zeros_like(noise_NT)

    rows_R = torch.arange(N, device=device)  # which completion each row is
    ended_R = torch.zeros(N, dtype=torch.bool, device=device)
    cache = transformers.DynamicCache(config=model.config)
    tokens = pad(prompts, device, left=True)
    attention = pad([[1] * len(prompt) for prompt in prompts], device, left=True)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    noted = []  # for experts_by_completion
    for t in range(max_new_tokens):
        with Routing(model) if notes_experts else contextlib.nullcontext() as routing:
            output = model(
                tokens,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
        logits_RV = output.logits[:, -1].float()
        if notes_experts:
            noted.append((rows_R, torch.stack(routing.noted, dim=1)))
        if t == 0:  # from a row for each prompt to a row for each completion
            cache.batch_repeat_interleave(group_size)
            logits_RV = logits_RV.repeat_interleave(group_size, dim=0)
            attention = attention.repeat_interleave(group_size, dim=0)
            positions = positions.repeat_interleave(group_size, dim=0)
        logprobs_RV = torch.log_softmax(logits_RV / temperature, dim=-1)
        if greedy:
            token_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
        else:
            # The inverse of the cumulative distribution, whose end is 1 up to rounding.
            cumulative_RV = logprobs_RV.exp().cumsum(-1)
            noise_R1 = noise_NT[rows_R, t, None] * cumulative_RV[:, -1:]
            token_R1 = torch.searchsorted(cumulative_RV, noise_R1, right=True)
            token_R1 = token_R1.clamp(max=cumulative_RV.shape[1] - 1)
        ids_NT[rows_R, t] = token_R1[:, 0]
        logprobs_NT[rows_R, t] = logprobs_RV.gather(1, token_R1)[:, 0]

        ended_R |= torch.isin(token_R1[:, 0], ends)
        if (t + 1) % drop_every == 0:
            kept = (~ended_R).nonzero()[:, 0]
            if len(kept) == 0:
                break
            if len(kept) < len(rows_R):
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
    if notes_experts:
        experts = experts_by_completion(noted, prompts, length_N.tolist())
    completions = []
    rows = zip(ids_NT.tolist(), logprobs_NT.tolist(), length_N.tolist(), strict=True)
    for i, (ids, logprobs, length) in enumerate(rows):
        prompt_ids = prompts[i // group_size]
        completion = Completion(prompt_ids, ids[:length], logprobs[:length], truncated[i])
        if notes_experts:
            completion = completion._replace(experts=experts[i])
        completions.append(completion)
    texts = tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
    return [c._replace(text=text) for c, text in zip(completions, texts, strict=True)]


# ---------------------------------------------------------------------------------------- log-probs


@dataclasses.dataclass
class Batch:
    """Completions as tensors. Masks come from lengths, never from token values: pad may be EOS."""

    tokens_BS: torch.Tensor  # prompts padded on the left, responses on the right
    attention_BS: torch.Tensor  # 1 on prompt and response
    mask_BT: torch.Tensor  # True on the response, its EOS included
    sampler_logprobs_BT: torch.Tensor
    sampler_experts_BSLK: torch.Tensor | None = None  # in the order of the top-k; -1: not known
    replayed_experts_BSLK: torch.Tensor | None = None  # by the policy; None or -1: its own choice

    def rows(self, rows):
        """The batch of these rows alone."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return Batch(*(None if tensor is None else tensor[rows] for tensor in fields))

    @functools.cached_property
    def lengths(self):
        """(tokens of each sequence, tokens of each one's mask), lists. Packing needs them on the host,
        which has to wait for a GPU to get them: so once, and shapes are computed from them."""
        return torch.stack([self.attention_BS.sum(1), self.mask_BT.sum(1)]).tolist()


def collate(completions, device):
    """List of `Completion`s -> `Batch` on the device."""
    prompts = pad([c.prompt_ids for c in completions], device, left=True)
    responses = pad([c.ids for c in completions], device)
    prompt_length_B1 = torch.tensor([[len(c.prompt_ids)] for c in completions], device=device)
    length_B1 = torch.tensor([[len(c.ids)] for c in completions], device=device)
    is_prompt = torch.arange(prompts.shape[1], device=device).flip(0) < prompt_length_B1
    mask_BT = torch.arange(responses.shape[1], device=device) < length_B1
    experts_BSLK = None
    if completions[0].experts is not None:
        experts_BSLK = pad_experts(completions, prompts.shape[1], responses.shape[1]).to(device)
    return Batch(
        tokens_BS=torch.cat([prompts, responses], dim=1),
        attention_BS=torch.cat([is_prompt, mask_BT], dim=1).long(),
        mask_BT=mask_BT,
        sampler_logprobs_BT=pad([c.logprobs for c in completions], device),
        sampler_experts_BSLK=experts_BSLK,
    )


class TokenOutputs(NamedTuple):
    """What the training forward returns for each response token. A dense model has L = 0."""

    logprobs_BT: torch.Tensor  # of the sampled tokens; 0 on padding
    entropy_BT: torch.Tensor  # in nats; 0 on padding
    aux_loss: torch.Tensor  # transformers' load-balancing loss over prompt and response; 0 if dense
    router_logits: tuple  # L tensors (B, T, E), raw, at the position that predicts the token; detached
    # What the routers choose by themselves, also where other experts are replayed: at the position that
    # predicts, sorted, so that equal sets compare equal; and for each token, in the order of the top-k.
    experts_BTLK: torch.Tensor
    experts_BSLK: torch.Tensor


def token_logprobs(model, batch, temperature, entropy_grad=False, chunk_numbers=2**26, replay=True):
    """Log-probs and entropies of the response tokens at the sampling temperature, in float32; entropies
    with a gradient only if asked for. More than `chunk_numbers` logits are made in chunks, and again in
    the backward pass, to save memory. The routers choose the batch's `replayed_experts_BSLK`, if any,
    unless `replay` is False, as for a reference."""
    mask_BT = batch.mask_BT
    B, T = mask_BT.shape
    K = getattr(model.config, "num_experts_per_tok", 0)
    router_kwargs = {"output_router_logits": True} if K else {}
    head = model.get_output_embeddings()

    def logprob_and_entropy(hidden, tokens):
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_grad):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy

    replayed_BSLK = batch.replayed_experts_BSLK if replay else None
    output, place_BS, real = forward_packed(model.base_model, batch, replayed_BSLK, **router_kwargs)
    predictor_BT = place_BS[:, -T - 1 : -1]  # the token at s is predicted at s - 1
    _, lengths = batch.lengths
    token = mask_BT.flatten().nonzero_static(size=sum(lengths))[:, 0]  # where the response tokens are
    hidden = output.last_hidden_state.flatten(0, 1)[predictor_BT.flatten()[token]]
    tokens = batch.tokens_BS[:, -T:].flatten()[token]
    chunk_size = max(1, chunk_numbers // model.config.vocab_size)
    chunks = list(zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True))
    if len(chunks) == 1:
        parts = [logprob_and_entropy(*chunks[0])]
    else:
        parts = [checkpoint(logprob_and_entropy, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    zeros = torch.zeros(B * T, device=mask_BT.device)
    logprobs_BT = zeros.index_put((token,), logprobs).view(B, T)
    entropy_BT = zeros.index_put((token,), entropy).view(B, T)
    if not K:
        no_experts = zeros.new_empty(B, T, 0, 0)
        return TokenOutputs(logprobs_BT, entropy_BT, zeros.sum(), (), no_experts, no_experts)

    layers = [logits.float() for logits in output.router_logits]  # each (packed tokens, E)
    num_experts = layers[0].shape[-1]
    aux_loss = load_balancing_loss_func(tuple(layers), num_experts, K, real)  # without padding
    router_logits = tuple(logits.detach()[predictor_BT] for logits in layers)
    experts = torch.stack([logits.detach().topk(K).indices for logits in layers], dim=1)
    experts_BTLK = experts[predictor_BT].sort().values
    experts_BSLK = experts[place_BS].int()
    return TokenOutputs(logprobs_BT, entropy_BT, aux_loss, router_logits, experts_BTLK, experts_BSLK)


# Each script has a copy of this one, to go with its loss.
def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 if it never is. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


# --------------------------------------------------------------------------------------- statistics


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Of the response tokens: router_entropy (nats) and expert_flip_frac (share for which the routers
    choose other experts than under the old policy), both means over layers; load (L*E,), the share of
    its layer's choices that each expert has. {} for a dense model. What is replayed does not count."""
    if not outputs.router_logits:
        return {}
    entropies = [torch.special.entr(logits.softmax(-1)).sum(-1) for logits in outputs.router_logits]
    entropy_BT = sum(entropies) / len(entropies)
    flips_BTL = (outputs.experts_BTLK != old_experts_BTLK).any(-1)
    L = len(outputs.router_logits)
    E = outputs.router_logits[0].shape[-1]
    layer_L1 = torch.arange(L, device=mask_BT.device)[:, None]
    expert_BTLK = outputs.experts_BTLK + E * layer_L1
    chosen_BTLK = mask_BT[:, :, None, None].expand_as(expert_BTLK).long()
    count_LE = torch.zeros(L * E, dtype=torch.long, device=mask_BT.device)
    count_LE = count_LE.index_add(0, expert_BTLK.flatten(), chosen_BTLK.flatten()).view(L, E)
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
    """The first completion of each of the first four problems, to be read: [dict]."""
    group_size = len(completions) // len(problems)
    rows = zip(problems, completions[::group_size], verdicts[::group_size], strict=True)
    samples = []
    for p, c, (reward, why) in rows:
        sample = {"prompt": p.prompt, "completion": c.text, "answer": p.answer}
        samples.append({**sample, "reward": reward, "verdict": why})
    return samples[:4]


def evaluate(model, tokenizer, problems, args, verify, sampled=False):
    """Held-out problems, answered greedily and, with `sampled`, also at the training temperature with
    fixed noise: {"greedy", "sampled": as by `describe`, "examples": [[prompt, last text]]}."""
    results = {}
    prompts = [problem.prompt_ids for problem in problems]
    ways = ["greedy", "sampled"] if sampled else ["greedy"]
    for name in ways:
        noise = torch.Generator().manual_seed(0)
        completions = sample(model, tokenizer, prompts, 1, args, noise, greedy=name == "greedy")
        pairs = zip(problems, completions, strict=True)
        verdicts = [verify(c.text, problem.answer, c.truncated) for problem, c in pairs]
        results[name] = describe(completions, verdicts)
    results["examples"] = [[p.prompt, c.text] for p, c in zip(problems[:3], completions, strict=False)]
    return results
