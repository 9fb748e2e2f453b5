"""How far predictions of memory are from published figures, and which published rows would not fit though they ran.

    python benchmarks/plan_memory.py published.jsonl

Documents state what PyTorch's allocator has reserved: the CUDA context and NCCL's buffers, which are not in it, are left out of
the comparison. Every row did run: one that would not fit is an error of the prediction, or leaves something unsaid.
"""

import argparse
import json
from pathlib import Path
from statistics import median

from plan_accuracy import Row, document, held_out
from plan_rows import job, replaced

from flopwise.predict.parallel.memory import OUTSIDE, planned_memory
from flopwise.spec.layout import RECOMPUTED, Job

GIB = 2**30


def memory_job(row: Row) -> Job | str:
    """The row as a job; llm-foundry's loss is fused, which matters for memory alone."""
    one = job(row)
    return replaced(one, software="llm-foundry") if isinstance(one, Job) and "llm-foundry" in row["source"] else one


def peak_gib(one: Job) -> float:
    return planned_memory(one).peak_bytes / GIB


def reserved_gib(one: Job) -> float:
    owners = planned_memory(one).owners
    return sum(size for name, size in owners.items() if name not in OUTSIDE) / GIB


def published_peaks(rows: list[Row], kept: list[bool]) -> None:
    print("| row | model | held out | published | predicted | error |")
    print("|:--|:--|:--|--:|--:|--:|")
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row, apart in zip(rows, kept, strict=True):
        one = memory_job(row)
        if not row.get("peak_mem_gib") or isinstance(one, str):
            continue
        guess = reserved_gib(one)
        errors[apart].append(guess / row["peak_mem_gib"] - 1)
        told = f"{row['peak_mem_gib']} GiB | {guess:.1f} GiB | {100 * errors[apart][-1]:+.1f} %"
        print(f"| {row['id']} | {row['model']}, {row['options']} | {'yes' if apart else ''} | {told} |")
    for apart, name in ((True, "held out"), (False, "the others")):
        if errors[apart]:
            print(f"\nmedian error, {name}: {100 * median(map(abs, errors[apart])):.1f} % of {len(errors[apart])} rows")


def do_not_fit(rows: list[Row], kept: list[bool]) -> None:
    """Of rows that say all that memory depends on, each; of the others, by the least recomputation that would fit."""
    print("| row | source | model | GPU | held out | predicted | of |")
    print("|:--|:--|:--|:--|:--|--:|--:|")
    stated = [0, 0]
    least: dict[str, list[str]] = {}
    for row, apart in zip(rows, kept, strict=True):
        one = memory_job(row)
        if isinstance(one, str) or not row.get("gpu_mem_gb"):
            continue
        limit = row["gpu_mem_gb"]  # vendors' GB of memory are GiB
        if row.get("micro_batch") is None or row.get("recompute") is None:
            fits = (how for how in RECOMPUTED if peak_gib(replaced(one, recompute=how)) <= limit)
            least.setdefault(next(fits, "nothing"), []).append(row["id"])
            continue
        size = peak_gib(one)
        stated[size > limit] += 1
        if size > limit:
            about = f"{row['id']} | {document(row)} | {row['model']} | {row['gpu']} | {'yes' if apart else ''}"
            print(f"| {about} | {size:.1f} GiB | {limit:.0f} |")
    print(
        f"\nOf {sum(stated)} rows that state micro-batch and recomputation, {stated[1]} would not fit, though they ran."
    )
    counts = "; ".join(f"{len(least[how])} with recomputation '{how}'" for how in RECOMPUTED if how in least)
    print(f"Of {sum(map(len, least.values()))} rows that do not, as little as fits: {counts}; ", end="")
    print(f"none would do for {', '.join(least.get('nothing', [])) or 'no row'}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    rows = [json.loads(line) for line in parser.parse_args().file.read_text().splitlines()]
    kept = held_out(rows)
    print("\nPeak memory\n")
    published_peaks(rows, kept)
    print("\nRows that ran and would not fit\n")
    do_not_fit(rows, kept)


if __name__ == "__main__":
    main()
