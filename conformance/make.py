"""Writes vectors.json: the cases of cases.toml with the results of reference.py.

    python conformance/make.py

No number and no default comes from the scripts. README.md explains the fields.
"""

import json
import random
import sys
import tomllib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from conformance import reference

VERSION = "1.0"
FILE = Path(__file__).parent / "vectors.json"
OF_A_CASE = "masked_places_hold micro_batches num_sequences num_tokens stop_gradient".split()
CASES = tomllib.loads((Path(__file__).parent / "cases.toml").read_text())


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def drawn(source, low, high, shape):
    if not shape:
        return round(source.uniform(low, high), 2)
    return [drawn(source, low, high, shape[1:]) for _ in range(shape[0])]


def field(spec, seed, logprobs):
    """The numbers of a field, from its description in cases.toml."""
    if not isinstance(spec, dict):
        return spec
    source = random.Random(seed)
    if "between" in spec:
        return drawn(source, *spec["between"], spec.get("shape", (4, 6)))
    ratios = spec["ratios"]
    ratios = CASES["ratios"][ratios] if isinstance(ratios, str) else drawn(source, *ratios, (4, 6))
    return (tensor(logprobs) - tensor(ratios)).round(decimals=2).tolist()


def make_case(section, name, special):
    about = CASES["sections"][section]
    kind = CASES["kinds"][about["kind"]]
    specs = {
        **kind.get("fields", {}),
        **about.get("defaults", {}),
        **about.get("fields", {}),
        **special,
    }
    case = {"name": name, "inputs": {}, "keywords": {}}
    case |= {key: specs.pop(key) for key in OF_A_CASE if key in specs}
    if "mask" in specs:
        masks = CASES["masks"][specs["mask"]]
        specs["mask"] = [[int(bit) for bit in mask] for mask in masks]
    fields = {}
    for key, spec in specs.items():
        fields[key] = field(spec, f"{section} {name} {key}", fields.get("logprobs"))
    case["inputs"] = {key: fields.pop(key) for key in kind["arguments"]}
    case["keywords"] = fields
    return case


def batch_of(case):
    b = reference.batch(bootstrap=torch.zeros(4, 1), micro_batches=case.get("micro_batches"))
    for name, x in (case["inputs"] | case["keywords"]).items():
        setattr(b, name, tensor(x) if isinstance(x, list) else x)
        if name in ("mask", "is_right"):
            setattr(b, name, tensor(x).bool())
    if "advantages" in case["inputs"]:
        b.advantages = b.advantages.expand_as(b.logprobs)
    if "masked_places_hold" in case:
        for name, x in vars(b).items():
            if torch.is_tensor(x) and x.shape == b.mask.shape and name != "mask":
                setattr(b, name, torch.where(b.mask, x, float(case["masked_places_hold"])))
    return b


def evaluate(section, case, change=None):
    """(value, gradient) from reference.py, or from an entry of mistakes.py instead."""
    kind = CASES["sections"][section]["kind"]
    b = batch_of(case)
    objective = getattr(reference, section)
    first = getattr(b, CASES["kinds"][kind]["arguments"][0]).requires_grad_()
    value = change(objective, b) if change else objective(b)
    if kind == "loss":
        value = -value
    if kind not in ("loss", "value", "lm"):
        return value.detach(), None
    value = value + 0 * first[b.mask].sum()  # a gradient even if nothing depends on it
    (gradient,) = torch.autograd.grad(value, first)
    return value.detach(), gradient


def sections():
    """{section: its part of vectors.json}"""
    result = {}
    for section, about in CASES["sections"].items():
        kind = CASES["kinds"][about["kind"]]
        cases = []
        for name, special in (kind["cases"] | about.get("cases", {})).items():
            case = make_case(section, name, dict(special))
            value, gradient = evaluate(section, case)
            case["value"] = value.tolist()
            if gradient is not None:
                case["gradient"] = gradient.tolist()
            cases.append(case)
        defaults = about.get("defaults", {})
        result[section] = {"arguments": kind["arguments"], "defaults": defaults, "cases": cases}
    return result


def main():
    text = json.dumps({"version": VERSION, "sections": sections()})
    for start in ('"name"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
