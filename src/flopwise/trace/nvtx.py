"""NVTX ranges of an Nsight Systems export: which are PyTorch ops, and which are someone's annotations.

`torch.autograd.profiler.emit_nvtx` (and `nsys profile --pytorch=autograd-nvtx`) writes every op as a range whose text is

    aten::mm, seq = 12, op_id = 345, sizes = [[64, 64], [64, 64]]

so nearly every text is unique. The name is cut off in front of `, seq = ` or `, op_id = ` chunk by chunk, and only the
few hundred names that remain are kept. What a name means is decided once per name, not once per row.
"""

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.records.note import Note, counted
from flopwise.trace.columns import GrowingColumn, compact
from flopwise.trace.nsys_file import Export, Ints, or_no_id, process_of, quoted, spellings
from flopwise.trace.op_shapes import NO_SHAPE, Shapes
from flopwise.trace.tables import ANNOTATION, FOLDED, MAX_NAMES, MAX_NAMES_CHARACTERS, MODULE, NO_ID, OTHER_NAMES, STEP
from flopwise.work.sized import SIZED

PUSH_POP, START_END = (59, 70), (60, 71)  # NvtxPushPopRange, NvtxStartEndRange, and their imported (Nvtxt) twins
_WANTED = spellings("start end thread:globalTid")

_EVALUATE = "autograd::engine::evaluate_function: "
_NODE_NAME = re.compile(r"(torch::autograd::.+|[^:]*Backwards?\d*)")  # MmBackward0, MyFunctionBackward, CopySlices
_ENGINE_NODE = re.compile(r"\w+Backward\d+")  # only autograd ends a name so: an op without a number, too
_UNQUALIFIED_OPS = ("detach", "detach_")  # the only ops that PyTorch records without a namespace
_SIZES = r", sizes = (\[\[.*?\]\])"
_MODULE_MARK, _STEP_MARKS = "flopwise.module:", ("flopwise.step:", "ProfilerStep#")


@dataclass
class NameTable:
    """Every name once, in the order of its first use."""

    ids: dict[str, int] = field(default_factory=dict)
    folded: int = 0  # names beyond the limits, now all called the same
    characters: int = 0

    def id(self, name: str) -> int:
        known = self.ids.get(name)
        if known is not None:
            return known
        if len(self.ids) >= MAX_NAMES or self.characters + len(name) > MAX_NAMES_CHARACTERS:
            self.folded += 1
            return self.ids.setdefault(OTHER_NAMES, len(self.ids))
        self.characters += len(name)
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
    op = text.startswith(("aten::", "autograd::", "torch::autograd::")) or _ENGINE_NODE.fullmatch(text) is not None
    name = text.partition(", sizes = ")[0] if op else text
    if text.startswith(_MODULE_MARK) and len(text) > len(_MODULE_MARK):
        return Meaning(text.removeprefix(_MODULE_MARK), MODULE, False, False, False)
    kind = STEP if text.startswith(_STEP_MARKS) else ANNOTATION
    backward = text.startswith(_EVALUATE) or bool(_NODE_NAME.fullmatch(text))
    return Meaning(name, kind, op, "::" in text or text in _UNQUALIFIED_OPS, backward)


def read_nvtx(export: Export, names: NameTable, shapes: Shapes, notes: list[Note]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ops and ranges, in the trace's own time; `end_ns` is MISSING where a range was still open at the end."""
    rows = _Rows(names, shapes)
    table = export.table("NVTX_EVENTS")
    text = _text_of(export, table)
    if text and export.column(table, "start") and export.column(table, "end"):
        kind = export.column(table, "eventType")
        ranges = ",".join(str(k) for k in PUSH_POP + START_END)
        where = f"{quoted(kind)} IN ({ranges})" if kind else f"{quoted(export.column(table, 'end'))} IS NOT NULL"
        for ints, texts in export.chunks(table, _WANTED, text, f"{where} AND {export.inside(table)}"):
            rows.add(ints, texts)
    if not rows.count:
        text = "no NVTX ranges: without them kernels have no ops, modules or phases (nsys profile -t cuda,nvtx)"
        notes.append(Note("no_ranges", text))
    notes += counted(names=(rows.texts.folded, "range name", FOLDED))
    return rows.tables()


_KINDS = (ANNOTATION, MODULE, STEP)


class _Rows:
    """Ops and ranges, separated and put into their columns chunk by chunk: a text is held only while its chunk is."""

    def __init__(self, names: NameTable, shapes: Shapes) -> None:
        self.texts = NameTable()  # without numbers
        self.count = 0
        self._names, self._shapes = names, shapes
        self._meanings: list[Meaning] = []
        self._of_text: dict[str, npt.NDArray[Any]] = {}
        span = ("start_ns", "end_ns", "thread")
        self._ops = {name: GrowingColumn() for name in (*span, "sequence")} | {"backward": GrowingColumn(np.bool_)}
        self._ops |= {name: GrowingColumn(np.uint32) for name in ("name", "shape")}
        self._ranges = {name: GrowingColumn() for name in span} | {
            name: GrowingColumn(np.uint32) for name in ("name", "kind")
        }

    def add(self, ints: dict[str, Ints], texts: list[str]) -> None:
        self.count += len(texts)
        whole = pl.Series("text", texts, dtype=pl.String)
        cut = _cut(whole)
        text = self.texts.of_each(cut["name"]).to_numpy()
        self._learn()
        sequence = cut["sequence"].fill_null(NO_ID).to_numpy()
        emitted = (cut["sequence"].is_not_null() | cut["op_id"].fill_null(False)).to_numpy()
        meanings = {name: per_text[text] for name, per_text in self._of_text.items()}
        is_op = (sequence >= 0) | meanings["op"] | (emitted & meanings["op_if_emitted"])
        columns = {"start_ns": ints["start"], "end_ns": ints["end"], "thread": or_no_id(ints["thread"])}
        columns |= {"sequence": sequence, "shape": self._sizes(whole, meanings["sized"])} | meanings
        for wanted, rows in ((self._ops, is_op), (self._ranges, ~is_op)):
            for name, column in wanted.items():
                column.append(columns[name][rows])

    def _learn(self) -> None:
        """What the texts that are new mean."""
        new = list(itertools.islice(self.texts.ids, len(self._meanings), None))
        if not new and self._of_text:
            return
        self._meanings += [meaning(text) for text in new]
        known = self._meanings
        self._of_text = {
            "op": np.array([m.op for m in known], dtype=bool),
            "op_if_emitted": np.array([m.op_if_emitted for m in known], dtype=bool),
            "backward": np.array([m.backward for m in known], dtype=bool),
            "sized": np.array([m.name in SIZED for m in known], dtype=bool),
            "name": np.array([self._names.id(m.name) for m in known], dtype=np.uint32),
            "kind": np.array([_KINDS.index(m.kind) for m in known], dtype=np.uint32),
        }

    def _sizes(self, texts: pl.Series, sized: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
        """The numbers of the sizes that `emit_nvtx(record_shapes=True)` writes, of the ops they are kept for."""
        shape = np.full(len(texts), NO_SHAPE, dtype=np.uint32)
        rows = np.flatnonzero(sized)
        sizes = texts[rows].str.extract(_SIZES, 1).fill_null("") if len(rows) else texts.clear()
        numbers = {text: self._shapes.id(text.encode()) for text in sizes.unique(maintain_order=True)}
        shape[rows] = [numbers[text] for text in sizes]
        return shape

    def tables(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        ops = {name: self._ops.pop(name).values() for name in list(self._ops)}
        ops["forward_thread"] = np.full(len(ops["name"]), NO_ID)
        ranges = {name: self._ranges.pop(name).values() for name in list(self._ranges)}
        kinds = pl.Series("kind", _KINDS).gather(ranges.pop("kind"))
        return _with_process(ops), _with_process(ranges).hstack([kinds])


def _with_process(columns: dict[str, npt.NDArray[Any]]) -> pl.DataFrame:
    thread = columns["thread"]
    return compact(columns | {"process": np.where(thread == NO_ID, NO_ID, process_of(thread))})


def _text_of(export: Export, table: str) -> str:
    """SQL for a range's text: written out in `text`, or registered once and referred to by `textId`."""
    text, text_id = export.column(table, "text"), export.column(table, "textId")
    strings = export.table("StringIds")
    if text_id and export.column(strings, "id") and export.column(strings, "value"):
        registered = f"(SELECT value FROM {quoted(strings)} WHERE id = {quoted(text_id)})"
        return f"coalesce({quoted(text)}, {registered})" if text else registered
    return quoted(text) if text else ""


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
    backward, sequence = ops["backward"].to_numpy(), ops["sequence"].to_numpy()
    unnumbered = backward & (sequence == NO_ID)
    if not unnumbered.any():
        return ops
    thread, start, end = (ops[column].to_numpy() for column in ("thread", "start_ns", "end_ns"))
    order = np.flatnonzero(np.isin(thread, np.unique(thread[unnumbered])))
    order = order[np.argsort(thread[order], kind="stable")]
    this, following = order[:-1], order[1:]
    inner = (thread[this] == thread[following]) & backward[following] & (start[following] < end[this])
    takes = unnumbered[this] & inner
    sequence = sequence.copy()
    sequence[this[takes]] = sequence[following[takes]]
    return ops.with_columns(pl.Series("sequence", sequence))
