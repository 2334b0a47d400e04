"""The objectives again, as slow double loops over completions and tokens, straight from the papers.

Nothing here is shared with the scripts: make.py writes the test vectors with it, and tests compare the
two. Inputs are in one batch `b`, under their names in vectors.json; only tokens of the mask are read.
Advantages are (B, T); where there is one ratio per completion, that of its first token is read.
"""

import math
from types import SimpleNamespace

import torch


def batch(**fields):
    b = SimpleNamespace(ref_logprobs=None, rollout_ratio=None, clip_level="token")
    vars(b).update(eps=1e-6, std_is_biased=False, has_zero_rule=True)  # of advantages
    vars(b).update(fields)
    return b


def tokens(b, i):
    """The positions of completion i that the policy has generated; there may be gaps between them."""
    return [t for t in range(b.mask.shape[1]) if b.mask[i, t]]


def each(b, term):
    """term(i, t) of every token, a list for each completion."""
    return [[term(i, t) for t in tokens(b, i)] for i in range(len(b.mask))]


def sequence_mean(terms):
    return sum(sum(row) / len(row) for row in terms) / len(terms)


def token_mean(terms):
    return sum(sum(row) for row in terms) / sum(len(row) for row in terms)


def completion_mean(b, term):
    return sum(term(i) for i in range(len(b.mask))) / len(b.mask)


def ratio(b, i, t):
    return torch.exp(b.logprobs[i, t] - b.old_logprobs[i, t])


def advantage(b, i):
    return b.advantages[i, tokens(b, i)[0]]


def clipped(r, a, b):
    return torch.min(r * a, torch.clamp(r, 1 - b.clip_eps_low, 1 + b.clip_eps_high) * a)


def clipped_term(b, i, t):
    return clipped(ratio(b, i, t), b.advantages[i, t], b)


def ppo(b):
    return token_mean(each(b, lambda i, t: clipped_term(b, i, t)))


dapo = ppo
vapo = ppo  # without the LM loss, which is a function of its own


def dr_grpo(b):
    terms = each(b, lambda i, t: clipped_term(b, i, t))
    return sum(sum(row) for row in terms) / (len(terms) * b.max_new_tokens)


def k3(log_x):
    """x - log x - 1, x = pi_ref / pi; by expm1, since x - 1 is rounding near 1"""
    return torch.expm1(log_x) - log_x


def grpo(b):
    def term(i, t):
        if b.ref_logprobs is None:
            return clipped_term(b, i, t)
        k = k3(b.ref_logprobs[i, t] - b.logprobs[i, t])
        if b.kl_is_corrected:
            # the ratio to what the completion was sampled from: pi / mu
            k = ratio(b, i, t) * k
            if b.rollout_ratio is not None:
                k = b.rollout_ratio[i, t] * k
        return clipped_term(b, i, t) - b.kl_coef * k

    return sequence_mean(each(b, term))


def sequence_ratio(b, i):
    places = tokens(b, i)
    return torch.exp(sum(b.logprobs[i, t] - b.old_logprobs[i, t] for t in places) / len(places))


def gspo(b):
    def term(i, t):
        own = torch.exp(b.logprobs[i, t]) / torch.exp(b.logprobs[i, t]).detach()
        return clipped(sequence_ratio(b, i).detach() * own, b.advantages[i, t], b)

    if b.variant == "gspo_token":
        return sequence_mean(each(b, term))
    return completion_mean(b, lambda i: clipped(sequence_ratio(b, i), advantage(b, i), b))


def importance_weight(r, a, b):
    if b.ppo_mask:
        too_high = a > 0 and r > 1 + b.clip_eps_high
        too_low = a < 0 and r < 1 - b.clip_eps_low
        return 0 * r if too_high or too_low else r
    return torch.clamp(r, b.is_weight_floor, b.is_weight_cap)


def stopped(x):
    return x.detach()


def cispo(b):
    def term(i, t):
        a = b.advantages[i, t]
        return stopped(importance_weight(ratio(b, i, t), a, b)) * a * b.logprobs[i, t]

    return token_mean(each(b, term))


def pessimistic(r, a, b):
    """min(r A, clip(r) A) / A; eps bounds the logarithm of r"""
    low, high = math.exp(-b.log_ratio_clip), math.exp(b.log_ratio_clip)
    return torch.min(r * a, torch.clamp(r, low, high) * a) / a


def geometric_mean(b, i, factor):
    """(prod_t |factor A|)^(1/|o|) sgn(A), not the scripts' log space"""
    a = advantage(b, i)
    if a == 0:
        return 0
    product = math.prod(factor(ratio(b, i, t), a, t) for t in tokens(b, i))
    if b.clip_level == "sequence":  # the counter-example: first the clip, then the root
        product = pessimistic(product, a, b)
    return product ** (1 / len(tokens(b, i))) * a


def gmpo(b):
    def factor(r, a, t):
        return pessimistic(r, a, b) if b.clip_level == "token" else r

    return completion_mean(b, lambda i: geometric_mean(b, i, factor))


def rspo(b):
    def term(i):
        def factor(r, a, t):
            gamma = max(b.router_shift[i, t].item(), b.gamma_min)
            if b.shift == "before_clip":
                return pessimistic(r * gamma, a, b)
            exponent = 1 if b.shift == "damped" else torch.sign(a)  # or as printed
            return pessimistic(r, a, b) * gamma**exponent

        return geometric_mean(b, i, factor)

    return completion_mean(b, term)


def gate(r, a, b):
    tau = b.tau_pos if a > 0 else b.tau_neg
    return 4 / tau / (1 + torch.exp(-tau * (r - 1)))


def sapo(b):
    def term(i, t):
        a = b.advantages[i, t]
        return gate(ratio(b, i, t), a, b) * a

    return sequence_mean(each(b, term))


def reinforce(b):
    terms = each(b, lambda i, t: b.advantages[i, t] * b.logprobs[i, t])
    return sum(sum(row) for row in terms) / len(terms)


rloo = reinforce


def positive_lm_loss(b):
    """VAPO's, of the tokens of right completions; 0 if there are none."""
    right = [i for i in range(len(b.mask)) if b.is_right[i, 0]]
    terms = [-b.logprobs[i, t] for i in right for t in tokens(b, i)]
    return sum(terms) / max(len(terms), 1)


def value_loss(b):
    def term(i, t):
        reach = b.value_clip or math.inf
        near = b.old_values[i, t] + torch.clamp(b.values[i, t] - b.old_values[i, t], -reach, reach)
        return torch.max((b.values[i, t] - b.returns[i, t]) ** 2, (near - b.returns[i, t]) ** 2)

    return token_mean(each(b, term))


def of_groups(b, advantages_of):
    """Exactly 0 in a group of equal rewards."""
    rows = []
    for group in b.rewards:
        is_uniform = all(reward == group[0] for reward in group)
        row = advantages_of(group)
        rows.append(torch.zeros_like(group) if is_uniform and b.has_zero_rule else row)
    return torch.stack(rows)


def group_differences(b):
    return of_groups(b, lambda group: group - sum(group) / len(group))


def group_advantages(b):
    def standardized(group):
        std = torch.std(group, unbiased=not b.std_is_biased)
        return (group - sum(group) / len(group)) / (std + b.eps)

    return of_groups(b, standardized)


def leave_one_out(b):
    return of_groups(b, lambda group: group - (sum(group) - group) / (len(group) - 1))


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
