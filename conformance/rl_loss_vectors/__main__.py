"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what is wrong.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: healthy; 1: not; 2: it cannot be called.
"""

import argparse
import ast
import sys
import traceback
import warnings
from types import SimpleNamespace

from rl_loss_vectors import doctor, load
from rl_loss_vectors.vectors import LOSSES, VECTORS, Misfit

ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}
ACCEPTED = """Parameters are recognized by name: new or logp, old or behavior, ref, mask, adv; clip
or eps (low, high), beta or kl_coef, max_tokens, num_items_in_batch, num_generations, gamma, lam. A loss
may be a number, the first of a tuple, "loss" of a dict or object, or terms (B, T). More: README.md."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def arguments(program):
    parser = Parser(program, description=__doc__.splitlines()[0], epilog=ACCEPTED, allow_abbrev=False)
    add = parser.add_argument
    add("target", help="FILE.py:FUNCTION, FILE.py:CLASS, FILE.py:CLASS.METHOD or pkg.mod:NAME")
    add("--algorithm", choices=LOSSES, help="whose loss or advantages the function computes")
    others = [section for section in VECTORS["sections"] if section not in LOSSES]
    what = ["loss", "advantages", *others]
    add("--what", choices=what, default="loss", help="what the function computes (default: loss)")
    allow_nan = "exit code 0 if the only complaint is that NaN in masked places spreads"
    add("--allow-nan", action="store_true", help=allow_nan)
    allow_clamp = "exit code 0 if the only complaint is a clamp of ratios at 10 or more"
    add("--allow-clamp", action="store_true", help=allow_clamp)
    set_help = "a parameter of yours, also of a class that has to be made; config.x=... makes a config"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)
    args = parser.parse_args()
    if args.what in ("loss", "advantages") and args.algorithm is None:
        parser.error("--algorithm is needed")
    if ":" not in args.target:
        parser.error(f"the target is FILE.py:FUNCTION, not {args.target}")
    args.section = args.what
    if args.what == "loss":
        args.section = args.algorithm
    if args.what == "advantages":
        args.section = ADVANTAGES.get(args.algorithm, "group_advantages")
    return args


def fixed_of(settings):
    """{parameter: value}; those with a dot are gathered in a namespace."""
    fixed = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        first, _, inner = name.partition(".")
        if inner:
            vars(fixed.setdefault(first, SimpleNamespace()))[inner] = value
        else:
            fixed[name] = value
    return fixed


def reason(error, target):
    """An error in one line, with the last line of the file at which it passed."""
    if isinstance(error, Misfit):
        return str(error)
    path = target.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    place = f" ({path}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # those of the function
    fixed = fixed_of(args.set)
    try:
        function, about = load.load(args.target, fixed)
        found = doctor.examine_shapes(function, args.section, fixed)
    except (Exception, SystemExit) as error:
        print(f"{args.target} cannot be called as {args.section}: {reason(error, args.target)}")
        sys.exit(2)
    subject, results, diagnosis = doctor.diagnosed(found)
    about_vectors = f"vectors {VECTORS['version']}, advantages {subject.advantages}"
    print(f"{args.target} as {args.section}, {about_vectors}")
    lines = doctor.report(subject, results)
    labels = [line.split()[0] for line in lines]
    num_agree = labels.count("agrees")
    num_others = labels.count("n/a")
    num_tested = len(lines) - num_others
    lines.append(f"{num_agree} of {num_tested} applicable cases agree, {num_others} not tested")
    lines += diagnosis
    is_healthy = num_agree == num_tested
    allowed = {"--allow-nan": args.allow_nan, "--allow-clamp": args.allow_clamp}
    needed = [doctor.needed_flag(line) for line in diagnosis]
    if diagnosis and None not in needed:
        flags = " ".join(dict.fromkeys(needed))
        lines.append(f"that alone: what was tested is right in ordinary batches; {flags} accepts it")
        is_healthy = all(allowed[flag] for flag in needed)
    elif is_healthy:
        lines.append("healthy" if num_agree >= 5 else "fewer than five cases apply: too few to tell")
    print(*about, *subject.notes(), *lines, sep="\n")
    sys.exit(not is_healthy or num_tested < 5)


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
