"""2,000 iterations of a very small configuration: memory and open files of the process, as a CSV.

    python benchmarks/soak.py [--iterations 2000]

Prints the largest resident memory and the number of files that stay open in the second and in the last
quarter. Exit code 1 if memory grows by more than 2 % or a file stays open. A run that is cut off starts
again.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CSV = ROOT / "benchmarks" / "results" / "soak.csv"
FLAGS = """--warm_start_steps 60 --prompts_per_iteration 4 --group_size 4 --max_new_tokens 8
--num_minibatches 2 --num_held_out 8 --eval_every 50 --save_every 50""".split()


def observe(process, metrics):
    """(iterations done, resident MiB, open files) of a process now; None if it has ended."""
    try:
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{process.pid}/fd"))
    except OSError:
        return None
    if pages == 0:
        return None
    return done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--iterations", type=int, default=2000)
    iterations = parser.parse_args().iterations
    folder = ROOT / "runs" / f"soak-{os.getpid()}"
    command = [sys.executable, "grpo.py", *FLAGS]
    command += ["--run_dir", str(folder), "--iterations", str(iterations)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=null, stderr=null)
    rows = []
    while process.poll() is None:
        time.sleep(0.5)
        row = observe(process, folder / "metrics.jsonl")
        if row is None:
            break
        if row[0] > 0:
            rows.append(row)
    if process.wait() != 0:
        sys.exit(f"the run ended with {process.returncode}")
    with open(CSV, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["iteration", "resident_mib", "open_files"])
        for done, mib, files in rows:
            writer.writerow([done, f"{mib:.1f}", files])
    second = [row for row in rows if iterations < 4 * row[0] <= 2 * iterations]
    last = [row for row in rows if 3 * iterations < 4 * row[0]]
    if not second or not last:
        sys.exit("the run was too short to compare its quarters")
    mib_before = max(mib for _, mib, _ in second)
    mib_after = max(mib for _, mib, _ in last)
    files_before = min(files for _, _, files in second)  # those that stay open
    files_after = min(files for _, _, files in last)
    print(f"resident memory {mib_before:.0f} MiB -> {mib_after:.0f} MiB", end="")
    print(f", open files {files_before} -> {files_after}")
    sys.exit(mib_after > 1.02 * mib_before or files_after > files_before)


if __name__ == "__main__":
    main()
