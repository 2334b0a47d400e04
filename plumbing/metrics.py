"""An iteration's metrics: means over its updates, router statistics, and rollout statistics."""

import math

import torch

from plumbing import ranks
from plumbing.errors import UserError


# Keys for which an iteration's largest value is logged, not its mean.
MAXIMA = {f"losses/{name}_max" for name in ("ratio", "sequence_ratio", "first_step_ratio_error")}


class Meter:
    """Averages what is reported in an iteration's updates. Values stay on the device until `means`."""

    def __init__(self):
        self.reports = []  # [(key, value, weight)]
        self.step_losses = {}  # of the current optimizer step: {name: sum over micro-batches}
        self.num_steps = 0

    def add(self, prefix, values, weight):
        """`values`: {name: number or tensor}; `weight`: the number of tokens or sequences averaged. A
        name with a slash is already a full key."""
        for name, value in values.items():
            key = name if "/" in name else f"{prefix}/{name}"
            self.reports.append((key, torch.as_tensor(value).detach(), torch.as_tensor(weight)))

    def add_pass(self, losses, stats, outputs, micro):
        """Adds a micro-batch: its losses (they sum to the step's), stats over the mask's tokens, and
        common.TokenOutputs."""
        for name, loss in losses.items():
            self.step_losses[name] = self.step_losses.get(name, 0) + loss.detach()
        mask_BT = micro.mask_BT
        num_tokens = mask_BT.sum()
        logratio_BT = outputs.logprobs_BT.detach() - micro.old_logprobs_BT
        logratio_B = torch.where(mask_BT, logratio_BT, 0).sum(1) / mask_BT.sum(1).clamp(min=1)
        numbers = {
            **stats,
            "entropy": masked_mean(outputs.entropy_BT, mask_BT),
            "sequence_ratio_max": torch.where(mask_BT.any(1), logratio_B, -math.inf).max().exp(),
        }
        self.add("losses", numbers, num_tokens)
        # Before the first update the ratio must be 1.
        if micro.old_experts_BTLK is not None and self.num_steps == 0:
            error = torch.where(mask_BT, logratio_BT.exp() - 1, 0).abs().max()
            self.add("losses", {"first_step_ratio_error_max": error}, 1)
        self.add("moe", {"aux_loss": outputs.aux_loss}, len(micro))
        self.add("moe", router_stats(outputs, micro.old_experts_BTLK, mask_BT), num_tokens)

    def add_step(self, num_sequences, grad_norm, norms, iteration):
        """Adds an optimizer step, just before it is taken: sums its losses over all ranks. UserError if
        the policy's loss or a norm is not finite."""
        for loss in self.step_losses.values():
            ranks.all_reduce(loss)
        finite = {"loss": self.step_losses["policy_loss"], "grad_norm": grad_norm, **norms}
        for name, scalar in finite.items():
            if not math.isfinite(scalar):  # the first one waits for the GPU; the others are then ready
                raise UserError(f"iteration {iteration}: {name} is not finite")
        if ranks.RANK == 0:  # count values that all ranks share only once
            self.add("losses", self.step_losses, num_sequences)
            self.add("charts", {"grad_norm": grad_norm}, 1)
        self.step_losses = {}
        self.num_steps += 1

    def means(self):
        """{key: weighted mean over all ranks, or the largest value for keys in MAXIMA}. Keys with zero
        weight are omitted."""
        # Objects with tensors on a rank's own GPU cannot be exchanged.
        reports = [(key, value.cpu(), weight.cpu()) for key, value, weight in self.reports]
        pairs = {}
        for key, value, weight in ranks.all_gather_list(reports):
            if weight > 0:
                pairs.setdefault(key, []).append((value, weight))
        means = {}
        for key, found in pairs.items():
            if key in MAXIMA:
                means[key] = max(value.item() for value, _ in found)
            else:
                total = sum(value * weight for value, weight in found)
                means[key] = (total / sum(weight for _, weight in found)).item()
        return means


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Statistics of the routers' own choices (not of replayed ones) for response tokens; {} for a dense
    model. load_max: the largest share of a layer's choices that goes to one expert.
    expert_flip_frac, if the old policy's experts are known: the share of (token, layer) pairs for which
    the routers now choose different experts."""
    L, K = outputs.experts_BTLK.shape[2:]
    if L == 0:
        return {}
    E = outputs.num_experts
    layer_L1 = torch.arange(L, device=mask_BT.device)[:, None]
    expert_BTLK = outputs.experts_BTLK + E * layer_L1
    is_counted_BTLK = mask_BT[:, :, None, None].expand_as(expert_BTLK).long()
    counts = torch.zeros(L * E, dtype=torch.long, device=mask_BT.device)
    counts.index_add_(0, expert_BTLK.flatten(), is_counted_BTLK.flatten())
    stats = {"load_max": counts.max() / (K * mask_BT.sum()).clamp(min=1)}
    if old_experts_BTLK is not None:
        flips_BTL = (outputs.experts_BTLK != old_experts_BTLK).any(-1)
        stats["expert_flip_frac"] = masked_mean(flips_BTL.float().mean(-1), mask_BT)
    return stats


def rollout_summary(completions, num_samples=1):
    """{name: number} for completions with their verdicts; pass@k if each problem has several. A
    "direct" completion begins with its answer and shows no work."""
    count = len(completions)
    lengths = [len(c.ids) for c in completions]
    verdicts = [c.verdict for c in completions]
    direct = [c.text.lstrip().startswith(("####", "\\box")) for c in completions]
    result = {
        "accuracy": verdicts.count("correct") / count,
        "truncated_frac": sum(c.truncated for c in completions) / count,
        "no_answer_frac": verdicts.count("no_answer") / count,
        "direct_frac": sum(direct) / count,
        "response_len_mean": sum(lengths) / count,
    }
    for name in completions[0].rewards or {}:
        result[f"reward_mean_{name}"] = sum(c.rewards[name] for c in completions) / count
    if num_samples > 1:
        result |= pass_at_k(completions, num_samples)
    return result


def pass_at_k(completions, group_size):
    """{"pass@k": probability that at least one of k completions of a problem is right} for k = 1, 2, 4,
    ... up to the size of a group, estimated without bias (Chen et al., 2021, arXiv 2107.03374)."""
    groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
    num_wrong = [sum(c.verdict != "correct" for c in group) for group in groups]
    result = {}
    k = 1
    while k <= group_size:
        # 1 - C(n - c, k) / C(n, k): not all of k completions drawn from n without replacement are wrong
        all_wrong = [math.comb(wrong, k) / math.comb(group_size, k) for wrong in num_wrong]
        result[f"pass@{k}"] = 1 - sum(all_wrong) / len(groups)
        k *= 2
    return result


def critic_stats(values_BT, returns_BT, mask_BT):
    """{"losses/explained_variance": share of the returns' variance that the critic's values explain};
    {} for a single token, which has no variance."""
    if mask_BT.sum() < 2:
        return {}
    errors = (returns_BT - values_BT)[mask_BT]
    return {"losses/explained_variance": 1 - errors.var() / returns_BT[mask_BT].var().clamp(min=1e-8)}


def iteration_metrics(meter, batch, completions, rewards, args):
    """{key: number} for an iteration and all the completions it generated. `rewards` are those in the
    update: (P, G), or (N, 1) if groups are not the baseline. `batch` is None if there is no update."""
    rollout = {
        **rollout_summary(completions),
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
    }
    wrong_lengths = [len(c.ids) for c in completions if c.verdict != "correct"]
    if wrong_lengths:
        rollout["response_len_wrong"] = sum(wrong_lengths) / len(wrong_lengths)
    if batch is not None:
        rollout |= {name: value.item() for name, value in correction_stats(batch, args).items()}
    metrics = meter.means() | {f"rollout/{name}": value for name, value in rollout.items()}
    if rewards.dim() == 2 and rewards.shape[1] > 1:
        is_uniform_P = (rewards == rewards[:, :1]).all(1)
        metrics["rollout/frac_zero_std_groups"] = is_uniform_P.float().mean().item()
    return metrics


@torch.no_grad()
def correction_stats(batch, args):
    """{name: scalar}: how far the sampler is from the training forward, and statistics of the weights
    that correct for it, if any."""
    stats = {}
    mask_BT = batch.mask_BT
    num_tokens = mask_BT.sum().clamp(min=1)
    if args.old_logprobs == "trainer":
        logratio_BT = torch.where(mask_BT, batch.old_logprobs_BT - batch.sampler_logprobs_BT, 0)
        # r - 1 - log r, whose mean estimates KL(mu || pi_old); near 0, exp(x) - 1 would be noise
        k3_BT = logratio_BT.expm1() - logratio_BT
        stats["sampler_kl"] = torch.where(mask_BT, k3_BT, 0).sum() / num_tokens
    if args.rollout_correction != "none":
        weights = batch.correction_weights.expand_as(mask_BT)[mask_BT]
        mean = weights.sum() / num_tokens
        mean_square = (weights**2).sum() / num_tokens
        stats["weight_zero_frac"] = (weights == 0).sum() / num_tokens
        # (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if only one is not 0
        stats["weight_effective_size"] = mean**2 / mean_square.clamp(min=1e-30)
    return stats
