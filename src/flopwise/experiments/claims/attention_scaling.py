"""`attention-scaling`: time and memory of attention by context and by head size, for each way of writing it.

A pass is forward and backward. What forward keeps for backward is counted from the tensors that autograd is given to keep, one
by one (q, k and v not counted: they were there before); on a GPU the allocator's peak stands beside it. The N × N matrix of
scores is predicted as batch × context² × bytes of a number, and looked for in a memory snapshot of the same work.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    TableOf,
    Verdict,
    part,
)
from flopwise.records.experiment import Place
from flopwise.spec.dtypes import item_bytes
from flopwise.statistics import FEWEST

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

CLAIM = (
    "However attention is written, its time grows with the square of the context; its memory does so only where the N × N matrix "
    "of scores is kept for the backward pass, and with the context itself where it is not."
)
NAIVE, COMPILED, SDPA, FLASH = "naive", "compiled", "SDPA", "flash (ours)"
KEEPS = (NAIVE, COMPILED)  # these write the scores to memory
KINDS = {NAIVE: "naive", SDPA: "sdpa", FLASH: "flash"}  # as the recipe's attention lever names them
HEAD_DIM = 64
FITTED = 3  # contexts that an exponent is fitted through, the longest: there overheads show least
NEAR, FAR = 0.3, 0.6  # of an exponent from what is claimed: as claimed; not as claimed
STEADY = 0.5  # of a time: an interval that is wider leaves its exponent open
ROOM = 0.8  # of the memory that is free: what a point may be expected to take


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    threads = torch.get_num_threads()
    if not bench.on_gpu:  # large operations would run on all cores and small ones on one: no law could be seen
        torch.set_num_threads(1)
    try:
        yield from _measured(bench)
    finally:
        torch.set_num_threads(threads)


def _measured(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise.lm.attention import attention_function

    ways: dict[str, Attend] = {NAIVE: attention_function("naive", compiled_elsewhere=False)}
    ways[SDPA] = attention_function("sdpa", compiled_elsewhere=False)
    if bench.on_gpu:
        ways[FLASH] = attention_function("flash", compiled_elsewhere=False)
    if not bench.quick:  # last: it takes as long as all others
        # Sizes that are not fixed: one compilation serves all points.
        ways[COMPILED] = torch.compile(attention_function("naive", compiled_elsewhere=True), dynamic=True)
    setting = _Setting(bench)
    for how in (NAIVE, *(name for name in ways if name == FLASH), SDPA):
        yield from _in_snapshot(bench, setting, how)
    for how, attend in ways.items():
        try:
            yield from _points(bench, setting, how, attend)
        except Exception as error:
            if how != COMPILED:
                raise
            # torch.compile needs a compiler that works: without one the others still count.
            yield _not_measured(how, setting.contexts[0], f"torch.compile failed: {one_line(str(error), 120)}")


class _Setting:
    """Sizes and type: half precision on a GPU, where fused attention is at home; fp32 on the CPU."""

    def __init__(self, bench: "Bench") -> None:
        import torch

        self.dtype, self.precision = (torch.bfloat16, "bf16") if bench.on_gpu else (torch.float32, "fp32")
        if bench.on_gpu:
            self.batch, self.middle = 16, 4096
            # Scores beyond 2³¹ numbers would be compiled once more, for wider indices.
            self.contexts: tuple[int, ...] = (2048, 4096, 8192) if bench.quick else (512, 1024, 2048, 4096, 8192)
        else:
            self.batch, self.middle = 1, 512
            self.contexts = (512, 1024, 2048) if bench.quick else (256, 512, 1024, 2048, 4096)
        # What keeps no scores has room for more; on a GPU it is only there that the chip is full.
        self.longer: tuple[int, ...] = (16384, 32768) if bench.on_gpu and not bench.quick else ()
        # Beside HEAD_DIM, at the middle context. Our kernels are compiled for each: they leave out the first.
        self.head_dims = (128,) if bench.quick else (32, 128)

    def sizes(self, context: int, head_dim: int) -> Row:
        return {"batch": self.batch, "context": context, "head_dim": head_dim, "dtype": self.precision}


def _points(bench: "Bench", setting: _Setting, how: str, attend: "Attend") -> Iterator[Row]:
    """By context, then by head size."""
    taken = 0.0  # by the context before, for each square of a token
    for context in setting.contexts + (() if how in KEEPS else setting.longer):
        expected = taken * context**2 if how in KEEPS else 0.0
        if expected > ROOM * _free_bytes(bench):
            yield _not_measured(how, context, f"it would take about {units.size(expected)}")
            continue
        found = _point(bench, setting, how, attend, context, HEAD_DIM)
        taken = (found["peak_bytes"] or 4 * found["saved_bytes"]) / context**2
        yield {"part": "context", **found}
        if context == setting.middle:
            yield {"part": "head", **found}
    for head_dim in setting.head_dims[how == FLASH :]:
        yield {"part": "head", **_point(bench, setting, how, attend, setting.middle, head_dim)}


def _point(bench: "Bench", setting: _Setting, how: str, attend: "Attend", context: int, head_dim: int) -> Row:
    import torch

    bench.doing(f"{how}, context {context}, head size {head_dim}")
    sizes = (setting.batch, context, head_dim)
    inputs = [torch.randn(sizes, device=bench.device, dtype=setting.dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(sizes, device=bench.device, dtype=setting.dtype)

    def both_ways() -> None:
        torch.autograd.grad(attend(*inputs), inputs, gradient)

    both_ways()  # compiles; a library's workspace is then no part of the peak
    saved = _saved_bytes(attend, inputs)
    peak = bench.peak_bytes(both_ways)
    timing = bench.time(both_ways, seconds=0.06 if bench.on_gpu else None)
    about = {"how": how, **setting.sizes(context, head_dim), "saved_bytes": saved, "peak_bytes": peak}
    return {**about, "device_ns": timing.device_ns, **timing.row()}


def _saved_bytes(attend: "Attend", inputs: "list[Tensor]") -> int:
    """What autograd keeps for the backward pass, each storage once, without the inputs'."""
    import torch

    kept: list[Tensor] = []  # alive until they are counted: no address is then given twice

    def keep(tensor: "Tensor") -> "Tensor":
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = attend(*inputs)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    del result
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return sum(n_bytes for address, n_bytes in storages.items() if address not in given)


def _free_bytes(bench: "Bench") -> float:
    import torch

    from flopwise.capture.memory_limit import free_bytes

    if bench.on_gpu:
        torch.cuda.empty_cache()  # what the points before have left in the allocator's cache
    free = free_bytes(bench.device)
    return math.inf if free is None else free


def _in_snapshot(bench: "Bench", setting: _Setting, how: str) -> Iterator[Row]:
    """The N × N matrix in a snapshot of one pass, as `flopwise memory` takes and reads it; and the largest of what is kept."""
    from flopwise.capture.memory_trial import record_trial
    from flopwise.records.events import Done, MemoryRequest
    from flopwise.records.memory import read_knowledge
    from flopwise.snapshot.read import read_snapshot
    from flopwise.snapshot.report import report
    from flopwise.spec.workload import Sampling, Trial, workload

    bench.doing(f"{how}, a memory snapshot")
    work = workload(
        "op:attention", batch=setting.batch, context=setting.middle, phase="backward", attention=KINDS[how],
        precision=setting.precision, set={"dim": HEAD_DIM},
    )  # fmt: skip
    path = bench.file(f"attention-scaling-{KINDS[how]}.pickle")
    ended: list[Done] = []
    record_trial(
        Trial(workload=work, sampling=Sampling(), device=str(bench.device)),
        lambda event: ended.append(event) if isinstance(event, Done) else None,
        lambda: True,
        MemoryRequest(path=str(path), steps=1),
    )
    if not path.is_file():
        raise FlopwiseError(f"no memory snapshot of {how} attention: {ended[-1].reason if ended else 'it did not run'}")
    found = report(read_snapshot(path), knowledge=read_knowledge(path), workload=work).devices[0]
    matrix = next(one for one in found.named if one.shape[-2:] == (setting.middle, setting.middle))
    about = {"how": how, **setting.sizes(setting.middle, HEAD_DIM)}
    yield {
        "part": "matrix",
        **about,
        "predicted_bytes": matrix_bytes(setting.batch, setting.middle, setting.precision),
        "found_bytes": matrix.bytes if matrix.kept else None,
        "kept": matrix.kept,
    }
    for tensor in [tensor for block in found.saved for tensor in block.largest]:
        shape = " × ".join(map(str, tensor.shape))
        kept = {"op": tensor.op, "shape": shape, "tensor_dtype": tensor.dtype, "tensor_bytes": tensor.bytes}
        kept["saved_by"] = tensor.saved_by or "nobody: the result"
        yield {"part": "kept", **about, **kept}


def matrix_bytes(batch: int, context: int, dtype: str) -> int:
    """One matrix of scores.

    >>> matrix_bytes(8, 16384, "fp32") == 8 * 2**30
    True
    """
    return int(batch * context**2 * item_bytes(dtype))


def _not_measured(how: str, context: int, why: str) -> Row:
    return {"part": "missing", "how": how, "context": context, "why": why}


def exponent(rows: Rows, key: str) -> float | None:
    """The slope of log(value) over log(context) through the longest contexts, by least squares; None for fewer than three.

    >>> exponent([{"context": n, "device_ns": 5.0 * n * n} for n in (256, 512, 1024)], "device_ns")
    2.0
    """
    longest = sorted((row["context"], row[key]) for row in rows if row[key])[-FITTED:]
    if len(longest) < FITTED:
        return None
    points = [(math.log(context), math.log(value)) for context, value in longest]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return float(round(slope, 6))


def _fitted(rows: Rows, how: str) -> list[Mapping[str, Any]]:
    """The longest contexts of one way."""
    mine = [row for row in part(rows, "context") if row["how"] == how]
    return sorted(mine, key=lambda row: row["context"])[-FITTED:]


def exponents(rows: Rows) -> list[Row]:
    """One row for each way: how its time and what it keeps grow with the context."""
    by_context = part(rows, "context")
    found: list[Row] = []
    for how in dict.fromkeys(row["how"] for row in by_context):
        mine = _fitted(rows, how)
        fitted = [row["context"] for row in mine]
        found.append(
            {
                "how": how,
                "through": ", ".join(map(str, fitted)),
                "time_exponent": exponent(mine, "device_ns"),
                "saved_exponent": exponent(mine, "saved_bytes"),
                "claimed_saved_exponent": 2 if how in KEEPS else 1,
            }
        )
    return found


def judge(rows: Rows, place: Place) -> Verdict:
    fitted = [row for row in exponents(rows) if None not in (row["time_exponent"], row["saved_exponent"])]
    fused = {SDPA, FLASH} if place.on_gpu else {SDPA}
    # Only a whole run goes below the three contexts of a quick one, which has no compiled attention.
    excused = part(rows, "missing")
    whole = len({row["context"] for row in (*part(rows, "context"), *excused) if row["how"] == NAIVE}) > FITTED
    compiled = {COMPILED} if whole and not any(row["how"] == COMPILED for row in excused) else set()
    if missing := {NAIVE, *fused, *compiled} - {row["how"] for row in fitted}:
        return Verdict(INCONCLUSIVE, f"fewer than {FITTED} contexts were measured of {_and(missing)}: no exponent.")
    matrices = part(rows, "matrix")
    if missing := {NAIVE, *fused} - {row["how"] for row in matrices}:
        return Verdict(INCONCLUSIVE, f"there is no memory snapshot of {_and(missing)} to look for the matrix in.")
    off = [abs(row["time_exponent"] - 2) for row in fitted]
    off += [abs(row["saved_exponent"] - row["claimed_saved_exponent"]) for row in fitted]
    as_predicted = all(
        row["kept"] and row["found_bytes"] == row["predicted_bytes"] if row["how"] in KEEPS else not row["kept"]
        for row in matrices
    )
    times = ", ".join(f"N^{row['time_exponent']:.2f} ({row['how']})" for row in fitted)
    saved = ", ".join(f"N^{row['saved_exponent']:.2f} ({row['how']})" for row in fitted)
    said = (
        f"with the context N, time grows as {times}; what is kept for the backward pass grows as {saved}. "
        f"{_matrix_words(rows)}"
    )
    if as_predicted and not all(_steady(row) for way in fitted for row in _fitted(rows, way["how"])):
        return Verdict(INCONCLUSIVE, f"{said} The times are not known well enough here to tell.")
    if as_predicted and max(off) <= NEAR:
        return Verdict(CONFIRMED, said)
    if as_predicted and any(row["time_exponent"] < 2 - NEAR for row in fitted):
        said += " An exponent below 2 says that the shorter contexts do not fill the chip yet."
    return Verdict(REFUTED if not as_predicted or max(off) > FAR else INCONCLUSIVE, said)


def _and(ways: set[str]) -> str:
    return " and ".join(sorted(ways))


def _steady(row: Mapping[str, Any]) -> bool:
    """Whether a time is known well enough to be fitted through: a GPU's own clock is, unless the GPU waited for the host."""
    if row.get("gpu_ns") is not None:
        return row.get("gpu_exact") is not False
    return bool(row["samples"] >= FEWEST and row["wall_high_ns"] - row["wall_low_ns"] <= STEADY * row["wall_ns"])


def _saved_matrices(rows: Rows, matrix: Mapping[str, Any]) -> int | None:
    """How many matrices fit into what autograd keeps at the same sizes; None where it was not counted."""
    same = (
        row["saved_bytes"] // matrix["predicted_bytes"]
        for row in part(rows, "context")
        if (row["how"], row["context"]) == (matrix["how"], matrix["context"])
    )
    return next(same, None)


def _matrix_words(rows: Rows) -> str:
    """What the snapshots hold."""
    matrices = part(rows, "matrix")
    naive = next(row for row in matrices if row["how"] == NAIVE)
    without = [row["how"] for row in matrices if row["how"] not in KEEPS and not row["kept"]]
    saved = _saved_matrices(rows, naive)
    of_these = "" if saved in (None, naive["kept"]) else f" when backward begins, of which autograd keeps {saved}"
    found = f"{naive['kept']} of {units.size(naive['found_bytes'])}{of_these}" if naive["kept"] else "none"
    none = f", and none in that of {' or '.join(without)}" if without else ""
    return (
        f"At context {naive['context']} an N × N matrix is predicted to take {units.size(naive['predicted_bytes'])}; "
        f"the snapshot of naive attention holds {found}{none}."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    by_context, by_head = part(rows, "context"), part(rows, "head")
    if not by_context:
        return []
    first = by_context[0]
    about = f"batch {first['batch']}, {first['dtype']}"
    ways = tuple(dict.fromkeys(row["how"] for row in by_context))
    pictures = [
        Picture(
            title=f"Attention forward and backward by context ({about}, head size {HEAD_DIM})",
            caption="Toward the right all lines come to one slope, the square of the context. Their distance is what is written "
            "to memory and read back.",
            kind="line", rows=by_context, x="context", y="device_ns", colour="how", words=ways, x_title="context",
            y_title="time", x_log=True, y_log=True,
        ),
        Picture(
            title="What forward keeps for the backward pass, by context",
            caption="Twice as steep where the N × N matrix is kept. Those that keep the same lie on one another.",
            kind="line", rows=by_context, x="context", y="saved_bytes", colour="how", words=ways, x_title="context",
            y_title="kept", x_log=True, y_log=True,
        ),
    ]  # fmt: skip
    if by_head:
        pictures.append(
            Picture(
                title=f"Attention forward and backward by head size, at context {by_head[0]['context']}",
                caption="Where the scores are written to memory, their traffic hides the head size; a fused kernel computes.",
                kind="line", rows=sorted(by_head, key=lambda row: row["head_dim"]), x="head_dim", y="device_ns", colour="how",
                words=ways, x_title="head size", y_title="time", x_log=True, y_log=True,
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    peak = {"peak_bytes": "allocator's peak"} if place.on_gpu else {}
    sizes = {"how": "attention", "context": "context", "head_dim": "head size"}
    measured = {"device_ns": "time", "saved_bytes": "kept for backward", **peak}
    kept = part(rows, "kept")
    savers = {"saved_by": "kept by"} if any("saved_by" in row for row in kept) else {}
    matrices = [{**row, "saved": _saved_matrices(rows, row)} for row in part(rows, "matrix")]
    points = [*part(rows, "context"), *(row for row in part(rows, "head") if row["head_dim"] != HEAD_DIM)]
    found = [
        TableOf(
            "exponents of the context",
            {"how": "attention", "time_exponent": "time", "saved_exponent": "kept for backward",
             "claimed_saved_exponent": "claimed for it", "through": "fitted through the contexts"},
            [_rounded(row) for row in exponents(rows)],
        ),
        TableOf("the N × N matrix in the memory snapshot",
                {"how": "attention", "context": "context", "predicted_bytes": "predicted", "found_bytes": "found, each",
                 "kept": "there when backward begins", "saved": "of which autograd keeps"}, matrices),
        TableOf("the largest tensors that are there when backward begins, in the snapshot",
                {"how": "attention", "op": "made by", "shape": "shape", "tensor_dtype": "type", "tensor_bytes": "size", **savers},
                kept),
        TableOf("forward and backward", sizes | measured, points),
    ]  # fmt: skip
    missing = part(rows, "missing")
    if missing:
        found.append(TableOf("not measured", {"how": "attention", "context": "context", "why": "why"}, missing))
    return [table for table in found if table.rows]


def _rounded(row: Mapping[str, Any]) -> Row:
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}


EXPERIMENT = Experiment(
    name="attention-scaling",
    number=14,
    line="Time and memory of attention by context and head size: naive, compiled, SDPA and ours; the N × N matrix found.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
