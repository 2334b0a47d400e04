"""The sampler against a slow loop without cache, and against the training forward; batches and their
parts; packing and chunks of logits."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import MIXED, batch_of_ids, problems_of, script_args
from transformers import GPT2Config, GPT2LMHeadModel

import common
from common import Batch, collate, evaluate, run_body, sample, token_logprobs
from plumbing.data import ProblemStream
from plumbing.model import Policy


def settings(**changes):
    return script_args("grpo", **{"max_new_tokens": 24, "temperature": 0.7} | changes)[1]


def noise_of(seed):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def slow_sample(model, prompt, noise, temperature, ends):
    """One completion by full forwards of the unpadded sequence: no cache, no batch, no mask."""
    ids = list(prompt)
    logprobs = []
    for number in noise.tolist():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
        logp = logits.log_softmax(0)
        token = int((logp.exp().cumsum(0) <= number).sum().clamp(max=len(logp) - 1))
        ids.append(token)
        logprobs.append(logp[token].item())
        if token in ends:
            break
    return ids[len(prompt) :], logprobs


def policy_with_learned_positions(tokenizer):
    """Rotary ones are the same wherever a prompt begins."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=17, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.5)
    config = GPT2Config(**sizes, bos_token_id=2, eos_token_id=1)
    return Policy(GPT2LMHeadModel(config).eval(), tokenizer)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_sampler_slow_loop_and_training_forward_agree(positions, tiny_policy):
    """The same noise gives the same tokens one by one, without cache, padding or neighbors, from the
    full distribution, whatever the generation config says; all three give the same log-probs. Each EOS
    id ends a completion; a pad that shares one masks nothing away."""
    policy = copy.deepcopy(tiny_policy)
    if positions == "learned":
        policy = policy_with_learned_positions(tiny_policy.tokenizer)
    tokenizer = copy.deepcopy(tiny_policy.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    policy.tokenizer = tokenizer
    ends = {tokenizer.eos_token_id, tokenizer("8").input_ids[0]}
    policy.model.generation_config.eos_token_id = list(ends)
    policy.model.generation_config.update(top_k=1, temperature=0.01, top_p=0.1, do_sample=True)
    problems = problems_of(policy, *MIXED)
    args = settings()
    completions = sample(policy, problems, 4, args, noise_of(2))
    assert [c.problem for c in completions] == [p for p in problems for _ in range(4)]
    assert {c.ids[-1] for c in completions} > ends and len({len(c.ids) for c in completions}) > 3
    noise = torch.rand(20, args.max_new_tokens, generator=noise_of(2))
    batch = collate(completions, args)
    with torch.no_grad():
        logprobs_BT = token_logprobs(policy, batch, args.temperature).logprobs_BT
    for i, c in enumerate(completions):
        ids, logprobs = slow_sample(policy.model, c.problem.prompt_ids, noise[i], 0.7, ends)
        assert c.ids == ids and c.truncated == (ids[-1] not in ends)
        assert c.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert c.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert logprobs_BT[i][batch.mask_BT[i]].tolist() == pytest.approx(logprobs, abs=1e-4)


SIZES = {
    1000: [20],
    10: [8, 8, 4],  # two prompts at a time, of five
    1: [4, 4, 4, 4, 4],  # smaller than a group
    0: [16, 4],  # as many as an iteration has
}


def test_completions_and_evaluations_do_not_depend_on_the_rollout_batch_size(tiny_policy, monkeypatch):
    """It is memory, not results: a prompt would get another one's noise, or a group come apart. The
    noise of evaluations is always the same, and is not that of training."""
    global_noise = torch.get_rng_state()
    counts = []
    sample_batch = common.sample_batch

    def counted(policy, problems, noise_NT, **keywords):
        counts.append(len(noise_NT))
        return sample_batch(policy, problems, noise_NT, **keywords)

    def grade(completions):
        return [c._replace(verdict=["wrong", "correct"][len(c.text) % 2]) for c in completions]

    monkeypatch.setattr(common, "sample_batch", counted)
    problems = problems_of(tiny_policy, *MIXED)
    results = []
    evaluations = []
    for size, expected in SIZES.items():
        args = settings(rollout_batch_size=size, prompts_per_iteration=4, group_size=4)
        counts.clear()
        results.append(sample(tiny_policy, problems, 4, args, noise_of(7)))
        assert counts == expected
        evaluations.append(evaluate(tiny_policy, problems, grade, args, sampled=True))
    for completions in results[1:]:
        for c, whole in zip(completions, results[0], strict=True):
            assert c._replace(logprobs=[]) == whole._replace(logprobs=[])
            assert c.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert len({tuple(c.ids) for c in results[0]}) > 10
    assert all(evaluation == evaluations[0] for evaluation in evaluations)
    assert evaluations[0]["greedy"] != evaluations[0]["sampled"]
    assert torch.equal(torch.get_rng_state(), global_noise)


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
    names = [field.name for field in dataclasses.fields(Batch)]
    return Batch(**{name: torch.arange(B)[:, None].repeat(1, S) for name in names})


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
    batch.returns_BT = None
    assert batch[2:5].returns_BT is None


@pytest.mark.parametrize("count, size", [(4, 0), (4, 2), (30, 1)])
def test_minibatches_tile_the_rollout_and_micro_batches_their_rows(count, size):
    """In their order, each row once in an epoch; sizes differ by one at most."""
    args = SimpleNamespace(num_minibatches=count, micro_batch_size=size, update_epochs=2)
    batch = numbered_batch(23)
    assert len(batch.parts(args)) == min(count, 23)
    minibatches = batch.minibatches(args)
    assert rows_of(*minibatches) == 2 * list(range(23))
    for minibatch in minibatches:
        micro_batches = minibatch.micro_batches(args)
        sizes = [len(micro) for micro in micro_batches]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
        assert max(sizes) <= (size or 23)
        assert rows_of(*micro_batches) == rows_of(minibatch)


@pytest.mark.parametrize("S, expected", [(256, [64]), (257, [32, 32]), (30_000, [1] * 64)])
def test_a_micro_batch_has_at_most_16384_tokens(S, expected):
    """As wide as the rollout's tensors, padding included; a longer row has a pass of its own."""
    args = SimpleNamespace(micro_batch_size=0)
    assert [len(micro) for micro in numbered_batch(64, S).micro_batches(args)] == expected


# ------------------------------------------------------------------------------ the training forward


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunked_logits_are_the_same(entropy_grad, tiny_policy):
    """Log-probs, entropies and gradients do not depend on how many logits exist at a time."""
    policy = copy.deepcopy(tiny_policy)
    batch = batch_of_ids([(p.prompt_ids, [7, 8, 9, 1]) for p in problems_of(policy, *MIXED)])
    results = []
    for max_logits in (2**26, 3 * 17):
        policy.model.zero_grad()
        outputs = token_logprobs(policy, batch, 0.7, entropy_grad, max_logits)
        assert outputs.entropy_BT.requires_grad == entropy_grad
        (outputs.logprobs_BT.sum() + outputs.entropy_BT.sum()).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        results.append((outputs.logprobs_BT, outputs.entropy_BT, gradient))
    torch.testing.assert_close(*results, atol=5e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_each_other(tiny_policy):
    """Side by side in shared rows, each sequence has the log-probs, entropies and experts that it has
    alone, and 0 behind its end. That rows are shared saves time."""
    g = noise_of(0)
    rows = []
    lengths = (4, 5, 4, 6, 4, 5, 30)
    for i, length in enumerate(lengths):
        ids = torch.randint(3, 17, (1 + i % 3 + length,), generator=g).tolist()
        rows.append((ids[:-length], ids[-length:]))
    batch = batch_of_ids(rows)
    with torch.no_grad():
        together = token_logprobs(tiny_policy, batch, 0.9)
        shapes = []
        body = tiny_policy.model.base_model
        hook = body.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
        run_body(body, batch)
        hook.remove()
        for i, length in enumerate(lengths):
            alone = token_logprobs(tiny_policy, batch_of_ids([rows[i]]), 0.9)
            for name in ("logprobs_BT", "entropy_BT", "experts_BTLK"):
                pair = getattr(together, name)[i, :length], getattr(alone, name)[0]
                torch.testing.assert_close(*pair, atol=1e-5, rtol=0)
            assert not together.logprobs_BT[i, length:].any()
    ((num_rows, _),) = shapes
    assert num_rows < len(rows)
