"""Write expected.json: logits and gradients of the tiny models, computed by transformers.

Run `python tests/models/families/write_expected.py` where transformers is installed.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent))

from foreign_models import DOCUMENTS, TOKENS, foreign_weights, model_with
from test_families import EXPECTED, gradients_of_both, in_transformers


def rounded(number: float) -> float:
    return float(f"{number:.7g}")


def main() -> None:
    found = {}
    for name, document in DOCUMENTS.items():
        weights = foreign_weights(document)
        theirs = in_transformers(transformers, document, weights)
        logits = theirs(torch.tensor(TOKENS)).logits[0, -3:]
        both = gradients_of_both(document, model_with(document, weights), theirs)
        found[name] = {
            "logits": [[rounded(value) for value in row] for row in logits.tolist()],
            "gradient_norms": {
                key: rounded(float(expected.norm())) for key, (_, expected) in both.items()
            },
        }
    EXPECTED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
