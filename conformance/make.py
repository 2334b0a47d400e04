"""Recomputes the results in vectors.json from the inputs there, with reference.py.

    python conformance/make.py

README.md explains the fields. Write a new case by hand, with the section's next id, and with null for
each result that the cases of its section have. No token may be exactly at a clip's bound, where the
gradient is not defined.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import VECTORS, reference

RESULTS = {"value", "gradient", "terms", "denominator"}
FILE = Path(__file__).parent / "rl_loss_vectors" / "vectors.json"


def main():
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    for section, about in VECTORS["sections"].items():
        for case in about["cases"]:
            results = reference.with_results(section, case)
            for name in RESULTS & {*results}:
                # Another CPU may round differently; that changes nothing.
                if case[name] is None or not np.allclose(results[name], case[name], 1e-12, 1e-15):
                    case[name] = results[name]
    text = json.dumps(VECTORS)
    for start in ('"id"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"terms"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
