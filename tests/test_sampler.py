"""The sampler against a slow loop without cache and against the training forward; the layout of
completions; batches and their parts; packing."""

import copy
import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import script_args
from transformers import GPT2Config, GPT2LMHeadModel

import common
import dapo
import grpo
from common import Batch, Completion, Problem, collate, evaluate, load_problems, sample
from common import token_logprobs
from plumbing import ranks
from plumbing.data import ProblemStream
from plumbing.models import end_ids
from plumbing.packing import forward_packed
from plumbing.policy import Policy

MIXED = ("57+308=", "12+34=", "999+999=", "5=", "100+20=")


def settings(**changes):
    flags = {"max_new_tokens": 24, "temperature": 0.7, "rollout_batch_size": 1000}
    flags |= {"routing_replay": "none", "device": "cpu"}
    return SimpleNamespace(**(flags | changes))


def problems_of(policy, *texts):
    return [Problem(text, "", policy.tokenizer(text).input_ids) for text in texts]


def batch_of_ids(rows):
    """Of [(prompt ids, response ids)]."""
    completions = [Completion(Problem("", "", prompt), ids, [0.0] * len(ids)) for prompt, ids in rows]
    return collate(completions, settings())


def noise_of(seed):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def slow_sample(model, prompt, noise, temperature, cap, eos):
    """One completion by full forwards of the unpadded sequence: no cache, no batch, no mask."""
    ids = list(prompt)
    logprobs = []
    for t in range(cap):
        logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
        logp = logits.log_softmax(0)
        token = int((logp.exp().cumsum(0) <= noise[t].item()).sum().clamp(max=len(logp) - 1))
        ids.append(token)
        logprobs.append(logp[token].item())
        if token in eos:
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("compact_every", [1, 7])
def test_sampler_slow_loop_and_training_forward_agree(compact_every, tiny_policy, monkeypatch):
    """14: the same noise gives the same tokens one by one, without cache, padding or neighbors; also
    where finished rows run on for a while, as on a GPU. All three give the same log-probs."""
    monkeypatch.setitem(common.COMPACT_EVERY, "cpu", compact_every)
    args = settings()
    completions = sample(tiny_policy, problems_of(tiny_policy, *MIXED), 4, args, noise_of(2))
    noise = torch.rand(20, args.max_new_tokens, generator=noise_of(2))
    ends = {tiny_policy.tokenizer.eos_token_id}
    batch = collate(completions, args)
    with torch.no_grad():
        logprobs_BT = token_logprobs(tiny_policy, batch, args.temperature).logprobs_BT
    assert len({len(c.ids) for c in completions}) > 3
    for i, c in enumerate(completions):
        prompt = c.problem.prompt_ids
        ids, logprobs = slow_sample(tiny_policy.model, prompt, noise[i], 0.7, 24, ends)
        assert c.ids == ids and c.truncated == (ids[-1] not in ends)
        assert c.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert logprobs_BT[i, : len(ids)].tolist() == pytest.approx(logprobs, abs=1e-4)


def test_positions_count_from_the_first_token_of_each_prompt(tiny_model):
    """With learned positions; rotary ones are the same wherever a prompt begins."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=17, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.5)
    sizes |= dict(bos_token_id=2, eos_token_id=1)
    policy = Policy(GPT2LMHeadModel(GPT2Config(**sizes)).eval(), tiny_model[1])
    completions = sample(policy, problems_of(policy, *MIXED), 2, settings(), noise_of(2))
    noise = torch.rand(10, 24, generator=noise_of(2))
    ends = set(end_ids(policy.model, policy.tokenizer))
    for i, c in enumerate(completions):
        ids, logprobs = slow_sample(policy.model, c.problem.prompt_ids, noise[i], 0.7, 24, ends)
        assert c.ids == ids and c.logprobs == pytest.approx(logprobs, abs=1e-4)


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


def test_several_eos_ids_and_pad_that_is_eos(tiny_policy):
    """All ids of the generation config end a completion, and a pad that shares the EOS's id masks
    nothing away."""
    policy = copy.deepcopy(tiny_policy)
    tokenizer = policy.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    hash_id = tokenizer("#").input_ids[0]
    ends = {tokenizer.eos_token_id, hash_id}
    policy.model.generation_config.eos_token_id = list(ends)
    completions = sample(policy, problems_of(policy, *MIXED), 6, settings(), noise_of(6))
    assert hash_id in {c.ids[-1] for c in completions}
    for c in completions:
        assert ends.isdisjoint(c.ids[:-1]) and c.truncated == (c.ids[-1] not in ends)
    mask = collate(completions, settings()).mask_BT
    assert mask.sum(1).tolist() == [len(c.ids) for c in completions]


def test_samples_follow_the_whole_distribution(tiny_policy):
    """No top-k, no top-p, no temperature from elsewhere: first-token frequencies are the softmax, tails
    included."""
    policy = copy.deepcopy(tiny_policy)
    # These must not leak in.
    policy.model.generation_config.update(top_k=1, temperature=0.01, top_p=0.1, do_sample=True)
    (problem,) = problems_of(policy, "57+308=")
    count = 40_000
    args = settings(max_new_tokens=1, temperature=1.5)
    completions = sample(policy, [problem], count, args, noise_of(4))
    with torch.no_grad():
        p = (policy.model(torch.tensor([problem.prompt_ids])).logits[0, -1] / 1.5).softmax(0)
    counts = Counter(c.ids[0] for c in completions)
    for token, probability in enumerate(p.tolist()):
        sigma = (probability * (1 - probability) / count) ** 0.5
        assert counts[token] / count == pytest.approx(probability, abs=5 * sigma + 1e-5)


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


SIZES = {
    1000: [20],
    10: [8, 8, 4],  # two prompts at a time, of five
    1: [4, 4, 4, 4, 4],  # smaller than a group
    0: [12, 8],  # as many as an iteration has
}


def test_completions_do_not_depend_on_the_rollout_batch_size(tiny_policy, batches):
    """It is memory, not results: a prompt would get another one's noise, or a group come apart."""
    problems = problems_of(tiny_policy, *MIXED)
    results = []
    for size, expected in SIZES.items():
        args = settings(rollout_batch_size=size, prompts_per_iteration=3, group_size=4)
        results.append(sample(tiny_policy, problems, 4, args, noise_of(7)))
        assert batches == expected
        batches.clear()
    for completions in results[1:]:
        for c, whole in zip(completions, results[0], strict=True):
            assert c._replace(logprobs=[]) == whole._replace(logprobs=[])
            assert c.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert len({tuple(c.ids) for c in results[0]}) > 10


def test_an_evaluation_does_not_depend_on_the_rollout_batch_size(tiny_policy, batches):
    """Accuracies before and after would not be comparable between runs."""
    _, args = script_args("grpo", device="cpu", num_held_out=20, rollout_batch_size=1000)
    stream, problems = load_problems(args, tiny_policy)
    assert len({len(problem.prompt_ids) for problem in problems}) > 1
    assert {p.prompt for p in problems}.isdisjoint(p.prompt for p in stream.problems)
    batches.clear()

    def grade(completions):  # so that something varies
        return [c._replace(verdict=["wrong", "correct"][len(c.text) % 2]) for c in completions]

    results = []
    for size, count in ((1000, 1), (7, 3)):
        args.rollout_batch_size = size
        results.append(evaluate(tiny_policy, problems, grade, args, sampled=True))
        assert len(batches) == 2 * count
        batches.clear()
    assert results[0] == results[1]
    assert 0 < results[0]["greedy"]["accuracy"] < 1 and results[0]["greedy"] != results[0]["sampled"]


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


# ------------------------------------------------------------------------- batches and their parts


def numbered_batch(B, S=8):
    """All tensors that a script sets, with the number of the row in every place."""
    fields = {}
    for field in dataclasses.fields(Batch):
        fields[field.name] = torch.arange(B)[:, None].repeat(1, S)
    return Batch(**fields)


def rows_of(*batches):
    """The numbers of their rows, which are the same in all tensors."""
    numbers = []
    for batch in batches:
        tensors = [getattr(batch, field.name) for field in dataclasses.fields(Batch)]
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        numbers += tensors[0][:, 0].tolist()
    return numbers


def test_a_part_of_a_batch_is_a_view_of_every_tensor():
    batch = numbered_batch(9)
    part = batch[2:5]
    assert len(batch) == 9 and len(part) == 3 and rows_of(part) == [2, 3, 4]
    for field in dataclasses.fields(Batch):
        assert getattr(part, field.name)._base is getattr(batch, field.name)
    part.values_BT += 1
    assert batch.values_BT[:, 0].tolist() == [0, 1, 3, 4, 5, 5, 6, 7, 8]
    batch.returns_BT = None
    assert batch[2:5].returns_BT is None
    whole = batch_of_ids([([3], [0]), ([3, 4], [5, 0, 7]), ([3], [4, 5])])  # 0 is no padding there
    assert whole.lengths == [[2, 5, 3], [1, 3, 2]] and whole[1:].lengths == [[5, 3], [3, 2]]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 7, 30])
@pytest.mark.parametrize("micro_batch_size", [0, 1, 2, 5])
def test_minibatches_tile_the_rollout_and_micro_batches_their_rows(
    world, count, micro_batch_size, monkeypatch
):
    """In their order, each row once in an epoch, and in one process; sizes differ by one at most. No
    process is without a row."""
    monkeypatch.setattr(ranks, "WORLD", world)
    flags = {"num_minibatches": count, "micro_batch_size": micro_batch_size, "update_epochs": 2}
    args = SimpleNamespace(**flags)
    batch = numbered_batch(23)
    parts = batch.parts(args)
    assert rows_of(*parts) == list(range(23))
    assert len(parts) == min(count, 23 // world)
    minibatches = batch.minibatches(args)
    assert rows_of(*minibatches) == 2 * list(range(23))
    for minibatch in minibatches:
        micro_batches = []
        for rank in range(world):
            monkeypatch.setattr(ranks, "RANK", rank)
            mine = minibatch.micro_batches(args)
            sizes = [len(micro) for micro in mine]
            assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
            assert max(sizes) <= (micro_batch_size or 23)
            micro_batches += mine
        assert rows_of(*micro_batches) == rows_of(minibatch)


@pytest.mark.parametrize("S, expected", [(256, [64]), (257, [32, 32]), (16_384, [1] * 64)])
def test_a_micro_batch_has_at_most_16384_tokens(S, expected):
    """As wide as the rollout's tensors, padding included; a longer row has a pass of its own."""
    args = SimpleNamespace(micro_batch_size=0)
    batch = numbered_batch(64, S)
    assert [len(micro) for micro in batch.micro_batches(args)] == expected
    assert [len(micro) for micro in numbered_batch(2, 30_000).micro_batches(args)] == [1, 1]


@pytest.mark.parametrize("script", [grpo, dapo])
def test_any_micro_batches_have_the_loss_and_gradient_of_the_step(script, tiny_policy):
    """13, through the model: no row depends on those that it is computed with."""
    policy = copy.deepcopy(tiny_policy)
    problems = problems_of(policy, *MIXED)
    batch = collate(sample(policy, problems, 2, settings(), noise_of(8)), settings())
    batch.old_logprobs_BT = batch.sampler_logprobs_BT - 0.1
    batch.advantages = torch.linspace(-1, 2, 10)[:, None]
    normalizer = {"num_tokens": batch.mask_BT.sum()} if script is dapo else {"num_sequences": 10}
    results = []
    for size in (10, 4, 1):
        total = 0
        policy.model.zero_grad()
        for micro in batch.micro_batches(SimpleNamespace(micro_batch_size=size)):
            outputs = token_logprobs(policy, micro, 0.7)
            inputs = outputs.logprobs_BT, micro.old_logprobs_BT, micro.advantages, micro.mask_BT
            loss, _ = script.policy_loss(*inputs, **normalizer)
            loss.backward()
            total += loss.detach()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        results.append((total, gradient))
    for total, gradient in results[1:]:
        assert total.item() == pytest.approx(results[0][0].item(), rel=1e-5)
        assert (gradient - results[0][1]).norm() < 1e-4 * gradient.norm()


# ------------------------------------------------------------------------------ the training forward


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


@pytest.mark.parametrize("lengths", [(3, 9, 4, 4, 2), (5, 5, 5, 5), (4, 5, 4, 6, 4, 5, 30), (7,)])
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
            pair = getattr(together, name)[i, :n], getattr(alone, name)[0]
            torch.testing.assert_close(*pair, atol=1e-5, rtol=0)
        assert (together.logprobs_BT[i, n:] == 0).all() and (together.entropy_BT[i, n:] == 0).all()
        for a, b in zip(together.router_logits, alone.router_logits, strict=True):
            torch.testing.assert_close(a[i, :n], b[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        is_token = forward_packed(model.base_model, batch_of_ids(rows)).is_token
    assert is_token.sum() == sum(len(prompt) + len(ids) for prompt, ids in rows)
    if len(set(lengths)) > 2:
        assert len(is_token) < len(rows)
