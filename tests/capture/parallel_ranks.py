"""Under torchrun: the losses of a few steps that the ranks share, in every way, beside those of one process."""

import json
import sys
from pathlib import Path

import torch

from flopwise.capture.build import build_step
from flopwise.lm.ranks import joined, ranks_here
from flopwise.spec.recipe import CHOICES
from flopwise.spec.workload import workload

STEPS = 3
SIZES = {"batch": 12, "context": 16}
CASES = {
    "plain": {},
    "normed queries, loop": {"set": {"qk_norm": True}, "optimizer": "adamw-loop"},
    "gelu, learned positions": {
        "set": {"mlp": "gelu", "positions": "learned", "max_context": 16, "norm_kind": "layer"}
    },
}


def losses(asked) -> list[float]:
    step, found = build_step(asked, torch.device("cpu")), []
    for _ in range(STEPS):
        for run in step.phases.values():
            run()
        found.append(step.ran().loss)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks, found = ranks_here(), {}
    with joined(ranks, torch.device("cpu"), alone=True):
        for case, options in CASES.items():
            for way in CHOICES["parallel"][1:]:
                if ranks.world % 2 and "tp" in way:
                    continue  # four heads
                given = {**SIZES, **options, "set": {"tied": False, "n_layers": 3, **options.get("set", {})}}
                alone = losses(workload("tiny", **given))
                found[f"{way}: {case}"] = alone, losses(workload("tiny", parallel=way, ranks=ranks.world, **given))
    if ranks.first:
        (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
