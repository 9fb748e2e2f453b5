"""Under torchrun: every collective is built, which checks it, and run; a rank writes what it saw."""

import json
import sys
from pathlib import Path

import torch

from flopwise.capture.build import build_step
from flopwise.lm.ranks import joined, ranks_here
from flopwise.spec.operations import COLLECTIVES
from flopwise.spec.workload import workload


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks, found = ranks_here(), {}
    with joined(ranks, torch.device("cpu"), alone=True, asked="gloo"):
        for name in COLLECTIVES:
            for precision in ("fp32", "bf16"):
                asked = workload(f"op:{name}", set={"bytes": 4096}, ranks=ranks.world, precision=precision)
                step = build_step(asked, torch.device("cpu"))
                for _ in range(2):
                    step.align()
                    step.phases["step"]()
                found[f"{name} {precision}"] = step.ran().backend
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
