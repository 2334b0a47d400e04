"""Computes the results in vectors.json again, from the inputs there, with reference.py.

    python conformance/make.py

README.md explains the fields. A new case is written by hand, with the section's next id and with null
for each result that the cases of its section have. No token is at a bound of a clip, so that nobody has
to guess which gradient is due at a tie.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import VECTORS, reference

FILE = Path(__file__).parent / "rl_loss_vectors" / "vectors.json"


def terms_and_denominator(section, case):
    """What an objective averages, as terms of the loss, and what the terms of a completion are divided
    by: the value is the sum of terms / denominator. (B, T) or (B, 1), and (B, 1)."""
    averages = []

    def recorded(b, terms, how, average=reference.average):
        averages.append((b, terms, how))
        return average(b, terms, how)

    without_gradient = {key: x for key, x in case.items() if key != "gradient"}
    with mock.patch.object(reference, "average", recorded):
        reference.evaluate(section, without_gradient)
    ((b, terms, how),) = averages
    sign = -1 if section in reference.LOSSES else 1
    lengths = [reference.length(b, i) for i in range(len(b.mask))]
    has_tokens = sum(len(row) for row in terms) == sum(lengths)  # a term for each
    places = b.mask if has_tokens else torch.ones(len(terms), 1).bool()
    table = torch.zeros(places.shape, dtype=torch.float64)
    table[places] = torch.tensor([sign * float(x) for row in terms for x in row], dtype=table.dtype)
    denominators = {
        "token": [sum(lengths)] * len(lengths),
        "sequence": [len(lengths) * length for length in lengths],
        "constant": [len(lengths) * getattr(b, "max_new_tokens", 0)] * len(lengths),
        "completion": [len(lengths)] * len(lengths),
    }
    return {"terms": table.tolist(), "denominator": [[x] for x in denominators[how]]}


def results(section, case):
    value, gradient = reference.evaluate(section, case)
    found = {"value": value.tolist()}
    if gradient is not None:
        found["gradient"] = gradient.tolist()
    if "terms" in case:
        found |= terms_and_denominator(section, case)
    return found


def main():
    for section, about in VECTORS["sections"].items():
        for case in about["cases"]:
            case |= results(section, case)
    text = json.dumps(VECTORS)
    for start in ('"id"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"terms"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
