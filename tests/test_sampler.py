"""The sampler against the training forward and against a slow loop without cache; masks, layout,
truncation."""

import copy
import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import script_args

import common
from common import Batch, Completion, Problem, collate, evaluate, load_problems, sample
from common import token_logprobs
from plumbing import forward_packed, plan_memory
from plumbing.args import parse_args
from plumbing.data import ProblemStream


def settings(**changes):
    flags = {"max_new_tokens": 24, "temperature": 0.7, "rollout_batch_size": 1000}
    flags |= {"reads_sampler_experts": False, "routing_replay": "none", "device": "cpu"}
    return SimpleNamespace(**(flags | changes))


def problems_of(policy, *texts):
    return [Problem(text, "", policy.tokenizer(text).input_ids) for text in texts]


def batch_of_ids(rows):
    """Of [(prompt ids, response ids)]."""
    completions = [Completion(Problem("", "", prompt), ids, [0.0] * len(ids)) for prompt, ids in rows]
    return collate(completions, settings())


def noise_of(seed):
    return torch.Generator().manual_seed(seed)


MIXED = ("57+308=", "12+34=", "999+999=", "5=", "100+20=")


@torch.no_grad()
def slow_sample(model, prompt, noise, temperature, cap, eos):
    """One completion by full forwards of the unpadded sequence: no cache, no batch, no mask."""
    ids, logprobs = list(prompt), []
    for t in range(cap):
        logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
        logp = logits.log_softmax(0)
        token = int((logp.exp().cumsum(0) <= noise[t].item()).sum().clamp(max=len(logp) - 1))
        ids.append(token)
        logprobs.append(logp[token].item())
        if token in eos:
            break
    return ids[len(prompt) :], logprobs


def test_prefix_sharing_and_row_dropping_change_nothing(tiny_policy):
    """The same noise gives the same tokens one by one, without cache, padding or neighbours."""
    args = settings(temperature=1.0)
    completions = sample(tiny_policy, problems_of(tiny_policy, *MIXED), 4, args, noise_of(2))
    noise = torch.rand(20, args.max_new_tokens, generator=noise_of(2))
    ends = {tiny_policy.tokenizer.eos_token_id}
    for i, c in enumerate(completions):
        ids, logprobs = slow_sample(
            tiny_policy.model, c.problem.prompt_ids, noise[i], 1.0, args.max_new_tokens, ends
        )
        assert c.ids == ids
        torch.testing.assert_close(torch.tensor(c.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=0)


def test_layout_and_ends(tiny_policy):
    """Row i * G + g belongs to problem i; the one EOS is the last token; no EOS means cut off at the
    cap."""
    tokenizer = tiny_policy.tokenizer
    problems = problems_of(tiny_policy, *MIXED)
    completions = sample(tiny_policy, problems, 6, settings(max_new_tokens=12), noise_of(3))
    assert [c.problem for c in completions] == [p for p in problems for _ in range(6)]
    for c in completions:
        assert c.ids.count(tokenizer.eos_token_id) == (not c.truncated)
        assert len(c.ids) == 12 if c.truncated else c.ids[-1] == tokenizer.eos_token_id
        assert c.text == tokenizer.decode([i for i in c.ids if i != tokenizer.eos_token_id])
        assert len(c.logprobs) == len(c.ids)
    assert 0 < sum(c.truncated for c in completions) < len(completions)


def test_samples_follow_the_whole_distribution(tiny_policy):
    """No top-k, no top-p, no temperature from elsewhere: first-token frequencies are the softmax, tails
    included."""
    policy = copy.deepcopy(tiny_policy)
    # These must not leak in.
    hostile = dict(top_k=1, temperature=0.01, top_p=0.1, do_sample=True)
    policy.model.generation_config.update(**hostile)
    (problem,), n = problems_of(policy, "57+308="), 40_000
    args = settings(max_new_tokens=1, temperature=1.5)
    completions = sample(policy, [problem], n, args, noise_of(4))
    with torch.no_grad():
        p = (policy.model(torch.tensor([problem.prompt_ids])).logits[0, -1] / 1.5).softmax(0)
    counts = Counter(c.ids[0] for c in completions)
    for token, probability in enumerate(p.tolist()):
        sigma = (probability * (1 - probability) / n) ** 0.5
        assert counts[token] / n == pytest.approx(probability, abs=5 * sigma + 1e-5)


SIZES = {
    1000: [20],
    20: [20],
    4: [4, 4, 4, 4, 4],  # a whole group
    10: [8, 8, 4],  # two prompts at a time, of five
    1: [4, 4, 4, 4, 4],  # smaller than a group
}


@pytest.fixture
def batches(monkeypatch):
    """How many completions were sampled at a time, a number for each `sample_batch`."""
    counts = []
    original = common.sample_batch

    def sample_batch(policy, problems, noise_NT, **keywords):
        counts.append(len(noise_NT))
        return original(policy, problems, noise_NT, **keywords)

    monkeypatch.setattr(common, "sample_batch", sample_batch)
    return counts


@pytest.mark.parametrize("greedy", [False, True])
def test_completions_do_not_depend_on_the_rollout_batch_size(greedy, tiny_policy, batches):
    """It is memory, not results: a prompt would get another one's noise, or a group come apart."""
    problems = problems_of(tiny_policy, *MIXED)
    results = []
    for size, expected in SIZES.items():
        args = settings(rollout_batch_size=size)
        results.append(sample(tiny_policy, problems, 4, args, noise_of(7), greedy))
        assert batches == expected
        batches.clear()
    for completions in results[1:]:
        for c, whole in zip(completions, results[0], strict=True):
            assert c._replace(logprobs=[]) == whole._replace(logprobs=[])
            assert c.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert greedy or len({tuple(c.ids) for c in results[0]}) > 10


def test_an_evaluation_does_not_depend_on_the_rollout_batch_size(tiny_policy, batches):
    """Accuracies before and after would not be comparable between runs."""
    _, args = script_args("grpo", num_held_out=20, rollout_batch_size=1000)
    problems = load_problems(args, tiny_policy)[1]
    assert len({len(problem.prompt_ids) for problem in problems}) > 1

    def verify(text, answer, truncated):  # that something varies
        return float(len(text)), "truncated" if truncated else ["wrong", "correct"][len(text) % 2]

    results = []
    for size, count in ((1000, 1), (20, 1), (7, 3), (1, 20)):
        args.rollout_batch_size = size
        results.append(evaluate(tiny_policy, problems, verify, args, sampled=True))
        assert len(batches) == 2 * count
        batches.clear()
    assert results[1:] == results[:-1]
    assert 0 < results[0]["greedy"]["accuracy"] < 1 and results[0]["greedy"] != results[0]["sampled"]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_all_are_sampled_at_once_by_default(name, monkeypatch, tiny_policy):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu"])
    args = parse_args(script_args(name)[0].Args)
    problems = problems_of(tiny_policy, *MIXED)
    args = plan_memory(args, tiny_policy, ProblemStream(problems, 1), held_out=problems)
    assert args.rollout_batch_size == 256


def planned(policy, prompt="999+999=", **changes):
    """(`--micro_batch_size` that 0 becomes, completions in a minibatch, tokens of each)."""
    _, args = script_args("grpo", device="cpu", rollout_batch_size=256, **changes)
    problems = problems_of(policy, "1=", prompt, "2+2=")
    args = plan_memory(args, policy, ProblemStream(problems[:2], 1), problems[2:])
    minibatch_size = args.prompts_per_iteration * args.group_size // args.num_minibatches
    return args.micro_batch_size, minibatch_size, len(prompt) + args.max_new_tokens


def test_a_micro_batch_is_a_whole_minibatch_in_the_default_job(tiny_policy):
    assert planned(tiny_policy) == (64, 64, 8 + 48)


PLANS = [
    {"max_new_tokens": 2000},
    {"max_new_tokens": 248},  # with the prompt 256 tokens: 64 completions have 16,384
    {"max_new_tokens": 249},
    {"max_new_tokens": 500, "prompts_per_iteration": 100},
    {"max_new_tokens": 10, "prompt": "1" * 900},
    {"max_new_tokens": 5000, "prompt": "1" * 3192},
    {"max_new_tokens": 16_376},
    {"max_new_tokens": 16_377},
    {"max_new_tokens": 30_000, "num_minibatches": 1},
]


@pytest.mark.parametrize("changes", PLANS, ids=str)
def test_a_micro_batch_has_at_most_16384_tokens(changes, tiny_policy):
    """Prompt and cap counted; in as few passes as that allows, of much the same size; and a completion
    that has more tokens gets a pass of its own."""
    size, minibatch_size, width = planned(tiny_policy, **changes)
    assert 1 <= size <= minibatch_size
    assert size * width <= 16_384 or size == 1
    passes = math.ceil(minibatch_size / size)
    fewer = math.ceil(minibatch_size / (passes - 1)) if passes > 1 else math.inf
    assert fewer * width > 16_384
    batch = Batch(*[torch.zeros(minibatch_size, 1)] * 4)
    sizes = [len(rows) for rows, _ in batch.micro_batches(torch.arange(minibatch_size), size)]
    assert len(sizes) == passes and sum(sizes) == minibatch_size
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1


def test_a_micro_batch_size_that_is_given_stays(tiny_policy):
    assert planned(tiny_policy, micro_batch_size=5)[0] == 5


def test_first_eos_counts_when_rows_are_dropped_late(tiny_policy, monkeypatch):
    """On a GPU ended rows run on for a while; what they make after their EOS must not get into the
    completion."""
    problems = problems_of(tiny_policy, *MIXED)
    now = sample(tiny_policy, problems, 4, settings(), noise_of(5))
    monkeypatch.setitem(common.COMPACT_EVERY, "cpu", 7)
    late = sample(tiny_policy, problems, 4, settings(), noise_of(5))
    assert [c.ids for c in now] == [c.ids for c in late]
    assert [c.truncated for c in now] == [c.truncated for c in late]


def test_several_eos_ids_and_pad_that_is_eos(tiny_policy):
    """All ids of the generation config end a completion, and a pad that shares the EOS's id masks
    nothing away."""
    policy = copy.deepcopy(tiny_policy)
    tokenizer = policy.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    hash_id = tokenizer("#").input_ids[0]
    policy.model.generation_config.eos_token_id = [tokenizer.eos_token_id, hash_id]
    completions = sample(policy, problems_of(policy, *MIXED), 6, settings(), noise_of(6))
    ends = Counter(c.ids[-1] for c in completions if not c.truncated)
    assert ends[hash_id] > 0
    assert all(
        token not in (hash_id, tokenizer.eos_token_id) for c in completions for token in c.ids[:-1]
    )
    mask = collate(completions, settings()).mask_BT
    assert mask.sum(1).tolist() == [len(c.ids) for c in completions]


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunked_logits_are_the_same(entropy_grad, tiny_policy):
    """Log-probs, entropies and gradients do not depend on how many logits exist at a time."""
    policy = copy.deepcopy(tiny_policy)
    batch = batch_of_ids([(p.prompt_ids, [7, 8, 9, 1]) for p in problems_of(policy, *MIXED)])
    results = []
    for max_logits in (2**26, 3 * 17, 1):
        outputs = token_logprobs(policy, batch, 0.7, entropy_grad, max_logits)
        assert outputs.entropy_BT.requires_grad == entropy_grad
        (outputs.logprobs_BT.sum() + outputs.entropy_BT.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in policy.parameters()])
        results.append((outputs.logprobs_BT, outputs.entropy_BT, grads))
        policy.model.zero_grad()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=5e-5, rtol=1e-5)


def test_every_epoch_is_a_permutation_and_position_is_all_the_state():
    problems = list(range(10))
    taken = ProblemStream(problems, seed=1).take(35)
    for epoch in range(3):
        assert sorted(taken[10 * epoch : 10 * epoch + 10]) == problems
    assert taken[:10] != taken[10:20] and taken[:10] != ProblemStream(problems, seed=2).take(10)
    pieces = []
    state = {"position": 0}
    for _ in range(7):
        stream = ProblemStream(problems, seed=1)
        stream.load_state_dict(state)
        pieces += stream.take(5)
        state = stream.state_dict()
    assert pieces == taken


@pytest.mark.parametrize(
    "lengths", [(3, 9, 4, 4, 2), (5, 5, 5, 5), (4, 5, 4, 6, 4, 5, 30), (1, 1), (7,)]
)
def test_packed_sequences_do_not_see_each_other(tiny_policy, lengths):
    """Side by side in shared rows, each sequence has the log-probs, entropies, experts and gradients
    that it has alone; and rows are shared."""
    policy = copy.deepcopy(tiny_policy)
    model = policy.model
    generator = noise_of(sum(lengths))

    def ids(count):
        return torch.randint(3, model.config.vocab_size, (count,), generator=generator).tolist()

    rows = [(ids(1 + i % 3), ids(n)) for i, n in enumerate(lengths)]
    together = token_logprobs(policy, batch_of_ids(rows), 0.9)
    together.logprobs_BT.sum().backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    for i, row in enumerate(rows):
        alone = token_logprobs(policy, batch_of_ids([row]), 0.9)
        alone.logprobs_BT.sum().backward()
        n = len(row[1])
        for name in ("logprobs_BT", "entropy_BT", "experts_BTLK"):
            a, b = getattr(together, name)[i], getattr(alone, name)[0]
            torch.testing.assert_close(a[:n], b, atol=1e-5, rtol=0)
        assert (together.logprobs_BT[i, n:] == 0).all() and (together.entropy_BT[i, n:] == 0).all()
        for a, b in zip(together.router_logits, alone.router_logits, strict=True):
            torch.testing.assert_close(a[i, :n], b[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        is_token = forward_packed(model.base_model, batch_of_ids(rows)).is_token
    assert is_token.sum() == sum(len(prompt) + len(ids) for prompt, ids in rows)
    if len(set(lengths)) > 2:
        assert len(is_token) < len(rows)
