"""The doctor, for those who only cloned: `python conformance/check.py grpo.py:policy_loss ...`

The same as `python -m rl_loss_vectors ...` once the package is installed. README.md explains it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors.__main__ import main

if __name__ == "__main__":
    main("python conformance/check.py")
