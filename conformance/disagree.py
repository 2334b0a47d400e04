"""What disagreement looks like: one batch, and the GRPO of the paper, of TRL and of verl by default.

    python conformance/disagree.py

engines.md says where the defaults come from.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import reference
from rl_loss_vectors.mistakes import pieces
from rl_loss_vectors.reference import clipped, ppo

OLD = [[-1, -0.5, -2, -0.1, -1.5, -0.7, -0.3, -1.1], [-2, -1, 0, 0, 0, 0, 0, 0]]
NEW = [[-1, -0.4, -1.6, -0.1, -1.6, -0.7, -0.2, -1.4], [-0.7, -0.9, 0, 0, 0, 0, 0, 0]]
MASK = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]]
INPUTS = {"logprobs": NEW, "old_logprobs": OLD, "advantages": [[1.0], [-1.0]], "mask": MASK}
KEYWORDS = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.04, "kl_is_corrected": False}
CASE = {"inputs": INPUTS, "keywords": KEYWORDS | {"ref_logprobs": OLD}, "gradient": None}


def dual_clip(r, a, low, high):
    return torch.max(clipped(r, a, low, high), -3 * abs(a))


GRPO = {
    "paper": lambda J, b: J(b),
    "TRL": lambda J, b: ppo(b),  # a token-mean without KL
    "verl": lambda J, b: pieces(clipped=dual_clip)(ppo, b),
}


def main():
    print("GRPO of    loss    gradient on 8 tokens with A = 1   on 2 tokens with A = -1")
    for name, change in GRPO.items():
        value, gradient = reference.evaluate("grpo", CASE, change)
        long, short = gradient.abs().sum(1)
        print(f"{name:7} {value:7.3f} {long:33.3f} {short:25.3f}")


if __name__ == "__main__":
    main()
