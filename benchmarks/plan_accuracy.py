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
import math
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, median

from plan_rows import Row, job, measured_s, model

from flopwise.predict.parallel.step import model_flops, planned_step
from flopwise.spec.gpu import gpu

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
    """Of one step, by our own count; None of a model of which too little is said."""
    shape, context = model(row), row.get("seq_len")
    if isinstance(shape, str) or not row.get("global_batch") or not context:
        return None
    return model_flops(shape, row["global_batch"], context)


def kind(row: Row) -> str:
    bits = next((n for n in ("8", "4") if n in row["precision"]), "16")
    return f"{row['gpu'].partition('-')[0]} {bits} bits"


def constant_utilisation(rows: list[Row], kept: list[bool]) -> list[float | None]:
    """The seconds of each row's step, by the median rate of rows that were not kept apart."""
    work, took = [flops(row) for row in rows], [measured_s(row) for row in rows]
    rates: dict[str, list[float]] = defaultdict(list)
    for row, count, seconds, apart in zip(rows, work, took, kept, strict=True):
        if count is not None and seconds and not apart:
            rates[kind(row)].append(count / seconds / row["n_gpus"])
    known = {name: median(some) for name, some in rates.items()}
    usual = median(found / peak(name) for name, found in known.items())  # for a GPU and bits of which no row is left

    def rate(row: Row) -> float:
        return known.get(kind(row)) or usual * peak(kind(row))

    return [
        count / rate(row) / row["n_gpus"] if count is not None else None for row, count in zip(rows, work, strict=True)
    ]


def peak(name: str) -> float:
    """Of a GPU in half precision."""
    return gpu(name.partition(" ")[0].lower()).peaks["fp16"]


def planned(rows: list[Row]) -> list[float | None]:
    jobs = [job(row) for row in rows]
    return [None if isinstance(one, str) else planned_step(one).wall_s for one in jobs]


def label(row: Row) -> str:
    name = document(row).rpartition("/")[2]
    if name in ("llm-foundry", "torchtitan", "vTrain"):
        name += f", {row['gpu'].partition('-')[0]}, {row['precision'].removeprefix('amp_').split()[0]}"
        return name if row.get("model") else f"{name}, single node"
    return f"{name}, {'MoE' if _has_experts(row) else 'dense'}"


def _has_experts(row: Row) -> bool:
    shape = model(row)
    return not isinstance(shape, str) and shape.experts is not None


def errors(rows: list[Row], guesses: list[float | None]) -> list[float]:
    pairs = [(guess, measured_s(row)) for row, guess in zip(rows, guesses, strict=True)]
    return [abs(guess / seconds - 1) for guess, seconds in pairs if guess and seconds]


def table(rows: list[Row], kept: list[bool]) -> None:
    """Of the rows that were kept apart: ours, and beside it the constant utilisation's."""
    ours, constant = planned(rows), constant_utilisation(rows, kept)
    print(
        "| source | rows | held out | of them predicted | median error | mean | 9 of 10 below | constant: median | mean |"
    )
    print("|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name in [*dict.fromkeys(label(row) for row in rows), "all"]:
        mine = [place for place, row in enumerate(rows) if name in ("all", label(row))]
        apart = [place for place in mine if kept[place]]
        found = sorted(errors([rows[p] for p in apart], [ours[p] for p in apart]))
        beside = errors([rows[p] for p in apart if ours[p]], [constant[p] for p in apart if ours[p]])
        figures = [""] * 5
        if found:
            worst = found[min(len(found) - 1, math.ceil(0.9 * len(found)) - 1)]
            figures = [
                f"{100 * one:.1f} %" for one in (median(found), mean(found), worst, median(beside), mean(beside))
            ]
        print(f"| {name} | {len(mine)} | {len(apart)} | {len(found)} | {' | '.join(figures)} |")
    print(f"\n{sum(kept)} of {len(rows)} rows are held out.")


def unsaid(rows: list[Row]) -> None:
    """Rows that are not predicted, and why."""
    reasons = Counter(f"{row.get('model')}: {why}" for row in rows if isinstance(why := job(row), str))
    for reason, count in reasons.most_common():
        print(f"- {count} × {reason}")


def outliers(rows: list[Row], kept: list[bool], beyond: float = 0.25) -> None:
    """Held-out rows that are further off than so much."""
    for row, guess, apart in zip(rows, planned(rows), kept, strict=True):
        seconds = measured_s(row)
        if apart and guess and seconds and abs(guess / seconds - 1) > beyond:
            layout = " ".join(f"{key}{row[key]}" for key in ("dp", "tp", "pp", "vp", "cp", "ep") if row.get(key))
            where = f"{row['n_gpus']} {row['gpu']}, {layout}, micro-batch {row.get('micro_batch')}"
            print(
                f"- {row['id']} {row.get('model') or row['arch']['d_model']}, {where}: {guess:.3g} s, measured {seconds:.3g}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--outliers", action="store_true", help="every held-out row that is more than a quarter off")
    given = parser.parse_args()
    for file in given.files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        kept = held_out(rows)
        print(f"\n{file.name}\n")
        table(rows, kept)
        unsaid(rows)
        if given.outliers:
            outliers(rows, kept)


if __name__ == "__main__":
    main()
