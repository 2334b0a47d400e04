"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what is wrong.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: healthy; 1: not; 2: it cannot be called.
"""

import argparse
import importlib
import runpy
import sys
import traceback
from pathlib import Path

from rl_loss_vectors import doctor
from rl_loss_vectors.vectors import COUNTS, VECTORS, Misfit

SECTIONS = VECTORS["sections"]
LOSSES = [name for name in SECTIONS if SECTIONS[name]["arguments"][:2] == ["logprobs", "old_logprobs"]]
ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def arguments(program):
    parser = Parser(program, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("target", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument(
        "--algorithm", choices=LOSSES, help="whose loss or advantages the function computes"
    )
    others = [section for section in SECTIONS if section not in LOSSES]
    what = ["loss", "advantages", *others]
    parser.add_argument(
        "--what", choices=what, default="loss", help="what the function computes (default: loss)"
    )
    precisions = ["float64", "float32"]
    parser.add_argument(
        "--dtype", choices=precisions, default="float64", help="of the tensors that it is given"
    )
    rename = "keywords that have different names: clip_eps_low=epsilon"
    parser.add_argument("--rename", nargs="+", default=[], metavar="OURS=YOURS", help=rename)
    allow_nan = "exit code 0 if the only complaint is that NaN in masked places spreads"
    parser.add_argument("--allow-nan", action="store_true", help=allow_nan)
    args = parser.parse_args()
    if args.what in ("loss", "advantages") and args.algorithm is None:
        parser.error("--algorithm is needed")
    if ":" not in args.target:
        parser.error(f"the target is FILE.py:FUNCTION or MODULE:FUNCTION, not {args.target}")
    if not all("=" in pair for pair in args.rename):
        parser.error("--rename takes pairs OURS=YOURS")
    args.section = args.what
    if args.what == "loss":
        args.section = args.algorithm
    if args.what == "advantages":
        args.section = ADVANTAGES.get(args.algorithm, "group_advantages")
    known = {*COUNTS}.union(*(case["keywords"] for case in SECTIONS[args.section]["cases"]))
    args.rename = dict(pair.split("=", 1) for pair in args.rename)
    if not set(args.rename) <= known:
        parser.error(f"--rename: the name before = must be one of {', '.join(sorted(known))}")
    return args


def load(target):
    path, name = target.rsplit(":", 1)
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise Misfit(f"no file {path}")
        sys.path.insert(0, str(Path(path).parent))
        names = runpy.run_path(path)
    else:
        sys.path.insert(0, "")
        names = vars(importlib.import_module(path))
    if name not in names:
        here = [key for key, x in names.items() if getattr(x, "__module__", None) == names["__name__"]]
        raise Misfit(f"no function {name}; it has: {', '.join(here) or 'none'}")
    return names[name]


def reason(error, path):
    """An error in one line, with the last line of the file at which it passed."""
    if isinstance(error, Misfit):
        return str(error)
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
    ]
    place = f" ({path}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def main(program=None):
    args = arguments(program)
    path = args.target.rsplit(":", 1)[0]
    try:
        how = {"dtype": args.dtype, "rename": args.rename}
        found = doctor.examine_shapes(load(args.target), args.section, **how)
    except (Exception, SystemExit) as error:
        print(f"{args.target} cannot be called as {args.section}: {reason(error, path)}")
        sys.exit(2)
    subject, results, diagnosis = doctor.diagnosed(found)
    lines = doctor.report(subject, results)
    about = f"vectors {VECTORS['version']}, advantages {subject.advantages}"
    print(f"{args.target} as {args.section}, {about}")
    if subject.arguments != subject.about["arguments"]:
        pairs = zip(subject.parameters, subject.arguments, strict=False)
        print("arguments by name:", ", ".join(f"{theirs} is {ours}" for theirs, ours in pairs))
    print(*lines, sep="\n")
    labels = [line.split()[0] for line in lines]
    num_agree = labels.count("agrees")
    num_others = labels.count("n/a")
    num_tested = len(lines) - num_others
    print(f"{num_agree} of {num_tested} applicable cases agree, {num_others} not tested")
    print(*diagnosis, sep="\n", end="\n" if diagnosis else "")
    is_finite = diagnosis == [doctor.SPREADS]
    if is_finite:
        print("that alone: what was tested is right while padding stays finite; --allow-nan accepts it")
    if num_agree == num_tested:
        print("healthy" if num_agree >= 5 else "fewer than five cases apply: too few to tell")
    is_healthy = num_agree == num_tested or (is_finite and args.allow_nan)
    sys.exit(not is_healthy or num_agree < 5)


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
