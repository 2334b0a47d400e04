"""Is your loss the one in the paper? Compares its values and gradients with the test vectors.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: right; 1: not right; 2: it cannot be called.
"""

import argparse
import sys
import textwrap
import warnings

from rl_loss_vectors import doctor, load
from rl_loss_vectors.call import VECTORS, Refusal
from rl_loss_vectors.reference import LOSSES

ADVANTAGES = dict.fromkeys(["dr_grpo", "deepseek_v32"], "group_differences") | {"rloo": "leave_one_out"}


def arguments(program):
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("target", help="FILE.py:FUNCTION or pkg.module:FUNCTION, which is run")
    losses = [name for name in LOSSES if name != "grpo_offpolicy"]
    add("--algorithm", choices=losses, help="whose loss or advantages the function computes")
    what = ["loss", "advantages", "gae", "value_loss", "whiten"]
    add("--what", choices=what, default="loss", help="what the function computes (default: loss)")
    set_help = "a number or a tensor's name for a parameter of the function; or a constant of the paper"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)
    add("--allow", action="append", default=[], choices=doctor.DEPARTURES, help="what to accept")
    add("--verbose", action="store_true", help="print all tables")
    args = parser.parse_args()
    advantages = ADVANTAGES.get(args.algorithm, "group_advantages")
    sections = {"loss": args.algorithm, "advantages": advantages}
    if args.what in sections and args.algorithm is None:
        parser.error("--algorithm is needed")
    args.section = sections.get(args.what, args.what)
    return args


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # the function's
    settings = {}
    for text in args.set:
        name, _, value = text.partition("=")
        settings[name] = load.value_of(value)
    function = None
    try:
        function = load.load(args.target)
        report = doctor.examine(function, args.section, settings, args.allow, args.verbose)
    except Refusal as error:
        print(f"{args.target} cannot be called as {args.section}: {error}")
        if function is not None:
            print("--set NAME=0.2 passes a number, --set NAME=mask a tensor. Or complete the last line")
            print("of this file, and check that:\n")
            print(textwrap.indent(load.adapter(args.target, function, args.section, settings), "    "))
        sys.exit(2)
    constants = " ".join(f"{name}={x:g}" for name, x in report.subject.constants.items())
    constants = f" with {constants}" if constants else ""
    print(f"{args.target} as {args.section}{constants}, vectors {VECTORS['version']}")
    print("\n".join([*report.notes(), *(report.lines or ["right"])]))
    sys.exit(bool(report.lines))


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
