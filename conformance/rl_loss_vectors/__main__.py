"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what is wrong.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: healthy; 1: not; 2: it cannot be called.
"""

import argparse
import importlib
import importlib.util
import runpy
import sys
import traceback
from pathlib import Path

from rl_loss_vectors import doctor
from rl_loss_vectors.vectors import COUNTS, VECTORS

SECTIONS = VECTORS["sections"]
LOSSES = [name for name in SECTIONS if SECTIONS[name]["arguments"][:2] == ["logprobs", "old_logprobs"]]
ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}


def arguments():
    parser = argparse.ArgumentParser("rl_loss_vectors", description=__doc__.splitlines()[0])
    parser.add_argument("target", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument("--algorithm", choices=LOSSES, help="of a loss, or of advantages")
    others = [section for section in SECTIONS if section not in LOSSES]
    parser.add_argument("--what", choices=["loss", "advantages", *others], default="loss")
    parser.add_argument("--way", choices=["loss", "terms", "reduction"], default="loss")
    parser.add_argument("--framework", choices=["torch", "numpy"], default="torch")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--rename", nargs="*", default=[], metavar="OURS=YOURS")
    args = parser.parse_args()
    if args.what in ("loss", "advantages") and args.algorithm is None:
        parser.error("--algorithm is needed")
    if args.framework == "torch" and importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed; --framework numpy is for functions of arrays")
    if ":" not in args.target or not all("=" in pair for pair in args.rename):
        parser.error("the target is FILE.py:FUNCTION, and --rename has pairs OURS=YOURS")
    args.section = args.what
    if args.what == "loss":
        args.section = args.algorithm
    if args.what == "advantages":
        args.section = ADVANTAGES.get(args.algorithm, "group_advantages")
    known = {*COUNTS}.union(*(case["keywords"] for case in SECTIONS[args.section]["cases"]))
    args.rename = dict(pair.split("=") for pair in args.rename)
    if not set(args.rename) <= known:
        parser.error(f"--rename: the name before = must be one of {', '.join(sorted(known))}")
    return args


def load(target):
    path, name = target.rsplit(":", 1)
    if not path.endswith(".py"):
        sys.path.insert(0, "")
        return getattr(importlib.import_module(path), name)
    sys.path.insert(0, str(Path(path).parent))
    return runpy.run_path(path)[name]


def main():
    args = arguments()
    how = {key: getattr(args, key) for key in ("way", "framework", "dtype", "rename")}
    try:
        found = doctor.examine_shapes(load(args.target), args.section, **how)
    except (Exception, SystemExit):
        error = traceback.format_exc()
        print(f"{args.target} cannot be called as {args.section}:\n{error}", end="")
        sys.exit(2)
    subject, results, diagnosis = doctor.diagnosed(found)
    lines = doctor.report(subject, results)
    about = f"vectors {VECTORS['version']}, advantages {subject.advantages}"
    print(f"{args.target} as {args.section}, {about}")
    print(*lines, sep="\n")
    labels = [line.split()[0] for line in lines]
    num_agree = labels.count("agrees")
    num_others = labels.count("n/a")
    num_tested = len(lines) - num_others
    print(f"{num_agree} of {num_tested} applicable cases agree, {num_others} not tested")
    if num_agree < num_tested:
        print(*diagnosis, sep="\n")
    else:
        print("healthy" if num_agree >= 5 else "fewer than five cases apply: too few to tell")
        for shape in broadcasting(found):
            print(f"careful: advantages {shape} broadcast: other numbers, and no error")
    sys.exit(num_agree < num_tested or num_agree < 5)


def broadcasting(found):
    """The shapes of advantages for which a healthy function gives other numbers."""
    for subject, results in found:
        pairs = [pair for pair in doctor.answered(results) if "masked_places" not in pair[0]["tags"]]
        if not all(doctor.is_right(subject, case, answer) for case, answer in pairs):
            yield subject.advantages


if __name__ == "__main__":
    main()
