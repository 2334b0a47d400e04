"""Computes the results in vectors.json again, from the inputs there, with reference.py.

    python conformance/make.py

README.md explains the fields. A new case is written by hand, with the section's next id and with null
for each result that the cases of its section have. No token is at a bound of a clip, so that nobody has
to guess which gradient is due at a tie.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rl_loss_vectors import VECTORS, reference

FILE = Path(__file__).parent / "rl_loss_vectors" / "vectors.json"


def main():
    for section, about in VECTORS["sections"].items():
        for case in about["cases"]:
            case |= reference.with_results(section, case)
    text = json.dumps(VECTORS)
    for start in ('"id"', '"inputs"', '"keywords"', '"value"', '"gradient"', '"terms"', '"arguments"'):
        text = text.replace(f"{start}:", f"\n{start}:")
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
