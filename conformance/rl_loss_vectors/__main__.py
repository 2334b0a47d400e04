"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what it computes.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: right; 1: not right; 2: it cannot be called.
"""

import argparse
import sys
import textwrap
import warnings

from rl_loss_vectors import doctor, load
from rl_loss_vectors.names import Misfit, optional_of
from rl_loss_vectors.reference import LOSSES
from rl_loss_vectors.vectors import LAYOUTS, VECTORS, ours, parameters_of

ADVANTAGES = {
    "dr_grpo": "group_differences",
    "deepseek_v32": "group_differences",
    "rloo": "leave_one_out",
}
OTHERS = ["gae", "value_loss", "whiten"]  # what is no loss


def arguments(program):
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "target",
        help="FILE.py:FUNCTION, FILE.py:CLASS, FILE.py:CLASS.METHOD or pkg.mod:NAME; it is run",
    )
    losses = [name for name in LOSSES if name != "grpo_offpolicy"]
    add("--algorithm", choices=losses, help="whose loss or advantages the function computes")
    what_help = "what the function computes (default: loss)"
    add("--what", choices=["loss", "advantages", *OTHERS], default="loss", help=what_help)
    layout_help = (
        "of rewards: P prompts x G completions (default), GP, N = P G in a row, or one group, G"
    )
    add("--layout", choices=LAYOUTS, help=layout_help)
    allow = {"dest": "allowed", "action": "append_const", "default": []}
    add("--allow-nan", const="--allow-nan", help="accept that NaN in masked places spreads", **allow)
    add("--allow-clamp", const="--allow-clamp", help="accept clamps of ratios at 10 or more", **allow)
    add(
        "--allow-value",
        const="--allow-value",
        help="accept another value with the right gradient",
        **allow,
    )
    set_help = (
        "a parameter of your function or its constructor: a number, config.x=..., or a tensor's name"
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)
    args = parser.parse_args()
    sections = {
        "loss": args.algorithm,
        "advantages": ADVANTAGES.get(args.algorithm, "group_advantages"),
    }
    if args.what in sections and args.algorithm is None:
        parser.error("--algorithm is needed")
    args.section = sections.get(args.what, args.what)
    return args


def refusal(error, args, function):
    """Lines: why the function cannot be called, and an adapter to complete."""
    why = " ".join(str(error).split())
    yield f"{args.target} cannot be called as {args.section}: {why}"
    if function is None and not error.unknown:
        return
    if error.unknown:
        yield f"Pass a number with --set {error.unknown[0]}=0.2 or --set {error.unknown[0]}.NAME=0.2, a tensor"
        yield f"with --set {error.unknown[-1]}=mask, or complete the last line of this file and check that:"
    else:
        yield "If it needs something else, complete the last line of this file and check that:"
    yield ""
    parameters = parameters_of(function) if function else {}
    wanted = VECTORS["sections"][args.section]["arguments"]
    optional = [name for name in optional_of(args.section) if name.isidentifier()]
    text = load.adapter(args.target, wanted, optional, parameters, error.known)
    yield textwrap.indent(text, "    ")


def title_of(section):
    names = {"cispo": "CISPO", "dr_grpo": "Dr. GRPO", "deepseek_v32": "DeepSeek-V3.2"}
    return names.get(section, section.upper() if section in LOSSES else section)


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # the function's
    fixed = load.settings_of(args.set)
    function = None
    try:
        function, constants = load.load(args.target, args.section, ours(args.section), fixed)
        found = doctor.examine(function, args.section, fixed, args.layout)
    except Misfit as error:
        for line in refusal(error, args, function):
            print(line)
        sys.exit(2)
    print(f"{args.target} as {args.section}, vectors {VECTORS['version']}")
    for line in [*found.subject.notes(constants), *found.notes]:
        print(line)
    for case, answer in found.results:
        print(doctor.report(case, answer))
    num_agree = sum(doctor.is_right(found.section, *pair) for pair in found.answered)
    num_others = sum(isinstance(answer, str) for _, answer in found.results)
    print(
        f"{num_agree} of {len(found.results) - num_others} applicable cases agree, {num_others} not tested"
    )
    for finding in found.constants:
        print(finding)
    needed = {doctor.needed_flag(line) for line in found.lines}
    for line in found.lines:
        print(line)
    if not found.lines:
        where = ", with the constants above" if found.constants else ""
        print(f"right: {title_of(args.section)}{where}")
    elif None not in needed:
        print(f"that alone: what was tested is right otherwise; {' '.join(sorted(needed))} accepts it")
    sys.exit(not needed <= {*args.allowed})


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
