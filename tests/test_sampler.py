"""The sampler against a slow loop without a cache and against the training forward; which completions
share a batch."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MIXED, interfere, problems_of, script_args
from transformers import GPT2Config, GPT2LMHeadModel

import common
import plumbing.memory
from common import Completion, Problem, UserError, collate, evaluate, prepare_sampling
from common import next_token, sample, similar_lengths, split_into_steps, token_logprobs
from plumbing.data import longest_sequence
from plumbing.model import Policy


def settings(**changes):
    return script_args("grpo", **{"max_new_tokens": 24, "temperature": 0.7} | changes)[1]


def noise_of(seed):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def slow_sample(model, prompt, noise, temperature, ends):
    """One completion by full forward passes of the sequence alone: no cache, no batch, no mask."""
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


def policy_with_learned_positions(tokenizer, count=64):
    """With rotary ones, it would not matter where a prompt begins."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=17, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)
    sizes["n_positions"] = count
    config = GPT2Config(**sizes, bos_token_id=2, eos_token_id=1)
    return Policy(GPT2LMHeadModel(config).eval(), tokenizer)


def test_sampler_slow_loop_and_training_forward_agree(own_policy):
    """The same noise gives the same tokens, from the full distribution, whatever the generation config
    says; all three give the same log-probs. Each EOS id ends a completion, and a pad token that shares
    one masks nothing. The graded text has all tokens but the EOS."""
    tokenizer = own_policy.tokenizer
    policy = policy_with_learned_positions(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})  # still in the text
    ends = {tokenizer.eos_token_id, tokenizer("8").input_ids[0]}
    policy.model.generation_config.eos_token_id = list(ends)
    policy.model.generation_config.update(top_k=1, temperature=0.01, top_p=0.1, do_sample=True)
    problems = problems_of(policy, *MIXED)
    args = settings()
    completions = sample(policy, problems, 4, args, noise_of(2))
    assert [c.problem for c in completions] == [p for p in problems for _ in range(4)]
    assert {c.ids[-1] for c in completions} > ends and len({len(c.ids) for c in completions}) > 3
    noise = torch.rand(20, args.max_new_tokens, generator=noise_of(2), dtype=torch.float64)
    batch = collate(completions, 3, args)
    with torch.no_grad():
        logprobs_BT = token_logprobs(policy, batch, args.temperature).logprobs_BT
    for i, c in enumerate(completions):
        ids, logprobs = slow_sample(policy.model, c.problem.prompt_ids, noise[i], 0.7, ends)
        assert c.ids == ids and c.truncated == (ids[-1] not in ends)
        shown = ids if c.truncated else ids[:-1]
        assert c.text == tokenizer.decode(shown, skip_special_tokens=False)
        assert c.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert logprobs_BT[i][batch.mask_BT[i]].tolist() == pytest.approx(logprobs, abs=1e-4)


def test_a_token_with_probability_0_is_never_sampled():
    """Not even by noise of exactly 0, or at the edge of a token with probability."""
    probs_RV = torch.tensor([[0.0, 0.5, 0.0, 0.5]]).expand(3, 4)
    noise_R1 = torch.tensor([[0.0], [0.5], [1 - 2**-24]])
    assert next_token(probs_RV.log(), noise_R1, greedy=False).tolist() == [[1], [3], [3]]


def test_tokens_of_a_large_vocabulary_have_their_probabilities():
    """Each one is drawn by noise just inside its part of the CDF, at both ends."""
    logprobs_1V = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    probs_1V = logprobs_1V.exp().double()
    probs_1V = probs_1V / probs_1V.sum()
    for inside in (0.001, 0.999):
        noise_1V = probs_1V.cumsum(-1) - inside * probs_1V
        assert next_token(logprobs_1V, noise_1V, greedy=False)[0].tolist() == list(range(150_000))


def test_equal_prompts_go_through_the_model_once_and_rows_that_have_ended_no_more(own_policy):
    rows = []
    hook = lambda module, inputs, keywords: rows.append(len(keywords["input_ids"]))  # noqa: E731
    own_policy.model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    problems = problems_of(own_policy, *MIXED)
    sample(own_policy, [problems[0], *problems], 4, settings(), noise_of(0))
    assert rows[:2] == [len(MIXED), 4 * (1 + len(MIXED))] and rows[-1] < rows[1]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_the_check_at_loading_needs_no_more_positions_than_the_run(max_new_tokens, own_policy):
    """Here it and its prompt of six tokens have exactly as many positions as they need."""
    policy = policy_with_learned_positions(own_policy.tokenizer, 6 + max_new_tokens)
    prepare_sampling(policy, settings(max_new_tokens=max_new_tokens))
    with pytest.raises(UserError):
        prepare_sampling(policy, settings(max_new_tokens=max_new_tokens + 1))


def test_the_longest_sequence_is_one_for_which_cached_keys_stay_right():
    """Beyond longrope's original length the angles of all tokens change, also those of cached keys."""
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    config = SimpleNamespace(max_position_embeddings=64, rope_parameters=longrope)
    assert longest_sequence(config) == 16
    assert longest_sequence(SimpleNamespace(max_position_embeddings=64)) == 64
    assert longest_sequence(SimpleNamespace()) == math.inf


def grade(completions):
    marks = [len(c.text) % 2 for c in completions]
    verdicts = ("wrong", "correct")
    return [c._replace(reward=x, verdict=verdicts[x]) for c, x in zip(completions, marks, strict=True)]


SIZES = [  # --rollout_batch_size; rows at a time, of five problems: four answers each, an evaluation
    (0, [20], [5]),
    (4, [4, 4, 4, 4, 4], [4, 1]),
    (3, [3] * 6 + [2], [3, 2]),
]


def test_completions_do_not_depend_on_the_rollout_batch_size(tiny_policy, monkeypatch):
    """Nor on torch's global noise, which they leave alone."""
    counts = []
    interfere(monkeypatch, common, "sample_batch", lambda *inputs: counts.append(len(inputs[2])))
    global_noise = torch.get_rng_state()
    problems = problems_of(tiny_policy, *MIXED)
    results = []
    evaluations = []
    for size, of_rollout, of_evaluation in SIZES:
        args = settings(rollout_batch_size=size)
        results.append(sample(tiny_policy, problems, 4, args, noise_of(7)))
        evaluations.append(evaluate(tiny_policy, problems, grade, args, sampled=True))
        assert counts == of_rollout + 2 * of_evaluation  # greedy and sampled
        counts.clear()
    for completions in results[1:]:
        for c, whole in zip(completions, results[0], strict=True):
            assert c._replace(logprobs=[]) == whole._replace(logprobs=[])
            assert c.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert len({tuple(c.ids) for c in results[0]}) > 10
    assert all(evaluation == evaluations[0] for evaluation in evaluations)
    assert evaluations[0]["greedy"] != evaluations[0]["sampled"]
    assert torch.equal(torch.get_rng_state(), global_noise)
    # By default, what the cache may hold: 8 tokens of the longest prompt and 24 of an answer per row
    monkeypatch.setattr(common, "ROLLOUT_TOKENS", 9 * 32)
    sample(tiny_policy, problems, 4, settings(), noise_of(7))
    assert counts == [9, 9, 2]


@pytest.mark.parametrize("chunk", [1, 5 * 17])
def test_log_probs_in_chunks_are_the_same(chunk, own_policy, monkeypatch):
    """To the bit, with their gradients, as from one chunk with all tokens."""
    problems = problems_of(own_policy, *MIXED)
    batch = collate(sample(own_policy, problems, 1, settings(), noise_of(0)), 3, settings())
    results = []
    for size in (1000 * 17, chunk):
        monkeypatch.setattr(plumbing.memory, "CPU_CHUNK", size)
        outputs = token_logprobs(own_policy, batch, 0.7, entropy_grad=True)
        own_policy.model.zero_grad()
        (outputs.logprobs_BT.sum() + 0.1 * outputs.entropy_BT.sum()).backward()
        gradients = [weight.grad.clone() for weight in own_policy.parameters()]
        results.append([outputs.logprobs_BT, outputs.entropy_BT, *gradients])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_chunks_save_memory(tiny_policy, monkeypatch):
    """The backward pass keeps logits, and of float32 only what the body of the model keeps."""
    problems = problems_of(tiny_policy, *MIXED)
    batch = collate(sample(tiny_policy, problems, 4, settings(), noise_of(0)), 3, settings())
    kept = []
    for size in (1000 * 17, 17):
        monkeypatch.setattr(plumbing.memory, "CPU_CHUNK", size)
        sizes = []
        note = lambda tensor: sizes.append(tensor.numel()) or tensor  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            token_logprobs(tiny_policy, batch, 0.7, entropy_grad=True)
        kept.append(sum(sizes))
    assert kept[0] - kept[1] > 2 * 17 * len(batch.predictor_N)


# ------------------------------------------------------------------------- batches and their parts


def completions_of(lengths):
    """Of (prompt, response). Prompts begin with 3, and 0 is also what tensors are padded with."""
    completions = []
    for prompt, response in lengths:
        problem = Problem("", "", [3] + [0] * (prompt - 1))
        completions.append(Completion(problem, [4] * response, [0.0] * response))
    return completions


def test_micro_batches_have_rows_of_similar_length():
    """Sorted by length, ties by row: as many tokens with padding as the limit says, or one row."""
    completions = completions_of([(2, 6), (70, 1), (5, 10), (1, 15), (1, 15), (6, 10)])
    assert similar_lengths(completions, range(6), 64) == [[0, 2, 3, 4], [5], [1]]
    assert similar_lengths(completions, range(6), 63) == [[0, 2, 3], [4, 5], [1]]
    assert similar_lengths(completions, range(6), 1) == [[0], [2], [3], [4], [5], [1]]


LIMITS = [  # device, --gradient_checkpointing, tokens in a batch by default
    ("cpu", False, 1_024),
    ("cpu", True, 1_024),
    ("cuda", False, 8_192),
    ("cuda", True, 32_768),
]


@pytest.mark.parametrize("device, gradient_checkpointing, limit", LIMITS)
def test_the_default_limit_on_tokens(device, gradient_checkpointing, limit):
    args = settings(gradient_checkpointing=gradient_checkpointing)
    args.device = device
    assert args.max_micro_batch_tokens == limit


def test_steps_have_rows_in_the_rollouts_order():
    """And are of nearly equal size. Padding is a real token."""
    completions = completions_of([(1, 5), (1, 4), (1, 3), (1, 2), (1, 1)])
    steps = split_into_steps(completions, 2, settings(micro_batch_tokens=10))
    rows = [[batch.rows_B.tolist() for batch in step] for step in steps]
    assert rows == [[[2, 1], [0]], [[4, 3]]]
    for batch in itertools.chain(*steps):
        assert (batch.tokens_BS[~batch.is_token_BS] == 3).all()
