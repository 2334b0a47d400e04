"""The nine objectives once more, as a slow double loop over sequences and tokens, straight from the papers.

Nothing here is shared with the scripts: the tests compare the two. All of it works on float64 scalars with
autograd, so that a literal gradient comes with each literal value.
"""

import math

import torch


def clip(x, low, high):
    return torch.clamp(x, low, high)


def sign(x):
    return 1 if x > 0 else -1 if x < 0 else 0


def ratio(lp, old, i, t):
    return torch.exp(lp[i, t] - old[i, t])


def mean_log_ratio(lp, old, lengths, i):
    return sum(lp[i, t] - old[i, t] for t in range(lengths[i])) / lengths[i]


def ppo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            r = ratio(lp, old, i, t)
            clipped = clip(r, 1 - args.clip_eps_low, 1 + args.clip_eps_high)
            total += torch.min(r * adv[i, t], clipped * adv[i, t])
    return total / sum(lengths)


def grpo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        inner = 0
        for t in range(n):
            r = ratio(lp, old, i, t)
            term = torch.min(r * adv[i], clip(r, 1 - args.clip_eps_low, 1 + args.clip_eps_high) * adv[i])
            if "ref_logprobs_BT" in extra:
                x = torch.exp(extra["ref_logprobs_BT"][i, t] - lp[i, t])  # pi_ref / pi_theta
                k3 = x - torch.log(x) - 1
                term = term - args.kl_coef * (r * k3 if args.kl_is_corrected else k3)
            inner += term
        total += inner / n
    return total / len(lengths)


def dr_grpo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            r = ratio(lp, old, i, t)
            total += torch.min(r * adv[i], clip(r, 1 - args.clip_eps_low, 1 + args.clip_eps_high) * adv[i])
    return total / (len(lengths) * args.max_new_tokens)


def dapo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            r = ratio(lp, old, i, t)
            total += torch.min(r * adv[i], clip(r, 1 - args.clip_eps_low, 1 + args.clip_eps_high) * adv[i])
    return total / sum(lengths)


def gspo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        s = torch.exp(mean_log_ratio(lp, old, lengths, i))
        low, high = 1 - args.clip_eps_low, 1 + args.clip_eps_high
        if args.variant == "gspo":
            total += torch.min(s * adv[i], clip(s, low, high) * adv[i])
        else:
            per_token = 0
            for t in range(n):
                s_it = s.detach() * torch.exp(lp[i, t]) / torch.exp(lp[i, t]).detach()
                a = adv[i, t] if adv.dim() == 2 else adv[i]
                per_token += torch.min(s_it * a, clip(s_it, low, high) * a)
            total += per_token / n
    return total / len(lengths)


def cispo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            r = ratio(lp, old, i, t).detach()
            if args.ppo_mask:
                too_high = adv[i] > 0 and r > 1 + args.clip_eps_high
                too_low = adv[i] < 0 and r < 1 - args.clip_eps_low
                weight = 0.0 if too_high or too_low else r
            else:
                weight = min(r, args.is_weight_cap)
            total += weight * adv[i] * lp[i, t]
    return total / sum(lengths)


def gmpo(lp, old, adv, lengths, args, extra):
    """The paper's product of |min(r A, clip(r) A)|, not the scripts' log space."""
    total, low, high = 0, math.exp(-args.log_ratio_clip), math.exp(args.log_ratio_clip)
    for i, n in enumerate(lengths):
        if adv[i] == 0:
            continue
        if args.clip_level == "token":
            product = 1
            for t in range(n):
                r = ratio(lp, old, i, t)
                product = product * torch.min(r * adv[i], clip(r, low, high) * adv[i]).abs()
            total += product ** (1 / n) * sign(adv[i])
        else:
            s = torch.exp(mean_log_ratio(lp, old, lengths, i))
            total += torch.min(s * adv[i], clip(s, low, high) * adv[i])
    return total / len(lengths)


def rspo(lp, old, adv, lengths, args, extra):
    total, low, high = 0, math.exp(-args.log_ratio_clip), math.exp(args.log_ratio_clip)
    for i, n in enumerate(lengths):
        a, product = adv[i], 1
        if a == 0:
            continue
        for t in range(n):
            w = ratio(lp, old, i, t)
            gamma = max(extra["router_shift_BT"][i, t].item(), args.gamma_min)
            if args.shift == "before_clip":
                w = w * gamma
            if args.shift == "literal":  # [prod (min(w^sgn, clip(w^sgn)) gamma)]^(sgn / |o|), as printed
                powered = w ** sign(a)
                product = product * torch.min(powered, clip(powered, low, high)) * gamma
            else:
                product = product * torch.min(w * a, clip(w, low, high) * a) / a
                product = product * (gamma if args.shift == "damped" else 1)
        total += (product ** (sign(a) / n) if args.shift == "literal" else product ** (1 / n)) * a
    return total / len(lengths)


def sapo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        tau, inner = args.tau_pos if adv[i] > 0 else args.tau_neg, 0
        for t in range(n):
            inner += 4 / tau / (1 + torch.exp(-tau * (ratio(lp, old, i, t) - 1))) * adv[i]
        total += inner / n
    return total / len(lengths)
