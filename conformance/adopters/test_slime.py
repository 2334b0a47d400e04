import pytest
from rl_loss_vectors import cases
from shapes import compute_policy_loss, sum_of_sample_mean  # in slime: from slime.utils.ppo_utils


def terms(logprobs, old_logprobs, advantages, mask, clip_eps_low, clip_eps_high):
    return compute_policy_loss(old_logprobs - logprobs, advantages, clip_eps_low, clip_eps_high)[0]


def reduced(terms, mask, num_sequences=None):
    samples = [mask.shape[1]] * len(mask)
    return sum_of_sample_mean(terms.flatten().nan_to_num(), samples, mask) / (
        num_sequences or len(mask)
    )


@pytest.mark.parametrize("case", cases("dapo", terms, way="terms"))
def test_terms(case):
    case.check()


@pytest.mark.parametrize("case", cases("grpo", reduced, way="reduction"))
def test_reduction(case):
    case.check()
