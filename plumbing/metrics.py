"""What a run measures: how long its phases take, and the numbers of metrics.jsonl."""

import math
import time
from contextlib import contextmanager

import torch


class Clock:
    """Times the phases of an iteration, and shows them on the progress bar."""

    def __init__(self):
        self.seconds = {}  # {phase: seconds since the iteration began}
        self.is_running = False
        self.show = lambda text: None

    @contextmanager
    def __call__(self, phase):
        """Times the code inside. Phases do not nest: sampling in an evaluation is evaluation."""
        if self.is_running:
            yield
            return
        self.is_running = True
        self.show(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.is_running = False
            self.seconds[phase] = self.seconds.get(phase, 0) + time.perf_counter() - start
            self.show("update")  # everything outside other phases


clock = Clock()


# ------------------------------------------------------------------------- means of an iteration

# Keys for which an iteration's largest value is logged, not its mean.
MAXIMA = {f"losses/{name}_max" for name in ("ratio", "sequence_ratio", "first_step_ratio_error")}


def add(reports, prefix, values, weight):
    """Adds {name: number or tensor} to `reports`, {key: [(value, weight)]}. The weight is the number of
    tokens or sequences averaged. A name with a slash is already a full key. Tensors stay on the device,
    so that the host does not wait for it."""
    for name, value in values.items():
        key = name if "/" in name else f"{prefix}/{name}"
        pair = (torch.as_tensor(value).detach(), torch.as_tensor(weight))
        reports.setdefault(key, []).append(pair)


def summarize(reports):
    """{key: weighted mean, or the largest value for keys in MAXIMA}. Keys with zero weight are
    omitted."""
    result = {}
    for key, pairs in reports.items():
        counted = [(value, weight) for value, weight in pairs if weight > 0]
        if counted and key in MAXIMA:
            result[key] = max(value.item() for value, _ in counted)
        elif counted:
            total = sum(value * weight for value, weight in counted)
            result[key] = (total / sum(weight for _, weight in counted)).item()
    return result


@torch.no_grad()
def policy_stats(outputs, micro, is_first_step):
    """{name: scalar} for a micro-batch: the entropy, and how far the policy is from the old one, if
    that is known."""
    mask_BT = micro.mask_BT
    stats = {"entropy": mean_over([outputs.entropy_BT], [mask_BT])}
    if micro.old.logprobs_BT is None:
        return stats
    logratio_BT = outputs.logprobs_BT - micro.old.logprobs_BT
    logratio_B = torch.where(mask_BT, logratio_BT, 0).sum(1) / mask_BT.sum(1).clamp(min=1)
    stats["sequence_ratio_max"] = torch.where(mask_BT.any(1), logratio_B, -math.inf).max().exp()
    if is_first_step:
        stats["first_step_ratio_error_max"] = torch.where(mask_BT, logratio_BT.expm1(), 0).abs().max()
    return stats


@torch.no_grad()
def router_stats(outputs, micro, num_experts):
    """Statistics of the routers' choices for response tokens; {} for a dense model. load_max: the
    largest fraction of a layer's choices that goes to one expert. expert_flip_frac, if the old policy's
    experts are known: the fraction of (token, layer) pairs for which the routers now choose different
    experts."""
    mask_BT = micro.mask_BT
    own_BTLK = outputs.experts_BTLK
    if own_BTLK is None:
        return {}
    L, K = own_BTLK.shape[2:]
    layer_L1 = torch.arange(L, device=mask_BT.device)[:, None]
    expert_BTLK = own_BTLK + num_experts * layer_L1
    is_counted_BTLK = mask_BT[:, :, None, None].expand_as(expert_BTLK).long()
    counts = torch.zeros(L * num_experts, dtype=torch.long, device=mask_BT.device)
    counts.index_add_(0, expert_BTLK.flatten(), is_counted_BTLK.flatten())
    stats = {"moe/load_max": counts.max() / (K * mask_BT.sum()).clamp(min=1)}
    old_BTLK = micro.old.experts_BTLK
    if old_BTLK is not None:
        flips_BTL = (own_BTLK != old_BTLK).any(-1)
        stats["moe/expert_flip_frac"] = mean_over([flips_BTL.float().mean(-1)], [mask_BT])
    return stats


def mean_over(tensors, masks):
    """Mean over several batches where the masks are True; 0 if they are empty. A tensor and a mask for
    each batch, both (B, T) or (B, 1), or the tensor (B, 1) and the mask (B, T)."""
    pairs = list(zip(tensors, masks, strict=True))
    total = sum(torch.where(mask, x, 0).sum() for x, mask in pairs)
    return total / sum(mask.sum() for mask in masks).clamp(min=1)


@torch.no_grad()
def sampler_stats(batches):
    """{name: scalar}: how far the sampler is from the training forward, if that ran before the
    update."""
    if batches[0].old.logprobs_BT is None:
        return {}
    kls = []
    for batch in batches:
        logratio_BT = batch.old.logprobs_BT - batch.sampler_logprobs_BT
        # r - 1 - log r, whose mean estimates KL(mu || pi_old); near 0, exp(x) - 1 would be noise
        kls.append(logratio_BT.expm1() - logratio_BT)
    return {"sampler_kl": mean_over(kls, [batch.mask_BT for batch in batches])}


def critic_stats(batches):
    """{key: scalar} of ppo's batches. losses/explained_variance: the fraction of the returns' variance
    that the critic explains; losses/kl_ref, with a reference."""
    masks = [batch.mask_BT for batch in batches]
    returns_N = torch.cat([batch.returns_BT[batch.mask_BT] for batch in batches])
    values_N = torch.cat([batch.values_BT[batch.mask_BT] for batch in batches])
    variance = (returns_N - values_N).var()
    stats = {"losses/explained_variance": 1 - variance / returns_N.var().clamp(min=1e-8)}
    if batches[0].ref.logprobs_BT is not None:
        stats["losses/kl_ref"] = mean_over([batch.kl_BT for batch in batches], masks)
    return stats


def rollout_summary(completions, num_samples=1):
    """{name: number} for graded completions, with pass@k if each problem has several. What needs
    verdicts is left out if one has none. A "direct" completion begins with its answer: no work."""
    count = len(completions)
    verdicts = [c.verdict for c in completions]
    direct = [c.text.lstrip().startswith(("####", "\\box")) for c in completions]
    result = {
        "accuracy": verdicts.count("correct") / count,
        "reward_mean": sum(c.reward for c in completions) / count,
        "truncated_frac": sum(c.truncated for c in completions) / count,
        "no_answer_frac": verdicts.count("no_answer") / count,
        "direct_frac": sum(direct) / count,
        "response_len_mean": sum(len(c.ids) for c in completions) / count,
    }
    if None in verdicts:
        for name in ("accuracy", "no_answer_frac", "direct_frac"):
            del result[name]
        return result
    if num_samples > 1:
        result |= pass_at_k(verdicts, num_samples)
    return result


def missing_signal(completions, rewards):
    """Why an iteration has nothing to learn from; "" if rewards differ in some group, or, without
    groups, in the rollout."""
    groups = rewards if rewards.shape[1] > 1 else rewards.T
    if (groups != groups[:, :1]).any():
        return ""
    cut_frac = sum(c.truncated for c in completions) / len(completions)
    cut = f"{cut_frac:.0%} of the completions were cut off at --max_new_tokens"
    if all(c.verdict in ("no_answer", "truncated") for c in completions):
        mute = "no answer was found: the verifier looks for ####, \\boxed{}, <answer> or Answer:"
        return cut if cut_frac > 0.5 else mute
    reason = "the rewards of each group are all equal" if len(groups) > 1 else "all rewards are equal"
    return f"{reason}, and {cut}" if cut_frac > 0.5 else reason


def pass_at_k(verdicts, group_size):
    """{"pass@k": probability that at least one of k completions of a problem is right} for k = 1, 2, 4,
    ... and the size of a group, estimated without bias (Chen et al., 2021, arXiv 2107.03374)."""
    starts = range(0, len(verdicts), group_size)
    num_wrong = [group_size - verdicts[i : i + group_size].count("correct") for i in starts]
    powers_of_2 = [2**i for i in range(group_size.bit_length())]
    result = {}
    for k in sorted({*powers_of_2, group_size}):
        # 1 - C(n - c, k) / C(n, k): not all of k completions drawn from n without replacement are wrong
        all_wrong = [math.comb(wrong, k) / math.comb(group_size, k) for wrong in num_wrong]
        result[f"pass@{k}"] = 1 - sum(all_wrong) / len(starts)
    return result
