"""A whole training step in bf16-master and in fp8, one after the other in one process, the first once more at the end.

    python benchmarks/fp8_steps.py 2.7B:16x1024 [--kinds bf16-master,fp8,fp8+dW] [--set compile=blocks …] [-o DIR]

A kind is a precision, with `+dW` for weight gradients in fp8 and `+fast` for fast accumulation in the backward pass.
"""

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch

from flopwise.capture.build import build_step
from flopwise.kernels import fp8_linear
from flopwise.spec.workload import workload

OWN = {"optimizer": "flopwise-bf16", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "fused"}
KINDS = "bf16-master,fp8,fp8+dW,fp8-rowwise,fp8-rowwise+dW,fp8+dW+fast,fp8-rowwise+dW+fast,bf16-master"


def milliseconds(
    target: str, batch: int, context: int, kind: str, levers: dict[str, str], seconds: float
) -> list[float]:
    precision, *more = kind.split("+")
    fp8_linear.usual_scaling = lambda by_rows: fp8_linear.Scaling(by_rows, "dW" in more, "fast" in more)
    step = build_step(
        workload(target, batch=batch, context=context, precision=precision, **levers), torch.device("cuda:0")
    )
    times: list[float] = []
    for number in range(1000):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for phase in step.phases.values():
            phase()
        ended.record()
        torch.cuda.synchronize()
        if number >= 5:  # the first compile and warm up
            times.append(begun.elapsed_time(ended))
        if sum(times) > 1000 * seconds and len(times) >= 10:
            break
    loss = step.loss()
    print(
        f"  loss {float('nan') if loss is None else float(loss):.4f}, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )
    del step, loss
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="MODEL:BATCHxCONTEXT")
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--set", nargs="*", default=[], metavar="LEVER=VALUE")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("-o", type=Path)
    asked = parser.parse_args()
    levers = OWN | dict(one.split("=") for one in asked.set)
    kept: dict[str, list[tuple[str, list[float]]]] = {}
    for target in asked.steps:
        name, shape = target.split(":")
        batch, context = map(int, shape.split("x"))
        rows = kept.setdefault(target, [])
        for kind in asked.kinds.split(","):
            try:
                rows.append((kind, milliseconds(name, batch, context, kind, levers, asked.seconds)))
            except Exception as error:  # noqa: BLE001  the next kind may run
                print(f"{target} {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            times, first = rows[-1][1], statistics.median(rows[0][1])
            middle, low, high = statistics.median(times), min(times), max(times)
            print(f"| {target} | {kind} | {middle:.1f} ms | {low:.1f}-{high:.1f} | {first / middle:.3f}x |", flush=True)
        if asked.o:
            (asked.o / "fp8_steps.json").write_text(json.dumps({"levers": levers, "ms": kept}))


if __name__ == "__main__":
    main()
