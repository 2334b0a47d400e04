"""2,000 iterations of a very small configuration: memory and open files of the process, written to a CSV.

    python benchmarks/soak.py [--iterations 2000]

Prints the largest resident memory and the largest number of open files in the second and in the last quarter.
Exit code 1 if memory differs by more than 2 % or a file stays open. A run that is cut off starts again.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = """--warm_start_steps 60 --prompts_per_iteration 4 --group_size 4 --max_new_tokens 8
--num_minibatches 2 --num_held_out 8 --eval_every 50 --save_every 50 --run_dir""".split()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=2000)
    iterations = parser.parse_args().iterations
    folder = ROOT / "runs" / f"soak-{os.getpid()}"
    command = [sys.executable, "grpo.py", *FLAGS, str(folder), "--iterations", str(iterations)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=-3, stderr=-3)
    rows, metrics = [], folder / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(0.5)
        try:
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:  # it has just ended
            break
        if done:
            rows.append((done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files))
    if process.wait():
        sys.exit(f"the run ended with {process.returncode}")
    with open(ROOT / "benchmarks" / "results" / "soak.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["iteration", "resident_mib", "open_files"])
        writer.writerows((done, f"{mib:.1f}", files) for done, mib, files in rows)
    quarters = [
        [row for row in rows if q * iterations < 4 * row[0] <= (q + 1) * iterations] for q in range(4)
    ]
    second, last = (max(row[1] for row in quarters[q]) for q in (1, 3))
    files = [max(row[2] for row in quarters[q]) for q in (1, 3)]
    print(f"resident memory {second:.0f} MiB -> {last:.0f} MiB, open files {files[0]} -> {files[1]}")
    sys.exit(last > 1.02 * second or files[1] > files[0])


if __name__ == "__main__":
    main()
