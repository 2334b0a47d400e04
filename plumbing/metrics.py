"""The metrics of an iteration: means over its updates, router statistics, and what was sampled."""

import math

import torch

from plumbing import ranks
from plumbing.errors import UserError


class Meter:
    """Averages the reports of an iteration's updates. Values stay on the device until `means`."""

    def __init__(self):
        self.pairs = {}  # {key: [(value, weight), ...]}
        self.step_losses = {}  # of the current optimizer step: {name: sum over micro-batches}
        self.num_steps = 0

    def add(self, prefix, values, weight):
        """`values`: {name: number or tensor}; `weight`: the number of tokens or sequences averaged. A
        name with a slash is a whole key."""
        for name, value in values.items():
            key = name if "/" in name else f"{prefix}/{name}"
            pairs = self.pairs.setdefault(key, [])
            pairs.append((torch.as_tensor(value).detach(), weight))

    def add_global(self, prefix, values, weight=1):
        """The same for values that all ranks share, which count once."""
        if ranks.RANK == 0:
            self.add(prefix, values, weight)

    def add_pass(self, losses, stats, outputs, micro):
        """The report of a micro-batch.

        losses   {name: scalar}, which sum over the micro-batches to the losses of a step
        stats    {name: scalar} over the tokens of the mask
        outputs  common.TokenOutputs of this pass
        """
        for name, loss in losses.items():
            self.step_losses[name] = self.step_losses.get(name, 0) + loss.detach()
        mask_BT = micro.mask_BT
        num_tokens = mask_BT.sum()
        logratio_BT = outputs.logprobs_BT.detach() - micro.old_logprobs_BT
        logratio_B = torch.where(mask_BT, logratio_BT, 0).sum(1) / mask_BT.sum(1).clamp(min=1)
        numbers = {
            **stats,
            "entropy": masked_mean(outputs.entropy_BT, mask_BT),
            "ratio_min": torch.where(mask_BT, logratio_BT, math.inf).min().exp(),
            "sequence_ratio_max": torch.where(mask_BT.any(1), logratio_B, -math.inf).max().exp(),
        }
        self.add("losses", numbers, num_tokens)
        # Before the first update the ratio has to be 1.
        if micro.old_experts_BTLK is not None and self.num_steps == 0:
            error = torch.where(mask_BT, logratio_BT.exp() - 1, 0).abs().max()
            self.add("losses", {"first_step_ratio_error_max": error}, 1)
        self.add("moe", {"aux_loss": outputs.aux_loss}, len(micro))
        self.add("moe", router_stats(outputs, micro.old_experts_BTLK, mask_BT), num_tokens)

    def add_step(self, num_sequences, grad_norm, norms, iteration):
        """The report of an optimizer step, before it is made: sums its losses over all ranks. UserError
        if the policy's loss or a norm is not finite."""
        for loss in self.step_losses.values():
            ranks.all_reduce(loss)
        finite = {"loss": self.step_losses["policy_loss"], "grad_norm": grad_norm, **norms}
        for name, scalar in finite.items():
            if not math.isfinite(scalar):  # the first waits for a GPU, which has the others by then
                raise UserError(f"iteration {iteration}: {name} is not finite")
        self.add_global("losses", self.step_losses, num_sequences)
        self.add_global("charts", {"grad_norm": grad_norm})
        self.step_losses = {}
        self.num_steps += 1

    def means(self):
        """{key: weighted mean over all ranks}, or the extreme for keys that end in "_max" or "_min".
        Keys with zero weight are omitted."""
        on_host = {}  # ranks cannot exchange tensors that are on one of their GPUs
        for key, pairs in self.pairs.items():
            on_host[key] = [(value.cpu(), torch.as_tensor(weight).cpu()) for value, weight in pairs]
        all_pairs = {}
        for theirs in ranks.all_gather(on_host):
            for key, pairs in theirs.items():
                all_pairs.setdefault(key, []).extend(pairs)
        means = {}
        for key, pairs in all_pairs.items():
            pairs = [(value, weight) for value, weight in pairs if weight > 0]
            if not pairs:
                continue
            if key.endswith("_max"):
                mean = max(value for value, _ in pairs)
            elif key.endswith("_min"):
                mean = min(value for value, _ in pairs)
            else:
                total_weight = sum(weight for _, weight in pairs)
                mean = sum(value * weight for value, weight in pairs) / total_weight
            if mean.dim() == 1:  # the load of every expert, of which the largest is logged
                key = f"{key}_max"
                mean = mean.max()
            means[key] = mean.item()
        return means


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Statistics of the routers' own choices (replayed ones do not count) for response tokens; {} for a
    dense model. load, (L*E,): each expert's share of its layer's choices. As means over layers
    router_entropy (nats) and, if the old policy's experts are known, expert_flip_frac: the share of
    tokens for which the routers now choose others."""
    L = outputs.experts_BTLK.shape[2]
    E = outputs.num_experts
    if L == 0:
        return {}
    layer_L1 = torch.arange(L, device=mask_BT.device)[:, None]
    expert_BTLK = outputs.experts_BTLK + E * layer_L1
    is_counted_BTLK = mask_BT[:, :, None, None].expand_as(expert_BTLK).long()
    count_LE = torch.zeros(L * E, dtype=torch.long, device=mask_BT.device)
    count_LE = count_LE.index_add(0, expert_BTLK.flatten(), is_counted_BTLK.flatten()).view(L, E)
    stats = {"load": (count_LE / count_LE.sum(1, keepdim=True).clamp(min=1)).flatten()}
    if outputs.router_logits:
        entropies = [torch.special.entr(logits.softmax(-1)).sum(-1) for logits in outputs.router_logits]
        stats["router_entropy"] = masked_mean(sum(entropies) / L, mask_BT)
    if old_experts_BTLK is not None:
        flips_BTL = (outputs.experts_BTLK != old_experts_BTLK).any(-1)
        stats["expert_flip_frac"] = masked_mean(flips_BTL.float().mean(-1), mask_BT)
    return stats


def rollout_summary(completions, num_samples=1):
    """{name: number} for completions with their verdicts; pass@k if each problem has several. A
    "direct" completion begins with its answer, without any working."""
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
        "response_len_max": max(lengths),
    }
    for name in completions[0].rewards or {}:
        result[f"reward_mean_{name}"] = sum(c.rewards[name] for c in completions) / count
    if num_samples > 1:
        result |= pass_at_k(completions, num_samples)
    return result


def group_summary(completions, group_size):
    """{name: number}: the mean length of wrong completions, the shares of groups that are all right or
    all wrong, and the share of different texts in a group."""
    result = {}
    wrong_lengths = [len(c.ids) for c in completions if c.verdict != "correct"]
    if wrong_lengths:
        result["response_len_wrong"] = sum(wrong_lengths) / len(wrong_lengths)
    if group_size > 1:
        groups = groups_of(completions, group_size)
        num_right = [sum(c.verdict == "correct" for c in group) for group in groups]
        num_texts = [len({c.text for c in group}) for group in groups]
        result["all_right_frac"] = num_right.count(group_size) / len(groups)
        result["all_wrong_frac"] = num_right.count(0) / len(groups)
        result["distinct_frac"] = sum(num_texts) / len(completions)
    return result


def groups_of(completions, group_size):
    return [completions[i : i + group_size] for i in range(0, len(completions), group_size)]


def pass_at_k(completions, group_size):
    """{"pass@k": probability that at least one of k completions of a problem is right} for k = 1, 2, 4,
    ... up to the size of a group, estimated without bias (Chen et al., 2021, arXiv 2107.03374)."""
    groups = groups_of(completions, group_size)
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
    """{key: number} of an iteration, of all completions that were generated. `rewards` are those in the
    update, (P, G), or (N, 1) if groups are not the baseline; `batch` is None without an update."""
    rollout = {
        **rollout_summary(completions),
        **group_summary(completions, args.group_size),
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
    }
    if batch is not None:
        rollout |= {name: value.item() for name, value in correction_stats(batch, args).items()}
    metrics = meter.means() | {f"rollout/{name}": value for name, value in rollout.items()}
    if rewards.dim() == 2 and rewards.shape[1] > 1:
        is_uniform_P = (rewards == rewards[:, :1]).all(1)
        metrics["rollout/frac_zero_std_groups"] = is_uniform_P.float().mean().item()
    return metrics


@torch.no_grad()
def correction_stats(batch, args):
    """{name: scalar}: how far the sampler is from the training forward, and the weights that correct
    for that, if there are any."""
    stats = {}
    mask_BT = batch.mask_BT
    num_tokens = mask_BT.sum().clamp(min=1)
    if args.old_logprobs == "trainer":
        logratio_BT = torch.where(mask_BT, batch.old_logprobs_BT - batch.sampler_logprobs_BT, 0)
        # r - 1 - log r, whose mean estimates KL(mu || pi_old); near 0, exp(x) - 1 would be noise
        k3_BT = logratio_BT.expm1() - logratio_BT
        stats["sampler_kl"] = torch.where(mask_BT, k3_BT, 0).sum() / num_tokens
        stats["sampler_logratio_max"] = logratio_BT.abs().max()
        if batch.sampler_experts_BSLK is not None:
            T = mask_BT.shape[1]
            experts_BTLK = batch.sampler_experts_BSLK[:, -T - 1 : -1].sort().values
            differ_BT = (experts_BTLK != batch.old_experts_BTLK).any(-1).float().mean(-1)
            stats["sampler_expert_diff_frac"] = torch.where(mask_BT, differ_BT, 0).sum() / num_tokens
    if args.rollout_correction != "none":
        weights = batch.correction_weights.expand_as(mask_BT)[mask_BT]
        mean = weights.sum() / num_tokens
        mean_square = (weights**2).sum() / num_tokens
        stats["weight_zero_frac"] = (weights == 0).sum() / num_tokens
        # (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if only one is not 0
        stats["weight_effective_size"] = mean**2 / mean_square.clamp(min=1e-30)
    return stats
