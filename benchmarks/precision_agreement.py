"""How far the precisions are from fp32: losses and gradients of the fourth to sixth step of `small`, beside the same by hand.

    python benchmarks/precision_agreement.py [--device cuda] [--batch 4] [--context 512]

It is what `flopwise tune` compares; on a CPU give it a small batch and context.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from flopwise.capture.isolate import Worker
from flopwise.records.events import AgreementRequest
from flopwise.spec.workload import Sampling, Trial, workload

MASTER = {"precision": "bf16-master"}
RECIPES: tuple[dict[str, str], ...] = (
    {"precision": "bf16"},
    MASTER | {"optimizer": "flopwise"},
    MASTER | {"optimizer": "flopwise-bf16"},
    MASTER | {"optimizer": "flopwise-bf16", "loss": "fused", "projections": "fused", "graph": "on"},
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--context", type=int, default=512)
    chosen = options.parse_args()

    def trial(**levers: Any) -> Trial:
        step = workload("small", batch=chosen.batch, context=chosen.context, **levers)
        return Trial(workload=step, sampling=Sampling(), device=chosen.device)

    print("| recipe | loss off by | gradients off by | losses |\n| :--- | ---: | ---: | :--- |")
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        path = str(Path(folder) / "reference.npz")
        by_hand = trial(attention="naive", norm="eager", activation="eager")
        worker.agree(by_hand, AgreementRequest(path=path, write=True))
        for recipe in RECIPES:
            if chosen.device == "cpu" and recipe.get("graph") == "on":
                continue
            found = worker.agree(trial(**recipe), AgreementRequest(path=path))
            name = " ".join(f"{lever}={value}" for lever, value in recipe.items())
            losses = ", ".join(f"{loss:.3f}" for loss in found.losses)
            print(f"| {name} | {found.loss_error or 0:.2%} | {found.gradient_error or 0:.1%} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
