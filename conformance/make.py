"""Writes vectors.json: the cases of cases.toml with the results of reference.py.

    python conformance/make.py

No number and no default comes from the scripts. README.md explains the fields. A case keeps its id,
which is found in the file by its name; new ones get the numbers after the section's last.
"""

import json
import random
import re
import sys
import tomllib
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import reference
from rl_loss_vectors.reference import tensor

HERE = Path(__file__).parent
VERSION = "2.1"
FILE = HERE / "rl_loss_vectors" / "vectors.json"
CASES = tomllib.loads((HERE / "cases.toml").read_text())
TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
OF_A_CASE = (
    "kind why tolerance masked_places_hold micro_batches num_sequences num_tokens stop_gradient "
    "coefficients"
).split()


def drawn(source, low, high, shape):
    if not shape:
        return round(source.uniform(low, high), 2)
    return [drawn(source, low, high, shape[1:]) for _ in range(shape[0])]


def field(spec, seed, shape, first):
    """The numbers of a field, from its description in cases.toml."""
    if not isinstance(spec, dict):
        return spec
    source = random.Random(seed)
    if "between" in spec:
        return drawn(source, *spec["between"], spec.get("shape", shape))
    ratios = spec["ratios"]
    ratios = CASES["ratios"][ratios] if isinstance(ratios, str) else drawn(source, *ratios, shape)
    return (tensor(first) - tensor(ratios)).round(decimals=2).tolist()


def make_case(section, name, special):
    about = CASES["sections"][section]
    kind = CASES["kinds"][about["kind"]]
    defaults = about.get("defaults", {})
    specs = kind.get("fields", {}) | defaults | about.get("fields", {}) | special
    case = {"name": name, "kind": "paper", "tolerance": TOLERANCE, "inputs": {}, "keywords": {}}
    case |= {key: specs.pop(key) for key in OF_A_CASE if key in specs}
    if isinstance(specs.get("mask"), str):
        specs["mask"] = [[int(bit) for bit in mask] for mask in CASES["masks"][specs["mask"]]]
    shape = (len(specs.get("mask", [])), 6)
    fields = {}
    for key, spec in specs.items():
        fields[key] = field(spec, f"{section} {name} {key}", shape, next(iter(fields.values()), None))
    case["inputs"] = {key: fields.pop(key) for key in kind["arguments"]}
    case["keywords"] = fields
    case["tags"] = tags(case, defaults)
    return case


def tags(case, defaults):
    """What is special in a case, as words."""
    inputs = case["inputs"]
    keywords = case["keywords"]
    masks = ["".join(str(bit) for bit in row) for row in inputs.get("mask", [])]
    lengths = {mask.count("1") for mask in masks if len(mask) > 1}
    found = {
        "holes": any(re.search("01", mask) for mask in masks),
        "different_lengths": len(lengths) > 1,
        "one_token": 1 in lengths,
        "masked_places": "masked_places_hold" in case,
        "micro_batches": "micro_batches" in case,
        "stop_gradient": "stop_gradient" in case,
        "kl": "ref_logprobs" in keywords,
        "settings": any(keywords.get(key, value) != value for key, value in defaults.items()),
        "zero_advantage": [0] in inputs.get("advantages", []),
        "token_advantages": "logprobs" in inputs and len(inputs.get("advantages", [[0]])[0]) > 1,
    }
    if "old_logprobs" in inputs and "logprobs" in inputs:
        size = (tensor(inputs["logprobs"]) - tensor(inputs["old_logprobs"])).abs().max()
        found |= {"on_policy": size == 0, "large_ratios": size > 10}
    return [tag for tag, is_so in found.items() if is_so]


def terms_and_denominator(section, case):
    """What an objective averages, as terms of the loss, and what the terms of a completion are divided
    by: the value is the sum of terms / denominator. (B, T) or (B, 1), and (B, 1)."""
    averages = []

    def recorded(b, terms, how, average=reference.average):
        averages.append((b, terms, how))
        return average(b, terms, how)

    with mock.patch.object(reference, "average", recorded):
        reference.evaluate(section, case, has_gradient=False)
    ((b, terms, how),) = averages
    sign = -1 if section in reference.LOSSES.split() else 1
    lengths = [reference.length(b, i) for i in range(len(b.mask))]
    has_tokens = sum(len(row) for row in terms) == sum(lengths)  # a term for each
    places = b.mask if has_tokens else torch.ones(len(terms), 1).bool()
    table = torch.zeros(places.shape, dtype=torch.float64)
    table[places] = tensor([sign * float(x) for row in terms for x in row])
    denominators = {
        "token": [sum(lengths)] * len(lengths),
        "sequence": [len(lengths) * length for length in lengths],
        "constant": [len(lengths) * getattr(b, "max_new_tokens", 0)] * len(lengths),
        "completion": [len(lengths)] * len(lengths),
    }
    return {"terms": table.tolist(), "denominator": [[x] for x in denominators[how]]}


def sections():
    """{section: its part of vectors.json}"""
    in_file = json.loads(FILE.read_text())["sections"]
    result = {}
    for section, about in CASES["sections"].items():
        kind = CASES["kinds"][about["kind"]]
        ids = {case["name"]: case["id"] for case in in_file.get(section, {"cases": []})["cases"]}
        last = max([int(id.split("-")[1]) for id in ids.values()], default=0)
        cases = []
        for name, special in (kind["cases"] | about.get("cases", {})).items():
            case = make_case(section, name, dict(special))
            if name not in ids:
                last += 1
                ids[name] = f"{section}-{last:03d}"
            has_gradient = kind.get("has_gradient", False)
            value, gradient = reference.evaluate(section, case, has_gradient=has_gradient)
            case = {"id": ids[name], **case, "value": value.tolist()}
            if gradient is not None:
                case["gradient"] = gradient.tolist()
            if kind.get("is_average"):
                case |= terms_and_denominator(section, case)
            cases.append(case)
        cases.sort(key=lambda case: case["id"])
        defaults = about.get("defaults", {})
        result[section] = {"arguments": kind["arguments"], "defaults": defaults, "cases": cases}
    return result


def main():
    about = {"version": VERSION, "license": "CC0-1.0", "sections": sections()}
    text = json.dumps(about)
    for start in ('"id"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"terms"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
