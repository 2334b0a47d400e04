"""Is your loss the one in the paper? Compares it with vectors.json, case by case.

    python conformance/check.py grpo.py:policy_loss --algorithm grpo

README.md lists the arguments of each function. Exit code 0: healthy; 1: not; 2: it cannot be called.
"""

import argparse
import inspect
import itertools
import json
import re
import runpy
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from conformance import make, mistakes

VECTORS = json.loads(make.FILE.read_text())
ADVANTAGES = {"dr_grpo": "group_differences", "rloo": "leave_one_out"}
COUNTS = ("num_sequences", "num_tokens")
SHAPES = ["as in the file", "BT", "B1", "B"]  # of advantages


def keywords_for(function, case, defaults, args):
    """({their keyword: ours}, None), or ({}, the reason why the case does not apply)."""
    parameters = inspect.signature(function).parameters
    names = {re.sub("_[A-Z][A-Z0-9]*$", "", name): name for name in parameters}  # mask_BT -> mask
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names |= {key: key for key in [*case["keywords"], *COUNTS]}
    names |= dict(pair.split("=") for pair in args.rename)
    for key, value in case["keywords"].items():
        if key not in names and value != defaults.get(key):
            return {}, f"it has no {key}"
    if "micro_batches" in case and not any(key in names for key in COUNTS):
        return {}, "it cannot be used in micro-batches: it has no count of the whole step"
    if args.shape in ("B", "B1") and len(case["inputs"].get("advantages", [[0]])[0]) > 1:
        return {}, "it takes one advantage for each completion"
    values = {}
    for key, value in case["keywords"].items():
        if key in names and values.setdefault(names[key], value) != value:
            return {}, f"it has one {names[key]} for two keywords"
    given = [*case["keywords"], *(key for key in COUNTS if key in case)]
    return {names[key]: key for key in given if key in names}, None


def difference(function, x):
    """The gradient of a function of an array, by finite differences; in float32, as it is no better."""
    gradient = torch.zeros(x.shape)
    for place in itertools.product(*map(range, x.shape)):
        step = torch.zeros(x.shape, dtype=torch.float64).numpy()
        step[place] = 1e-5
        gradient[place] = (float(function(x + step)) - float(function(x - step))) / 2e-5
    return gradient


def answer(function, case, arguments, keywords, args):
    """(value, gradient) of the user's function; the gradient is None if there is none to compare."""
    b = make.batch_of(case)
    if "advantages" in arguments:
        width = {"BT": 6, "B1": 1}.get(args.shape, len(case["inputs"]["advantages"][0]))
        b.advantages = b.advantages[:, 0] if args.shape == "B" else b.advantages[:, :width]
    fields = vars(b) | {key: case[key] for key in COUNTS if key in case}
    value = torch.zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(fields[arguments[0]])
    for rows in case.get("micro_batches", [slice(None)]):
        part = {key: x[rows] if torch.is_tensor(x) else x for key, x in fields.items()}
        if args.framework == "numpy":
            part = {key: x.numpy() if torch.is_tensor(x) else x for key, x in part.items()}
        elif "gradient" in case:
            part[arguments[0]].requires_grad_()
        first, *others = [part[key] for key in arguments]
        given = {name: part[key] for name, key in keywords.items()}
        result = function(first, *others, **given)
        outputs = result if isinstance(result, tuple) else (result,)
        if "gradient" not in case:
            outputs = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in outputs])
            outputs = torch.where(b.mask, outputs, 0) if "mask" in arguments else outputs
            return outputs.squeeze(0), None
        value = value + torch.as_tensor(outputs[0]).detach()
        if args.framework == "torch":
            if outputs[0].requires_grad:
                gradient[rows] = torch.autograd.grad(outputs[0], first)[0]
        elif len(outputs) > 1:
            gradient[rows] = torch.as_tensor(outputs[1])
        elif not case.get("stop_gradient"):
            gradient = gradient.float()
            gradient[rows] = difference(lambda x: function(x, *others, **given), first)  # noqa: B023
        else:
            gradient = None
    return value, gradient


def same(found, expected):
    """Whether (value, gradient) are equal up to the error of a constant in float32, or of finite
    differences. Where the expected number is NaN (as for some entries of mistakes.py), any will do."""
    for x, y in zip(found, expected, strict=True):
        if x is not None and y is not None:
            size = y.nan_to_num().abs()
            tolerance = 1e-6 * (1 + size)
            if x.dtype == torch.float32:
                tolerance = 1e-5 * (1 + size.max())
            if not (((x - y).abs() <= tolerance) | y.isnan()).all():
                return False
    return True


def diagnosis(section, answers):
    """The entries that reproduce the answers in all cases, or else combinations of two, or of three."""
    entries = [("mistake", *entry) for entry in mistakes.MISTAKES if section in entry[1].split()]
    entries += [("variant", *entry) for entry in mistakes.VARIANTS if section in entry[1].split()]
    for count in (1, 2, 3):
        found = []
        for chosen in itertools.combinations(entries, count):
            change = mistakes.together(*(change for *_, change in chosen))
            if all(same(x, make.evaluate(section, case, change)) for case, x in answers):
                found.append(" and ".join(f"{kind}: {name}" for kind, name, *_ in chosen))
        if found:
            return found
    return ["unknown: no entries of mistakes.py give these numbers"]


def examine(function, section, args):
    """(lines of a report, the applicable cases with their answers, how many of them agree)"""
    about = VECTORS["sections"][section]
    lines = []
    answers = []
    num_agree = 0
    for case in about["cases"]:
        keywords, why_not = keywords_for(function, case, about["defaults"], args)
        if why_not:
            lines.append(f"  n/a      {case['name']}: {why_not}")
            continue
        found = answer(function, case, about["arguments"], keywords, args)
        answers.append((case, found))
        expected = make.tensor(case["value"]), make.tensor(case.get("gradient", 0.0))
        agrees = same(found, expected)
        num_agree += agrees
        line = f"  {'agrees ' if agrees else 'DIFFERS'}  {case['name']}"
        if "gradient" in case and found[1] is None:
            line += " (by value only)"
        elif "gradient" in case and not agrees:
            off = (found[1] - expected[1]).abs().max()
            line += f": {found[0]:.9g}, not {expected[0]:.9g}; gradient off by {off:.2g}"
        lines.append(line)
    return lines, answers, num_agree


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="FILE.py:FUNCTION")
    parser.add_argument("--algorithm", required=True, choices=mistakes.LOSSES.split())
    what = ("loss", "advantages", "gae", "router_shift", "value_loss", "positive_lm_loss")
    parser.add_argument("--what", choices=what, default="loss")
    parser.add_argument("--advantages", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--framework", choices=["torch", "numpy"], default="torch")
    parser.add_argument("--rename", nargs="*", default=[], metavar="OURS=YOURS")
    args = parser.parse_args()
    advantages = ADVANTAGES.get(args.algorithm, "group_advantages")
    section = {"loss": args.algorithm, "advantages": advantages}.get(args.what, args.what)
    known = {*COUNTS}.union(*(case["keywords"] for case in VECTORS["sections"][section]["cases"]))
    if not {pair.split("=")[0] for pair in args.rename} <= known:
        parser.error(f"--rename: the name before = must be one of {', '.join(sorted(known))}")
    results = []
    errors = []
    for shape in args.advantages:
        args.shape = shape
        try:
            path, name = args.target.rsplit(":", 1)
            sys.path.insert(0, str(Path(path).parent))
            results.append((*examine(runpy.run_path(path)[name], section, args), shape))
        except (Exception, SystemExit):
            errors.append(traceback.format_exc())
    if not results:
        print(f"{args.target} cannot be called as {section}:\n{errors[0]}", end="")
        sys.exit(2)
    lines, answers, num_agree, shape = max(results, key=lambda result: result[2])
    print(f"{args.target} as {section}, vectors {VECTORS['version']}, advantages {shape}")
    print(*lines, sep="\n")
    not_tested = len(lines) - len(answers)
    print(f"{num_agree} of {len(answers)} applicable cases agree, {not_tested} not tested")
    if num_agree < len(answers):
        print(*diagnosis(section, answers), sep="\n")
    elif num_agree < 5:
        print("fewer than five cases apply, which shows nothing")
    sys.exit(num_agree < len(answers) or num_agree < 5)


if __name__ == "__main__":
    main()
