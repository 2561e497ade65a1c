"""Exactness on a GPU: every tiny family of the tests, fp32, drafts right and wrong, against `model.generate`.

    PYTHONPATH=src:tests python benchmarks/check_gpu.py [--device cuda] [--only llama,gpt2]

Prints a line per family that differs, then how many agree. CI has no GPU; the result is in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

import TIDE
from families import FAMILIES, build
from policies import Everyone, Knowing, texts_of
from TIDE.engine.check import check_unknown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(sorted(FAMILIES)))
    args = parser.parse_args()
    names = args.only.split(",")
    agreed = [name for name in names if agrees(name, torch.device(args.device))]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{len(agreed)} of {len(names)} families agree on {args.device}, {versions}")
    sys.exit(len(agreed) != len(names))


def agrees(name: str, device: torch.device) -> bool:
    """Whether exits off, exits everywhere and random drafts write what `model.generate` writes."""
    model = build(name).to(device)
    ids = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :3] = 0, 0
    inputs = dict(input_ids=(ids * mask).to(device), attention_mask=mask.to(device), max_new_tokens=16, do_sample=False)
    expected = model.generate(**inputs)
    texts = texts_of(expected.cpu(), mask)
    policies = {
        "off": None,
        "everyone": Everyone(0, 2),
        "random": Knowing(texts, (1, 2, 3), seed=0, should_exit=0.6, right=0.7),
    }
    wrong = []
    for label, policy in policies.items():
        with TIDE.TIDE(model, policy) as engine:
            check_unknown(engine.adapter)  # the start-up check, here for families that do not need it
            if not torch.equal(engine.generate(**inputs), expected):
                wrong.append(label)
    if wrong:
        print(f"{name}: differs with exits {', '.join(wrong)}")
    return not wrong


if __name__ == "__main__":
    main()
