"""The gradient of every optimizer step of all twelve scripts, against the literal objectives.

A run is watched from outside: the completions with their rewards and the sampler's log-probs, and,
before each step, weights and gradients. From these the objective of the step is computed once more, by
conformance/reference.py and a plain forward pass in float64, with nothing of the scripts, common.py or
plumbing/.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MORE, SCRIPTS, TINY_MOE, run, script_args
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from conformance import reference

# 28 completions: two steps of 14, in micro-batches of 5, 5 and 4. The sampler's weights are rounded.
SETTINGS = dict(iterations=2, prompts_per_iteration=7, group_size=4, num_minibatches=2, update_epochs=2)
SETTINGS |= dict(max_new_tokens=24, temperature=0.9, lr=2e-3, max_grad_norm=1e9, router_aux_coef=0.3)
SETTINGS |= dict(micro_batch_size=5, rollout_dtype="int4", rollout_correction="token_tis")
SETTINGS |= dict(rollout_cap=1.02, eval_every=0)
WITH_CRITIC = dict(kl_coef=0.1, gamma=0.95, entropy_coef=0.1)
OWN = {
    "ppo": WITH_CRITIC | dict(prompts_per_iteration=28),
    "grpo": dict(kl_coef=0.3),
    "more.reinforce": dict(prompts_per_iteration=28, group_size=1),
    "more.vapo": WITH_CRITIC | dict(pretraining_iterations=1, positive_lm_coef=0.3),
}
VARIANTS = [
    ("grpo", dict(kl_is_corrected=True, ref_reset_every=1)),
    ("dapo", dict(overlong="filter", max_new_tokens=40)),
    ("gspo", dict(variant="gspo_token")),
    ("cispo", dict(ppo_mask=True)),
    ("gmpo", dict(clip_level="sequence")),
    ("rspo", dict(shift="before_clip", rollout_correction="sequence_mis")),
]
CASES = [(name, {}) for name in SCRIPTS + MORE] + VARIANTS


def watched_run(module, name, args, changes, monkeypatch):
    """Runs the script; returns its iterations, each with the completions that were verified (in dapo
    of all rounds) and, before each step, copies of weights and gradients, by parameter group."""
    iterations = []
    new_meter = module.Meter
    judge = module.judge

    def meter(iteration):
        iterations.append(SimpleNamespace(completions=[], steps=[]))
        return new_meter(iteration)

    def watched_judge(*inputs):
        completions = judge(*inputs)
        iterations[-1].completions += completions
        return completions

    def before_step(optimizer, *_):
        weights, gradients = [], []
        for group in optimizer.param_groups:
            weights.append([weight.detach().double() for weight in group["params"]])
            gradients.append(
                [weight.grad.double() for weight in group["params"] if weight.grad is not None]
            )
        iterations[-1].steps.append(SimpleNamespace(weights=weights, gradients=gradients))

    monkeypatch.setattr(module, "Meter", meter)
    monkeypatch.setattr(module, "judge", watched_judge)
    hook = register_optimizer_step_pre_hook(before_step)
    flags = [word for key in changes for word in (f"--{key}", changes[key])]
    result = run(name, *flags, held_out=4)
    hook.remove()
    assert result.returncode == 0, result.stderr
    return iterations


def with_weights(module, weights):
    """A copy with these weights."""
    module = copy.deepcopy(module)
    for weight, value in zip(module.parameters(), weights, strict=True):
        weight.data = value.clone()
    return module


def padded(completions):
    """Token ids of prompts and responses, padded on the right, and where they are."""
    rows = [c.problem.prompt_ids + c.ids for c in completions]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_token = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, is_token


def of_responses(x_BS, completions, args, shift=1):
    """(B, S, ...) -> (B, T, ...): what stands at the position before each response token, else 0."""
    x_BT = x_BS.new_zeros(len(completions), args.max_new_tokens, *x_BS.shape[2:])
    rows = []
    for i, c in enumerate(completions):
        start = len(c.problem.prompt_ids) - shift
        here = x_BS[i, start : start + len(c.ids)]
        rows.append(torch.cat([here, x_BT[i, len(c.ids) :]]))
    return torch.stack(rows)


def forward(model, completions, args):
    """Of the response tokens: log-probs, entropies, and the routers' log-probs, a tensor per layer;
    and, of all tokens, the routers' probabilities."""
    ids, is_token = padded(completions)
    output = model(ids, attention_mask=is_token, output_router_logits=True)
    logp = torch.log_softmax(output.logits / args.temperature, dim=-1)
    next_ids = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    logprobs_BS = logp.gather(-1, next_ids[:, :, None])[:, :, 0]
    routers = [torch.log_softmax(layer, -1).view(*ids.shape, -1) for layer in output.router_logits]
    return SimpleNamespace(
        logprobs=of_responses(logprobs_BS, completions, args),
        entropy=of_responses(-(logp.exp() * logp).sum(-1), completions, args),
        routers=[of_responses(layer, completions, args) for layer in routers],
        all_probs=torch.cat([layer[is_token.bool()] for layer in routers]).exp(),
    )


def balancing_loss(probs, num_active):
    """E sum_e f_e p_e: f_e the choices of expert e per token, p_e its mean probability."""
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(num_active).indices, 1)
    return probs.shape[1] * (chosen.mean(0) * probs.mean(0)).sum()


def values_of(critic, completions, args):
    """A critic's values of the response tokens (N, T), and after each last token (N, 1)."""
    body, head = critic
    ids, is_token = padded(completions)
    values_NS = head(body(ids, attention_mask=is_token).last_hidden_state)[:, :, 0]
    after = [values_NS[i, sum(is_token[i]) - 1] for i in range(len(ids))]
    return of_responses(values_NS, completions, args), torch.stack(after)[:, None]


def mixed(completions, group_size):
    """DAPO: the groups with right and wrong completions."""
    kept = []
    for start in range(0, len(completions), group_size):
        group = completions[start : start + group_size]
        if len({c.verdict == "correct" for c in group}) == 2:
            kept += group
    return kept


def shaped_reward(c, args):
    """DAPO: the reward, minus up to 1 for the last tokens below the cap."""
    penalty = 0.0
    if getattr(args, "overlong", "none") == "soft":
        free = args.max_new_tokens - args.overlong_cache
        penalty = min(max((len(c.ids) - free) / args.overlong_cache, 0), 1)
    return c.reward - penalty


def correction_weights(name, args, log_rho_NT, mask_NT):
    """token_tis and sequence_mis, where objectives with one ratio have one weight per completion."""
    weights_NT = torch.ones_like(log_rho_NT)
    for i in range(len(mask_NT)):
        log_rho = log_rho_NT[i, mask_NT[i]]
        if args.rollout_correction == "sequence_mis":
            product = math.exp(log_rho.sum())
            weights_NT[i] = product if product <= args.rollout_cap else 0
        elif name in ("gmpo", "rspo") or (name == "gspo" and args.variant == "gspo"):
            weights_NT[i] = min(math.exp(log_rho.mean()), args.rollout_cap)
        else:
            weights_NT[i] = log_rho_NT[i].exp().clamp(max=args.rollout_cap)
    return weights_NT


def rollout_batch(name, args, completions, old, ref, critic, baseline):
    """Everything that is fixed during an update: a batch for reference.py with all rows."""
    mask = torch.zeros(len(completions), args.max_new_tokens, dtype=torch.bool)
    sampler_logprobs = torch.zeros(mask.shape, dtype=torch.float64)
    for i, c in enumerate(completions):
        is_filtered = getattr(args, "overlong", None) == "filter" and c.truncated
        mask[i, : len(c.ids)] = not is_filtered
        sampler_logprobs[i, : len(c.ids)] = torch.tensor(c.logprobs, dtype=torch.float64)
    b = reference.batch(**vars(args) | {"mask": mask, "old_logprobs": old.logprobs})
    rewards = torch.tensor([shaped_reward(c, args) for c in completions], dtype=torch.float64)
    b.is_right = torch.tensor([[c.verdict == "correct"] for c in completions])
    log_rho = torch.where(mask, old.logprobs - sampler_logprobs, 0)
    weights = correction_weights(name, args, log_rho, mask)
    if ref is not None:
        b.ref_logprobs = ref.logprobs
        b.rollout_ratio = log_rho.exp()
    if name in ("ppo", "more.vapo"):
        advantages = of_critic(name, args, b, rewards, critic, completions)
    else:
        groups = SimpleNamespace(**vars(b) | {"rewards": rewards.view(-1, args.group_size)})
        kind = {"dr_grpo": reference.group_differences, "more.rloo": reference.leave_one_out}
        advantages = kind.get(name, reference.group_advantages)(groups).view(-1, 1)
        if name == "more.reinforce":
            advantages = (rewards - baseline).view(-1, 1)
    b.advantages = weights * advantages
    return b


def of_critic(name, args, b, rewards, critic, completions):
    """GAE's advantages, whitened; sets the critic's targets."""
    last = [len(c.ids) - 1 for c in completions]
    b.old_values, after = values_of(critic, completions, args)
    token_rewards = -args.kl_coef * (b.old_logprobs - b.ref_logprobs)
    token_rewards[range(len(last)), last] += rewards
    was_cut_off = torch.tensor([[c.truncated] for c in completions])
    inputs = dict(mask=b.mask, rewards=token_rewards, values=b.old_values, gamma=args.gamma)
    inputs["bootstrap"] = torch.where(was_cut_off, after, 0)
    if name == "ppo":
        advantages, b.returns = reference.gae(SimpleNamespace(**inputs, lam=args.gae_lambda))
    else:
        lam = torch.tensor([max(0, 1 - 1 / (args.lambda_alpha * (k + 1))) for k in last])
        _, b.returns = reference.gae(SimpleNamespace(**inputs, lam=1.0))
        advantages, _ = reference.gae(SimpleNamespace(**inputs, lam=lam))
    counted = advantages[b.mask]
    return (advantages - counted.mean()) / (counted.std(correction=0) + 1e-8)


def rows_of(b, rows):
    """The batch of an optimizer step."""
    N = len(b.mask)
    fields = {}
    for key, value in vars(b).items():
        is_of_rows = torch.is_tensor(value) and len(value) == N
        fields[key] = value[rows] if is_of_rows else value
    return SimpleNamespace(**fields)


def parts(rows, size):
    """Rows in ceil(n / size) parts, the first of them one longer where n is not divisible."""
    return [part.tolist() for part in torch.tensor(rows).tensor_split(math.ceil(len(rows) / size))]


def expected_loss(name, args, b, model, critic, completions, old):
    """The loss of an optimizer step on these completions, (policy's, critic's)."""
    now = forward(model, completions, args)
    b.logprobs = now.logprobs
    if name == "rspo":
        active = [layer.topk(2).indices for layer in old.routers]
        pairs = list(zip(now.routers, old.routers, active, strict=True))
        b.scores = torch.stack([new.gather(-1, chosen) for new, _, chosen in pairs], dim=2).detach()
        b.old_scores = torch.stack([was.gather(-1, chosen) for _, was, chosen in pairs], dim=2)
        b.router_shift = reference.router_shift(b)
    has_tokens = b.mask.any(1)  # what DAPO filters counts nowhere
    loss = -getattr(reference, name.removeprefix("more."))(
        rows_of(b, has_tokens) if name == "dapo" else b
    )
    for part in parts(range(len(completions)), args.micro_batch_size):
        probs = forward(model, [completions[i] for i in part], args).all_probs
        share = len(part) / len(completions)
        loss = loss + args.router_aux_coef * share * balancing_loss(probs, num_active=2)
    if critic is None:
        return loss, None
    loss = loss - args.entropy_coef * now.entropy[b.mask].mean()
    if name == "more.vapo":
        loss = loss + args.positive_lm_coef * reference.positive_lm_loss(b)
    b.values, _ = values_of(critic, completions, args)
    return loss, args.value_coef * reference.value_loss(b)


def assert_gradient(found, loss, weights):
    """Equal up to float32; weights that the loss does not use have none, or zeros."""
    expected = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    expected = torch.cat([gradient.flatten() for gradient in expected])
    found = torch.cat([gradient.flatten() for gradient in found])
    assert expected.norm() > 1e-3 and (found - expected).norm() < 2e-4 * expected.norm()


@pytest.fixture(scope="module")
def plain_model():
    """The base model in float64, its experts computed in a loop."""
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float64, **kinds).eval()


@pytest.mark.parametrize("name, variant", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_run_takes_the_gradient_of_the_objective(
    name, variant, tmp_path, monkeypatch, plain_model, reward_file
):
    settings = SETTINGS | OWN.get(name, {}) | variant
    module, args = script_args(name)
    changes = {key: value for key, value in settings.items() if key in vars(args)}
    _, args = script_args(name, **changes)
    # Graded, so that no value, verdict or length can stand for another.
    reward = reward_file(
        "digits = sum(map(text.count, '02468'))", "return digits / 7, ('correct', 'wrong')[digits % 2]"
    )
    changes |= {"reward": reward, "run_dir": tmp_path / "run"}
    iterations = watched_run(module, name, args, changes, monkeypatch)
    assert len(iterations) == 2

    base = [weight.detach().double() for weight in plain_model.parameters()]
    reference_weights = base if getattr(args, "kl_coef", 0) > 0 else None
    baseline = 0.0
    num_steps = args.update_epochs * args.num_minibatches
    for number, iteration in enumerate(iterations, 1):
        assert len(iteration.steps) == num_steps
        completions = iteration.completions
        if name == "dapo":
            completions = mixed(completions, args.group_size)
        first = iteration.steps[0]
        with torch.no_grad():
            old = forward(with_weights(plain_model, first.weights[0]), completions, args)
            ref = None
            if reference_weights is not None:
                ref = forward(with_weights(plain_model, reference_weights), completions, args)
            critic = None
            if len(first.weights) == 2:
                critic = critic_of(plain_model, first.weights[1])
            b = rollout_batch(name, args, completions, old, ref, critic, baseline)
        rows = [
            part.tolist() for part in torch.arange(len(completions)).tensor_split(args.num_minibatches)
        ]
        for step, minibatch in zip(iteration.steps, rows * args.update_epochs, strict=True):
            model = with_weights(plain_model, step.weights[0])
            if critic is not None:
                critic = critic_of(plain_model, step.weights[1])
            chosen = [completions[i] for i in minibatch]
            of_old = SimpleNamespace(routers=[layer[minibatch] for layer in old.routers])
            loss, critic_loss = expected_loss(
                name, args, rows_of(b, minibatch), model, critic, chosen, of_old
            )
            if number <= getattr(args, "pretraining_iterations", 0):
                assert step.gradients[0] == []  # the policy stays as it is
            else:
                assert_gradient(step.gradients[0], loss, list(model.parameters()))
            if critic is not None:
                weights = [*critic[0].parameters(), *critic[1].parameters()]
                assert_gradient(step.gradients[1], critic_loss, weights)
        rewards = [c.reward for c in iteration.completions]
        baseline = 0.9 * baseline + 0.1 * sum(rewards) / len(rewards)
        if getattr(args, "ref_reset_every", 0) == 1 and number == 1:
            reference_weights = iterations[1].steps[0].weights[0]


def critic_of(model, weights):
    """(body, head) of a critic with these weights."""
    body = with_weights(model.base_model, weights[:-1])
    head = torch.nn.Linear(model.config.hidden_size, 1, bias=False).double()
    head.weight.data = weights[-1].clone()
    return body, head
