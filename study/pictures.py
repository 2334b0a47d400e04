"""How each objective treats a token and the length of an answer: numbers for figures.py and page.py. No
formula is repeated here: all of them come from the scripts' own losses, with their default settings."""

import importlib
import inspect
import sys

import scripts  # noqa: F401  puts the scripts' folder on the path
import torch

NUM_TOKENS = 10
GAMMA = 0.8  # rspo's, here at its floor
RATIOS_N = 3 ** torch.linspace(-1, 1, 121, dtype=torch.float64)


def pyplot():
    """matplotlib.pyplot, imported where something is drawn: the numbers do not need it."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("pictures need matplotlib: pip install -r study/requirements.txt")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def gradient(name, logprobs_NT, mask_NT, advantage=1, gamma=1, **flags):
    """dJ / d log pi of all tokens, by autograd, with all old log-probs 0. The advantage and rspo's
    gamma are numbers or tensors that broadcast over the tokens. Unknown flags are ignored."""
    policy_loss = importlib.import_module(name).policy_loss
    logprobs_NT = logprobs_NT.clone().requires_grad_()
    advantages = advantage * torch.ones_like(logprobs_NT[:, :1])
    gamma_NT = gamma * torch.ones_like(logprobs_NT)
    known = {"max_new_tokens": mask_NT.shape[1], "router_shift_BT": gamma_NT} | flags
    parameters = inspect.signature(policy_loss).parameters
    known = {key: value for key, value in known.items() if key in parameters}
    loss, _ = policy_loss(logprobs_NT, torch.zeros_like(logprobs_NT), advantages, mask_NT, **known)
    return torch.autograd.grad(-loss, logprobs_NT)[0]


def pulls(name, advantage, moved):
    """The pull on the first of ten tokens, relative to r = 1, when `moved` of them have each ratio.
    grpo's KL is left out because its pull does not depend on r."""
    logprobs_NT = torch.zeros(len(RATIOS_N), NUM_TOKENS, dtype=torch.float64)
    mask_NT = torch.ones_like(logprobs_NT)
    sizes_N = gradient(name, logprobs_NT, mask_NT)[:, 0]  # before rspo's gamma
    logprobs_NT[:, :moved] = RATIOS_N.log()[:, None]
    return gradient(name, logprobs_NT, mask_NT, advantage, GAMMA)[:, 0] / sizes_N


def gradients(names):
    """{column: values}: the ratios, then the pulls in "script advantage tokens moved"."""
    found = {"ratio": RATIOS_N.tolist()}
    for name in names:
        for advantage in (1, -1):
            for moved in (1, NUM_TOKENS):
                found[f"{name} {advantage:+d} {moved}"] = pulls(name, advantage, moved).tolist()
    return found


def tokens(names):
    """{column: values}: the length of an answer, then the weight of one of its tokens in each script,
    at r = 1, times the number of tokens in the step. The step has one answer of each length."""
    longest = importlib.import_module("grpo").Args().max_new_tokens
    mask_NT = torch.ones(longest, longest, dtype=torch.float64).tril()
    found = {"length": mask_NT.sum(1).tolist()}
    for name in names:
        weights_NT = gradient(name, torch.zeros_like(mask_NT), mask_NT)
        found[name] = (weights_NT[:, 0] * mask_NT.sum()).tolist()
    return found
