"""The H200's rows, edited so that a claim no longer follows from them: none of these may stay confirmed."""

import copy
from pathlib import Path

import msgspec
import pytest

from flopwise.experiments.results import AS_STORED, answer, read_lab

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"
MEASURED = {
    result.experiment: result
    for name in ("lab", "lab-warmup", "lab-attention", "lab-again", "lab-claims")
    for result in read_lab(RESULTS / name).results
    if result.status == "ok"
}
TIMES = ("device_ns", "gpu_ns", "wall_ns", "wall_low_ns", "wall_high_ns", "launch_ns")
RATES = ("rate_flops_per_s", "rate_bytes_per_s", "used_bytes_per_s", "done_flops_per_s")


def judged(name, edit):
    """The verdict on a copy of the rows; `edit` changes it, or returns another list."""
    rows = copy.deepcopy(list(MEASURED[name].rows))
    edited = edit(rows)
    found = answer(msgspec.structs.replace(MEASURED[name], rows=tuple(rows if edited is None else edited))).verdict
    assert AS_STORED not in found.why
    return found


def slower(by, where=lambda row: True):
    """Times of these rows so many times as long, and their rates as much lower."""

    def edit(rows):
        for row in filter(where, rows):
            row.update({key: by * row[key] for key in TIMES if row.get(key)})
            row.update({key: row[key] / by for key in RATES if row.get(key)})

    return edit


def put(where=lambda row: True, **values):
    def edit(rows):
        for row in filter(where, rows):
            row.update({key: value(row) if callable(value) else value for key, value in values.items() if key in row})

    return edit


def without(where):
    return lambda rows: [row for row in rows if not where(row)]


def flat(row):
    return row["factor"] if row["axis"] in ("steps", "layers") else 1


def true_mlp(rows):
    """Times that the claim follows from."""
    ends = {"wall_ns": 1e6, "wall_low_ns": 0.99e6, "wall_high_ns": 1.01e6, "gpu_ns": 0.98e6, "graph_ns": 0.98e6}
    for row in rows:
        row.update({key: ns * flat(row) for key, ns in ends.items()})


def growing_graph(rows):
    true_mlp(rows)
    put(lambda row: row["axis"] in ("batch", "width"), graph_ns=lambda row: 1e6 * row["factor"])(rows)


def one_factor(rows):
    true_mlp(rows)
    return [dict(row, factor=1) for row in rows]


def kept_norm(rows):
    put(lambda row: row.get("op") == "rms_norm", treatment="kept in fp32")(rows)
    return rows


def true_softmax(rows):
    put(softmax_ns=lambda row: row["scores_bytes"] * (8 if row["how"] == "written out" else 2) / 4000)(rows)
    return rows


def fp32_sums(rows):
    for row in rows:
        if row["part"] == "result" and row["way"] == "one by one" and row["sum"] == "fp32" != row["terms"]:
            row.update(result=9.02, adding_off=abs(9.02 - 1000 * row["held_term"]))
        elif row["part"] == "result" and row["way"] == "one by one" and row["sum"] == row["terms"] != "fp32":
            row.update(result=0.1, adding_off=abs(0.1 - 1000 * row["held_term"]))


def kahan(row):
    return row["part"] == "result" and row["way"] == "Kahan"


def waited(row):
    return row["how"] == "add, waited for"


def part_is(name):
    return lambda row: row.get("part") == name


def jagged(row):
    return 1e9 if row["step"] == 0 else 5e7 * (0.5 + row["step"] % 2 if 5 <= row["step"] < 15 else 1)


EDITS = [
    ("coalescing", "more at 16 than at 8", slower(0.26, lambda row: row.get("stride", 0) > 8)),
    ("coalescing", "times that deny the bandwidths", put(gpu_ns=1e6)),
    ("tiling", "most tiles slower than none", slower(12, lambda row: row.get("tile") in (16, 32, 64))),
    ("tiling", "device_ns denies gpu_ns", put(lambda row: row["way"].startswith("tiles"), gpu_ns=25.3e6)),
    ("softmax-vs-matmul", "one type", lambda rows: without(lambda row: row["dtype"] == "fp32")(true_softmax(rows))),
    (
        "softmax-vs-matmul", "other contexts",
        lambda rows: without(lambda row: row["how"] == "one kernel" and row["context"] > 512)(true_softmax(rows)),
    ),
    ("mlp-scaling", "one factor alone", one_factor),
    ("mlp-scaling", "the graph grows", growing_graph),
    ("accumulation", "fp32 sums of 9.02", fp32_sums),
    ("accumulation", "a negative error", put(kahan, adding_off=-5.0)),
    ("accumulation", "a step of 1e9", put(kahan, adding_off=9.0, step=1e9)),
    ("accumulation", "results that deny the errors", put(lambda row: row.get("sum") == "bf16", result=10.0)),
    ("warmup", "wide after the warm-up", put(wall_ns=jagged)),
    ("launch-overhead", "2 ms for an add", put(lambda row: row["how"] != "empty kernel", launch_ns=2e6)),
    ("launch-overhead", "noise", put(waited, wall_low_ns=1e2, wall_high_ns=1e9)),
    ("launch-overhead", "one sample", put(waited, samples=1)),
    ("launch-overhead", "a negative launch", put(lambda row: row["how"] == "empty kernel", launch_ns=-5.0)),
    ("matmul-scaling", "large ones slow", slower(5, lambda row: row["n"] >= 4096)),
    ("matmul-scaling", "times that deny the rates", put(gpu_ns=1e6)),
    ("tile-quantization", "× 8", slower(4, lambda row: row.get("how") == "fixed tile" and row["n"] > 2048)),
    ("tile-quantization", "inexact alignment", put(part_is("alignment"), gpu_exact=False, samples=1)),
    ("tile-quantization", "two divisors", without(lambda row: row.get("divisor", 1) not in (1, 64))),
    ("recomputation", "no gain", slower(1 / 1.63, lambda row: row.get("way") == "fused, kept")),
    ("recomputation", "too much of a gain", slower(50, lambda row: row.get("way") == "fused, kept")),
    *((name, what, slower(by)) for name in ("fusion", "low-precision") for what, by in (("slow", 100), ("fast", 0.01))),
    ("attention-scaling", "no flash, none compiled", without(lambda row: row["how"] in ("flash (ours)", "compiled"))),
    ("attention-scaling", "none compiled", without(lambda row: row["how"] == "compiled")),
    ("attention-scaling", "no snapshot", without(part_is("matrix"))),
    (
        "attention-scaling", "naive's snapshot alone",
        without(lambda row: row["part"] == "matrix" and row["how"] != "naive"),
    ),
    ("autocast-audit", "no fp16", lambda rows: without(lambda row: row.get("precision") == "fp16")(kept_norm(rows))),
    (
        "autocast-audit", "no gradients, no loss",
        lambda rows: without(lambda row: row.get("what") in ("gradients", "loss"))(kept_norm(rows)),
    ),
    ("autocast-audit", "the toy alone", lambda rows: without(lambda row: row["model"] != "ToyModel")(kept_norm(rows))),
    ("memory-hierarchy", "no registers", without(lambda row: row.get("level") == "registers")),
    (
        "memory-hierarchy", "below zero",
        put(latency_ns=lambda row: -row["latency_ns"], read_bytes_per_s=lambda row: -row["read_bytes_per_s"]),
    ),
    ("branch-divergence", "free within", slower(0.1, lambda row: row["split"] == "within warps" and row.get("paths", 1) > 8)),
    ("branch-divergence", "dear between", slower(2, lambda row: row["split"] == "between warps" and row.get("paths", 1) > 1)),
    ("branch-divergence", "wrong results", put(off=0.5)),
    ("simt", "33 threads as fast as 64", slower(0.4, lambda row: row.get("threads") == 33)),
    ("simt", "occupancy for nothing", put(lambda row: row["part"] == "reads", rate_bytes_per_s=2e12, gpu_ns=5e5)),
    ("layer-norm-precision", "fp16 holds", put(error=1e-4)),
    ("compiler-view", "as many launches", put(lambda row: row["part"] == "chain", launches=5)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edit"), [pytest.param(name, edit, id=f"{name}, {what}") for name, what, edit in EDITS]
)
def test_what_does_not_follow_is_not_confirmed(name, edit):
    assert judged(name, edit).word in ("refuted here", "inconclusive")


@pytest.mark.parametrize(
    ("name", "edit"), [("mlp-scaling", true_mlp), ("softmax-vs-matmul", true_softmax), ("autocast-audit", kept_norm)]
)
def test_what_does_follow_is(name, edit):
    assert judged(name, edit).word == "confirmed"


def test_a_quick_run_without_the_compiler_is_enough():
    """Three contexts of each way, and no compiled one."""
    short = without(lambda row: row["how"] == "compiled" or (row["part"] == "context" and row["context"] < 2048))
    assert judged("attention-scaling", short).word == "confirmed"


def test_the_rows_as_they_are():
    words = {name: judged(name, lambda rows: None).word for name in MEASURED}
    assert {name for name, word in words.items() if word == "refuted here"} == {
        "mlp-scaling",
        "autocast-audit",
        "sparsity-int8",
    }
    assert {name for name, word in words.items() if word == "inconclusive"} == {"softmax-vs-matmul"}
