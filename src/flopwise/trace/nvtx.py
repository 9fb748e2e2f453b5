"""NVTX ranges of an Nsight Systems export: which are PyTorch ops, and which are someone's annotations.

`torch.autograd.profiler.emit_nvtx` (and `nsys profile --pytorch=autograd-nvtx`) writes every op as a range whose text is

    aten::mm, seq = 12, op_id = 345, sizes = [[64, 64], [64, 64]]

so nearly every text is unique. The name is cut off in front of `, seq = ` or `, op_id = ` chunk by chunk, and only the
few hundred names that remain are kept. What a name means is decided once per name, not once per row.
"""

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.trace.nsys_file import Export, Ints, or_no_id, process_of, quoted
from flopwise.trace.tables import NO_ID

PUSH_POP, START_END = (59, 70), (60, 71)  # NvtxPushPopRange, NvtxStartEndRange, and their imported (Nvtxt) twins
_WANTED = {"start": ("start",), "end": ("end",), "thread": ("globalTid",)}

_EVALUATE = "autograd::engine::evaluate_function: "
_NODE_NAME = re.compile(r"(torch::autograd::.+|[^:]*Backwards?\d*)")  # MmBackward0, MyFunctionBackward, CopySlices
_UNQUALIFIED_OPS = ("detach", "detach_")  # the only ops that PyTorch records without a namespace
_MODULE, _STEP = "flopwise.module:", ("flopwise.step:", "ProfilerStep#")

MAX_NAMES = 1_000_000
MAX_NAME_BYTES = 256 << 20
_OTHER = "(other names)"


@dataclass
class Names:
    """Every name once, in the order of its first use."""

    ids: dict[str, int] = field(default_factory=dict)
    folded: int = 0  # names beyond the limits, now all called the same
    bytes: int = 0

    def id(self, name: str) -> int:
        known = self.ids.get(name)
        if known is not None:
            return known
        if len(self.ids) >= MAX_NAMES or self.bytes + len(name) > MAX_NAME_BYTES:
            self.folded += 1
            return self.ids.setdefault(_OTHER, len(self.ids))
        self.bytes += len(name)
        return self.ids.setdefault(name, len(self.ids))

    def of_each(self, texts: pl.Series) -> pl.Series:
        distinct = texts.unique(maintain_order=True)
        ids = [self.id(t) for t in distinct.to_list()]
        return texts.replace_strict(distinct, ids, return_dtype=pl.UInt32) if len(distinct) else texts.cast(pl.UInt32)


@dataclass(frozen=True)
class Meaning:
    """What a name says by itself."""

    name: str
    kind: str  # of the range that it would be
    op: bool  # an op whatever follows the name
    op_if_emitted: bool  # an op if emit_nvtx wrote it; record_function's names look like anything
    backward: bool  # the autograd engine runs it


def meaning(text: str) -> Meaning:
    """What the text of a range means, once `, seq = ` and `, op_id = ` are cut off.

    >>> meaning("autograd::engine::evaluate_function: MmBackward0").backward
    True
    >>> meaning("flopwise.module:blocks.0.mlp")
    Meaning(name='blocks.0.mlp', kind='module', op=False, op_if_emitted=False, backward=False)
    """
    op = text.startswith(("aten::", _EVALUATE))
    name = text.partition(", sizes = ")[0] if op else text
    if text.startswith(_MODULE) and len(text) > len(_MODULE):
        return Meaning(text[len(_MODULE) :], "module", False, False, False)
    kind = "step" if text.startswith(_STEP) else "annotation"
    backward = text.startswith(_EVALUATE) or bool(_NODE_NAME.fullmatch(text))
    return Meaning(name, kind, op, "::" in text or text in _UNQUALIFIED_OPS, backward)


def read_nvtx(export: Export, names: Names, notes: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ops and ranges, in the trace's own time; `end_ns` is MISSING where a range was still open at the end."""
    raw = _rows(export, notes)
    texts = raw.names
    meanings = [meaning(text) for text in texts.ids]
    if texts.folded:
        notes.append(f"{texts.folded:,} range names beyond the first {MAX_NAMES:,} are called {_OTHER}")
    name_ids = np.array([names.id(m.name) for m in meanings], dtype=np.uint32)
    frame = raw.frame.with_columns(pl.Series("process", process_of(raw.frame["thread"].to_numpy())))
    text, sequence, emitted = (frame[c].to_numpy() for c in ("name", "sequence", "emitted"))

    def per_row(flags: list[bool]) -> npt.NDArray[np.bool_]:
        return np.take(np.array(flags, dtype=bool), text)

    is_op = (
        (sequence >= 0) | per_row([m.op for m in meanings]) | (emitted & per_row([m.op_if_emitted for m in meanings]))
    )
    backward = per_row([m.backward for m in meanings])
    kinds = pl.Series([m.kind for m in meanings], dtype=pl.String)
    frame = frame.with_columns(
        pl.Series("name", name_ids[text]), pl.Series("thread", or_no_id(frame["thread"].to_numpy()))
    )
    ops = frame.filter(pl.Series(is_op)).with_columns(
        pl.Series("backward", backward[is_op]), forward_thread=pl.lit(NO_ID, dtype=pl.Int64)
    )
    ranges = frame.filter(pl.Series(~is_op)).with_columns(kinds.gather(text[~is_op]).alias("kind"))
    return ops.drop("emitted"), ranges.drop("emitted", "sequence")


@dataclass(frozen=True)
class _Rows:
    frame: pl.DataFrame  # start_ns, end_ns, thread, name (in `names`), sequence, emitted
    names: Names


def _rows(export: Export, notes: list[str]) -> _Rows:
    names = Names()
    table = export.table("NVTX_EVENTS")
    text = _text_of(export, table)
    parts: list[pl.DataFrame] = []
    if text and export.column(table, "start") and export.column(table, "end"):
        kind = export.column(table, "eventType")
        ranges = ",".join(str(k) for k in PUSH_POP + START_END)
        where = f"{quoted(kind)} IN ({ranges})" if kind else f"{quoted(export.column(table, 'end'))} IS NOT NULL"
        parts = [_chunk(ints, texts, names) for ints, texts in export.chunks(table, _WANTED, text, where)]
    if not parts:
        notes.append("no NVTX ranges: without them kernels have no ops, modules or phases (nsys profile -t cuda,nvtx)")
        parts = [_chunk({name: np.empty(0, np.int64) for name in _WANTED}, [], names)]
    return _Rows(pl.concat(parts, rechunk=True), names)


def _text_of(export: Export, table: str) -> str:
    """SQL for a range's text: written out in `text`, or registered once and referred to by `textId`."""
    text, text_id = export.column(table, "text"), export.column(table, "textId")
    strings = export.table("StringIds")
    if text_id and export.column(strings, "id") and export.column(strings, "value"):
        registered = f"(SELECT value FROM {quoted(strings)} WHERE id = {quoted(text_id)})"
        return f"coalesce({quoted(text)}, {registered})" if text else registered
    return quoted(text) if text else ""


def _chunk(ints: dict[str, Ints], texts: list[str], names: Names) -> pl.DataFrame:
    cut = _cut(pl.Series("text", texts, dtype=pl.String))
    return pl.DataFrame({"start_ns": ints["start"], "end_ns": ints["end"], "thread": ints["thread"]}).with_columns(
        names.of_each(cut["name"]).alias("name"),
        cut["sequence"].fill_null(NO_ID).alias("sequence"),
        (cut["sequence"].is_not_null() | cut["op_id"].fill_null(False)).alias("emitted"),
    )


def _cut(texts: pl.Series) -> pl.DataFrame:
    """Name, sequence number and whether there is an op_id. A text with `, seq = ` and no number behind it stays whole."""
    words = texts.str.splitn(", ", 3).struct.unnest()
    second = pl.col("field_1")
    numbered, identified = second.str.starts_with("seq = "), second.str.starts_with("op_id = ")
    usual = words.select(
        name="field_0",
        sequence=pl.when(numbered).then(second.str.strip_prefix("seq = ")).cast(pl.Int64, strict=False),
        op_id=identified,
        unusual=second.is_not_null() & ~identified,
    )
    if not usual.select((pl.col("unusual") & pl.col("sequence").is_null()).any()).item():
        return usual
    seq = pl.col("text").str.splitn(", seq = ", 2)  # names with a comma in them: twice as slow
    number = seq.struct[1].str.splitn(",", 2).struct[0].cast(pl.Int64, strict=False)
    whole = pl.when(number.is_null()).then("text").otherwise(seq.struct[0])
    op_id = whole.str.splitn(", op_id = ", 2)
    return texts.to_frame().select(sequence=number, name=op_id.struct[0], op_id=op_id.struct[1].str.contains(r"^\d"))


def with_engine_sequence(ops: pl.DataFrame) -> pl.DataFrame:
    """Give the engine's range around a backward node (`evaluate_function: MmBackward0`) the node's own sequence number.

    Recent PyTorch writes the number only on the inner range, which is the next one on the thread. `ops` is sorted by start.
    """
    following = [pl.col(c).shift(-1).over("thread") for c in ("sequence", "backward", "start_ns")]
    inner = following[1] & (following[2] < pl.col("end_ns"))
    unnumbered = pl.col("backward") & (pl.col("sequence") == NO_ID)
    return ops.with_columns(pl.when(unnumbered & inner).then(following[0]).otherwise("sequence").alias("sequence"))
