"""Shared by all scripts, in the order of the loop: rollout, batch, log-probs, evaluation; and the
check of a model. It also re-exports what scripts need from plumbing/.

A tensor's suffix names its axes:
  P prompts, G completions per prompt, B rows of a batch, R rows still in the decoder
  T response tokens (in the sampler: --max_new_tokens), S prompt + response, V vocabulary
  N response tokens of all rows, one row after the other, without padding
  L layers, E experts, K active experts, 1 for a size-1 axis
A "step" is an optimizer step; a `Batch` is a micro-batch; an "iteration" is a rollout and its steps.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from plumbing.answers import final_answer, verify
from plumbing.args import RunArgs, UserError, flag, launch, one_line
from plumbing.data import Problem, addition_problems, load_problems
from plumbing.decoding import graphs_for, new_decoder
from plumbing.memory import in_chunks, similar_lengths
from plumbing.metrics import clock, critic_stats, rollout_summary
from plumbing.model import TrainedModel, load_unchecked
from plumbing.reward import load_grader
from plumbing.routing import Routing, balancing_loss
from plumbing.run import Run

# ------------------------------------------------------------------------------------------ rollout

ROLLOUT_TOKENS = 2**17  # most tokens in the KV cache, if every answer has full length


class Completion(NamedTuple):
    problem: Problem
    ids: list  # as sampled, never retokenized; the last one is EOS unless truncated
    logprobs: list  # of ids, under the sampler
    truncated: bool = False  # hit the cap before EOS
    text: str = ""
    reward: float | None = None  # set by grading, with the verdict
    verdict: str | None = None  # correct, wrong, no_answer or truncated; None if --reward gave none


def sample(policy, problems, group_size, args, generator=None, greedy=False):
    """[Completion]: `group_size` in a row for each problem, sampled from the full distribution at
    `--temperature` (no top-k, no top-p), or greedily. All noise is drawn in advance, so that, up to
    rounding, a completion does not depend on its batch."""
    problems = [problem for problem in problems for _ in range(group_size)]  # one for each completion
    shape = (len(problems), args.max_new_tokens)
    noise_BT = torch.rand(shape, generator=generator, dtype=torch.float64)
    longest = max(len(problem.prompt_ids) for problem in problems) + args.max_new_tokens
    rows_at_a_time = args.rollout_batch_size or max(1, ROLLOUT_TOKENS // longest)
    completions = []
    with clock("rollout"):
        for start in range(0, len(problems), rows_at_a_time):
            batch = problems[start : start + rows_at_a_time]
            noise = noise_BT[start : start + rows_at_a_time]
            completions += sample_batch(policy, batch, noise, args.temperature, greedy)
    return completions


def next_token(logprobs_RV, noise_R1, greedy):
    """The next token of each row, (R, 1): the most likely one, or one drawn using the noise."""
    if greedy:
        return logprobs_RV.argmax(dim=-1, keepdim=True)
    # Inverse-CDF sampling, in float64: float32's noise and sums are so coarse that, in a vocabulary of
    # 150,000, up to 0.0015 of the probability would be with other tokens. Because of rounding, the CDF
    # may not end at exactly 1.
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=noise_R1.dtype)
    token_R1 = torch.searchsorted(cumulative_RV, noise_R1 * cumulative_RV[:, -1:], right=True)
    return token_R1.clamp(max=cumulative_RV.shape[1] - 1)


@torch.inference_mode()
def sample_batch(policy, problems, noise_BT, temperature, greedy):
    """Samples one completion for each problem, with its row of noise."""
    device = policy.model.device
    B, max_new_tokens = noise_BT.shape
    end_ids = policy.end_ids
    ends = torch.tensor(end_ids, device=device)
    if device.type == "mps":  # it has no float64; noise must not be rounded to 1
        noise_BT = noise_BT.float().clamp(max=1 - 2**-24)
    noise_BT = noise_BT.to(device)
    ids_BT = torch.zeros_like(noise_BT, dtype=torch.long)
    logprobs_BT = torch.zeros_like(noise_BT, dtype=torch.float32)

    decoder = new_decoder(policy, max_new_tokens)  # the model, with its KV cache
    logits_RV = decoder.prefill([problem.prompt_ids for problem in problems])
    has_ended_R = torch.zeros(B, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        rows_R = decoder.rows  # the index of each row's completion
        logprobs_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
        token_R1 = next_token(logprobs_RV, noise_BT[rows_R, t, None], greedy)
        ids_BT[rows_R, t] = token_R1[:, 0]
        logprobs_BT[rows_R, t] = logprobs_RV.gather(1, token_R1)[:, 0]

        if t == max_new_tokens - 1:
            break
        has_ended_R |= torch.isin(token_R1[:, 0], ends)
        # The decoder drops ended rows when it can. No row is left if all have ended.
        token_R1, has_ended_R = decoder.drop(token_R1, has_ended_R)
        if len(token_R1) == 0:
            break
        logits_RV = decoder(token_R1)

    completions = []
    rows = zip(problems, ids_BT.tolist(), logprobs_BT.tolist(), strict=True)
    for problem, ids, logprobs in rows:
        # Cut at the first EOS. The row may have run on until it was dropped.
        is_end = [token in end_ids for token in ids]
        truncated = not any(is_end)
        length = max_new_tokens if truncated else is_end.index(True) + 1
        # Without the end token, but with other special tokens, since <answer> may be one
        shown = ids if truncated else ids[: length - 1]
        text = policy.tokenizer.decode(shown, skip_special_tokens=False)
        completion = Completion(problem, ids[:length], logprobs[:length], truncated, text)
        completions.append(completion)
    return completions


# ------------------------------------------------------------------------------------------- batch


def split_into_steps(completions, num_steps, args):
    """The rollout as tensors, for one epoch: a list of optimizer steps, each a list of `Batch`es, which
    go through the model one by one. Steps take the completions in their order; in a batch, all rows
    have similar lengths."""
    # Padding is a real token: a pad token's embedding may be 0, where some norms' gradient is NaN.
    filler = completions[0].problem.prompt_ids[0]
    steps = []
    for in_step in torch.arange(len(completions)).tensor_split(num_steps):
        step = []
        for rows in similar_lengths(completions, in_step.tolist(), args.max_micro_batch_tokens):
            batch = collate([completions[row] for row in rows], filler, args)
            batch.rows_B = torch.tensor(rows, device=args.torch_device)
            step.append(batch)
        steps.append(step)
    return steps


class TokenOutputs(NamedTuple):
    """What the training forward returns. None: not computed, as entropies and the aux loss with
    `only_logprobs`, or the experts of a dense model."""

    logprobs_BT: torch.Tensor | None = None  # of the sampled tokens; 0 on padding
    experts_BTLK: torch.Tensor | None = None  # that were chosen where each token is predicted, sorted
    router_logits: list | None = None  # only if asked for: L tensors (B, T, E), detached
    entropy_BT: torch.Tensor | None = None  # in nats; 0 on padding
    aux_loss: torch.Tensor | None = None  # an MoE's load-balancing loss, a scalar; 0 without one


@dataclasses.dataclass
class Batch:
    """Completions that go through the model together, one row each, padded on the right. Masks come
    from lengths, never from token ids, since EOS may double as padding. Scripts add fields of their
    own. The comments show a row of three prompt tokens (p) and two response tokens (r)."""

    completions: list  # of the rows
    tokens_BS: torch.Tensor  # p p p r r -
    is_token_BS: torch.Tensor  # 1 1 1 1 1 0: prompt and response
    predicts_BS: torch.Tensor  # 0 0 1 1 0 0: the next token is a response token
    predictor_N: torch.Tensor  # 2 3: the same as flat indices; with a mask, the host waits for a GPU
    mask_BT: torch.Tensor  # 1 1: the response, including EOS
    sampler_logprobs_BT: torch.Tensor
    rows_B: torch.Tensor | None = None  # the completions' indices in the rollout
    # set by the scripts, without gradient
    old: TokenOutputs = TokenOutputs()  # of the policy before the update
    ref: TokenOutputs = TokenOutputs()  # of the reference

    def __len__(self):
        return len(self.completions)

    def as_rows(self, x_N):
        """(N, ...) -> (B, T, ...), 0 on padding."""
        lengths = [len(c.ids) for c in self.completions]
        return pad_sequence(x_N.split(lengths), batch_first=True)

    def where_predicted(self, x):
        """x at every token, (B * S, ...) -> x where each response token is predicted, (B, T, ...)."""
        return self.as_rows(x[self.predictor_N])


def collate(completions, filler, args):
    """[Completion] -> `Batch` on `--device`, padded with the filler, a token id."""
    device = args.torch_device
    sequences = [torch.tensor(c.problem.prompt_ids + c.ids) for c in completions]
    tokens_BS = pad_sequence(sequences, batch_first=True, padding_value=filler)
    column_S = torch.arange(tokens_BS.shape[1])
    prompt_B1 = torch.tensor([[len(c.problem.prompt_ids)] for c in completions])
    response_B1 = torch.tensor([[len(c.ids)] for c in completions])
    end_B1 = prompt_B1 + response_B1
    predicts_BS = (prompt_B1 - 1 <= column_S) & (column_S < end_B1 - 1)
    logprobs = [torch.tensor(c.logprobs) for c in completions]
    return Batch(
        completions=completions,
        tokens_BS=tokens_BS.to(device),
        is_token_BS=(column_S < end_B1).to(device),
        predicts_BS=predicts_BS.to(device),
        predictor_N=predicts_BS.flatten().nonzero()[:, 0].to(device),
        mask_BT=(torch.arange(response_B1.max()) < response_B1).to(device),
        sampler_logprobs_BT=pad_sequence(logprobs, batch_first=True).to(device),
    )


# ---------------------------------------------------------------------------------------- log-probs


def token_logprobs(
    policy,
    batch,
    temperature,
    *,
    only_logprobs=False,
    entropy_grad=False,
    router_logits=False,
    routing=None,
):
    """The training forward: log-probs of the response tokens at the sampling temperature, in float32,
    and, unless `only_logprobs`, entropies and the aux loss. Entropies have a gradient only with
    `entropy_grad`. routing: the `Routing` that records what an MoE's routers choose [None: a new one].

    Every sequence begins in column 0, and causal attention never looks at the padding after it, so the
    model needs no attention mask and no positions."""
    routing = routing or Routing(policy.routers)
    with routing:
        # With this mask, transformers computes logits only where a response token is predicted: (N, V).
        output = policy.model(batch.tokens_BS, logits_to_keep=batch.predicts_BS, use_cache=False)
    ids_N = batch.tokens_BS.flatten()[batch.predictor_N + 1]  # the tokens that were predicted

    def logprobs_and_entropy(logits_NV, ids_N):
        logits_NV = logits_NV.float()
        if temperature != 1:
            logits_NV = logits_NV / temperature
        logprobs_NV = logits_NV.log_softmax(-1)
        logprobs_N = logprobs_NV.gather(-1, ids_N[:, None])[:, 0]
        if only_logprobs:
            return (logprobs_N,)
        if not entropy_grad:
            logprobs_NV = logprobs_NV.detach()
        return logprobs_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    # In float32, all logits at once would take too much memory.
    results = in_chunks(logprobs_and_entropy, output.logits, ids_N)
    outputs = TokenOutputs(batch.as_rows(results[0]))
    if policy.routers.num_experts > 0:
        experts_BTLK = batch.where_predicted(routing.choices()).sort().values
        outputs = outputs._replace(experts_BTLK=experts_BTLK)
    if router_logits:
        logits = [batch.where_predicted(layer.detach()) for layer in routing.token_logits()]
        outputs = outputs._replace(router_logits=logits)
    if not only_logprobs:
        aux_loss = balancing_loss(routing, batch.is_token_BS)
        outputs = outputs._replace(entropy_BT=batch.as_rows(results[1]), aux_loss=aux_loss)
    return outputs


# --------------------------------------------------------------------------------------- evaluation


def evaluate(policy, problems, grade, args, sampled=False):
    """Answers the held-out problems greedily and, with `sampled`, also `--eval_samples` times at the
    training temperature with fixed noise. Returns {"greedy": summary, "sampled": summary if asked,
    "examples": [[prompt, gold answer, text]]}, sampled ones if there are any. `rollout_summary` makes
    the summaries."""

    def answers(group_size, greedy):
        noise = torch.Generator().manual_seed(0)
        return grade(sample(policy, problems, group_size, args, noise, greedy=greedy))

    with clock("evaluation"):
        shown = answers(1, greedy=True)
        results = {"greedy": rollout_summary(shown)}
        if sampled:
            completions = answers(args.eval_samples, greedy=False)
            results["sampled"] = rollout_summary(completions, args.eval_samples)
            shown = completions[:: args.eval_samples]
    results["examples"] = [[c.problem.prompt, c.problem.answer, c.text] for c in shown[:3]]
    return results


# -------------------------------------------------------------------------------------------- model


def load_policy(args):
    """`--model` -> `Policy`, ready to sample."""
    policy = load_unchecked(args)
    prepare_sampling(policy, args)
    return policy


def prepare_sampling(policy, args):
    """Checks that a policy can sample, and chooses how: with CUDA graphs, if it can. UserError if it
    cannot, or if sampler, with its cache, and training forward give different log-probs in float32."""
    special = policy.tokenizer.all_special_ids
    ids = [token for token in range(len(policy.tokenizer)) if token not in special][:6]
    half = ids[: len(ids) // 2 + 1]
    # Three lengths, so that there is padding; each twice, since the check cuts one of two answers.
    prompts = [ids, ids, half, half, ids[:1], ids[:1]]
    with one_line(f"--model {args.model}: the sampler cannot run this architecture"):
        check_sampler(policy, prompts, args)
    policy.graphs, policy.why_no_graphs = graphs_for(policy, prompts, args.max_new_tokens)


def check_sampler(policy, prompts, args):
    """UserError if the log-probs of answers of up to four tokens differ."""
    problems = [Problem("", "", prompt) for prompt in prompts]
    num_tokens = min(4, args.max_new_tokens)  # the model may have no positions for more
    noise_BT = torch.zeros(len(prompts), num_tokens)
    for model in dict.fromkeys([policy.master, policy.model]):  # in float32 both are the same
        tried = policy.with_model(model)
        completions = sample_batch(tried, problems, noise_BT, temperature=1.0, greedy=True)
        for i in range(0, len(prompts), 2):
            short = completions[i]
            length = (num_tokens + 1) // 2
            completions[i] = short._replace(ids=short.ids[:length], logprobs=short.logprobs[:length])
        batch = collate(completions, prompts[0][0], args)
        with torch.no_grad():
            logprobs_BT = token_logprobs(tried, batch, temperature=1.0, only_logprobs=True).logprobs_BT
        gap = (logprobs_BT - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max().item()
        is_exact = model is policy.master and model.dtype == torch.float32
        if is_exact and not gap < 1e-3:  # a NaN fails this too
            raise UserError(f"its log-probs differ from the training forward's by {gap:.2g}")
