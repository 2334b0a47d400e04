"""The metrics that are logged: means over an iteration's updates, router statistics, rollouts."""

import math
import time

import torch

from plumbing import ranks
from plumbing.args import UserError


class Meter:
    """Averages the reports of an iteration's updates. Values stay on the device until `means`."""

    def __init__(self, iteration):
        self.iteration = iteration
        self.pairs = {}  # key: [(value, weight), ...]
        self.step_losses = {}  # of the current optimizer step: {name: sum over micro-batches}
        self.num_steps = 0
        self.laps = {}  # {name: seconds}
        self.lap_start = time.time()

    def lap(self, name):
        """Records the seconds since the previous lap."""
        now = time.time()
        self.laps[name] = now - self.lap_start
        self.lap_start = now

    def add(self, prefix, values, weight):
        """`values`: {name: number or tensor}; `weight`: the number of tokens or sequences averaged."""
        for name, value in values.items():
            pairs = self.pairs.setdefault(f"{prefix}/{name}", [])
            pairs.append((torch.as_tensor(value).detach(), weight))

    def add_global(self, prefix, values, weight=1):
        """The same for values that all ranks share, which count once."""
        if ranks.RANK == 0:
            self.add(prefix, values, weight)

    def add_pass(self, losses, stats, outputs, old, rows, mask_BT):
        """The report of a micro-batch.

        losses   {name: scalar}, which sum over the micro-batches to the losses of a step
        stats    {name: scalar} over the tokens of the mask
        outputs  common.TokenOutputs of this pass
        old      the policy's `OldScores` for all rows; `rows` are those of the micro-batch
        """
        for name, loss in losses.items():
            self.step_losses[name] = self.step_losses.get(name, 0) + loss.detach()
        num_tokens = mask_BT.sum()
        entropy = masked_mean(outputs.entropy_BT, mask_BT)
        self.add("losses", {**stats, "entropy": entropy}, num_tokens)
        self.add("moe", {"aux_loss": outputs.aux_loss}, len(rows))
        logratio_BT = outputs.logprobs_BT.detach() - old.logprobs_NT[rows]
        ratio_min = torch.where(mask_BT, logratio_BT, math.inf).min().exp()
        logratio_B = torch.where(mask_BT, logratio_BT, 0).sum(1) / mask_BT.sum(1).clamp(min=1)
        sequence_ratio_max = torch.where(mask_BT.any(1), logratio_B, -math.inf).max().exp()
        extremes = {"ratio_min": ratio_min, "sequence_ratio_max": sequence_ratio_max}
        self.add("losses", extremes, num_tokens)
        # The weight is the number of completions; dapo's filter masks some of them.
        self.add("losses", {"logratio_spread": spread(logratio_BT, mask_BT)}, mask_BT.any(1).sum())
        old_experts_BTLK = None
        if old.experts_NTLK is not None:
            old_experts_BTLK = old.experts_NTLK[rows]
            if self.num_steps == 0:  # before the first update the ratio has to be 1
                error = torch.where(mask_BT, logratio_BT.exp() - 1, 0).abs().max()
                self.add("losses", {"first_step_ratio_error_max": error}, 1)
        self.add("moe", router_stats(outputs, old_experts_BTLK, mask_BT), num_tokens)

    def check_finite(self, **norms):
        """Before the step: sums its losses over all ranks, and raises a UserError if the policy's loss
        or a norm is not finite."""
        for loss in self.step_losses.values():
            ranks.all_reduce(loss)
        for name, scalar in {"loss": self.step_losses["policy_loss"], **norms}.items():
            if not math.isfinite(scalar):  # the first waits for a GPU, which has the others by then
                raise UserError(f"iteration {self.iteration}: {name} is not finite")

    def add_step(self, num_sequences, grad_norm):
        """After `check_finite` and the step: its losses, and the norm of the policy's gradient."""
        self.add_global("losses", self.step_losses, num_sequences)
        self.add_global("charts", {"grad_norm": grad_norm})
        self.step_losses = {}
        self.num_steps += 1

    def means(self):
        """{key: weighted mean}, or the extreme for keys that end in "_max" or "_min". A vector becomes
        two keys, for the largest and the smallest of its means. What no token counts for is absent."""
        means = {}
        on_host = {}  # ranks cannot exchange tensors that are on one of their GPUs
        for key, pairs in self.pairs.items():
            on_host[key] = [(value.cpu(), torch.as_tensor(weight).cpu()) for value, weight in pairs]
        for key, pairs in ranks.all_gather_interleaved(on_host).items():
            pairs = [(value, weight) for value, weight in pairs if weight > 0]
            if not pairs:
                continue
            total_weight = sum(weight for _, weight in pairs)
            mean = sum(value * weight for value, weight in pairs) / total_weight
            if key.endswith("_max"):
                means[key] = max(value for value, _ in pairs).item()
            elif key.endswith("_min"):
                means[key] = min(value for value, _ in pairs).item()
            elif mean.dim() == 0:
                means[key] = mean.item()
            else:
                means[f"{key}_max"] = mean.max().item()
                means[f"{key}_min"] = mean.min().item()
        return means


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def spread(x_BT, mask_BT):
    """The standard deviation of x over a completion's tokens; its mean over completions with tokens."""
    length_B = mask_BT.sum(1).clamp(min=1)
    mean_B1 = (torch.where(mask_BT, x_BT, 0).sum(1) / length_B)[:, None]
    square_BT = torch.where(mask_BT, (x_BT - mean_B1) ** 2, 0)
    return masked_mean((square_BT.sum(1) / length_B).sqrt(), mask_BT.any(1))


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Statistics over the response tokens: router_entropy (nats) and, if the old policy's experts are
    known, expert_flip_frac (share for which the routers now choose others), both means over layers;
    load (L*E,), each expert's share of its layer's choices. {} for a dense model. Replayed choices do
    not count, only the routers' own."""
    L = outputs.experts_BTLK.shape[2]
    E = outputs.num_experts
    if L == 0:
        return {}
    layer_L1 = torch.arange(L, device=mask_BT.device)[:, None]
    expert_BTLK = outputs.experts_BTLK + E * layer_L1
    chosen_BTLK = mask_BT[:, :, None, None].expand_as(expert_BTLK).long()
    count_LE = torch.zeros(L * E, dtype=torch.long, device=mask_BT.device)
    count_LE = count_LE.index_add(0, expert_BTLK.flatten(), chosen_BTLK.flatten()).view(L, E)
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
    """{name: number}: lengths of right and of wrong completions, the shares of groups that are all
    right or all wrong, and the share of different texts in a group."""
    result = {}
    for name, is_right in (("right", True), ("wrong", False)):
        lengths = [len(c.ids) for c in completions if (c.verdict == "correct") == is_right]
        if lengths:
            result[f"response_len_{name}"] = sum(lengths) / len(lengths)
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


def critic_stats(values_NT, returns_NT, mask_NT):
    """{"explained_variance": share of the returns' variance that the critic's values explain}; {} for a
    single token, which has no variance."""
    if mask_NT.sum() < 2:
        return {}
    errors = (returns_NT - values_NT)[mask_NT]
    return {"explained_variance": 1 - errors.var() / returns_NT[mask_NT].var().clamp(min=1e-8)}


def iteration_metrics(meter, completions, rewards, args):
    """{key: number} of an iteration, for Run.log: of all completions that were generated. `rewards` are
    those in the update, (P, G), or (N, 1) if groups are not the baseline."""
    rollout = {
        **rollout_summary(completions),
        **group_summary(completions, args.group_size),
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
    }
    metrics = meter.means() | {f"rollout/{name}": value for name, value in rollout.items()}
    if rewards.dim() == 2 and rewards.shape[1] > 1:
        is_uniform_P = (rewards == rewards[:, :1]).all(1)
        metrics["rollout/frac_zero_std_groups"] = is_uniform_P.float().mean().item()
    num_tokens = sum(len(c.ids) for c in completions)
    metrics["charts/tokens_per_second"] = num_tokens / sum(meter.laps.values())
    return metrics | {f"charts/{name}": seconds for name, seconds in meter.laps.items()}
