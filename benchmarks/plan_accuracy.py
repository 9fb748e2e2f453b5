"""How far predictions of training throughput are from published figures, on rows that nothing was fitted to.

    python benchmarks/plan_accuracy.py published.jsonl [a100-single-node.jsonl]

Each row is a measured configuration: model, GPUs, layout, precision and the time of a step. Which rows are held out was decided
before anything was fitted, by a hash of their group: whole documents (of few rows) and whole groups of model and GPUs are kept
apart. Beside a prediction stands a constant utilisation: the median FLOP rate of the rows that are not held out, of the same GPU
and precision.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from flopwise.predict.flops import model_flops
from flopwise.spec.model import ModelSpec

Row = dict[str, Any]
FEW = 12  # a document of fewer rows is held out whole, or not at all
SHARE = 40  # of a hundred groups


def document(row: Row) -> str:
    """Without its tables and versions: 'VIA-Research/vTrain'."""
    words: list[str] = row["source"].replace(",", " ").split()
    return " ".join(words[:2]) if words[0] == "arXiv" else words[0].partition("@")[0]


def group(row: Row, few: bool) -> str:
    if few:
        return document(row)
    sizes = {"n_layers", "d_model"}
    model = row.get("model") or " ".join(f"{name}={row['arch'][name]}" for name in sorted(sizes))
    return f"{document(row)} | {model} | {row['gpu']} | {row['n_gpus'] if 'model' not in row else ''}"


def held_out(rows: list[Row]) -> list[bool]:
    """Whether each row is kept from every fit."""
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        count[document(row)] += 1
    names = [group(row, count[document(row)] < FEW) for row in rows]
    chosen = {name for name in names if _place(name) < SHARE}
    # Of a document and GPU that has several groups, one is always kept apart: that which the hash puts first.
    several: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row, name in zip(rows, names, strict=True):
        several[document(row), row["gpu"]].add(name)
    chosen |= {min(some, key=_place) for some in several.values() if len(some) > 1 and not some & chosen}
    return [name in chosen for name in names]


def _place(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100


def flops(row: Row) -> float | None:
    """Of one step, by our own count; None of a model that is not dense, or of which too little is said."""
    arch = row.get("arch") or {}
    wanted = ("n_layers", "d_model", "n_heads", "d_ff", "vocab")
    if any(not isinstance(arch.get(name), int) for name in wanted) or any("expert" in name for name in arch):
        return None
    heads = arch["n_heads"]
    spec = ModelSpec(
        name=str(row.get("model", "")),
        n_layers=arch["n_layers"],
        d_model=arch["d_model"],
        n_heads=heads,
        n_kv_heads=arch.get("n_kv_heads") or heads,
        head_dim=arch.get("head_dim") or arch["d_model"] // heads,
        d_ff=arch["d_ff"],
        vocab=arch["vocab"],
        mlp="gelu" if arch.get("mlp") == "gelu" else "swiglu",
    )
    if not row.get("global_batch") or not row.get("seq_len"):
        return None
    return float(model_flops(spec, row["global_batch"], row["seq_len"]).total)


def kind(row: Row) -> str:
    bits = next((n for n in ("8", "4") if n in row["precision"]), "16")
    return f"{row['gpu'].partition('-')[0]} {bits} bits"


def constant_utilisation(rows: list[Row], kept: list[bool]) -> list[float | None]:
    """The seconds of each row's step, by the median rate of rows that were not kept apart."""
    work = [flops(row) for row in rows]
    rates: dict[str, list[float]] = defaultdict(list)
    for row, count, apart in zip(rows, work, kept, strict=True):
        if count is not None and row.get("step_s") and not apart:
            rates[kind(row)].append(count / row["step_s"] / row["n_gpus"])
    return [
        count / median(rates[kind(row)]) / row["n_gpus"] if count is not None and kind(row) in rates else None
        for row, count in zip(rows, work, strict=True)
    ]


def table(rows: list[Row], kept: list[bool], predicted: list[float | None]) -> None:
    print("| source | rows | held out | of them predicted | median error | mean | 9 of 10 below |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for name in sorted({document(row) for row in rows}):
        mine = [place for place, row in enumerate(rows) if document(row) == name]
        apart = [place for place in mine if kept[place]]
        errors = [
            abs(guess / rows[place]["step_s"] - 1)
            for place in apart
            if (guess := predicted[place]) is not None and rows[place].get("step_s")
        ]
        figures = ["", "", ""]
        if errors:
            worst = quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
            figures = [f"{100 * one:.1f} %" for one in (median(errors), mean(errors), worst)]
        print(f"| {name} | {len(mine)} | {len(apart)} | {len(errors)} | {' | '.join(figures)} |")
    print(f"\n{sum(kept)} of {len(rows)} rows are held out.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        kept = held_out(rows)
        print(f"\n{file.name}, constant utilisation\n")
        table(rows, kept, constant_utilisation(rows, kept))


if __name__ == "__main__":
    main()
