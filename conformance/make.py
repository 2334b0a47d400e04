"""Computes the results in vectors.json again, from the inputs there, with reference.py.

    python conformance/make.py

README.md explains the fields. A new case is written by hand, with the section's next id and with null
for each result that the cases of its section have. No token is at a bound of a clip, so that nobody has
to guess which gradient is due at a tie.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import VECTORS, reference

FILE = Path(__file__).parent / "rl_loss_vectors" / "vectors.json"


def is_near(x, y):
    """Equal up to what another CPU may round differently."""
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        return all(map(is_near, x, y))
    is_number = isinstance(x, float) and isinstance(y, float)
    return math.isclose(x, y, rel_tol=1e-12, abs_tol=1e-15) if is_number else x == y


def main():
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    for section, about in VECTORS["sections"].items():
        for case in about["cases"]:
            results = reference.with_results(section, case)
            for name in results:
                if not is_near(results[name], case[name]):
                    case[name] = results[name]
    text = json.dumps(VECTORS)
    for start in ('"id"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"terms"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
