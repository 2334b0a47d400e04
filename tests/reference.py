"""The objectives once more, as a slow double loop over sequences and tokens, straight from the
papers.

Nothing here is shared with the scripts: the tests compare the two. All of it works on float64 scalars
with autograd, so that a literal gradient comes with each literal value. `adv` is (B, T) here, also
where all tokens of a completion have the same advantage; objectives with one ratio per completion read
its first. With `extra["weights"]` (B, T) they are the decoupled objectives: each term has the weight of
its token, or of its completion, which is the first token's, outside of min and clip."""

import math

import torch


def clip(x, low, high):
    return torch.clamp(x, low, high)


def sign(x):
    return 1 if x > 0 else -1 if x < 0 else 0


def ratio(lp, old, i, t):
    return torch.exp(lp[i, t] - old[i, t])


def sum_log_ratio(lp, old, lengths, i):
    return sum(lp[i, t] - old[i, t] for t in range(lengths[i]))


def weight(extra, i, t=0):
    return extra["weights"][i, t] if "weights" in extra else 1


def clipped(r, a, args):
    """min(r A, clip(r) A)"""
    return torch.min(r * a, clip(r, 1 - args.clip_eps_low, 1 + args.clip_eps_high) * a)


def ppo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            total += weight(extra, i, t) * clipped(ratio(lp, old, i, t), adv[i, t], args)
    return total / sum(lengths)


def grpo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        inner = 0
        for t in range(n):
            r = ratio(lp, old, i, t)
            term = weight(extra, i, t) * clipped(r, adv[i, t], args)
            if "ref_logprobs_BT" in extra:
                x = torch.exp(extra["ref_logprobs_BT"][i, t] - lp[i, t])  # pi_ref / pi_theta
                k3 = x - torch.log(x) - 1
                if args.kl_is_corrected:
                    # the ratio to what the completion was sampled from: pi / mu
                    k3 = r * k3
                    if "rollout_ratio_BT" in extra:
                        k3 = extra["rollout_ratio_BT"][i, t] * k3
                term = term - args.kl_coef * k3
            inner += term
        total += inner / n
    return total / len(lengths)


def dr_grpo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            total += weight(extra, i, t) * clipped(ratio(lp, old, i, t), adv[i, t], args)
    return total / (len(lengths) * args.max_new_tokens)


def dapo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            total += weight(extra, i, t) * clipped(ratio(lp, old, i, t), adv[i, t], args)
    return total / sum(lengths)


def gspo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        s = torch.exp(sum_log_ratio(lp, old, lengths, i) / n)
        if args.variant == "gspo":
            total += weight(extra, i) * clipped(s, adv[i, 0], args)
        else:
            inner = 0
            for t in range(n):
                s_it = s.detach() * torch.exp(lp[i, t]) / torch.exp(lp[i, t]).detach()
                inner += weight(extra, i, t) * clipped(s_it, adv[i, t], args)
            total += inner / n
    return total / len(lengths)


def cispo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            r = ratio(lp, old, i, t).detach()
            if args.ppo_mask:
                too_high = adv[i, t] > 0 and r > 1 + args.clip_eps_high
                too_low = adv[i, t] < 0 and r < 1 - args.clip_eps_low
                importance = 0.0 if too_high or too_low else r
            else:
                importance = min(max(r, args.is_weight_floor), args.is_weight_cap)
            total += weight(extra, i, t) * importance * adv[i, t] * lp[i, t]
    return total / sum(lengths)


def gmpo(lp, old, adv, lengths, args, extra):
    """The paper's product of |min(r A, clip(r) A)|, not the scripts' log space. For the counter-example
    the sum of the log-ratios, clipped at +-eps on the side that A asks for, and only then divided by
    |o|."""
    total = 0
    eps = args.log_ratio_clip
    for i, n in enumerate(lengths):
        a = adv[i, 0]
        if a == 0:
            continue
        if args.clip_level == "token":
            product = 1
            for t in range(n):
                r = ratio(lp, old, i, t)
                product = product * torch.min(r * a, clip(r, math.exp(-eps), math.exp(eps)) * a).abs()
            total += weight(extra, i) * product ** (1 / n) * sign(a)
        else:
            whole = sum_log_ratio(lp, old, lengths, i)
            if a > 0:
                whole = torch.clamp(whole, max=eps)
            else:
                whole = torch.clamp(whole, min=-eps)
            total += weight(extra, i) * a * torch.exp(whole / n)
    return total / len(lengths)


def rspo(lp, old, adv, lengths, args, extra):
    total = 0
    low = math.exp(-args.log_ratio_clip)
    high = math.exp(args.log_ratio_clip)
    for i, n in enumerate(lengths):
        a = adv[i, 0]
        product = 1
        if a == 0:
            continue
        for t in range(n):
            w = ratio(lp, old, i, t)
            gamma = max(extra["router_shift_BT"][i, t].item(), args.gamma_min)
            if args.shift == "before_clip":
                w = w * gamma
            if (
                args.shift == "literal"
            ):  # [prod (min(w^sgn, clip(w^sgn)) gamma)]^(sgn / |o|), as printed
                powered = w ** sign(a)
                product = product * torch.min(powered, clip(powered, low, high)) * gamma
            else:
                product = product * torch.min(w * a, clip(w, low, high) * a) / a
                product = product * (gamma if args.shift == "damped" else 1)
        mean = product ** (sign(a) / n) if args.shift == "literal" else product ** (1 / n)
        total += weight(extra, i) * mean * a
    return total / len(lengths)


def sapo(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        inner = 0
        for t in range(n):
            tau = args.tau_pos if adv[i, t] > 0 else args.tau_neg
            gate = 4 / tau / (1 + torch.exp(-tau * (ratio(lp, old, i, t) - 1)))
            inner += weight(extra, i, t) * gate * adv[i, t]
        total += inner / n
    return total / len(lengths)


def reinforce(lp, old, adv, lengths, args, extra):
    total = 0
    for i, n in enumerate(lengths):
        for t in range(n):
            total += weight(extra, i, t) * adv[i, t] * lp[i, t]
    return total / len(lengths)


def rloo(lp, old, adv, lengths, args, extra):
    return reinforce(lp, old, adv, lengths, args, extra)


def vapo(lp, old, adv, lengths, args, extra):
    """Without the LM loss, which is a function of its own."""
    return ppo(lp, old, adv, lengths, args, extra)


def leave_one_out(rewards):
    """RLOO's advantages of one group, a list."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in range(len(rewards)) if j != i]
        advantages.append(reward - sum(others) / len(others))
    return advantages


def gae(rewards, values, gamma, lam):
    """Advantages of one completion from the sums that GAE abbreviates; lists, V is 0 after the end."""
    n = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


def positive_lm_loss(lp, is_right, lengths):
    """Minus the mean log-prob of the tokens of right completions; 0 if there are none."""
    total = 0
    count = 0
    for i, n in enumerate(lengths):
        if is_right[i]:
            total -= sum(lp[i, t] for t in range(n))
            count += n
    return total / max(count, 1)
