"""Every script's main, seen from outside: the gradient that each optimizer step gets is that of the
literal objective in conformance/rl_loss_vectors/reference.py.

We record the graded completions of a run, with their rewards and the sampler's log-probs, and weights
and gradients at each optimizer step. From these we compute everything else once more: log-probs,
entropies, values and router logits by a plain forward of one completion at a time, then the correction,
advantages, the objective and the load-balancing loss.
"""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MORE, SCRIPTS, SUMS, fields_of, loss_of, metrics, script_args
from rl_loss_vectors import reference
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common
import plumbing.model

# 15 completions in minibatches of 5, which cut through groups, and these in micro-batches of at most 45
# tokens. After a step or two the ratios are outside of every clip range.
SMALL = dict(
    iterations=2,
    prompts_per_iteration=5,
    group_size=3,
    max_new_tokens=12,
    temperature=0.8,
    lr=2e-3,
    update_epochs=2,
    num_minibatches=3,
    micro_batch_tokens=45,
    max_grad_norm=1.0,  # which some steps exceed, and others do not
    router_aux_coef=0.1,
    dataset=str(SUMS),
    num_held_out=4,
    eval_every=0,
    clip_eps_low=0.1,
    clip_eps_high=0.3,
    rollout_dtype="int4",
    rollout_correction="token_tis",
    rollout_cap=1.2,
)
ALONE = {"prompts_per_iteration": 15}  # of scripts with one completion per prompt
CRITIC = {"entropy_coef": 0.1, "kl_coef": 0.3, "critic_lr": 3e-3, "value_clip": 0.05, "gamma": 0.9}
CRITIC |= {"max_grad_norm": 0.5}  # which some of the critic's steps exceed, too
PRETRAINED = {"iterations": 3, "pretraining_iterations": 1}
UNWEIGHTED = {"rollout_correction": "none", "rollout_cap": 2.0}
FROM_SAMPLER = {"old_logprobs": "sampler"} | UNWEIGHTED
FROM_SAMPLER |= {"kl_coef": 0.5, "lr": 1e-3}  # with 2e-3, log-ratios are so large that scripts cap them
BASELINE = {"iterations": 3, "max_grad_norm": 2.0, "baseline_decay": 0.75}
STALE = {"rollout_dtype": "same", "rollout_refresh_every": 2, "rollout_correction": "geo_mask"}
STALE |= {"rollout_mask_low": 0.98, "rollout_mask_high": 1.01, "kl_coef": 0.0}
UNCLIPPED = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}  # by default, only ppo_mask reads them
CASES = {  # variants that change no line of main are compared by test_conformance.py
    "ppo": ("ppo", ALONE | CRITIC),
    "grpo": ("grpo", {"kl_coef": 0.5}),
    "grpo, reset": ("grpo", {"kl_coef": 0.5, "ref_reset_every": 1}),
    "mismatch": ("more.mismatch", {"kl_coef": 0.5}),
    "mismatch, sampler": ("more.mismatch", FROM_SAMPLER),
    "mismatch, stale": ("more.mismatch", STALE),
    "dr_grpo": ("dr_grpo", {"max_grad_norm": 0.2, "max_new_tokens": 40}),  # more than any has
    "dapo": ("dapo", {"overlong_cache": 6}),
    "dapo, default": ("dapo", {"max_new_tokens": 32}),
    "dapo, filter": ("dapo", {"overlong": "filter", "max_new_tokens": 20}),
    "dapo, one round": ("dapo", {"overlong": "none", "max_sampling_rounds": 1, "num_minibatches": 5}),
    "gspo": ("gspo", {}),
    "cispo": ("cispo", {"is_weight_cap": 1.2, "is_weight_floor": 0.8} | UNCLIPPED),
    "gmpo": ("gmpo", {"log_ratio_clip": 0.2}),
    "rspo": ("rspo", {"log_ratio_clip": 0.3, "gamma_min": 0.9}),
    "sapo": ("sapo", {"tau_pos": 2.0, "tau_neg": 1.5}),
    "reinforce": ("more.reinforce", ALONE | BASELINE),
    "rloo": ("more.rloo", {"max_grad_norm": 3.0}),
    "deepseek_v32": ("more.deepseek_v32", {"kl_coef": 0.5, "offpolicy_mask": 0.02}),
    "vapo": ("more.vapo", CRITIC | PRETRAINED | {"lambda_alpha": 0.3, "kl_coef": 0.0}),
}
KNOWN = dict.fromkeys(script for script, _ in CASES.values())
for name in [*SCRIPTS, *MORE]:
    if name not in KNOWN:  # a new script needs no case of its own
        changes = {} if "group_size" in fields_of(name) else ALONE
        if "pretraining_iterations" in fields_of(name):
            changes = changes | PRETRAINED
        CASES[name] = (name, changes)
# Here the master weights have a working copy, as with bfloat16, but in float32, so that numbers agree.
WITH_COPIES = ["ppo", "grpo, reset", "mismatch, stale", "dapo", "vapo"]
ADVANTAGES = {
    "dr_grpo": reference.group_differences,
    "more.deepseek_v32": reference.group_differences,
    "more.rloo": reference.leave_one_out,
}


def objective_of(name):
    """The function of reference.py; for a new script that is not there, the one of the script with the
    same policy_loss."""
    loss = loss_of(name)
    for each in [name, *KNOWN]:
        found = getattr(reference, each.removeprefix("more."), None)
        if found and loss_of(each) == loss:
            return found
    short = name.removeprefix("more.")
    pytest.fail(f"its objective is missing: write `{short}` in rl_loss_vectors/reference.py")


def advantages_of(name):
    """The function of reference.py; for a new script the one that gives its numbers."""
    if name in KNOWN:
        return ADVANTAGES.get(name, reference.group_advantages)
    rewards = torch.tensor([[0.5, 0.25, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = script_args(name)[0].compute_advantages(rewards)
    for function in (reference.group_advantages, *ADVANTAGES.values()):
        if torch.allclose(function(batch(rewards=rewards)), found):
            return function
    pytest.fail(
        f"the advantages of {name} are missing: write them in rl_loss_vectors/reference.py, and "
        "name the function in ADVANTAGES, here"
    )


def watched(name, args, with_copies):
    """Runs a script. Returns for each iteration its `rounds` of graded completions and its `steps`,
    each with the weights, gradients and rates of the policy and of the critic, if there is one."""
    script = importlib.import_module(name)
    grade = common.load_grader(args)
    iterations = []

    def sample(*inputs):  # evaluations call that of common.py
        completions = common.sample(*inputs)
        if not iterations or iterations[-1].steps:
            iterations.append(SimpleNamespace(rounds=[], steps=[]))
        iterations[-1].rounds.append(grade(completions))
        return completions

    def before_step(optimizer, *_):
        step = SimpleNamespace(weights=[], gradients=[], rates=[])
        for group in optimizer.param_groups:
            gradients = [weight.grad for weight in group["params"]]
            step.weights.append([weight.detach().clone() for weight in group["params"]])
            step.gradients.append([None if x is None else x.clone() for x in gradients])
            step.rates.append(group["lr"])
        iterations[-1].steps.append(step)

    def copy_in_float32(master, dtype):
        return real_working_copy(master, "float")

    real_working_copy = plumbing.model.working_copy
    hook = register_optimizer_step_pre_hook(before_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "sample", sample)
        if with_copies:
            patch.setattr(plumbing.model, "working_copy", copy_in_float32)
        script.main(args)
    hook.remove()
    return iterations


# ------------------------------------------------------------------ one completion at a time


def named(model, weights):
    return {name: weight for (name, _), weight in zip(model.named_parameters(), weights, strict=True)}


def answer(model, weights, completion, temperature):
    """A plain forward -> log-probs and entropies, (T,), router logits of all tokens, (L, S, E), and of
    those that predict the response."""
    prompt = completion.problem.prompt_ids
    ids = torch.tensor(completion.ids)
    tokens = torch.tensor([prompt + completion.ids])
    options = {"output_router_logits": True}
    output = functional_call(model, named(model, weights), (tokens,), options)
    predictors = slice(len(prompt) - 1, len(prompt) - 1 + len(ids))
    logprobs = (output.logits[0, predictors].double() / temperature).log_softmax(-1)
    routers = torch.stack(output.router_logits).double()
    return SimpleNamespace(
        logprobs=logprobs[torch.arange(len(ids)), ids],
        entropies=-(logprobs.exp() * logprobs).sum(-1),
        routers=routers,
        predicting_routers=routers[:, predictors],
    )


def values_of(model, weights, completion):
    """(T,): a critic's values of the tokens."""
    *body, head = weights
    tokens = torch.tensor([completion.problem.prompt_ids + completion.ids])
    output = functional_call(model.base_model, named(model.base_model, body), (tokens,))
    first = len(completion.problem.prompt_ids) - 1
    return (output.last_hidden_state[0, first:-1] @ head[0]).double()


def expert_logprobs(answers, old_answers):
    """(B, T, L, K): of the experts that the old policy has chosen."""
    rows = []
    for now, old in zip(answers, old_answers, strict=True):
        chosen = old.predicting_routers.topk(2).indices
        rows.append(now.predicting_routers.log_softmax(-1).gather(-1, chosen).transpose(0, 1))
    return pad_sequence(rows, batch_first=True)


def load_balancing_loss(answers):
    """E sum_e f_e P_e over all tokens and layers: the share of the choices, times K, and the mean
    probability of each expert."""
    logits = torch.cat([a.routers.flatten(0, 1) for a in answers])
    E = logits.shape[1]
    chosen = torch.nn.functional.one_hot(logits.topk(2).indices, E).double()
    return E * (chosen.sum(1).mean(0) * logits.softmax(-1).mean(0)).sum()


def rounded(model, weights):
    """All matrices but embeddings and routers, to 15 values for each row."""
    rounded = []
    for name, weight in named(model, weights).items():
        if weight.dim() > 1 and "embed" not in name and "mlp.gate.weight" not in name:
            scale = weight.abs().amax(-1, keepdim=True) / 7
            weight = torch.where(scale > 0, (weight / scale).round() * scale, 0)
        rounded.append(weight)
    return rounded


# -------------------------------------------------------------------------- before an update


def learned_from(args, rounds):
    """The completions of an iteration; dapo samples until it has enough groups with right and wrong
    ones."""
    if not hasattr(args, "max_sampling_rounds"):
        assert len(rounds) == 1
        return rounds[0]
    kept = []
    wanted = args.prompts_per_iteration * args.group_size
    for completions in rounds:
        assert len(completions) == wanted - len(kept)
        for start in range(0, len(completions), args.group_size):
            group = completions[start : start + args.group_size]
            if len({c.verdict == "correct" for c in group}) == 2:
                kept += group
    assert len(kept) == wanted or len(rounds) == args.max_sampling_rounds
    return kept


def correction_weights(args, old, mu, mask):
    """min(rho, cap). With geo_mask, 0 where the completion's geometric mean is out of bounds."""
    if getattr(args, "rollout_correction", "none") == "none":
        return torch.ones_like(old)
    log_rho = torch.where(mask, old - mu, 0)
    log_mean = (log_rho.sum(1) / mask.sum(1))[:, None].expand_as(mask)
    weights = log_rho.exp().clamp(max=args.rollout_cap)
    if args.rollout_correction == "geo_mask":
        weights[log_mean < math.log(args.rollout_mask_low)] = 0
        weights[log_mean > math.log(args.rollout_mask_high)] = 0
    return weights


def batch(**fields):
    """For reference.py's functions."""
    return SimpleNamespace(**(reference.ABSENT | fields))


def plain_advantages(name, args, completions, baseline):
    """(N, 1)"""
    rewards = torch.tensor([c.reward for c in completions], dtype=torch.float64)
    if getattr(args, "overlong", "") == "soft":
        cache = args.overlong_cache or args.max_new_tokens // 4
        over = [len(c.ids) - (args.max_new_tokens - cache) for c in completions]
        rewards -= torch.tensor([max(0, tokens) / cache for tokens in over])
    if hasattr(args, "baseline_decay"):
        return (rewards - baseline)[:, None]
    b = batch(rewards=rewards.view(-1, args.group_size))
    return advantages_of(name)(b).view(-1, 1)


def advantages_of_a_critic(args, completions, old, ref, values, mask):
    """(advantages, returns), (N, T)"""
    rewards = torch.where(mask, -args.kl_coef * (old - ref), 0)
    for i, c in enumerate(completions):
        rewards[i, len(c.ids) - 1] += c.reward
    b = batch(rewards=rewards, values=values, mask=mask, gamma=args.gamma)
    if hasattr(args, "gae_lambda"):
        b.lam = args.gae_lambda
        advantages, returns = reference.gae(b)
    else:
        b.lam = 1.0
        _, returns = reference.gae(b)
        b.lam = (1 - 1 / (args.lambda_alpha * mask.sum(1).double())).clamp(min=0)
        advantages, _ = reference.gae(b)
    counted = advantages[mask]
    return (advantages - counted.mean()) / (counted.std(correction=0) + 1e-8), returns


@torch.no_grad()
def before_update(name, args, completions, weights, ref_weights, baseline, model):
    """What the steps of an iteration share; (N, T) unless said otherwise."""

    def logprobs_under(weights):
        answers = [answer(model, weights, c, args.temperature) for c in completions]
        return answers, pad_sequence([a.logprobs for a in answers], batch_first=True)

    mask = pad_sequence([torch.ones(len(c.ids)).bool() for c in completions], batch_first=True)
    mu = pad_sequence([torch.tensor(c.logprobs).double() for c in completions], batch_first=True)
    old_answers, old = logprobs_under(weights[0])
    _, ref = logprobs_under(ref_weights)
    values = returns = None
    if len(weights) == 2:
        values = [values_of(model, weights[1], c) for c in completions]
        values = pad_sequence(values, batch_first=True)
        advantages, returns = advantages_of_a_critic(args, completions, old, ref, values, mask)
    else:
        advantages = plain_advantages(name, args, completions, baseline)
    factors = correction_weights(args, old, mu, mask)
    if getattr(args, "overlong", "") == "filter":
        mask = mask & torch.tensor([[not c.truncated] for c in completions])
    return SimpleNamespace(
        completions=completions,
        answers=old_answers,
        mask=mask,
        trainer=old,
        logprobs=mu if getattr(args, "old_logprobs", "") == "sampler" else old,
        ref=ref if getattr(args, "kl_coef", 0) > 0 else None,
        mu=mu,
        values=values,
        returns=returns,
        advantages=factors * advantages,
    )


# -------------------------------------------------------------------------------------- a step


def total_loss(name, args, before, rows, weights, model):
    """Of one optimizer step: a scalar."""
    completions = [before.completions[i] for i in rows]
    answers = [answer(model, weights[0], c, args.temperature) for c in completions]
    mask = before.mask[rows]
    width = mask.shape[1]

    def table(tensors):
        padded = pad_sequence(tensors, batch_first=True)
        return torch.nn.functional.pad(padded, (0, width - padded.shape[1]))

    b = batch(**vars(args), mask=mask, logprobs=table([a.logprobs for a in answers]))
    b.old_logprobs = before.logprobs[rows]
    b.advantages = before.advantages[rows]
    if before.ref is not None:
        b.ref_logprobs = before.ref[rows]
    b.sampler_logprobs = before.mu[rows]
    if hasattr(args, "gamma_min"):
        old_answers = [before.answers[i] for i in rows]
        b.scores = expert_logprobs(answers, old_answers)
        b.old_scores = expert_logprobs(old_answers, old_answers)
        b.router_shift = reference.router_shift(b).detach()
    loss = -objective_of(name)(b)
    if len(weights) == 2:
        b.old_values = before.values[rows]
        b.returns = before.returns[rows]
        b.values = table([values_of(model, weights[1], c) for c in completions])
        entropy = torch.cat([a.entropies for a in answers]).mean()
        loss = loss + args.value_coef * reference.value_loss(b) - args.entropy_coef * entropy
    if hasattr(args, "positive_lm_coef"):
        b.is_right = torch.tensor([[c.verdict == "correct"] for c in completions])
        loss = loss + args.positive_lm_coef * reference.positive_lm_loss(b)
    # A product of two means, and so the one that depends on how the rows are parted.
    widths = [a.routers.shape[1] for a in answers]
    parts = []
    for i in sorted(range(len(rows)), key=lambda i: widths[i]):
        if not parts or (len(parts[-1]) + 1) * widths[i] > args.micro_batch_tokens:
            parts.append([])
        parts[-1].append(i)
    assert len(parts) > 1 or len(rows) < 5
    for part in parts:
        share = len(part) / len(rows)
        balance = load_balancing_loss([answers[i] for i in part])
        loss = loss + args.router_aux_coef * share * balance
    return loss


def check_step(name, args, before, rows, step, is_pretraining, model):
    """The gradients that the optimizer was given, clipped model by model. Returns the policy's norm
    before that, 0 if it has none."""
    norms = []
    for weights in step.weights:
        for weight in weights:
            weight.requires_grad_()
    loss = total_loss(name, args, before, rows, step.weights, model)
    for number, (weights, gradients) in enumerate(zip(step.weights, step.gradients, strict=True)):
        if is_pretraining and number == 0:
            assert all(gradient is None for gradient in gradients)
            norms.append(0)
            continue
        # Zeros for layers that no loss reaches, if the correction masks the whole minibatch.
        expected = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
        expected = torch.cat([gradient.flatten() for gradient in expected])
        norms.append(expected.norm().item())
        expected = expected * min(1, args.max_grad_norm / (norms[-1] + 1e-6))
        seen = torch.cat([gradient.flatten() for gradient in gradients])
        assert (seen - expected).norm() <= 5e-4 * expected.norm()  # a value clip may leave 0
    return norms[0]


def check_sampler(args, before, first_weights, weights, model, line):
    """Completions come from the policy of now, perhaps in int4, or from that of the first iteration.
    The log has the KL to the policy of now, over the tokens of all steps."""
    sampler = weights
    if getattr(args, "rollout_refresh_every", 1) > 1:
        sampler = first_weights
    elif getattr(args, "rollout_dtype", "same") == "int4":
        sampler = rounded(model, weights)
    with torch.no_grad():
        for c in before.completions:
            logprobs = answer(model, sampler, c, args.temperature).logprobs
            assert c.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    if "rollout/sampler_kl" in line:
        log_rho = (before.trainer - before.mu)[before.mask]
        kl = (log_rho.expm1() - log_rho).mean().item()
        assert line["rollout/sampler_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-8)


# ------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("case", CASES)
def test_run_has_the_gradients_of_the_literal_objective(case, tmp_path, tiny_model, reward_file):
    reward = reward_file(
        "number = sum(map(ord, text))",
        'return number % 7 / 7, "correct" if number % 2 else "wrong"',
    )
    name, changes = CASES[case]
    small = {field: value for field, value in SMALL.items() if field in fields_of(name)}
    _, args = script_args(name, **small | changes, reward=reward, run_dir=str(tmp_path / "run"))
    iterations = watched(name, args, case in WITH_COPIES)
    assert len(iterations) == args.iterations
    model, _ = tiny_model
    first_weights = iterations[0].steps[0].weights[0]
    rates = [args.lr, args.critic_lr] if hasattr(args, "critic_lr") else [args.lr]
    ref_weights = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first_weights, ref_weights, strict=True))
    baseline = 0.0
    for iteration, (seen, line) in enumerate(zip(iterations, metrics(args.folder), strict=True), 1):
        weights = seen.steps[0].weights
        if iteration > 1 and getattr(args, "ref_reset_every", 0) > 0:
            ref_weights = weights[0]
        completions = learned_from(args, seen.rounds)
        before = before_update(name, args, completions, weights, ref_weights, baseline, model)
        if hasattr(args, "baseline_decay"):
            mean_reward = sum(c.reward for c in completions) / len(completions)
            baseline = args.baseline_decay * baseline + (1 - args.baseline_decay) * mean_reward
        check_sampler(args, before, first_weights, weights[0], model, line)
        # dapo, if it could not fill its batch, takes fewer steps of about the same size.
        rows_per_step = args.prompts_per_iteration * args.group_size / args.num_minibatches
        num_minibatches = max(1, round(len(completions) / rows_per_step))
        minibatches = torch.arange(len(completions)).tensor_split(num_minibatches)
        assert len(seen.steps) == args.update_epochs * num_minibatches
        is_pretraining = iteration <= getattr(args, "pretraining_iterations", 0)
        norms = []
        for number, step in enumerate(seen.steps):
            rows = minibatches[number % num_minibatches].tolist()
            norms.append(check_step(name, args, before, rows, step, is_pretraining, model))
            assert step.rates == rates
        assert line["charts/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
