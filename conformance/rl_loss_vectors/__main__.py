"""Is your loss the one in the paper? Runs it on the vectors, case by case, and says what it computes.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: right; 1: not right; 2: it cannot be called.
"""

import argparse
import sys
import textwrap
import warnings

from rl_loss_vectors import doctor, load
from rl_loss_vectors.names import COUNTS, Misfit, optional_of
from rl_loss_vectors.reference import LOSSES
from rl_loss_vectors.vectors import LAYOUTS, VECTORS, ours

ADVANTAGES = dict.fromkeys(["dr_grpo", "deepseek_v32"], "group_differences") | {"rloo": "leave_one_out"}
ALLOWED = {
    "--allow-nan": "accept that NaN in masked places spreads",
    "--allow-clamp": "accept clamps of ratios at 10 or more",
    "--allow-value": "accept a different value if the gradient is right",
    "--allow-rounding": "accept rounding noise as advantages of equal rewards",
}


def arguments(program):
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "target",
        help="FILE.py:FUNCTION, FILE.py:CLASS, FILE.py:CLASS.METHOD or pkg.mod:NAME, which is run",
    )
    losses = [name for name in LOSSES if name != "grpo_offpolicy"]
    add("--algorithm", choices=losses, help="whose loss or advantages the function computes")
    what = ["loss", "advantages", "gae", "value_loss", "whiten"]
    add("--what", choices=what, default="loss", help="what the function computes (default: loss)")
    layout_help = "of rewards: P prompts x G completions (default), GP, N in a row, or one group, G"
    add("--layout", choices=LAYOUTS, help=layout_help)
    set_help = (
        "a parameter of the function or its constructor: a number, config.x=..., or a tensor's name"
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)
    for flag, text in ALLOWED.items():
        add(flag, dest="allowed", action="append_const", const=flag, default=[], help=text)
    args = parser.parse_args()
    advantages = ADVANTAGES.get(args.algorithm, "group_advantages")
    sections = {"loss": args.algorithm, "advantages": advantages}
    if args.what in sections and args.algorithm is None:
        parser.error("--algorithm is needed")
    args.section = sections.get(args.what, args.what)
    return args


def refusal(error, args):
    """Lines: why the function cannot be called, and an adapter to complete."""
    lines = [f"{args.target} cannot be called as {args.section}: {' '.join(str(error).split())}"]
    if error.parameters is None:
        return lines
    if args.what == "advantages" and args.layout is None:
        lines.append("If it takes one group of rewards, say --layout G.")
    what = "If it needs something else,"
    if error.unknown:
        words = "--set NAME=0.2 passes a number, --set NAME.FIELD=0.2 a number in a config, and"
        lines.append(f"For a parameter NAME, {words}")
        what = "--set NAME=mask a tensor. Or"
    lines.append(f"{what} complete the last line of this file and check that:")
    wanted = VECTORS["sections"][args.section]["arguments"]
    optional = [name for name in optional_of(args.section) if name.isidentifier()]
    known = {name: x for name, x in error.known.items() if x not in COUNTS}
    text = load.adapter(args.target, wanted, optional, error.parameters, known)
    return [*lines, "", textwrap.indent(text, "    ")]


def title_of(section):
    titles = {"dr_grpo": "Dr. GRPO", "deepseek_v32": "DeepSeek-V3.2"}
    return titles.get(section, section.upper() if section in LOSSES else section)


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # the function's
    try:
        fixed = load.settings_of(args.set)
        function, constants = load.load(args.target, args.section, ours(args.section), fixed)
        found = doctor.examine(function, args.section, fixed, args.layout)
    except Misfit as error:
        print("\n".join(refusal(error, args)))
        sys.exit(2)
    print(f"{args.target} as {args.section}, vectors {VECTORS['version']}")
    cases = [doctor.line_about(*pair) for pair in found.results]
    print("\n".join([*found.subject.notes(constants), *found.notes, *cases]))
    num_agree = sum(line.startswith("  agrees") for line in cases)
    num_tested = sum(not line.startswith("  n/a") for line in cases)
    print(f"{num_agree} of {num_tested} cases that apply agree, {len(cases) - num_tested} do not apply")
    for line in [*found.constants, *found.lines]:
        print(line)
    needed = {doctor.needed_flag(line) for line in found.lines}
    title = title_of(args.section) + (", with the constants above" if found.constants else "")
    if not needed:
        print(f"right: {title}")
    elif None not in needed:
        print(
            f"all else that was tested is right: {title}; {' '.join(sorted(needed))} accepts the rest"
        )
    sys.exit(not needed <= {*args.allowed})


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
