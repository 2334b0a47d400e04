"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what is wrong.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: healthy; 1: not; 2: it cannot be called.
"""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from rl_loss_vectors import doctor
from rl_loss_vectors.vectors import LOSSES, VECTORS, Misfit

ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def arguments(program):
    parser = Parser(program, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("target", help="FILE.py:FUNCTION")
    parser.add_argument(
        "--algorithm", choices=LOSSES, help="whose loss or advantages the function computes"
    )
    others = [section for section in VECTORS["sections"] if section not in LOSSES]
    what = ["loss", "advantages", *others]
    parser.add_argument(
        "--what", choices=what, default="loss", help="what the function computes (default: loss)"
    )
    allow_nan = "exit code 0 if the only complaint is that NaN in masked places spreads"
    parser.add_argument("--allow-nan", action="store_true", help=allow_nan)
    args = parser.parse_args()
    if args.what in ("loss", "advantages") and args.algorithm is None:
        parser.error("--algorithm is needed")
    if ".py:" not in args.target:
        parser.error(f"the target is FILE.py:FUNCTION, not {args.target}")
    args.section = args.what
    if args.what == "loss":
        args.section = args.algorithm
    if args.what == "advantages":
        args.section = ADVANTAGES.get(args.algorithm, "group_advantages")
    return args


def load(path, name):
    if not Path(path).is_file():
        raise Misfit(f"no file {path}")
    sys.path.insert(0, str(Path(path).parent))
    names = runpy.run_path(path)
    if name not in names:
        here = [key for key, x in names.items() if getattr(x, "__module__", None) == names["__name__"]]
        raise Misfit(f"no function {name}; it has: {', '.join(here) or 'none'}")
    return names[name]


def reason(error, path):
    """An error in one line, with the last line of the file at which it passed."""
    if isinstance(error, Misfit):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    place = f" ({path}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def main(program=None):
    args = arguments(program)
    path, name = args.target.rsplit(":", 1)
    try:
        found = doctor.examine_shapes(load(path, name), args.section)
    except (Exception, SystemExit) as error:
        print(f"{args.target} cannot be called as {args.section}: {reason(error, path)}")
        sys.exit(2)
    subject, results, diagnosis = doctor.diagnosed(found)
    about = f"vectors {VECTORS['version']}, advantages {subject.advantages}"
    print(f"{args.target} as {args.section}, {about}")
    if subject.arguments != subject.about["arguments"]:
        pairs = zip(subject.parameters, subject.arguments, strict=False)
        print("arguments by name:", ", ".join(f"{theirs} is {ours}" for theirs, ours in pairs))
    lines = doctor.report(subject, results)
    labels = [line.split()[0] for line in lines]
    num_agree = labels.count("agrees")
    num_others = labels.count("n/a")
    num_tested = len(lines) - num_others
    lines.append(f"{num_agree} of {num_tested} applicable cases agree, {num_others} not tested")
    lines += diagnosis
    is_healthy = num_agree == num_tested
    if diagnosis == [doctor.SPREADS]:
        lines.append(
            "that alone: what was tested is right while padding stays finite; --allow-nan accepts it"
        )
        is_healthy = args.allow_nan
    elif is_healthy:
        lines.append("healthy" if num_agree >= 5 else "fewer than five cases apply: too few to tell")
    print(*lines, sep="\n")
    sys.exit(not is_healthy or num_agree < 5)


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
