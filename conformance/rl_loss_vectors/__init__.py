"""Test vectors for the losses of PPO, GRPO, Dr. GRPO, DAPO, GSPO, CISPO, GMPO, RSPO, SAPO and more.

    from rl_loss_vectors import VECTORS, diagnose

`VECTORS` is vectors.json as a dict; `diagnose` names what is wrong with a loss, and so does
`python -m rl_loss_vectors`. The vectors are in the public domain (CC0).
"""

from rl_loss_vectors.doctor import diagnose
from rl_loss_vectors.vectors import VECTORS

__all__ = ["VECTORS", "diagnose"]
