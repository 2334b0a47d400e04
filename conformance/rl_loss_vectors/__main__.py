"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what is wrong.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: healthy; 1: not healthy; 2: it cannot be called.
"""

import argparse
import ast
import sys
import traceback
import warnings
from types import SimpleNamespace

from rl_loss_vectors import doctor, load
from rl_loss_vectors.names import Misfit
from rl_loss_vectors.vectors import LOSSES, VECTORS

ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}
ACCEPTED = """Parameters are recognized by name: new or logp, old or behavior, ref, mask, adv; clip
or eps (low, high), beta or kl_coef, max_tokens, num_items_in_batch, num_generations, gamma, lam. A loss
may be a number, the first of a tuple, "loss" of a dict or object, or terms (B, T). More: README.md."""


def arguments(program):
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0], epilog=ACCEPTED)
    add = parser.add_argument
    add("target", help="FILE.py:FUNCTION, FILE.py:CLASS, FILE.py:CLASS.METHOD or pkg.mod:NAME")
    add("--algorithm", choices=LOSSES, help="whose loss or advantages the function computes")
    others = [section for section in VECTORS["sections"] if section not in LOSSES]
    what = ["loss", "advantages", *others]
    add("--what", choices=what, default="loss", help="what the function computes (default: loss)")
    allow = {"dest": "allowed", "action": "append_const", "default": []}
    nan_help = "exit code 0 if the only complaint is that NaN in masked places spreads"
    add("--allow-nan", const="--allow-nan", help=nan_help, **allow)
    clamp_help = "the same for ratios that are clamped at 10 or more"
    add("--allow-clamp", const="--allow-clamp", help=clamp_help, **allow)
    set_help = "one of your function's or constructor's parameters; config.x=... makes a config"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)
    args = parser.parse_args()
    advantages = ADVANTAGES.get(args.algorithm, "group_advantages")
    sections = {"loss": args.algorithm, "advantages": advantages}
    if args.what in sections and args.algorithm is None:
        parser.error("--algorithm is needed")
    args.section = sections.get(args.what, args.what)
    return args


def fixed_of(settings):
    """{parameter: value}; names with a dot are gathered in a namespace."""
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


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # the function's
    fixed = fixed_of(args.set)
    try:
        function, about = load.load(args.target, fixed)
        subject, results, diagnosis = doctor.examined(function, args.section, fixed)
    except (Exception, SystemExit) as error:
        why = str(error)
        if not isinstance(error, Misfit):
            place = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {why} ({place.filename}, line {place.lineno})"
        print(f"{args.target} cannot be called as {args.section}: {' '.join(why.split())}")
        sys.exit(2)
    print(f"{args.target} as {args.section}, vectors {VECTORS['version']}")
    for line in [*about, *subject.notes()]:
        print(line)
    for case, answer in results:
        print(doctor.report(case, answer))
    num_agree = sum(doctor.is_right(*pair) for pair in doctor.answered(results))
    num_others = sum(isinstance(answer, str) for _, answer in results)
    print(f"{num_agree} of {len(results) - num_others} applicable cases agree, {num_others} not tested")
    for line in diagnosis or ["healthy"]:
        print(line)
    needed = {doctor.needed_flag(line) for line in diagnosis}
    if needed and None not in needed:
        flags = " ".join(sorted(needed))
        print(f"that alone: what was tested is right in ordinary batches; {flags} accepts it")
    sys.exit(not needed <= {*args.allowed})


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
