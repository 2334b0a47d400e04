"""Shared by all scripts, in the order of the loop: problems, model, rollout, verifier, batch,
log-probs, rollout correction, evaluation. It also re-exports what scripts need from plumbing/.

A tensor's suffix names its axes: P prompts, G completions per prompt, B rows (of a rollout, minibatch
or micro-batch), N rows of a sampler's batch, R the rows of it that are not finished, T response tokens,
U = T + 1, S prompt + response, V vocabulary, L layers, E experts, K active experts, 1 for a size-1
axis. A "step" is an optimizer step; an "iteration" is a rollout and its steps.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import random
from typing import NamedTuple

import plumbing  # before transformers, so that Ctrl-C while it is imported prints no traceback
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from plumbing import one_line, ranks
from plumbing.answers import final_answer, is_same
from plumbing.args import RunArgs, UserError, flag, launch
from plumbing.clock import clock
from plumbing.data import ProblemStream, hash_of, problem_rows, read_dataset
from plumbing.metrics import critic_stats, rollout_summary
from plumbing.models import context_limits, end_ids, load_model, logits_of
from plumbing.packing import forward_packed
from plumbing.policy import Policy, TrainedModel
from plumbing.reward import graded, load_rewards
from plumbing.routing import Routing, experts_by_completion
from plumbing.run import Run

# ----------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list
    columns: dict | None = None  # the dataset's, for reward functions


def addition_problems(count=10_496):
    """Distinct sums of two- and three-digit numbers: [(prompt, gold answer)]. 256 are held out, and no
    script's default run uses more than 10,240, so no sum is seen twice."""
    rng = random.Random(0)
    ranges = [(10, 99), (100, 999)]
    answers = {}
    while len(answers) < count:
        a = rng.randint(*rng.choice(ranges))
        b = rng.randint(*rng.choice(ranges))
        answers[f"{a}+{b}="] = str(a + b)
    return list(answers.items())


def load_problems(args, policy):
    """`--dataset` -> (stream of training problems, [held-out problems]). The held-out ones are the
    same for all seeds. UserError if the sampler and the training forward disagree on log-probs."""
    if args.dataset == "addition":
        rows = [{"question": prompt, "answer": answer} for prompt, answer in addition_problems()]
    else:
        rows = read_dataset(args)
    problems = [Problem(*parts) for parts in problem_rows(rows, policy, args)]
    check_sampler(policy, problems, args)
    stream = ProblemStream(problems[args.num_held_out :], args.seed)
    stream.raw_hash = hash_of([(p.columns["prompts"], p.answer) for p in problems])
    stream.rendered_hash = hash_of([p.prompt for p in problems])  # a template may insert the date
    return stream, problems[: args.num_held_out]


# -------------------------------------------------------------------------------------------- model


def load_policy(args):
    """`--model` -> `Policy`: the model, its tokenizer, and the copy that samples."""
    master, tokenizer = load_model(args)
    with one_line(f"--model {args.model}: this architecture cannot be run"):
        policy = Policy(master, tokenizer, args.dtype, args.rollout_dtype, args.rollout_refresh_every)
    if args.routing_replay != "none" and not policy.routers.can_replay:
        reason = "it is dense, or its routers do not support replay"
        raise UserError(f"--routing_replay cannot be used with --model {args.model}: {reason}")
    return policy


def check_sampler(policy, problems, args):
    """Compares the sampler's log-probs with the training forward's, for prompts of three lengths and
    near every length that the run can reach where attention or rotary embeddings change."""
    by_length = sorted([problem.prompt_ids for problem in problems], key=len)
    ids = by_length[len(by_length) // 2]
    longest_ids = by_length[-1]
    with one_line(f"--model {args.model}: the sampler cannot run this architecture"):
        check_logprobs(policy, [ids, ids[: len(ids) // 2 + 1], ids[:1]], args)
        for limit in context_limits(policy.model):
            if len(longest_ids) + args.max_new_tokens > limit:
                # a prompt that ends just before the limit or, if one is that long, just after it
                length = max(limit - 2, min(len(longest_ids), limit + 2))
                repeated_ids = longest_ids * (length // len(longest_ids) + 1)
                check_logprobs(policy, [repeated_ids[:length], longest_ids[:1]], args)


def check_logprobs(policy, prompts, args):
    """`check_sampler` for some prompts, in float32, with answers of two and four tokens. If packed
    sequences attend to each other, turns packing off. UserError if log-probs still differ."""
    exact = policy.with_model(policy.master)
    problems = [Problem("", "", ids) for ids in prompts]
    caps_N = torch.tensor([2, 4] * len(prompts), device=policy.model.device)
    noise_NT = torch.zeros(len(caps_N), 4)
    completions = sample_batch(exact, problems, noise_NT, temperature=1.0, greedy=True, caps_N=caps_N)
    batch = collate(completions, args)
    for one_sequence_per_row in (policy.one_sequence_per_row, True):
        exact.one_sequence_per_row = one_sequence_per_row
        with torch.no_grad():
            logprobs_BT = token_logprobs(exact, batch, temperature=1.0, replay=False).logprobs_BT
        gap = (logprobs_BT - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max().item()
        if gap < 1e-3:
            policy.one_sequence_per_row = one_sequence_per_row
            return
    raise UserError(
        f"--model {args.model}: log-probs of the same tokens differ by {gap:.2g} between the sampler "
        f"(with a cache) and the training forward, after prompts of up to {len(prompts[0])} tokens"
    )


# ------------------------------------------------------------------------------------------ rollout

# Finished rows are dropped every n tokens: rarely on a GPU, since the host has to wait for it.
COMPACT_EVERY = {"cuda": 16}  # elsewhere 1


class Completion(NamedTuple):
    problem: Problem
    ids: list  # as sampled, never retokenized; the last one is EOS unless truncated
    logprobs: list  # of ids, under the sampler
    truncated: bool = False  # hit the cap before EOS
    text: str = ""
    experts: torch.Tensor | None = None  # (prompt and response, L, K), if recorded
    reward: float | None = None  # grading sets this and the next two
    verdict: str | None = None  # correct, wrong, no_answer or truncated
    rewards: dict | None = None  # {function of --reward: its value}


def pad(rows, device, side="right", value=0):
    """Lists or tensors of different lengths -> one tensor on the device."""
    rows = [torch.as_tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side).to(device)


def sample(policy, problems, group_size, args, generator=None, greedy=False, experts=True):
    """[Completion]: `group_size` in a row for each problem, sampled from the full distribution at
    `--temperature` (no top-k, no top-p), or greedily. All noise is drawn in advance, so a completion
    does not depend on the rest of its batch. For r3 the routers' choices are recorded, unless
    `experts` is False."""
    noise_PGT = torch.rand(len(problems), group_size, args.max_new_tokens, generator=generator)
    my_problems = ranks.local_slice(problems)
    my_noise_PGT = ranks.local_slice(noise_PGT)
    rows_at_a_time = args.rollout_batch_size or args.prompts_per_iteration * args.group_size
    problems_at_a_time = max(1, rows_at_a_time // group_size)  # keeps groups together
    record_experts = experts and args.routing_replay == "r3"
    completions = []
    with clock("rollout"):
        for start in range(0, len(my_problems), problems_at_a_time):
            end = start + problems_at_a_time
            completions += sample_batch(
                policy,
                my_problems[start:end],
                my_noise_PGT[start:end].flatten(0, 1),
                temperature=args.temperature,
                greedy=greedy,
                record_experts=record_experts,
            )
        return ranks.all_gather_list(completions)


class CachedForward:
    """A model with its KV cache: each call continues where the last one ended."""

    def __init__(self, model, record_experts):
        self.model = model
        self.cache = None  # made by the first call
        is_mamba = "cache_params" in inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if is_mamba else "past_key_values"
        self.record_experts = record_experts
        self.experts = []  # one entry per call, for experts_by_completion: (rows, (tokens, L, K))

    def __call__(self, rows_R, tokens, attention, positions):
        """Logits of the next token, (R, V), in float32. rows_R is only stored with the experts."""
        if self.cache is not None and self.cache_name == "cache_params":
            attention = None  # padding before the prompt never entered its state
        context = Routing(self.model) if self.record_experts else contextlib.nullcontext()
        with context as routing:
            output = self.model(
                tokens,
                attention_mask=attention,
                position_ids=positions,
                logits_to_keep=1,
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        if self.record_experts:
            self.experts.append((rows_R, routing.choices()))
        self.cache = getattr(output, self.cache_name, None)
        if type(self.cache) is not transformers.DynamicCache:
            raise TypeError("it has no cache that allows rows to be copied and removed")
        return output.logits[:, -1].float()


def prefill(forward, prompts, group_size):
    """Runs each prompt once and copies its KV cache to the `group_size` rows of its group. Returns, for
    N rows: the next token's logits (N, V), the attention mask, and each row's last position (N, 1)."""
    device = forward.model.device
    tokens = pad(prompts, device, "left")
    attention = pad([[1] * len(prompt) for prompt in prompts], device, "left")
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    rows_P = torch.arange(len(prompts), device=device)
    logits_PV = forward(rows_P, tokens, attention, positions)
    forward.cache.reorder_cache(rows_P.repeat_interleave(group_size))
    by_prompt = (logits_PV, attention, positions[:, -1:])
    return [tensor.repeat_interleave(group_size, dim=0) for tensor in by_prompt]


def next_token(logprobs_RV, noise_R1, greedy):
    """The next token of each row, (R, 1): the most likely one, or one drawn using the noise."""
    if greedy:
        return logprobs_RV.argmax(dim=-1, keepdim=True)
    # Inverse-CDF sampling. Because of rounding the CDF may not end at exactly 1.
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    token_R1 = torch.searchsorted(cumulative_RV, noise_R1 * cumulative_RV[:, -1:], right=True)
    return token_R1.clamp(max=cumulative_RV.shape[1] - 1)


@torch.inference_mode()
def sample_batch(policy, problems, noise_NT, *, temperature, greedy, record_experts=False, caps_N=None):
    """`sample` for one batch of problems. Finished rows are dropped. With `caps_N`, used only
    by check_logprobs, a row ends after that many tokens instead of at EOS."""
    device = policy.model.device
    N, max_new_tokens = noise_NT.shape
    group_size = N // len(problems)
    ends = torch.tensor(end_ids(policy.model, policy.tokenizer), device=device, dtype=torch.long)
    compact_every = COMPACT_EVERY.get(device.type, 1)
    if caps_N is None:
        caps_N = torch.full((N,), max_new_tokens, device=device)
    else:
        ends = ends[:0]
        compact_every = 1
    noise_NT = noise_NT.to(device)
    ids_NT = torch.zeros_like(noise_NT, dtype=torch.long)
    logprobs_NT = torch.zeros_like(noise_NT)
    forward = CachedForward(policy.model, record_experts)
    prompts = [problem.prompt_ids for problem in problems]
    logits_RV, attention, position_R1 = prefill(forward, prompts, group_size)
    rows_R = torch.arange(N, device=device)  # the index of each row's completion
    ended_R = torch.zeros(N, dtype=torch.bool, device=device)

    for t in range(max_new_tokens):
        logprobs_RV = torch.log_softmax(logits_RV / temperature, dim=-1)
        token_R1 = next_token(logprobs_RV, noise_NT[rows_R, t, None], greedy)
        ids_NT[rows_R, t] = token_R1[:, 0]
        logprobs_NT[rows_R, t] = logprobs_RV.gather(1, token_R1)[:, 0]
        if t + 1 == max_new_tokens:
            break

        ended_R |= torch.isin(token_R1[:, 0], ends) | (caps_N[rows_R] == t + 1)
        if (t + 1) % compact_every == 0:
            kept = (~ended_R).nonzero()[:, 0]
            if len(kept) == 0:
                break
            if len(kept) < len(rows_R):
                forward.cache.reorder_cache(kept)
                rows_R = rows_R[kept]
                ended_R = ended_R[kept]
                token_R1 = token_R1[kept]
                attention = attention[kept]
                position_R1 = position_R1[kept]
        attention = F.pad(attention, (0, 1), value=1)
        position_R1 = position_R1 + 1
        logits_RV = forward(rows_R, token_R1, attention, position_R1)

    # Cut each row at its first EOS. It may have run on until it was dropped from the batch.
    is_end_NT = torch.isin(ids_NT, ends)
    truncated = (~is_end_NT.any(1)).tolist()
    length_N = torch.where(is_end_NT.any(1), is_end_NT.int().argmax(1) + 1, max_new_tokens)
    length_N = torch.minimum(length_N, caps_N).tolist()
    ids = [row[:length] for row, length in zip(ids_NT.tolist(), length_N, strict=True)]
    logprobs = [row[:length] for row, length in zip(logprobs_NT.tolist(), length_N, strict=True)]
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    experts = [None] * N
    if record_experts:
        experts = experts_by_completion(forward.experts, prompts, length_N)
    return [
        Completion(problems[i // group_size], ids[i], logprobs[i], truncated[i], texts[i], experts[i])
        for i in range(N)
    ]


# ----------------------------------------------------------------------------------------- verifier


def verify(text, answer, truncated=False):
    """(reward, verdict): 1.0 and 'correct', else 0.0 and 'wrong', 'no_answer' or 'truncated'."""
    if truncated:
        return 0.0, "truncated"
    found = final_answer(text)
    if found is None:
        return 0.0, "no_answer"
    if is_same(found, answer):
        return 1.0, "correct"
    return 0.0, "wrong"


def load_grader(args):
    """Returns a function that adds rewards and verdicts to completions, using `verify` or the functions
    that `--reward FILE.py:FUNCTION ...` names."""
    functions = load_rewards(args) if args.reward else verify

    def grade(completions):
        with clock("reward"):
            mine = ranks.local_slice(completions)  # each completion is graded by one process
            fields = ranks.all_gather_list(graded(functions, mine))
        return [c._replace(**values) for c, values in zip(completions, fields, strict=True)]

    return grade


# ------------------------------------------------------------------------------------------- batch

MICRO_BATCH_TOKENS = 16_384  # per forward and backward pass, if --micro_batch_size is 0


@dataclasses.dataclass
class Batch:
    """Completions as tensors, one row each: a rollout, a minibatch, or a micro-batch. Masks come from
    lengths, never from token ids, since EOS may double as padding."""

    tokens_BS: torch.Tensor  # prompts padded on the left, responses on the right
    attention_BS: torch.Tensor  # 1 on prompt and response
    mask_BT: torch.Tensor  # True on the response, including EOS
    sampler_logprobs_BT: torch.Tensor
    # for the policy to use, in top-k order; None or -1: it chooses itself
    replayed_experts_BSLK: torch.Tensor | None = None
    # set by record_old_policy
    old_logprobs_BT: torch.Tensor | None = None
    old_experts_BTLK: torch.Tensor | None = None  # the routers' own choice, sorted; None if unknown
    old_router_scores_BTLK: torch.Tensor | None = None  # the result of its `router_fn`
    # set by rollout_correction
    correction_weights: torch.Tensor | None = None  # a factor on advantages, (B, T) or (B, 1)
    rollout_ratio_BT: torch.Tensor | None = None  # pi_old / sampler
    # set by the scripts
    ref_logprobs_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None  # a critic's, before its update
    returns_BT: torch.Tensor | None = None
    is_right_B1: torch.Tensor | None = None  # according to the verifier
    advantages: torch.Tensor | None = None  # (B, T) or (B, 1)

    def __len__(self):
        return len(self.mask_BT)

    def __getitem__(self, rows):
        """The batch of a slice of the rows; its tensors are views."""
        tensors = {}
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            tensors[field.name] = None if tensor is None else tensor[rows]
        return Batch(**tensors)

    def parts(self, args):
        """[Batch of one optimizer step]: `--num_minibatches` of nearly equal size, in rollout order.
        Fewer if a process would otherwise have no row in one of them."""
        count = max(1, min(args.num_minibatches, len(self) // ranks.WORLD))
        return [self[rows] for rows in ranks.even_slices(len(self), count)]

    def minibatches(self, args):
        """`parts`, repeated `--update_epochs` times: one for each optimizer step of an iteration."""
        return self.parts(args) * args.update_epochs

    def micro_batches(self, args):
        """[Batch of one forward and backward pass]: this process's rows of a minibatch, in batches of
        nearly equal size: at most `--micro_batch_size` rows, or as many as fit in 16,384 tokens."""
        mine = ranks.local_slice(self)
        S = self.tokens_BS.shape[1]  # of the whole rollout
        size = args.micro_batch_size or max(1, MICRO_BATCH_TOKENS // S)
        return [mine[rows] for rows in ranks.even_slices(len(mine), math.ceil(len(mine) / size))]

    @functools.cached_property
    def lengths(self):
        """Tokens in each sequence. Packing needs them on the host, and reading them means waiting for
        the GPU, so it is done once."""
        return self.attention_BS.sum(1).tolist()

    def active_experts(self, own_experts_BTLK):
        """The sorted experts that predict each response token: the replayed ones if known, else the
        routers' own choice."""
        if self.replayed_experts_BSLK is None:
            return own_experts_BTLK
        T = self.mask_BT.shape[1]
        replayed_BTLK = self.replayed_experts_BSLK[:, -T - 1 : -1].sort().values
        return torch.where(replayed_BTLK < 0, own_experts_BTLK, replayed_BTLK)


def collate(completions, args):
    """List of `Completion`s -> `Batch` on `--device`; with r3, including the sampler's experts."""
    prompts = [c.problem.prompt_ids for c in completions]
    responses = [c.ids for c in completions]
    is_prompt = pad([[1] * len(ids) for ids in prompts], args.device, "left")
    is_response = pad([[1] * len(ids) for ids in responses], args.device)
    experts_BSLK = None
    if completions[0].experts is not None:
        of_prompts = [c.experts[: len(c.problem.prompt_ids)] for c in completions]
        of_responses = [c.experts[len(c.problem.prompt_ids) :] for c in completions]
        left = pad(of_prompts, args.device, "left", value=-1)
        right = pad(of_responses, args.device, value=-1)
        experts_BSLK = torch.cat([left, right], dim=1)
    return Batch(
        tokens_BS=torch.cat([pad(prompts, args.device, "left"), pad(responses, args.device)], dim=1),
        attention_BS=torch.cat([is_prompt, is_response], dim=1),
        mask_BT=is_response.bool(),
        sampler_logprobs_BT=pad([c.logprobs for c in completions], args.device),
        replayed_experts_BSLK=experts_BSLK,
    )


# ---------------------------------------------------------------------------------------- log-probs

MAX_LOGITS = 2**26  # more logits than this are computed in chunks


class TokenOutputs(NamedTuple):
    """The training forward's results for each response token. A dense model has L = 0."""

    logprobs_BT: torch.Tensor  # of the sampled tokens; 0 on padding
    entropy_BT: torch.Tensor  # in nats; 0 on padding
    aux_loss: torch.Tensor  # transformers' load-balancing loss over prompt and response; 0 if none
    # L tensors (B, T, E), raw and detached, where the token is predicted; () if there is no softmax
    router_logits: tuple
    # The routers' own choice of experts, even where replay overrode it:
    experts_BTLK: torch.Tensor  # where the token is predicted; sorted, so equal sets compare equal
    routing_choices_BSLK: torch.Tensor  # at every token of the sequence, in top-k order


def token_logprobs(policy, batch, temperature, entropy_grad=False, max_logits=MAX_LOGITS, replay=True):
    """The training forward: log-probs and entropies of the response tokens at the sampling temperature,
    in float32; entropies have a gradient only with `entropy_grad`. The routers use the batch's
    `replayed_experts_BSLK`, if any, unless `replay` is False (it is for a reference)."""
    model = policy.model
    T = batch.mask_BT.shape[1]
    # Before the forward pass, while the GPU has nothing to do: the host waits for the number of tokens.
    response = batch.mask_BT.nonzero(as_tuple=True)

    def logprob_and_entropy(hidden, tokens):
        logprobs = torch.log_softmax(logits_of(model, hidden).float() / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_grad):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy

    packed = forward_packed(
        model.base_model,
        batch,
        policy.one_sequence_per_row,
        replayed_BSLK=batch.replayed_experts_BSLK if replay else None,
        router_logits=policy.routers.has_softmax,
    )
    predictor_BT = packed.place_BS[:, -T - 1 : -1]  # the token at s is predicted at s - 1
    hidden = packed.hidden[predictor_BT[response]]
    tokens = batch.tokens_BS[:, -T:][response]
    chunk_size = max(1, max_logits // model.config.get_text_config().vocab_size)
    logprobs, entropy = in_chunks(logprob_and_entropy, hidden, tokens, chunk_size)
    zeros_BT = torch.zeros(predictor_BT.shape, device=predictor_BT.device)
    return TokenOutputs(
        zeros_BT.index_put(response, logprobs),
        zeros_BT.index_put(response, entropy),
        *router_outputs(policy.routers, packed, predictor_BT),
    )


def in_chunks(function, hidden, tokens, size):
    """`function(hidden, tokens)`, which returns two rows of values, for `size` tokens at a time. To
    save memory, it is called again in the backward pass (gradient checkpointing)."""
    if len(tokens) <= size:
        return function(hidden, tokens)
    chunks = zip(hidden.split(size), tokens.split(size), strict=True)
    pairs = [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    return [torch.cat(values) for values in zip(*pairs, strict=True)]


def router_outputs(routers, packed, predictor_BT):
    """The last four fields of `TokenOutputs`."""
    zero = torch.zeros((), device=predictor_BT.device)
    if routers.num_experts == 0:
        no_experts = zero.new_empty(*predictor_BT.shape, 0, 0)
        return zero, (), no_experts, no_experts
    layers = [logits.float() for logits in packed.router_logits]  # each (packed tokens, E)
    if routers.are_probabilities:
        layers = [probs.clamp(min=1e-30).log() for probs in layers]
    aux_loss = zero
    if routers.are_balanced:
        K = packed.experts.shape[-1]
        aux_loss = load_balancing_loss_func(tuple(layers), routers.num_experts, K, packed.is_token)
    router_logits = tuple(logits.detach()[predictor_BT] for logits in layers)
    experts_BTLK = packed.experts[predictor_BT].sort().values
    routing_choices_BSLK = packed.experts[packed.place_BS]
    return aux_loss, router_logits, experts_BTLK, routing_choices_BSLK


@torch.no_grad()
def over_rows(function, parts, args):
    """Calls `function(micro_batch)` -> {name: (rows, ...)} on every micro-batch of a batch's parts.
    Returns {name: (B, ...)} for all rows of the batch, on every process."""
    results = []
    for part in parts:
        results += [function(micro) for micro in part.micro_batches(args)]
    sizes = [len(part) for part in parts]
    return {name: ranks.all_rows([r[name] for r in results], sizes) for name in results[0]}


def record_old_policy(policy, batch, args, router_fn=None):
    """One forward pass before the update. Sets `old_logprobs_BT`, `old_experts_BTLK` and, with r2, the
    experts to replay. `router_fn(router_logits, active_experts_BTLK)` computes
    `old_router_scores_BTLK`. `--old_logprobs sampler` skips this pass."""

    def old_policy(micro):
        outputs = token_logprobs(policy, micro, args.temperature)
        result = {"old_logprobs_BT": outputs.logprobs_BT, "old_experts_BTLK": outputs.experts_BTLK}
        if args.routing_replay == "r2":
            result["replayed_experts_BSLK"] = outputs.routing_choices_BSLK
        if router_fn is not None:
            active_BTLK = micro.active_experts(outputs.experts_BTLK)
            result["old_router_scores_BTLK"] = router_fn(outputs.router_logits, active_BTLK)
        return result

    if args.old_logprobs == "sampler":
        batch.old_logprobs_BT = batch.sampler_logprobs_BT
        return
    for name, tensor in over_rows(old_policy, batch.parts(args), args).items():
        setattr(batch, name, tensor)


def reference_logprobs(reference, batch, args):
    """Log-probs of the sampled tokens under a frozen policy, (B, T). Experts are not replayed."""

    def forward(micro):
        outputs = token_logprobs(reference, micro, args.temperature, replay=False)
        return {"logprobs_BT": outputs.logprobs_BT}

    # The update's minibatches would work, but may be small. On a CPU, 64 rows at a time are fastest.
    count = max(1, len(batch) // (64 * ranks.WORLD))
    parts = [batch[rows] for rows in ranks.even_slices(len(batch), count)]
    return over_rows(forward, parts, args)["logprobs_BT"]


def critic_values(critic, batch, args):
    """A critic's values, (B, U): at each response token, and after the last column."""
    parts = batch.parts(args)  # as in the update, so that its first step computes the same values
    return over_rows(lambda micro: {"values_BU": critic.model(micro)}, parts, args)["values_BU"]


# ------------------------------------------------------------------------------- rollout correction


def rollout_weights(
    old_logprobs_BT,
    sampler_logprobs_BT,
    mask_BT,
    *,
    rule,
    cap=2.0,
    mask_low=0.95,
    mask_high=1.05,
    per_sequence=False,
):
    """Importance weights that correct for a sampler mu that differs from the trainer's pi_old: engines
    often sample at lower precision, or with stale weights.

    The decoupled objective is w min(r A, clip(r) A): r = pi / pi_old is clipped as usual, but w, which
    is computed from rho = pi_old / mu, is not. Since w is never negative, A can be multiplied by it.

    old_logprobs_BT      log-probs under the training forward, before the first step
    sampler_logprobs_BT  log-probs of the same tokens under the sampler
    mask_BT              1 on response tokens
    rule                 none, token_tis, sequence_tis, sequence_mis, geo_mask, geo_filter or icepop
    per_sequence         for objectives with one ratio, and so one weight, per completion: token rules
                         then apply to the geometric mean of rho over the completion

    Returns (weights, rho_BT). Weights are at least 0, and (B, T), or (B, 1) if one per completion.
    Sources: Hilton et al., arXiv 2110.00641 (the decoupled objective); Yao et al. 2025 (truncated and
    masked weights); the Ling team, arXiv 2510.18855 (icepop).
    """
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    # As in the losses: mask before exp, and clamp to keep exp finite.
    log_rho_BT = torch.where(mask_BT, old_logprobs_BT - sampler_logprobs_BT, 0).clamp(-20, 20)
    log_product_B1 = log_rho_BT.sum(1, keepdim=True)
    product_B1 = log_product_B1.clamp(-20, 20).exp()
    mean_B1 = (log_product_B1 / length_B1).exp()  # geometric
    is_near_B1 = (mask_low <= mean_B1) & (mean_B1 <= mask_high)
    rho_BT = log_rho_BT.exp()
    ratio = mean_B1 if per_sequence else rho_BT  # for the token rules
    if rule == "none":
        weights = torch.ones_like(mean_B1)
    elif rule == "token_tis":
        # w_t = min(rho_t, C)
        weights = ratio.clamp(max=cap)
    elif rule == "sequence_tis":
        # w_i = min(prod_t rho_t, C); the product is compared with C before it is clamped
        weights = torch.where(log_product_B1.exp() <= cap, product_B1, cap)
    elif rule == "sequence_mis":
        # w_i = prod_t rho_t, or 0 above C, with the same comparison
        weights = torch.where(log_product_B1.exp() <= cap, product_B1, 0)
    elif rule == "geo_mask":
        # w_t = min(rho_t, C), or 0 for the whole completion unless low <= mean_i <= high
        weights = torch.where(is_near_B1, ratio.clamp(max=cap), 0)
    elif rule == "geo_filter":
        # w_i = 1, or 0 unless low <= mean_i <= high: only the mask
        weights = is_near_B1.to(rho_BT.dtype)
    elif rule == "icepop":
        # w_t = rho_t, or 0 outside [0.5, 5]
        weights = torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0)
    else:
        raise ValueError(f"unknown rule: {rule}")
    return weights, rho_BT


@torch.no_grad()
def rollout_correction(batch, args, per_sequence=False):
    """Sets `correction_weights` by `--rollout_correction`, and `rollout_ratio_BT`. per_sequence: one
    weight per completion."""
    batch.correction_weights, batch.rollout_ratio_BT = rollout_weights(
        batch.old_logprobs_BT,
        batch.sampler_logprobs_BT,
        batch.mask_BT,
        rule=args.rollout_correction,
        cap=args.rollout_cap,
        mask_low=args.rollout_mask_low,
        mask_high=args.rollout_mask_high,
        per_sequence=per_sequence,
    )


# --------------------------------------------------------------------------------------- evaluation


def evaluate(policy, problems, grade, args, sampled=False):
    """Answers the held-out problems greedily and, with `sampled`, also `--eval_samples` times at the
    training temperature with fixed noise. Returns {"greedy" and "sampled": a `rollout_summary`,
    "examples": [[prompt, gold answer, text]], of sampled answers if there are any}."""
    results = {}
    group_sizes = {"greedy": 1}
    if sampled:
        group_sizes["sampled"] = args.eval_samples
    with clock("evaluation"):
        for way, size in group_sizes.items():
            noise = torch.Generator().manual_seed(0)
            is_greedy = way == "greedy"
            completions = sample(policy, problems, size, args, noise, greedy=is_greedy, experts=False)
            completions = grade(completions)
            results[way] = rollout_summary(completions, size)
    examples = completions[::size][:3]
    results["examples"] = [[c.problem.prompt, c.problem.answer, c.text] for c in examples]
    return results
