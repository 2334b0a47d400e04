"""Shared by all scripts, in the order of the loop: problems, model, rollout, verifier, log-probs.

A tensor's suffix names its axes: P prompts, G completions per prompt, N = P*G completions of a rollout,
B rows of a batch (all N or a micro-batch), R rows that are still being sampled, T response tokens,
U = T + 1, S prompt + response, V vocabulary, L layers, E experts, K active experts, 1 a size-1 axis.
A "step" is an optimizer step, an "iteration" a rollout with its steps.
"""

import dataclasses
import functools
import inspect
import math
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from plumbing import ranks
from plumbing.answers import final_answer, is_same
from plumbing.args import UserError
from plumbing.data import ProblemStream, check_token_ids, hash_of, problem_rows, read_dataset
from plumbing.memory import MAX_LOGITS
from plumbing.metrics import rollout_summary
from plumbing.models import attention_window, end_ids, load_model, logits_of
from plumbing.packing import forward_packed
from plumbing.policy import Policy
from plumbing.reward import graded, load_rewards
from plumbing.routing import Routing, experts_by_completion, pad_experts

# ----------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list
    columns: dict | None = None  # of the dataset, for reward functions


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


def load_problems(args, policy):
    """`--dataset` -> (stream of training problems, [held-out problems], the same for all seeds)."""
    if args.dataset == "addition":
        rows = [{"question": prompt, "answer": answer} for prompt, answer in addition_problems()]
        rows = enumerate(rows, 1)
    else:
        rows = read_dataset(args)
    problems = [Problem(*parts) for parts in problem_rows(rows, policy, args)]
    check_window(policy, max((problem.prompt_ids for problem in problems), key=len), args)
    stream = ProblemStream(problems[args.num_held_out :], args.seed)
    stream.raw_hash = hash_of([(p.columns["prompts"], p.answer) for p in problems])
    stream.rendered_hash = hash_of([p.prompt for p in problems])  # a template may contain the date
    return stream, problems[: args.num_held_out]


# -------------------------------------------------------------------------------------------- model


def load_policy(args):
    """`--model` -> `Policy`: the model, its tokenizer and the copy that samples. UserError if the model
    cannot be loaded, or fails a test on short prompts."""
    master, tokenizer = load_model(args)
    policy = Policy(master, tokenizer, args.dtype, args.rollout_dtype, args.rollout_refresh_every)
    if args.routing_replay != "none" and policy.routers.no_replay:
        reason = policy.routers.no_replay
        raise UserError(f"--routing_replay cannot be used with --model {args.model}: {reason}")
    prompts = tokenizer(["1", "2", "10+10="]).input_ids
    check_token_ids(prompts, policy)
    check_logprobs(policy, prompts, args)
    return policy


def check_logprobs(policy, prompts, args):
    """Compares, in float32, the sampler's log-probs with the update's, for answers of four tokens, half
    of which leave after two. Some architectures attend across packed sequences; for these, packing is
    turned off. UserError if they still differ."""
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
        "(with a cache) and the training forward"
    )


def check_window(policy, longest_ids, args):
    """Compares them again beyond the model's attention window, if a prompt and an answer may get there:
    after a prompt that ends just before or, if the longest one does, just behind it."""
    window = attention_window(policy.model)
    if len(longest_ids) + args.max_new_tokens > window:
        length = max(window - 2, min(len(longest_ids), window + 2))
        repeated_ids = longest_ids * (length // len(longest_ids) + 1)
        check_logprobs(policy, [repeated_ids[:length], longest_ids[:1]], args)


# ------------------------------------------------------------------------------------------ rollout

COMPACT_EVERY = {"cuda": 16}  # tokens between removals of ended rows, for which the host waits; else 1


class Completion(NamedTuple):
    problem: Problem
    ids: list  # as sampled, never re-tokenized; the last one is the EOS unless truncated
    logprobs: list  # of ids, as the sampler saw them
    truncated: bool = False  # reached the cap without an EOS
    text: str = ""
    experts: torch.Tensor | None = None  # (prompt and response, L, K), if recorded
    reward: float | None = None  # these three are from `judge`
    verdict: str | None = None  # correct, wrong, no_answer or truncated
    rewards: dict | None = None  # {function of --reward: its value}


def pad(rows, device, left=False):
    """List of lists -> tensor on the device, with zeros on the right, or on the left."""
    width = max(len(row) for row in rows)
    zeros = [[0] * (width - len(row)) for row in rows]
    pairs = zip(zeros, rows, strict=True) if left else zip(rows, zeros, strict=True)
    return torch.tensor([first + second for first, second in pairs]).to(device)


def sample(policy, problems, group_size, args, generator=None, greedy=False, experts=True):
    """[Completion], `group_size` for each problem, next to each other, sampled from the full
    distribution at `--temperature` (no top-k, no top-p), or greedily. All noise is drawn in advance, so
    that a completion does not depend on the others that are sampled with it. Experts are recorded if
    an update reads them, unless `experts` is False."""
    noise_PGT = torch.rand(len(problems), group_size, args.max_new_tokens, generator=generator)
    my_problems = ranks.local_slice(problems)
    my_noise_PGT = ranks.local_slice(noise_PGT)
    rows_at_a_time = args.rollout_batch_size or len(problems) * group_size
    problems_at_a_time = max(1, rows_at_a_time // group_size)  # a group is sampled together
    completions = []
    for start in range(0, len(my_problems), problems_at_a_time):
        end = start + problems_at_a_time
        completions += sample_batch(
            policy,
            my_problems[start:end],
            my_noise_PGT[start:end].flatten(0, 1),
            temperature=args.temperature,
            greedy=greedy,
            record_experts=experts and args.reads_sampler_experts and policy.routers.num_experts > 0,
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
        """Logits of the next token, (R, V), in float32. rows_R are only noted with the experts."""
        if self.cache is not None and self.cache_name == "cache_params":
            attention = None  # its state has left out the padding before the prompt
        with Routing(self.model, enabled=self.record_experts) as routing:
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
            raise UserError("--model: it has no cache whose rows can be copied and removed")
        return output.logits[:, -1].float()


def prefill(forward, prompts, group_size):
    """Runs each prompt once and copies its KV cache to the `group_size` rows of its group. Returns, for
    N rows: the next token's logits (N, V), the attention mask, and each row's last position (N, 1)."""
    device = forward.model.device
    tokens = pad(prompts, device, left=True)
    attention = pad([[1] * len(prompt) for prompt in prompts], device, left=True)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    rows_P = torch.arange(len(prompts), device=device)
    logits_PV = forward(rows_P, tokens, attention, positions)
    forward.cache.reorder_cache(rows_P.repeat_interleave(group_size))
    by_prompt = (logits_PV, attention, positions[:, -1:])
    return [tensor.repeat_interleave(group_size, dim=0) for tensor in by_prompt]


def next_token(logprobs_RV, noise_R1, greedy):
    """The next token of each row, (R, 1): the most likely one, or one drawn with the noise."""
    if greedy:
        return logprobs_RV.argmax(dim=-1, keepdim=True)
    # Inverse-CDF sampling; the CDF ends at 1 up to rounding.
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    token_R1 = torch.searchsorted(cumulative_RV, noise_R1 * cumulative_RV[:, -1:], right=True)
    return token_R1.clamp(max=cumulative_RV.shape[1] - 1)


@torch.inference_mode()
def sample_batch(policy, problems, noise_NT, *, temperature, greedy, record_experts=False, caps_N=None):
    """`sample` for one batch of problems. Rows that have ended leave the batch, also those with as many
    tokens as `caps_N` allows, which only the test of a model gives."""
    device = policy.model.device
    N, max_new_tokens = noise_NT.shape
    group_size = N // len(problems)
    ends = torch.tensor(end_ids(policy.model, policy.tokenizer), device=device, dtype=torch.long)
    compact_every = COMPACT_EVERY.get(device.type, 1) if caps_N is None else 1
    if caps_N is None:
        caps_N = torch.full((N,), max_new_tokens, device=device)
    noise_NT = noise_NT.to(device)
    ids_NT = torch.zeros_like(noise_NT, dtype=torch.long)
    logprobs_NT = torch.zeros_like(noise_NT)
    forward = CachedForward(policy.model, record_experts)
    prompts = [problem.prompt_ids for problem in problems]
    logits_RV, attention, position_R1 = prefill(forward, prompts, group_size)
    rows_R = torch.arange(N, device=device)  # the number of each row's completion
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

    # A completion ends with its first EOS; its row may have run on until it left the batch.
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


def load_verifier(args):
    """`verify`, or the functions that `--reward FILE.py:FUNCTION ...` names."""
    return load_rewards(args) if args.reward else verify


def judge(completions, verify):
    """The completions with rewards and verdicts. Each is verified once, on one of the ranks."""
    mine = graded(verify, ranks.local_slice(completions))
    pairs = zip(completions, ranks.all_gather_list(mine), strict=True)
    return [c._replace(**judgement) for c, judgement in pairs]


# ---------------------------------------------------------------------------------------- log-probs


@dataclasses.dataclass
class Batch:
    """Completions as tensors. Masks come from lengths, never from token ids: EOS may be the padding."""

    tokens_BS: torch.Tensor  # prompts padded on the left, responses on the right
    attention_BS: torch.Tensor  # 1 on prompt and response
    mask_BT: torch.Tensor  # True on the response, its EOS included
    sampler_logprobs_BT: torch.Tensor
    sampler_experts_BSLK: torch.Tensor | None = None  # in the order of the top-k; -1: unknown
    replayed_experts_BSLK: torch.Tensor | None = None  # by the policy; None or -1: its own choice

    def rows(self, rows):
        """The same for a subset of the rows."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return Batch(*(None if tensor is None else tensor[rows] for tensor in fields))

    def minibatches(self, count):
        """[row numbers of one optimizer step]: `count` parts of nearly equal size, in the order of the
        rollout; fewer if some part would leave a rank without a row."""
        rows_N = torch.arange(len(self.mask_BT), device=self.mask_BT.device)
        return rows_N.tensor_split(max(1, min(count, len(rows_N) // ranks.WORLD)))

    def micro_batches(self, minibatch, size):
        """Yields (row numbers, the batch of these rows): this rank's rows of a minibatch, in parts of
        nearly equal size, at most `size` rows each."""
        mine = ranks.local_slice(minibatch)
        for rows in mine.tensor_split(math.ceil(len(mine) / size)):
            yield rows, self.rows(rows)

    def active_experts(self, own_experts_BTLK):
        """The sorted experts behind each response token's prediction: the replayed ones where they are
        known, else the routers' own choice."""
        if self.replayed_experts_BSLK is None:
            return own_experts_BTLK
        T = self.mask_BT.shape[1]
        replayed_BTLK = self.replayed_experts_BSLK[:, -T - 1 : -1].sort().values
        return torch.where(replayed_BTLK < 0, own_experts_BTLK, replayed_BTLK)

    @functools.cached_property
    def lengths(self):
        """(tokens of each sequence, tokens in each one's mask), two lists. Packing needs them on the
        host. Reading them waits for a GPU, so it is done once, and shapes derive from them."""
        return torch.stack([self.attention_BS.sum(1), self.mask_BT.sum(1)]).tolist()


def collate(completions, args):
    """List of `Completion`s -> `Batch` on `--device`; with r3, the sampler's experts are replayed."""
    prompts = [c.problem.prompt_ids for c in completions]
    prompt_ids = pad(prompts, args.device, left=True)
    response_ids = pad([c.ids for c in completions], args.device)
    prompt_length_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=args.device)
    length_B1 = torch.tensor([[len(c.ids)] for c in completions], device=args.device)
    is_prompt = torch.arange(prompt_ids.shape[1], device=args.device).flip(0) < prompt_length_B1
    mask_BT = torch.arange(response_ids.shape[1], device=args.device) < length_B1
    experts_BSLK = None
    if completions[0].experts is not None:
        experts_BSLK = pad_experts(completions, prompt_ids.shape[1], response_ids.shape[1])
        experts_BSLK = experts_BSLK.to(args.device)
    return Batch(
        tokens_BS=torch.cat([prompt_ids, response_ids], dim=1),
        attention_BS=torch.cat([is_prompt, mask_BT], dim=1).long(),
        mask_BT=mask_BT,
        sampler_logprobs_BT=pad([c.logprobs for c in completions], args.device),
        sampler_experts_BSLK=experts_BSLK,
        replayed_experts_BSLK=experts_BSLK if args.routing_replay == "r3" else None,
    )


class TokenOutputs(NamedTuple):
    """The training forward's results for each response token. A dense model has L = 0."""

    logprobs_BT: torch.Tensor  # of the sampled tokens; 0 on padding
    entropy_BT: torch.Tensor  # in nats; 0 on padding
    aux_loss: torch.Tensor  # transformers' load-balancing loss over prompt and response; 0 without one
    # L tensors (B, T, E), raw, at the position that predicts the token, detached; () without a softmax
    router_logits: tuple
    num_experts: int  # E, in a layer
    # The routers' own choices, even where replay overrides them:
    experts_BTLK: torch.Tensor  # where the token is predicted, sorted, so that equal sets compare equal
    routing_choices_BSLK: torch.Tensor  # at every token, in the order of the top-k


def token_logprobs(policy, batch, temperature, entropy_grad=False, max_logits=MAX_LOGITS, replay=True):
    """The training forward: log-probs and entropies of the response tokens at the sampling temperature,
    in float32; entropies have a gradient only with `entropy_grad`. To save memory, more than
    `max_logits` logits are computed in chunks, and recomputed in the backward pass. The routers use the
    batch's `replayed_experts_BSLK`, if any, unless `replay` is False, as it is for a reference."""
    model = policy.model
    routers = policy.routers
    mask_BT = batch.mask_BT
    B, T = mask_BT.shape
    router_kwargs = {} if routers.no_softmax else {"output_router_logits": True}

    def logprob_and_entropy(hidden, tokens):
        logprobs = torch.log_softmax(logits_of(model, hidden).float() / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_grad):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy

    packed = forward_packed(
        model.base_model,
        batch,
        policy.one_sequence_per_row,
        batch.replayed_experts_BSLK if replay else None,
        **router_kwargs,
    )
    predictor_BT = packed.place_BS[:, -T - 1 : -1]  # the token at s is predicted at s - 1
    _, lengths = batch.lengths
    # Like nonzero(), but with the size known, so that the host does not wait for a GPU to count.
    is_response = mask_BT.flatten().nonzero_static(size=sum(lengths))[:, 0]
    hidden = packed.hidden[predictor_BT.flatten()[is_response]]
    tokens = batch.tokens_BS[:, -T:].flatten()[is_response]
    chunk_size = max(1, max_logits // model.config.get_text_config().vocab_size)
    chunks = list(zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True))
    if len(chunks) == 1:
        parts = [logprob_and_entropy(*chunks[0])]
    else:
        parts = [checkpoint(logprob_and_entropy, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    zeros = torch.zeros(B * T, device=mask_BT.device)
    logprobs_BT = zeros.index_put((is_response,), logprobs).view(B, T)
    entropy_BT = zeros.index_put((is_response,), entropy).view(B, T)
    if routers.num_experts == 0:
        no_experts = zeros.new_empty(B, T, 0, 0)
        return TokenOutputs(logprobs_BT, entropy_BT, zeros.sum(), (), 0, no_experts, no_experts)

    layers = [logits.float() for logits in packed.router_logits]  # each (packed tokens, E)
    if routers.are_probabilities:
        layers = [probs.clamp(min=1e-30).log() for probs in layers]
    aux_loss = zeros.sum()
    if routers.are_balanced:
        K = packed.experts.shape[-1]
        aux_loss = load_balancing_loss_func(tuple(layers), routers.num_experts, K, packed.is_token)
    return TokenOutputs(
        logprobs_BT,
        entropy_BT,
        aux_loss,
        router_logits=tuple(logits.detach()[predictor_BT] for logits in layers),
        num_experts=routers.num_experts,
        experts_BTLK=packed.experts[predictor_BT].sort().values,
        routing_choices_BSLK=packed.experts[packed.place_BS],
    )


@torch.no_grad()
def score(policy, batch, minibatches, args):
    """Log-probs of the sampled tokens, (N, T), under a policy that chooses its own experts, such as a
    reference: all rows, on every rank, computed in the micro-batches of the update."""
    logprobs = []
    for minibatch in minibatches:
        for _, micro in batch.micro_batches(minibatch, args.micro_batch_size):
            outputs = token_logprobs(policy, micro, args.temperature, replay=False)
            logprobs.append(outputs.logprobs_BT)
    return ranks.all_rows(logprobs, minibatches)


class OldScores(NamedTuple):
    """The result of `score_old`: all rows, on every rank."""

    logprobs_NT: torch.Tensor
    experts_NTLK: torch.Tensor | None  # the routers' own choice, sorted; None if unknown
    router_values: torch.Tensor | None = None  # what `router_fn` returns, if a script gives one


@torch.no_grad()
def score_old(policy, batch, minibatches, args, router_fn=None):
    """`OldScores` of the policy before its update. With r2, the batch's later forwards replay the
    experts that it chooses here. `router_fn(router_logits, active_experts_BTLK)` gives `router_values`.
    `--old_logprobs sampler` skips this forward, and so saves up to a quarter of an update's time."""
    if args.old_logprobs == "sampler":
        return OldScores(batch.sampler_logprobs_BT, None)
    logprobs = []
    experts = []
    choices = []
    values = []
    for minibatch in minibatches:
        for _, micro in batch.micro_batches(minibatch, args.micro_batch_size):
            outputs = token_logprobs(policy, micro, args.temperature)
            logprobs.append(outputs.logprobs_BT)
            experts.append(outputs.experts_BTLK)
            if args.routing_replay == "r2":
                choices.append(outputs.routing_choices_BSLK)
            if router_fn is not None:
                active_BTLK = micro.active_experts(outputs.experts_BTLK)
                values.append(router_fn(outputs.router_logits, active_BTLK))
    if choices:
        batch.replayed_experts_BSLK = ranks.all_rows(choices, minibatches)
    return OldScores(*[ranks.all_rows(parts, minibatches) for parts in (logprobs, experts, values)])


@torch.no_grad()
def score_values(critic, batch, minibatches, args):
    """A critic's values, (N, U): at each response token, and after the last column."""
    values = []
    for minibatch in minibatches:
        for _, micro in batch.micro_batches(minibatch, args.micro_batch_size):
            values.append(critic.model(micro))
    return ranks.all_rows(values, minibatches)


# --------------------------------------------------------------------------------------- evaluation


def evaluate(policy, problems, verify, args, sampled=False):
    """Answers the held-out problems greedily and, with `sampled`, also `--eval_samples` times at the
    training temperature with fixed noise: {"metrics": for the log, "greedy" and "sampled": summaries by
    `rollout_summary`, "examples": [[prompt, text]], sampled if there are sampled answers}."""
    results = {"metrics": {}}
    ways = {"greedy": 1, "sampled": args.eval_samples} if sampled else {"greedy": 1}
    for way, size in ways.items():
        noise = torch.Generator().manual_seed(0)
        completions = sample(policy, problems, size, args, noise, greedy=way == "greedy", experts=False)
        completions = judge(completions, verify)
        results[way] = rollout_summary(completions, size)
    results["examples"] = [[c.problem.prompt, c.text] for c in completions[::size][:3]]
    for name in ("accuracy", "response_len_mean"):
        results["metrics"][f"eval/{name}"] = results["greedy"][name]
    return results
