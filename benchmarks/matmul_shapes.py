"""Matmuls of odd and even sizes: measured on a GPU, beside what is predicted of them.

python benchmarks/matmul_shapes.py measure shapes.jsonl          # on the GPU
python benchmarks/matmul_shapes.py table shapes.jsonl --gpu h200

Sizes are drawn by a seed: whole multiples of 64, squares, and sizes of which a side has one, two or four more. `linear` is
x Wᵀ, as a linear layer has it; `plain` is a b, all in bf16 and row by row.
"""

import argparse
import random
import statistics
from functools import partial
from pathlib import Path

import msgspec

LAYOUTS = ("linear", "plain")


class Product(msgspec.Struct, frozen=True):
    """One product, and the GPU's time for it."""

    layout: str
    m: int
    n: int
    k: int
    ns: float = 0.0


def products(seed: int = 25) -> list[Product]:
    draw = random.Random(seed)

    def side() -> int:
        return 64 * round(2 ** draw.uniform(2, 7))

    found = [Product("linear", side(), side(), side()) for _ in range(24)]
    found += [Product("plain", *(side(),) * 3) for _ in range(6)] + [Product("plain", n, n, n) for n in (1792, 1793)]
    for number in range(16):
        m, n, k = (max(512, side()) for _ in range(3))
        more = (1, 2, 4)[number % 3]
        for layout in LAYOUTS:
            found += [Product(layout, m, n, k + more), Product(layout, m, n + more, k), Product(layout, m + more, n, k)]
    return found


def measure(place: Path) -> None:
    import torch

    from flopwise.experiments.bench import Bench

    bench = Bench(torch.device("cuda:0"))
    with place.open("wb") as file:
        for one in products():
            a = bench.randn(one.m, one.k, dtype="bf16")
            b = (
                bench.randn(one.n, one.k, dtype="bf16").t()
                if one.layout == "linear"
                else bench.randn(one.k, one.n, dtype="bf16")
            )
            timed = bench.time(partial(torch.mm, a, b), seconds=0.03)
            file.write(msgspec.json.encode(msgspec.structs.replace(one, ns=timed.gpu_ns)) + b"\n")
            file.flush()


def table(place: Path, gpu: str) -> None:
    from flopwise.predict.machine import find_ceilings
    from flopwise.predict.op_time import op_times
    from flopwise.spec.gpu import gpu as gpu_named
    from flopwise.work.operation import MATMUL, OpWork

    limits = find_ceilings(gpu_named(gpu))
    rows = [msgspec.json.decode(line, type=Product) for line in place.read_bytes().splitlines()]
    misses: dict[str, list[float]] = {}
    print("| layout | m | n | k | measured, µs | predicted | ratio |\n| :-- | --: | --: | --: | --: | --: | --: |")
    for one in rows:
        moved = 2 * (one.m * one.k + one.k * one.n)
        op = OpWork(
            op="mm",
            module="",
            phase="forward",
            kind=MATMUL,
            dtype="bf16",
            shapes=((one.m, one.k), (one.k, one.n)),
            flops=2 * one.m * one.n * one.k,
            read_bytes=moved,
            write_bytes=2 * one.m * one.n,
        )
        ns = op_times([op], limits)[0].ns
        odd = [name for name in "mnk" if getattr(one, name) % 8]
        misses.setdefault(f"{one.layout}, {'+'.join(odd) + ' unaligned' if odd else 'aligned'}", []).append(ns / one.ns)
        print(
            f"| {one.layout} | {one.m} | {one.n} | {one.k} | {one.ns / 1e3:.1f} | {ns / 1e3:.1f} | {ns / one.ns:.2f} |"
        )
    print(
        "\n| products | count | median of predicted over measured | median error | within 20 % |\n| :-- | --: | --: | --: | --: |"
    )
    for name, ratios in misses.items():
        errors = [abs(ratio - 1) for ratio in ratios]
        near = sum(error <= 0.2 for error in errors)
        print(
            f"| {name} | {len(ratios)} | {statistics.median(ratios):.2f} | {statistics.median(errors):.1%} | {near} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("place", type=Path)
    parser.add_argument("--gpu", default="h200")
    asked = parser.parse_args()
    measure(asked.place) if asked.what == "measure" else table(asked.place, asked.gpu)


if __name__ == "__main__":
    main()
