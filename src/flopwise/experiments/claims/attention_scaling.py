"""`attention-scaling`: time and memory of attention by context and by head size, for each way of writing it.

A pass is forward and backward. What forward keeps for backward is counted from the tensors that autograd is given to keep, one
by one (q, k and v not counted: they were there before); on a GPU the allocator's peak is measured as well. The N × N matrix of
scores is predicted as batch × context² × bytes of a number, and looked for in a memory snapshot of the same work.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Row, Timed, by, fields, select, values
from flopwise.experiments.verdict import INCONCLUSIVE, Check, each, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.dtypes import item_bytes
from flopwise.statistics import FEWEST

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

LINE = (
    "Time and memory of attention by context and head size: naive, compiled, SDPA and ours; the N × N matrix in memory."
)
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


class Sized(Row, frozen=True, kw_only=True):
    how: str
    batch: int
    context: int
    head_dim: int
    dtype: str


class Matrix(Sized, frozen=True, kw_only=True, tag_field="part", tag="matrix"):
    """The N × N matrix in a snapshot."""

    predicted_bytes: int
    found_bytes: int | None
    kept: int  # matrices that are there when backward begins

    @property
    def as_predicted(self) -> bool:
        if self.how not in KEEPS:
            return not self.kept
        return self.kept > 0 and self.found_bytes == self.predicted_bytes


class Kept(Sized, frozen=True, tag_field="part", tag="kept"):
    """A tensor that is there when backward begins."""

    op: str
    shape: str
    tensor_dtype: str
    tensor_bytes: int
    saved_by: str = ""


class Point(Timed, frozen=True, kw_only=True):
    how: str
    batch: int
    context: int
    head_dim: int
    dtype: str
    saved_bytes: int
    peak_bytes: int | None
    device_ns: float

    @property
    def steady(self) -> bool:
        """Whether its time can be fitted through: a GPU's own clock can, unless the GPU waited for the host."""
        if self.gpu_ns is not None:
            return self.gpu_exact
        return self.samples >= FEWEST and self.wall_high_ns - self.wall_low_ns <= STEADY * self.wall_ns


class ByContext(Point, frozen=True, tag_field="part", tag="context"):
    pass


class ByHead(Point, frozen=True, tag_field="part", tag="head"):
    pass


class Missing(Row, frozen=True, tag_field="part", tag="missing"):
    how: str
    context: int
    why: str


class Growth(Row, frozen=True, kw_only=True):
    """How the time of one way, and what it keeps, grow with the context."""

    how: str
    through: str
    time_exponent: float | None
    saved_exponent: float | None

    @property
    def claimed_saved_exponent(self) -> int:
        return 2 if self.how in KEEPS else 1

    @property
    def off(self) -> float:
        """How far the exponents are from what is claimed, at most."""
        time, saved = self.time_exponent or 0.0, self.saved_exponent or 0.0
        return max(abs(time - 2), abs(saved - self.claimed_saved_exponent))


AnyRow = Matrix | Kept | ByContext | ByHead | Missing
Rows = Sequence[AnyRow]


def measure(bench: "Bench") -> Iterator[AnyRow]:
    from flopwise.experiments.bench import one_thread

    with one_thread(bench):
        yield from _measured(bench)


def _measured(bench: "Bench") -> Iterator[AnyRow]:
    import torch

    from flopwise.lm.attention import attention_function

    ways: dict[str, Attend] = {
        how: attention_function(kind, compiled_elsewhere=False)
        for how, kind in KINDS.items()
        if how != FLASH or bench.on_gpu
    }
    setting = Setting(bench)
    for how in sorted(ways, key=(NAIVE, FLASH, SDPA).index):
        yield from _in_snapshot(bench, setting, how)
    for how, attend in ways.items():
        yield from _points(bench, setting, how, attend)
    if bench.quick:
        return
    # Last: it takes as long as all others. Sizes that are not fixed: one compilation serves all points.
    compiled = torch.compile(attention_function("naive", compiled_elsewhere=True), dynamic=True)
    try:
        yield from _points(bench, setting, COMPILED, compiled)
    except Exception as error:  # noqa: BLE001  torch.compile needs a compiler that works: without one the others still count
        yield Missing(COMPILED, setting.contexts[0], f"torch.compile failed: {one_line(str(error), 120)}")


class Setting:
    """Sizes and type: half precision on a GPU, where fused attention is at home; fp32 on the CPU."""

    def __init__(self, bench: "Bench") -> None:
        if bench.on_gpu:
            self.precision, self.batch, self.middle = "bf16", 16, 4096
            # Scores beyond 2³¹ numbers would be compiled once more, for wider indices.
            self.contexts: tuple[int, ...] = (2048, 4096, 8192) if bench.quick else (512, 1024, 2048, 4096, 8192)
        else:
            self.precision, self.batch, self.middle = "fp32", 1, 512
            self.contexts = (512, 1024, 2048) if bench.quick else (256, 512, 1024, 2048, 4096)
        # What keeps no scores has room for more; on a GPU it is only there that the chip is full.
        self.longer: tuple[int, ...] = (16384, 32768) if bench.on_gpu and not bench.quick else ()
        # Besides HEAD_DIM, at the middle context. Our kernels are compiled for each: they leave out the first.
        self.head_dims = (128,) if bench.quick else (32, 128)

    def sizes(self, how: str, context: int, head_dim: int) -> dict[str, Any]:
        return {"how": how, "batch": self.batch, "context": context, "head_dim": head_dim, "dtype": self.precision}


def _points(bench: "Bench", setting: Setting, how: str, attend: "Attend") -> Iterator[ByContext | ByHead | Missing]:
    """By context, then by head size."""
    taken = 0.0  # by the context before, for each square of a token
    for context in setting.contexts + (() if how in KEEPS else setting.longer):
        expected = taken * context**2 if how in KEEPS else 0.0
        if expected > ROOM * bench.free_bytes():
            yield Missing(how, context, f"it would take about {units.size(expected)}")
            continue
        found = _point(bench, setting, how, attend, context, HEAD_DIM)
        taken = (found["peak_bytes"] or 4 * found["saved_bytes"]) / context**2
        yield ByContext(**found)
        if context == setting.middle:
            yield ByHead(**found)
    for head_dim in setting.head_dims[how == FLASH :]:
        yield ByHead(**_point(bench, setting, how, attend, setting.middle, head_dim))


def _point(bench: "Bench", setting: Setting, how: str, attend: "Attend", context: int, head_dim: int) -> dict[str, Any]:
    import torch

    bench.doing(f"{how}, context {context}, head size {head_dim}")
    sizes = (setting.batch, context, head_dim)
    inputs = [bench.randn(*sizes, dtype=setting.precision, requires_grad=True) for _ in range(3)]
    gradient = bench.randn(*sizes, dtype=setting.precision)

    def both_ways() -> None:
        torch.autograd.grad(attend(*inputs), inputs, gradient)

    both_ways()  # compiles; a library's workspace is then no part of the peak
    memory = {"saved_bytes": saved_bytes(attend, inputs), "peak_bytes": bench.peak_bytes(both_ways)}
    timing = bench.time(both_ways, seconds=0.06 if bench.on_gpu else None)
    return setting.sizes(how, context, head_dim) | memory | {"device_ns": timing.took_ns} | fields(timing)


def saved_bytes(attend: "Attend", inputs: "list[Tensor]") -> int:
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


def _in_snapshot(bench: "Bench", setting: Setting, how: str) -> Iterator[Matrix | Kept]:
    """The N × N matrix in a snapshot of one pass, as `flopwise memory` takes and reads it; and the largest of what is kept."""
    from flopwise.capture.memory_trial import record_trial
    from flopwise.records.events import Done, MemoryRequest
    from flopwise.records.memory import read_knowledge
    from flopwise.snapshot.read import read_snapshot
    from flopwise.snapshot.report import report
    from flopwise.spec.workload import Sampling, Trial, workload

    bench.doing(f"{how}, a memory snapshot")
    shape: dict[str, Any] = {"batch": setting.batch, "context": setting.middle, "set": {"dim": HEAD_DIM}}
    shape |= {"attention": KINDS[how], "precision": setting.precision}
    work = workload("op:attention", phase="backward", **shape)
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
    sizes = setting.sizes(how, setting.middle, HEAD_DIM)
    predicted = matrix_bytes(setting.batch, setting.middle, setting.precision)
    held = matrix.bytes if matrix.kept else None
    yield Matrix(**sizes, predicted_bytes=predicted, found_bytes=held, kept=matrix.kept)
    for tensor in [tensor for block in found.saved for tensor in block.largest]:
        text, saved_by = " × ".join(map(str, tensor.shape)), tensor.saved_by or "nobody: the result"
        yield Kept(tensor.op, text, tensor.dtype, tensor.bytes, saved_by, **sizes)


def matrix_bytes(batch: int, context: int, dtype: str) -> int:
    """One matrix of scores.

    >>> matrix_bytes(8, 16384, "fp32") == 8 * 2**30
    True
    """
    return int(batch * context**2 * item_bytes(dtype))


def exponent(points: Mapping[int, float]) -> float | None:
    """The slope of log(value) over log(context) through the longest contexts, by least squares; None for fewer than three.

    >>> exponent({n: 5.0 * n * n for n in (256, 512, 1024)})
    2.0
    """
    longest = sorted((context, value) for context, value in points.items() if value)[-FITTED:]
    if len(longest) < FITTED:
        return None
    logs = [(math.log(context), math.log(value)) for context, value in longest]
    mean_x, mean_y = (sum(some) / len(logs) for some in zip(*logs, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return float(round(slope, 6))


def fitted(rows: Rows) -> dict[str, list[ByContext]]:
    """The longest contexts of each way."""
    points = sorted(select(rows, ByContext), key=attrgetter("context"))
    ways = dict.fromkeys(row.how for row in select(rows, ByContext))
    return {how: [row for row in points if row.how == how][-FITTED:] for how in ways}


def growths(rows: Rows) -> list[Growth]:
    found = []
    for how, points in fitted(rows).items():
        time, saved = ({row.context: getattr(row, key) for row in points} for key in ("device_ns", "saved_bytes"))
        through = ", ".join(map(str, time))
        found.append(Growth(how=how, through=through, time_exponent=exponent(time), saved_exponent=exponent(saved)))
    return found


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = [row for row in growths(rows) if None not in (row.time_exponent, row.saved_exponent)]
    fused = {SDPA, FLASH} if place.on_gpu else {SDPA}
    short = {NAIVE, *fused, *_compiled(rows)} - set(by(found, "how"))
    few = f"fewer than {FITTED} contexts were measured of {' and '.join(sorted(short))}: no exponent."
    yield require("enough contexts", not short, few)
    matrices = by(select(rows, Matrix), "how")
    unseen = " and ".join(sorted({NAIVE, *fused} - set(matrices)))
    yield require("snapshots", not unseen, f"there is no memory snapshot of {unseen} to look for the matrix in.")
    times, saved = (
        ", ".join(f"N^{getattr(row, key):.2f} ({row.how})" for row in found)
        for key in ("time_exponent", "saved_exponent")
    )
    yield said(f"with the context N, time grows as {times}; what is kept for the backward pass grows as {saved}.")
    yield said(_matrix_described(rows))
    yield each("matrix as predicted", {how: row.as_predicted for how, row in matrices.items()})
    steady = all(row.steady for points in fitted(rows).values() for row in points)
    yield (
        _exponents(found)
        if steady
        else Check("exponents", INCONCLUSIVE, "The times are not known well enough here to tell.")
    )


def _compiled(rows: Rows) -> set[str]:
    """Whether compiled attention has to be there: only a whole run goes beyond the three contexts of a quick one, which has
    none; and it may say why it is missing."""
    contexts = {row.context for row in rows if isinstance(row, ByContext | Missing) and row.how == NAIVE}
    return {COMPILED} if len(contexts) > FITTED and COMPILED not in by(select(rows, Missing), "how") else set()


def _exponents(found: Sequence[Growth]) -> Check:
    """As claimed, or clearly not; in between it stays open."""
    off = max(row.off for row in found)
    low = any((row.time_exponent or 0.0) < 2 - NEAR for row in found)
    answer = True if off <= NEAR else False if off > FAR else None
    text = "An exponent below 2 says that the shorter contexts do not fill the chip yet." if low else ""
    return holds("exponents", answer, refuted=text, unknown=text, off=off)


def _saved_matrices(rows: Rows, matrix: Matrix) -> int | None:
    """How many matrices fit into what autograd keeps at the same sizes; None where it was not counted."""
    points = by(select(rows, ByContext), "how", "context")
    point = points.get((matrix.how, matrix.context))
    return point.saved_bytes // matrix.predicted_bytes if point else None


def _matrix_described(rows: Rows) -> str:
    """What the snapshots hold."""
    matrices = select(rows, Matrix)
    naive = next(row for row in matrices if row.how == NAIVE)
    without = " or ".join(row.how for row in matrices if row.how not in KEEPS and not row.kept)
    saved = _saved_matrices(rows, naive)
    of_these = "" if saved in (None, naive.kept) else f" when backward begins, of which autograd keeps {saved}"
    found = f"{naive.kept} of {units.size(naive.found_bytes or 0)}{of_these}" if naive.kept else "none"
    none = f", and none in that of {without}" if without else ""
    return (
        f"At context {naive.context} an N × N matrix is predicted to take {units.size(naive.predicted_bytes)}; "
        f"the snapshot of naive attention holds {found}{none}."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    by_context = values(select(rows, ByContext))
    by_head = values(sorted(select(rows, ByHead), key=attrgetter("head_dim")))
    if not by_context:
        return []
    about = f"batch {by_context[0]['batch']}, {by_context[0]['dtype']}"
    shared: dict[str, Any] = {"colour": "how", "words": tuple(dict.fromkeys(row["how"] for row in by_context))}
    context, time = Axis("context", "context", log=True), Axis("device_ns", "time", log=True)
    at = f", at context {by_head[0]['context']}" if by_head else ""
    return [
        line(by_context, context, time, **shared).titled(
            f"Attention forward and backward by context ({about}, head size {HEAD_DIM})",
            "Toward the right all lines come to one slope, the square of the context. Their distance is what is written to "
            "memory and read back.",
        ),
        line(by_context, context, Axis("saved_bytes", "kept", log=True), **shared).titled(
            "What forward keeps for the backward pass, by context",
            "Twice as steep where the N × N matrix is kept. Those that keep the same lie on one another.",
        ),
        line(by_head, Axis("head_dim", "head size", log=True), time, **shared).titled(
            f"Attention forward and backward by head size{at}",
            "Where the scores are written to memory, their traffic hides the head size; a fused kernel computes.",
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    kept, missing = select(rows, Kept), select(rows, Missing)
    exponents = [
        {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
        for row in values(growths(rows), "claimed_saved_exponent")
    ]
    matrices = [fields(row) | {"saved": _saved_matrices(rows, row)} for row in select(rows, Matrix)]
    points = [*select(rows, ByContext), *(row for row in select(rows, ByHead) if row.head_dim != HEAD_DIM)]
    of_growth = columns(how="attention", time_exponent="time", saved_exponent="kept for backward")
    of_growth |= columns(claimed_saved_exponent="claimed for it", through="fitted through the contexts")
    of_matrix = columns(how="attention", context="context", predicted_bytes="predicted", found_bytes="found, each")
    of_matrix |= columns(kept="there when backward begins", saved="of which autograd keeps")
    of_kept = columns(how="attention", op="made by", shape="shape", tensor_dtype="type", tensor_bytes="size")
    of_kept |= columns(saved_by="kept by") if any(row.saved_by for row in kept) else {}
    of_points = columns(how="attention", context="context", head_dim="head size", device_ns="time")
    of_points |= columns(saved_bytes="kept for backward")
    of_points |= columns(peak_bytes="allocator's peak") if place.on_gpu else {}
    return [
        table_of("exponents of the context", of_growth, exponents),
        table_of("the N × N matrix in the memory snapshot", of_matrix, matrices),
        table_of("the largest tensors that are there when backward begins, in the snapshot", of_kept, values(kept)),
        table_of("forward and backward", of_points, values(points)),
        table_of("not measured", columns(how="attention", context="context", why="why"), values(missing)),
    ]


EXPERIMENT = Experiment(
    14, "attention-scaling", LINE, CLAIM, (Matrix, Kept, ByContext, ByHead, Missing), measure, judge, draw, tabulate
)
