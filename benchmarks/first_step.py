"""One optimizer step per rollout: the ratio is always 1, nothing is ever clipped, and the algorithms become
one.

    python benchmarks/first_step.py [--iterations 10]

Runs the five scripts that average within completions, with --num_minibatches 1 (grpo.py without its KL), and
prints the mean reward of every iteration.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = {"grpo": ["--kl_coef", "0"], "gspo": [], "gmpo": [], "rspo": [], "sapo": []}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10)
    iterations = parser.parse_args().iterations
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                f"{name}.py",
                "--num_minibatches",
                "1",
                "--iterations",
                str(iterations),
            ]
            command += ["--eval_every", "0", "--run_dir", folder, *flags]
            subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=True)
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        print(f"{name:6}" + " ".join(f"{line['rollout/reward_mean']:.4f}" for line in lines), flush=True)


if __name__ == "__main__":
    main()
