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
from common import Completion, collate, evaluate, load_problems, pad, sample
from common import take_problems, token_logprobs
from harness import parse_args
from memory import plan_memory
from packing import forward_packed
from ranks import micro_batches


def settings(**changes):
    flags = {"max_new_tokens": 24, "temperature": 0.7, "rollout_batch_size": 1000}
    flags |= {"rollout_dtype": "same", "routing_replay": "none"}
    return SimpleNamespace(**(flags | changes))


def prompts_of(tokenizer, *texts):
    return [tokenizer(text).input_ids for text in texts]


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


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_equal_those_of_the_training_forward(tiny_model, temperature):
    """14: mixed prompt lengths, shared prefixes, rows that ended and were dropped, temperature other
    than 1."""
    model, tokenizer = tiny_model
    args, generator = settings(temperature=temperature), torch.Generator().manual_seed(1)
    completions = sample(model, tokenizer, prompts_of(tokenizer, *MIXED), 8, args, generator)
    assert len({len(c.ids) for c in completions}) > 3, "rows should end at different steps"
    batch = collate(completions, "cpu")
    with torch.no_grad():
        outputs = token_logprobs(model, batch, temperature)
    gap = (outputs.logprobs_BT - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max()
    assert gap < 1e-4
    with torch.no_grad():  # the test can tell: the log-probs at another temperature are other ones
        other = token_logprobs(model, batch, temperature + 0.2).logprobs_BT
    assert (other - batch.sampler_logprobs_BT)[batch.mask_BT].abs().max() > 1e-2


def test_prefix_sharing_and_row_dropping_change_nothing(tiny_model):
    """The same noise gives the same tokens one by one, without cache, padding or neighbours."""
    model, tokenizer = tiny_model
    args, prompts = settings(temperature=1.0), prompts_of(tokenizer, *MIXED)
    completions = sample(model, tokenizer, prompts, 4, args, torch.Generator().manual_seed(2))
    noise = torch.rand(20, args.max_new_tokens, generator=torch.Generator().manual_seed(2))
    for i, c in enumerate(completions):
        ids, logprobs = slow_sample(
            model, prompts[i // 4], noise[i], 1.0, args.max_new_tokens, {tokenizer.eos_token_id}
        )
        assert c.ids == ids
        torch.testing.assert_close(torch.tensor(c.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=0)


def test_layout_and_ends(tiny_model):
    """Row i * G + g belongs to prompt i; the one EOS is the last token; no EOS means cut off at the
    cap."""
    model, tokenizer = tiny_model
    prompts = prompts_of(tokenizer, *MIXED)
    completions = sample(
        model, tokenizer, prompts, 6, settings(max_new_tokens=12), torch.Generator().manual_seed(3)
    )
    assert [c.prompt_ids for c in completions] == [p for p in prompts for _ in range(6)]
    for c in completions:
        assert c.ids.count(tokenizer.eos_token_id) == (not c.truncated)
        assert len(c.ids) == 12 if c.truncated else c.ids[-1] == tokenizer.eos_token_id
        assert c.text == tokenizer.decode([i for i in c.ids if i != tokenizer.eos_token_id])
        assert len(c.logprobs) == len(c.ids)
    assert 0 < sum(c.truncated for c in completions) < len(completions)


def test_samples_follow_the_whole_distribution(tiny_model):
    """No top-k, no top-p, no temperature from elsewhere: first-token frequencies are the softmax, tails
    included."""
    model, tokenizer = copy.deepcopy(tiny_model[0]), tiny_model[1]
    # These must not leak in.
    model.generation_config.update(top_k=1, temperature=0.01, top_p=0.1, do_sample=True)
    prompt, n = prompts_of(tokenizer, "57+308=")[0], 40_000
    args = settings(max_new_tokens=1, temperature=1.5)
    completions = sample(model, tokenizer, [prompt], n, args, torch.Generator().manual_seed(4))
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(0)
    counts = Counter(c.ids[0] for c in completions)
    for token, probability in enumerate(p.tolist()):
        sigma = (probability * (1 - probability) / n) ** 0.5
        assert counts[token] / n == pytest.approx(probability, abs=5 * sigma + 1e-5)


def test_greedy_is_the_argmax(tiny_model):
    model, tokenizer = tiny_model
    prompts = prompts_of(tokenizer, *MIXED)
    for prompt, c in zip(
        prompts, sample(model, tokenizer, prompts, 1, settings(), greedy=True), strict=True
    ):
        ids = list(prompt)
        for token in c.ids:
            with torch.no_grad():
                assert model(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)


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

    def sample_batch(model, tokenizer, prompts, noise_NT, *args):
        counts.append(len(noise_NT))
        return original(model, tokenizer, prompts, noise_NT, *args)

    monkeypatch.setattr(common, "sample_batch", sample_batch)
    return counts


@pytest.mark.parametrize("greedy", [False, True])
def test_completions_do_not_depend_on_the_rollout_batch_size(greedy, tiny_model, batches):
    """It is memory, not results: a prompt would get another one's noise, or a group come apart."""
    model, tokenizer = tiny_model
    prompts = prompts_of(tokenizer, *MIXED)
    results = []
    for size, expected in SIZES.items():
        args, generator = settings(rollout_batch_size=size), torch.Generator().manual_seed(7)
        results.append(sample(model, tokenizer, prompts, 4, args, generator, greedy))
        assert batches == expected
        batches.clear()
    for completions in results[1:]:
        for c, whole in zip(completions, results[0], strict=True):
            assert c._replace(logprobs=[]) == whole._replace(logprobs=[])
            assert c.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert greedy or len({tuple(c.ids) for c in results[0]}) > 10


def test_an_evaluation_does_not_depend_on_the_rollout_batch_size(tiny_model, batches):
    """Accuracies before and after would not be comparable between runs."""
    _, args = script_args("grpo", num_held_out=20, rollout_batch_size=1000)
    problems = load_problems(args, *tiny_model)[1]
    assert len({len(problem.prompt_ids) for problem in problems}) > 1

    def verify(text, answer, truncated):  # that something varies
        return float(len(text)), "truncated" if truncated else ["wrong", "correct"][len(text) % 2]

    results = []
    for size, count in ((1000, 1), (20, 1), (7, 3), (1, 20)):
        args.rollout_batch_size = size
        results.append(evaluate(*tiny_model, problems, args, verify, sampled=True))
        assert len(batches) == 2 * count
        batches.clear()
    assert results[1:] == results[:-1]
    assert 0 < results[0]["greedy"]["accuracy"] < 1 and results[0]["greedy"] != results[0]["sampled"]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_all_are_sampled_at_once_by_default(name, monkeypatch, tiny_model):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu"])
    args = parse_args(script_args(name)[0].Args)
    plan_memory(args, tiny_model[0], [SimpleNamespace(prompt_ids=[1])], parts={})
    assert args.rollout_batch_size == 256


def planned(model, tokenizer, prompt="999+999=", **changes):
    """(`--micro_batch_size` that 0 becomes, completions in a minibatch, tokens of each)."""
    _, args = script_args("grpo", device="cpu", rollout_batch_size=256, **changes)
    problems = [common.Problem(text, "1", tokenizer(text).input_ids) for text in ("1=", prompt, "2+2=")]
    plan_memory(args, model, problems, parts={})
    minibatch_size = args.prompts_per_iteration * args.group_size // args.num_minibatches
    return args.micro_batch_size, minibatch_size, len(prompt) + args.max_new_tokens


def test_a_micro_batch_is_a_whole_minibatch_in_the_default_job(tiny_model):
    assert planned(*tiny_model) == (64, 64, 8 + 48)


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
def test_a_micro_batch_has_at_most_16384_tokens(changes, tiny_model):
    """Prompt and cap counted; in as few passes as that allows, of much the same size; and a completion
    that has more tokens gets a pass of its own."""
    size, minibatch_size, width = planned(*tiny_model, **changes)
    assert 1 <= size <= minibatch_size
    assert size * width <= 16_384 or size == 1
    passes = math.ceil(minibatch_size / size)
    fewer = math.ceil(minibatch_size / (passes - 1)) if passes > 1 else math.inf
    assert fewer * width > 16_384
    sizes = [len(rows) for rows in micro_batches(torch.arange(minibatch_size), size)]
    assert len(sizes) == passes and sum(sizes) == minibatch_size
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1


def test_a_micro_batch_size_that_is_given_stays(tiny_model):
    assert planned(*tiny_model, micro_batch_size=5)[0] == 5


def test_first_eos_counts_when_rows_are_dropped_late(tiny_model):
    """On a GPU ended rows run on for a while; what they make after their EOS must not get into the
    completion."""
    model, tokenizer = tiny_model
    prompts = prompts_of(tokenizer, *MIXED)
    now = sample(
        model, tokenizer, prompts, 4, settings(), torch.Generator().manual_seed(5), drop_every=1
    )
    late = sample(
        model, tokenizer, prompts, 4, settings(), torch.Generator().manual_seed(5), drop_every=7
    )
    assert [c.ids for c in now] == [c.ids for c in late]
    assert [c.truncated for c in now] == [c.truncated for c in late]


def test_several_eos_ids_and_pad_that_is_eos(tiny_model):
    """All ids of the generation config end a completion, and a pad that shares the EOS's id masks
    nothing away."""
    model, tokenizer = copy.deepcopy(tiny_model[0]), copy.deepcopy(tiny_model[1])
    tokenizer.pad_token = tokenizer.eos_token
    hash_id = tokenizer("#").input_ids[0]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, hash_id]
    completions = sample(
        model, tokenizer, prompts_of(tokenizer, *MIXED), 6, settings(), torch.Generator().manual_seed(6)
    )
    ends = Counter(c.ids[-1] for c in completions if not c.truncated)
    assert ends[hash_id] > 0
    assert all(
        token not in (hash_id, tokenizer.eos_token_id) for c in completions for token in c.ids[:-1]
    )
    mask = collate(completions, "cpu").mask_BT
    assert mask.sum(1).tolist() == [len(c.ids) for c in completions]


def test_the_eos_is_trained_and_what_follows_is_masked(tiny_model):
    """A gradient reaches the log-prob of the EOS itself, and none comes from the columns after it."""
    import grpo

    model, tokenizer = tiny_model
    eos = tokenizer.eos_token_id
    rows = [Completion([5, 6], [7, 8, eos], [0.0] * 3), Completion([5], [7, 8, 9, 10, eos], [0.0] * 5)]
    batch = collate(rows, "cpu")
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, eos, 0, 0], [0, 5, 7, 8, 9, 10, eos]]
    assert batch.attention_BS.tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]
    assert batch.mask_BT.tolist() == [[True, True, True, False, False], [True] * 5]
    lp = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss, _ = grpo.policy_loss(lp, torch.zeros(2, 5), advantages, batch.mask_BT)
    loss.backward()
    assert (lp.grad[0, :3] != 0).all() and (lp.grad[0, 3:] == 0).all() and (lp.grad[1] != 0).all()


def test_logprob_of_a_row_does_not_depend_on_its_padding(tiny_model):
    model, tokenizer = tiny_model
    rows = [Completion(p, [7, 8, 9, 1], [0.0] * 4) for p in prompts_of(tokenizer, *MIXED)]
    rows.append(Completion([5] * 20, [6] * 15, [0.0] * 15))
    with torch.no_grad():
        together = token_logprobs(model, collate(rows, "cpu"), 1.0)
        for i, row in enumerate(rows):
            alone = token_logprobs(model, collate([row], "cpu"), 1.0)
            n = len(row.ids)
            torch.testing.assert_close(
                together.logprobs_BT[i, :n], alone.logprobs_BT[0], atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                together.entropy_BT[i, :n], alone.entropy_BT[0], atol=1e-5, rtol=0
            )
            assert torch.equal(together.experts_BTLK[i, :n], alone.experts_BTLK[0])


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunked_logits_are_the_same(entropy_grad, tiny_model):
    """Log-probs, entropies and gradients do not depend on how many logits exist at a time."""
    model, tokenizer = copy.deepcopy(tiny_model[0]), tiny_model[1]
    batch = collate(
        [Completion(p, [7, 8, 9, 1], [0.0] * 4) for p in prompts_of(tokenizer, *MIXED)], "cpu"
    )
    results = []
    for chunk_numbers in (2**26, 3 * 17, 1):
        outputs = token_logprobs(model, batch, 0.7, entropy_grad, chunk_numbers)
        assert outputs.entropy_BT.requires_grad == entropy_grad
        (outputs.logprobs_BT.sum() + outputs.entropy_BT.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((outputs.logprobs_BT, outputs.entropy_BT, grads))
        model.zero_grad()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)


def gradient_of(model, scalar):
    return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(model.parameters()))])


def test_the_gradient_of_the_entropy_is_there_if_asked_for(tiny_model):
    """Against torch's own entropy of the logits of each completion alone; else there is none."""
    model, tokenizer = tiny_model
    rows = [Completion(p, [7, 8, 9, 1], [0.0] * 4) for p in prompts_of(tokenizer, *MIXED)]
    batch = collate(rows, "cpu")
    outputs = token_logprobs(model, batch, 0.7, entropy_grad=True)
    expected = 0.0
    for row in rows:
        logits = model(torch.tensor([row.prompt_ids + row.ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        expected += torch.distributions.Categorical(logits=logits / 0.7).entropy().sum()
    torch.testing.assert_close(outputs.entropy_BT.sum(), expected)
    theirs = gradient_of(model, expected)
    assert theirs.norm() > 0.1
    torch.testing.assert_close(
        gradient_of(model, outputs.entropy_BT.sum()), theirs, atol=1e-4, rtol=1e-3
    )
    plain = token_logprobs(model, batch, 0.7)
    assert not plain.entropy_BT.requires_grad and plain.logprobs_BT.requires_grad
    torch.testing.assert_close(plain.entropy_BT, outputs.entropy_BT.detach())
    with torch.no_grad():  # old log-probs: no graph, whatever is asked for
        assert not token_logprobs(model, batch, 0.7, entropy_grad=True).entropy_BT.requires_grad


def test_pad():
    assert pad([[1], [2, 3]], "cpu").tolist() == [[1, 0], [2, 3]]
    assert pad([[1], [2, 3]], "cpu", left=True).tolist() == [[0, 1], [2, 3]]


def test_every_epoch_is_a_permutation_and_position_is_all_the_state():
    problems = list(range(10))
    stream = take_problems(problems, 0, 35, seed=1)
    for epoch in range(3):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == problems
    assert stream[:10] != stream[10:20] and stream[:10] != take_problems(problems, 0, 10, seed=2)
    pieces = [take_problems(problems, position, 5, seed=1) for position in range(0, 35, 5)]
    assert sum(pieces, []) == stream


@pytest.mark.parametrize(
    "lengths", [(3, 9, 4, 4, 2), (5, 5, 5, 5), (4, 5, 4, 6, 4, 5, 30), (1, 1), (7,)]
)
def test_packed_sequences_do_not_see_each_other(tiny_model, lengths):
    """Side by side in shared rows, each sequence has the log-probs, entropies, experts and gradients
    that it has alone; and rows are shared."""
    model, _ = tiny_model
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(sum(lengths))

    def ids(count):
        return torch.randint(3, model.config.vocab_size, (count,), generator=generator).tolist()

    rows = [Completion(ids(1 + i % 3), ids(n), [0.0] * n) for i, n in enumerate(lengths)]
    together = token_logprobs(model, collate(rows, "cpu"), 0.9)
    together.logprobs_BT.sum().backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    for i, row in enumerate(rows):
        alone = token_logprobs(model, collate([row], "cpu"), 0.9)
        alone.logprobs_BT.sum().backward()
        n = len(row.ids)
        for name in ("logprobs_BT", "entropy_BT", "experts_BTLK"):
            a, b = getattr(together, name)[i], getattr(alone, name)[0]
            torch.testing.assert_close(a[:n], b, atol=1e-5, rtol=0)
        assert (together.logprobs_BT[i, n:] == 0).all() and (together.entropy_BT[i, n:] == 0).all()
        for a, b in zip(together.router_logits, alone.router_logits, strict=True):
            torch.testing.assert_close(a[i, :n], b[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        _, index, real = forward_packed(model.base_model, collate(rows, "cpu"))
    assert real.sum() == sum(len(row.prompt_ids) + len(row.ids) for row in rows)
    if len(set(lengths)) > 2:
        assert len(real) < len(rows)
