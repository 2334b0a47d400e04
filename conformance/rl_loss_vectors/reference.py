"""The objectives again, as slow double loops over completions and tokens, straight from the papers.

The expected numbers in vectors.json were made with it, and mistakes.py replaces its pieces. Inputs are
in one batch `b`, under their names in vectors.json; only tokens in the mask are read. Advantages are
(B, T); where there is one ratio per completion, the first token's advantage is read.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import torch

LOSSES = "ppo grpo dr_grpo dapo gspo cispo gmpo rspo sapo reinforce rloo vapo".split()
LOSSES += ["deepseek_v32", "grpo_offpolicy"]
DTYPES = dict.fromkeys(["mask", "is_right"], torch.bool)
DTYPES |= dict.fromkeys(["indices", "group_ids", "rollout_ids"], torch.int64)
ABSENT = {"ref_logprobs": None, "sampler_logprobs": None, "clip_level": "token", "offpolicy_mask": 0}
ABSENT |= {"rollout_ratio": defaultdict(lambda: 1.0), "bootstrap": defaultdict(lambda: 0.0)}
ABSENT |= {"kl_is_corrected": False}


def tokens(b, i):
    """The positions of completion i that the policy has generated; there may be gaps between them."""
    return [t for t in range(b.mask.shape[1]) if b.mask[i, t]]


def length(b, i):
    return len(tokens(b, i))


def lengths(b):
    return torch.tensor([[length(b, i)] for i in range(len(b.mask))])


def each(b, term):
    """term(i, t) for every token, and 0 elsewhere, (B, T)."""
    terms = torch.zeros(b.mask.shape, dtype=torch.float64)
    for i in range(len(terms)):
        for t in tokens(b, i):
            terms[i, t] = term(i, t)
    return terms


def average(b, terms, divisors):
    """The sum of all terms, (B, T) or (B, 1), divided by one number or by one for each completion."""
    b.terms = terms
    b.denominators = torch.zeros(len(terms), 1) + divisors
    return (terms / divisors).sum()


def completion_mean(b, term):
    terms = torch.zeros(len(b.mask), 1, dtype=torch.float64)
    for i in range(len(terms)):
        terms[i] = term(i)
    return average(b, terms, len(terms))


def log_ratio(b, i, t):
    return b.logprobs[i, t] - b.old_logprobs[i, t]


def ratio(b, i, t):
    return torch.exp(log_ratio(b, i, t))


def advantage(b, i):
    return b.advantages[i, tokens(b, i)[0]]


def clipped(r, a, low, high):
    return torch.min(r * a, torch.clamp(r, low, high) * a)


def clipped_by_eps(r, a, b):
    return clipped(r, a, 1 - b.clip_eps_low, 1 + b.clip_eps_high)


def clipped_term(b, i, t):
    return clipped_by_eps(ratio(b, i, t), b.advantages[i, t], b)


def ppo(b):
    return average(b, each(b, lambda i, t: clipped_term(b, i, t)), lengths(b).sum())


dapo = ppo
vapo = ppo  # without the LM loss, which is a function of its own


def dr_grpo(b):
    terms = each(b, lambda i, t: clipped_term(b, i, t))
    return average(b, terms, len(terms) * b.max_new_tokens)


def k3(log_x):
    """x - log x - 1, x = pi_ref / pi; with expm1, since x - 1 would lose digits near 1"""
    return torch.expm1(log_x) - log_x


def is_dropped(b, i):
    """The mask of DeepSeek-V3.2: a bad completion that the policy has moved away from."""
    if b.offpolicy_mask == 0 or advantage(b, i) >= 0:
        return False
    log_old_over_pi = sum(-log_ratio(b, i, t).item() for t in tokens(b, i))
    log_mu_over_old = sum(-math.log(b.rollout_ratio[i, t]) for t in tokens(b, i))
    return (log_old_over_pi + log_mu_over_old) / length(b, i) > b.offpolicy_mask


def grpo(b):
    def term(i, t):
        policy_term = 0 * b.logprobs[i, t] if is_dropped(b, i) else clipped_term(b, i, t)
        if b.ref_logprobs is None:
            return policy_term
        k = k3(b.ref_logprobs[i, t] - b.logprobs[i, t])
        if b.kl_is_corrected:
            # pi / mu, where mu is what the completion was sampled from; rollout_ratio is pi_old / mu
            k = b.rollout_ratio[i, t] * ratio(b, i, t) * k
        return policy_term - b.kl_coef * k

    return average(b, each(b, term), len(b.mask) * lengths(b))


grpo_offpolicy = grpo  # with b.offpolicy_mask


def deepseek_v32(b):
    """GRPO whose KL is weighted by pi / mu, with gradient, and which drops bad completions that the
    policy has moved away from. mu is the sampler, by default the old policy."""
    mu = b.old_logprobs if b.sampler_logprobs is None else b.sampler_logprobs

    def is_left(i):
        places = tokens(b, i)
        moved = sum((mu[i, t] - b.logprobs[i, t]).item() for t in places) / len(places)
        return sum(b.advantages[i, t] for t in places) < 0 and moved > b.offpolicy_mask

    def term(i, t):
        policy_term = 0 * b.logprobs[i, t] if is_left(i) else clipped_term(b, i, t)
        if b.ref_logprobs is None:
            return policy_term
        k = k3(b.ref_logprobs[i, t] - b.logprobs[i, t])
        return policy_term - b.kl_coef * torch.exp(b.logprobs[i, t] - mu[i, t]) * k

    return average(b, each(b, term), len(b.mask) * lengths(b))


def sequence_ratio(b, i):
    zero = torch.zeros((), dtype=b.logprobs.dtype)
    return torch.exp(sum((log_ratio(b, i, t) for t in tokens(b, i)), start=zero) / length(b, i))


def gspo(b):
    def term(i, t):
        own = torch.exp(b.logprobs[i, t]) / torch.exp(b.logprobs[i, t]).detach()
        return clipped_by_eps(sequence_ratio(b, i).detach() * own, b.advantages[i, t], b)

    if b.variant == "gspo_token":
        return average(b, each(b, term), len(b.mask) * lengths(b))
    return completion_mean(b, lambda i: clipped_by_eps(sequence_ratio(b, i), advantage(b, i), b))


def stopped(x):
    return x.detach()


def cispo(b):
    def term(i, t):
        a = b.advantages[i, t]
        r = ratio(b, i, t)
        weight = torch.clamp(r, b.is_weight_floor, b.is_weight_cap)
        if b.ppo_mask:
            too_high = a > 0 and r > 1 + b.clip_eps_high
            too_low = a < 0 and r < 1 - b.clip_eps_low
            weight = 0 * r if too_high or too_low else r
        return stopped(weight) * a * b.logprobs[i, t]

    return average(b, each(b, term), lengths(b).sum())


def pessimistic(r, a, b):
    """min(r A, clip(r) A) / A; eps bounds the logarithm of r"""
    return clipped(r, a, math.exp(-b.log_ratio_clip), math.exp(b.log_ratio_clip)) / a


def geometric_means(b, factor):
    """(prod_t |factor A|)^(1/|o|) sgn(A), not the scripts' log space"""

    def term(i):
        a = advantage(b, i)
        if a == 0:
            return 0
        product = math.prod(factor(i, t, ratio(b, i, t), a) for t in tokens(b, i))
        if b.clip_level == "sequence":  # the counterexample: first the clip, then the root
            product = pessimistic(product, a, b)
        return product ** (1 / length(b, i)) * a

    return completion_mean(b, term)


def gmpo(b):
    return geometric_means(b, lambda i, t, r, a: pessimistic(r, a, b) if b.clip_level == "token" else r)


def rspo(b):
    def factor(i, t, r, a):
        gamma = max(b.router_shift[i, t].item(), b.gamma_min)
        if b.shift == "before_clip":
            return pessimistic(r * gamma, a, b)
        exponent = 1 if b.shift == "damped" else torch.sign(a)  # or as printed
        return pessimistic(r, a, b) * gamma**exponent

    return geometric_means(b, factor)


def gate(r, tau):
    return 4 / tau / (1 + torch.exp(-tau * (r - 1)))


def sapo(b):
    def term(i, t):
        a = b.advantages[i, t]
        return gate(ratio(b, i, t), b.tau_pos if a > 0 else b.tau_neg) * a

    return average(b, each(b, term), len(b.mask) * lengths(b))


def reinforce(b):
    return average(b, each(b, lambda i, t: b.advantages[i, t] * b.logprobs[i, t]), len(b.mask))


rloo = reinforce


def positive_lm_loss(b):
    """VAPO's, over the tokens of right completions; 0 if there are none."""
    right = [i for i in range(len(b.mask)) if b.is_right[i, 0]]
    terms = [-b.logprobs[i, t] for i in right for t in tokens(b, i)]
    return sum(terms, start=torch.zeros((), dtype=b.logprobs.dtype)) / max(len(terms), 1)


worse = torch.max


def value_loss(b):
    def term(i, t):
        reach = b.value_clip or math.inf
        near = b.old_values[i, t] + torch.clamp(b.values[i, t] - b.old_values[i, t], -reach, reach)
        return worse((b.values[i, t] - b.returns[i, t]) ** 2, (near - b.returns[i, t]) ** 2)

    return average(b, each(b, term), lengths(b).sum())


def is_uniform(rewards):
    return all(reward == rewards[0] for reward in rewards)


def mean(rewards, j):
    return sum(rewards) / len(rewards)


def mean_of_others(rewards, j):
    return (sum(rewards) - rewards[j]) / (len(rewards) - 1)


def scale(rewards):
    return rewards.std(unbiased=True) + 1e-6


def of_group(rewards, baseline, divisor):
    """Advantages; exactly 0 if the rewards are equal."""
    if is_uniform(rewards):
        return torch.zeros_like(rewards)
    differences = [x - baseline(rewards, j) for j, x in enumerate(rewards)]
    return torch.stack(differences) / divisor(rewards)


def of_groups(b, baseline, divisor=lambda rewards: 1):
    return torch.stack([of_group(rewards, baseline, divisor) for rewards in b.rewards])


def group_differences(b):
    return of_groups(b, mean)


def group_advantages(b):
    return of_groups(b, mean, scale)


def leave_one_out(b):
    return of_groups(b, mean_of_others)


def grouped_advantages(b):
    """For samples in any order, (N,); a rollout counts once in its group, even with several samples."""
    result = torch.zeros_like(b.rewards)
    for group in b.group_ids.unique():
        places = [n for n, other in enumerate(b.group_ids) if other == group]
        rewards = {b.rollout_ids[n].item(): b.rewards[n] for n in places}
        advantages = of_group(torch.stack([*rewards.values()]), mean, scale)
        found = dict(zip(rewards, advantages, strict=True))
        for n in places:
            result[n] = found[b.rollout_ids[n].item()]
    return result


def whiten(b):
    """Mean 0 and standard deviation 1 over the tokens of the mask, (B, T)."""
    x = b.advantages[b.mask]
    deviation = x - sum(x) / len(x)
    whitened = torch.zeros_like(b.advantages)
    whitened[b.mask] = deviation / (torch.sqrt(sum(deviation**2) / len(x)) + 1e-8)
    return whitened


def overlong_penalty(b):
    start = b.max_new_tokens - b.overlong_cache
    return torch.clamp((start - b.lengths) / b.overlong_cache, -1, 0)


def rollout_weights(b):
    weights = torch.zeros_like(b.old_logprobs)
    for i in range(len(weights)):
        places = tokens(b, i)
        rho = torch.exp(b.old_logprobs[i, places] - b.rollout_logprobs[i, places])
        weights[i, places] = weights_by_rule(b, rho)
    return weights


def weights_by_rule(b, rho):
    """The weights of one completion's tokens; rho = pi_old / mu."""
    product = rho.prod()
    if b.rule == "token_tis":
        return rho.clamp(max=b.cap)
    if b.rule == "sequence_tis":
        return product.clamp(max=b.cap)
    if b.rule == "sequence_mis":
        return product * (product <= b.cap)
    if b.rule == "icepop":
        return rho * (b.mask_low <= rho) * (rho <= b.mask_high)
    is_near = b.mask_low <= product ** (1 / len(rho)) <= b.mask_high
    return is_near * (rho.clamp(max=b.cap) if b.rule == "geo_mask" else torch.ones_like(rho))


def replayed_gate(b):
    """The weights of given experts under the current router, (N, K): from a softmax over all experts,
    or only over the given ones; 0 where the mask is 0."""
    rows = []
    for n in range(len(b.logits)):
        p = torch.exp(b.logits[n]) / torch.exp(b.logits[n]).sum()
        chosen = torch.stack([p[k] for k in b.indices[n].long()])
        chosen = chosen / sum(chosen) if b.normalized else chosen
        rows.append(chosen * b.mask[n])
    return torch.stack(rows)


def gae(b):
    """(advantages, returns), (2, B, T), from the sums that GAE abbreviates; 0 outside the mask."""
    advantages = torch.zeros_like(b.rewards)
    for i in range(len(b.mask)):
        places = tokens(b, i)
        lam = b.lam[i] if torch.is_tensor(b.lam) else b.lam
        # V after the last token: 0, or the critic's value there if the completion was cut off
        values = [*b.values[i, places], b.bootstrap[i, 0]]
        delta = b.rewards[i, places].clone()
        for k in range(len(places)):
            delta[k] += b.gamma * values[k + 1] - values[k]
        for k, t in enumerate(places):
            advantages[i, t] = sum((b.gamma * lam) ** j * d for j, d in enumerate(delta[k:]))
    return torch.stack([advantages, torch.where(b.mask, advantages + b.values, 0)])


def router_shift(b):
    """RSPO's gamma before its floor, (B, T), from the log-probabilities of K experts in L layers."""
    B, T, L, K = b.scores.shape
    gamma = torch.zeros(B, T, dtype=b.scores.dtype)
    for i in range(B):
        for t in range(T):
            layers = (b.scores - b.old_scores)[i, t].abs()
            gamma[i, t] = torch.exp(-sum(sum(layer) / K for layer in layers) / L)
    return gamma


# ---------------------------------------------------------------------------- cases of vectors.json


def fields_of(case):
    """The arguments and keywords of a case, by name: tensors, numbers and words."""
    fields = {}
    for name, x in (case["inputs"] | case["keywords"]).items():
        fields[name] = x
        if isinstance(x, list):
            fields[name] = torch.tensor(x, dtype=DTYPES.get(name, torch.float64))
    if "masked_places_hold" in case:
        for name, x in fields.items():
            if torch.is_tensor(x) and x.is_floating_point() and x.shape == fields["mask"].shape:
                fields[name] = torch.where(fields["mask"], x, float(case["masked_places_hold"]))
    return fields


def batch_of(section, case):
    b = SimpleNamespace(**(ABSENT | fields_of(case)))
    b.micro_batches = case.get("micro_batches", [slice(None)])
    if section in LOSSES:
        b.advantages = b.advantages.expand_as(b.logprobs)
    return b


def evaluate(section, case, change=None, b=None):
    """(value, gradient or None) as arrays. change: an entry's, from mistakes.py."""
    b = b or batch_of(section, case)
    objective = globals()[section]
    first = getattr(b, next(iter(case["inputs"])))
    first.requires_grad_("gradient" in case)
    value = change(objective, b) if change else objective(b)
    if section in LOSSES:
        value = -value
    if "gradient" not in case:
        return value.numpy(), None
    value = torch.as_tensor(value, dtype=torch.float64)
    total = (value * torch.tensor(case.get("coefficients", 1))).sum()
    total = total + 0 * first.nan_to_num().sum()  # a gradient even if nothing depends on it
    (gradient,) = torch.autograd.grad(total, first)
    return value.detach().numpy(), gradient.numpy()


def with_results(section, case, change=None):
    """The case with the objective's results for it; change: as in evaluate."""
    b = batch_of(section, case)
    value, gradient = evaluate(section, case, change, b)
    case = case | {"value": value.tolist()}
    if gradient is not None:
        case["gradient"] = gradient.tolist()
    if "denominator" in case:
        terms = -b.terms if section in LOSSES else b.terms
        case |= {"terms": terms.tolist(), "denominator": b.denominators.tolist()}
    return case
