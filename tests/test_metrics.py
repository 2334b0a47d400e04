"""The numbers in metrics.jsonl, computed by hand. Statistics of losses: test_losses.py; of the weights
for the mismatch, and of experts that the sampler did not share: test_mismatch.py."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, checkpoint_of, metrics, script_args
from torch.optim import AdamW

import plumbing.run
from common import Completion, Problem, Run, TokenOutputs, UserError, critic_stats
from plumbing.data import ProblemStream


class Micro(SimpleNamespace):
    def __len__(self):
        return len(self.mask_BT)


def two_layers(experts):
    """Of two experts per token, which choose alike: e and e + 4, and then the next ones, of eight."""
    first_BT = torch.tensor(experts)
    first_BTK = torch.stack([first_BT, first_BT + 4], -1)
    return torch.stack([first_BTK, first_BTK + 1], 2) % 8


def micro_batch(mask, logratios, entropies, experts, old_experts, aux_loss):
    """(a micro-batch, the outputs of its forward). Padding has numbers that must not count. Only the
    first expert of a token in the first layer may change."""
    mask_BT = torch.tensor(mask).bool()
    zeros_BT = torch.zeros(mask_BT.shape)
    old_experts_BTLK = two_layers(experts)
    old_experts_BTLK[:, :, 0, 0] = torch.tensor(old_experts)
    micro = Micro(
        mask_BT=mask_BT,
        sampler_logprobs_BT=zeros_BT - 0.1,
        old=TokenOutputs(zeros_BT, old_experts_BTLK),
    )
    outputs = SimpleNamespace(
        logprobs_BT=torch.tensor(logratios),
        entropy_BT=torch.tensor(entropies),
        experts_BTLK=two_layers(experts),
        aux_loss=torch.tensor(aux_loss),
    )
    return micro, outputs


# Seven tokens: the first step has 4 and 2, in two and one completions; the second step has 1.
FIRST = micro_batch(
    [[1, 1, 1], [1, 0, 0]],
    [[0.3, -0.1, 0.4], [-1.0, 5.0, 5.0]],
    [[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]],
    [[0, 0, 1], [0, 5, 5]],
    [[0, 0, 0], [0, 6, 6]],
    2.0,
)
SECOND = micro_batch([[1, 1]], [[0.0, 0.3]], [[0.5, 0.5]], [[1, 1]], [[2, 2]], 3.0)
THIRD = micro_batch([[1, 0]], [[-1.5, 9.0]], [[7.0, 9.0]], [[2, 2]], [[2, 6]], 4.0)
# A group with a right answer, and one without: 3 + 1 + 2 + 1 tokens
COMPLETIONS = [
    Completion(None, [5] * 3, [], text="1+1=2 #### 2", reward=1.0, verdict="correct"),
    Completion(None, [5], [], text="#### 3", reward=0.0, verdict="wrong"),
    Completion(None, [5] * 2, [], text="2", reward=0.0, verdict="no_answer"),
    Completion(None, [5], [], text="1+", truncated=True, reward=0.0, verdict="truncated"),
]
# Four tokens
CRITIC_BATCHES = [
    SimpleNamespace(
        mask_BT=torch.tensor([[True, True], [True, False]]),
        returns_BT=torch.tensor([[1.0, 3.0], [2.0, 50.0]]),
        values_BT=torch.tensor([[0.0, 2.0], [3.0, 9.0]]),
        ref=TokenOutputs(torch.zeros(2, 2)),
        kl_BT=torch.tensor([[0.4, -0.1], [0.2, 7.0]]),
    ),
    SimpleNamespace(
        mask_BT=torch.tensor([[True]]),
        returns_BT=torch.tensor([[6.0]]),
        values_BT=torch.tensor([[5.0]]),
        ref=TokenOutputs(torch.zeros(1, 1)),
        kl_BT=torch.tensor([[-0.9]]),
    ),
]
BY_HAND = {
    "iteration": 1,
    # sums over a step, weighted by its 3 and 1 completions
    "losses/policy_loss": ((0.5 - 0.2) * 3 + 0.9 * 1) / 4,
    "losses/value_loss": ((1.0 + 2.0) * 3 + 4.0 * 1) / 4,
    "losses/positive_lm_loss": ((0.1 + 0.1) * 3 + 0.6 * 1) / 4,
    # means, weighted by 4, 2 and 1 tokens
    "losses/clipfrac_low": (0.5 * 4 + 0.0 * 2 + 1.0 * 1) / 7,
    "losses/entropy": (10 + 1 + 7) / 7,
    "moe/load_max": (3 / 8 * 4 + 1 / 2 * 2 + 1 / 2 * 1) / 7,  # of both experts of a token
    "moe/expert_flip_frac": (1 / 4 * 4 + 1 * 2 + 0 * 1) / 7 / 2,  # in one of two layers
    # the largest
    "losses/ratio_max": 3.0,
    "losses/sequence_ratio_max": math.exp(0.2),
    "losses/first_step_ratio_error_max": 1 - math.exp(-1),
    "moe/aux_loss": (2.0 * 2 + 3.0 * 1 + 4.0 * 1) / 4,
    "charts/grad_norm": (1.0 + 2.0) / 2,
    "rollout/reward_mean": 1 / 4,
    "rollout/reward_std": math.sqrt(3) / 4,
    "rollout/accuracy": 1 / 4,
    "rollout/frac_zero_std_groups": 1 / 2,
    "rollout/response_len_mean": 7 / 4,
    "rollout/response_len_wrong": 4 / 3,
    "rollout/truncated_frac": 1 / 4,
    "rollout/no_answer_frac": 1 / 4,
    "rollout/direct_frac": 1 / 4,
    "rollout/sampler_kl": math.exp(0.1) - 1 - 0.1,
    # Returns 1, 3, 2, 6 and errors 1, 1, -1, 1: the variances are 14 / 3 and 1.
    "losses/explained_variance": 1 - 3 / 14,
    "losses/kl_ref": (0.4 - 0.1 + 0.2 - 0.9) / 4,  # a mean of log-ratios
    # of 10 seconds, 2 for the rollout, 1 for the reward, and 3 for an evaluation
    "charts/rollout_seconds": 2.0,
    "charts/reward_seconds": 1.0,
    "charts/evaluation_seconds": 3.0,
    "charts/update_seconds": 4.0,
    "charts/tokens_per_second": 1.0,
    "eval/accuracy": 0.25,
    "eval/response_len_mean": 6.0,
}


@pytest.fixture
def first_iteration(tiny_policy, tmp_path):
    """A run in its first iteration."""
    args = script_args("grpo", group_size=2, run_dir=str(tmp_path))[1]
    optimizer = AdamW(tiny_policy.parameters())
    run = Run(args, tiny_policy, ProblemStream([], 1), optimizer=optimizer)
    iterations = run.iterations()
    next(iterations)
    yield run
    iterations.close()
    run.lock.release()


def test_a_line_of_metrics_jsonl_by_hand(first_iteration, tmp_path, monkeypatch):
    run = first_iteration
    run.start = 100.0
    monkeypatch.setattr(plumbing.run.time, "perf_counter", lambda: 110.0)
    plumbing.run.clock.seconds |= {"rollout": 2.0, "reward": 1.0, "evaluation": 3.0}
    for (micro, outputs), loss, clipped, largest, values in (
        (FIRST, 0.5, 0.5, 1.5, (1.0, 0.1)),
        (SECOND, -0.2, 0.0, 3.0, (2.0, 0.1)),
        (THIRD, 0.9, 1.0, 2.0, (4.0, 0.6)),
    ):
        stats = {"clipfrac_low": torch.tensor(clipped), "ratio_max": torch.tensor(largest)}
        losses = dict(zip(("value_loss", "positive_lm_loss"), map(torch.tensor, values), strict=True))
        run.record(torch.tensor(loss), stats, outputs, micro, **losses)
        if micro is SECOND[0]:
            run.record_step(3, torch.tensor(1.0), critic_grad_norm=torch.tensor(9.0))
    run.record_step(1, torch.tensor(2.0))
    run.log_eval({"greedy": {"accuracy": 0.25, "response_len_mean": 6.0}})
    steps = [[FIRST[0], SECOND[0]], [THIRD[0]]]
    problem = Problem("1+1=", "2", [4])
    completions = [c._replace(problem=problem) for c in COMPLETIONS]
    rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    run.log(steps, completions, rewards_PG, **critic_stats(CRITIC_BATCHES))
    (line,) = metrics(tmp_path)
    assert line.keys() == BY_HAND.keys()
    assert line == pytest.approx(BY_HAND, rel=1e-5)


# By hand elsewhere: in test_losses.py, test_main.py, test_mismatch.py, test_rewards.py and below. The
# first two lines are given to the test above, which only averages them.
ELSEWHERE = """losses/policy_loss losses/value_loss losses/positive_lm_loss losses/clipfrac_low
losses/ratio_max moe/aux_loss charts/grad_norm
rollout/weight_zero_frac rollout/weight_mean rollout/groups_*
rollout/weight_effective_size losses/gate_slope losses/approx_kl losses/clipfrac_high
losses/offpolicy_mask_frac moe/sampler_flip_frac moe/router_shift moe/router_floor_frac
charts/*_seconds charts/peak_memory_gib charts/peak_reserved_gib eval/reward_mean""".split()


def test_every_key_that_the_page_explains_is_computed_by_hand():
    text = (ROOT / "plumbing" / "README.md").read_text()
    explained = set()
    for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE):
        first, *others = re.findall("`(.*?)`", cell)
        group = first.partition("/")[0]
        for name in others:
            if name.startswith("_"):  # response_len_mean, _wrong
                name = first.rpartition("_")[0].partition("/")[2] + name
            explained.add(f"{group}/{name.removeprefix(group + '/')}")
        explained.add(first)
    by_hand = {key for key in BY_HAND if not key.endswith("_seconds")} - {"iteration", *ELSEWHERE}
    assert explained == by_hand | set(ELSEWHERE)


NORMS = [  # loss, the policy's norm, the critic's, and what the line names
    (math.nan, 1.0, 1.0, "loss"),
    (0.0, math.inf, 1.0, "grad_norm"),
    (0.0, 1.0, math.inf, "critic_grad_norm"),
]


@pytest.mark.parametrize("loss, norm, critic_norm, name", NORMS)
def test_a_loss_or_norm_that_is_not_finite_ends_the_run(loss, norm, critic_norm, name, first_iteration):
    micro, outputs = THIRD
    first_iteration.record(torch.tensor(loss), {}, outputs, micro)
    norms = {"critic_grad_norm": torch.tensor(critic_norm)}
    with pytest.raises(UserError, match=f"^iteration 1: {name} is not finite; .* lower --lr"):
        first_iteration.record_step(1, torch.tensor(norm), **norms)


def test_continue_before_the_log_is_an_error(first_iteration):
    """In the last iteration, too."""
    first_iteration.args.iterations = 2
    iterations = first_iteration.iterations()
    next(iterations)
    with pytest.raises(RuntimeError, match="iteration 2 was not logged; call run.log"):
        next(iterations)


def test_leaving_the_loop_before_the_log_loses_nothing(first_iteration, tmp_path):
    """What is known of the iteration is logged, and saved."""
    micro, outputs = FIRST
    first_iteration.record(torch.tensor(0.5), {}, outputs, micro)
    first_iteration.record_step(1, torch.tensor(1.0))
    summary = {"accuracy": 0.25, "response_len_mean": 6.0}
    first_iteration.log_eval({"greedy": summary, "sampled": summary, "examples": []})
    first_iteration.finish()
    (line,) = metrics(tmp_path)
    assert line["losses/policy_loss"] == 0.5 and line["eval/accuracy"] == 0.25
    assert checkpoint_of(tmp_path).name == "checkpoint-000001"
