"""Timings from somebody's CSV: size, context, and the time of forward, backward or the whole step, under any usual heading.

Wide (`forward_mean_ms`, `backward_mean_ms`) or long (`pass_type`, `avg_time_ms`); of pandas with its index, of a spreadsheet
with semicolons, of a Markdown table, or flopwise's own. A heading without a unit leaves the unit open.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.trace.input_file import check_file

FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "forward and backward", "step"
OF_THE_ROW = ""  # the time of whatever pass the row is of
LARGEST, MOST_ROWS, MOST_COLUMNS = 4 * 2**20, 100_000, 1_000  # bytes; a table of timings has thousands
NS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_NAMED = 12  # columns that an error names
_LONGEST = 100  # letters of a heading that are read
_DELIMITERS = (",", ";", "\t", "|")
_SIZE = ("model_size", "size", "model", "model_name", "workload", "preset", "config", "name")
_CASE = ("file", "case", "trace", "run", "label", "configuration")  # size and context in one name
_CONTEXT = r"(ctx|context|seq|sequence)(_?(len|length))?(_tokens)?|seqlen"
_BATCH = r"batch(_?size)?|bs"
_MODE = ("pass_type", "pass", "phase", "mode", "direction", "stage")
_PRECISION = ("precision", "dtype", "data_type")
# Parts of a heading: what is timed, in which unit, and what is no mean.
_PHASES = {
    BOTH: r"(forward|fwd)_?(and|plus|\+)?_?(backward|bwd)|fwd_?bwd",
    FORWARD: r"forward|fwd|python|inference",
    BACKWARD: r"backward|bwd",
    STEP: r"step|train|training|total|full|iteration",
}
_UNITS = {"ms": "ms|milliseconds?|msec", "us": "us|µs|microseconds?", "ns": "ns|nanoseconds?", "s": "s|secs?|seconds?"}
_NO_MEAN = (
    r"std|stdev|stddev|sd|min|max|var|ci|low|high|p\d+|err(or)?|half_width|share|speedup|ratio|count|n|percentage|"
    r"gpu|launch|idle|traced|duration|loss|optimizer|peak|mem(ory)?|gb|bytes"
)
_MEAN = r"mean|avg|average|median|time|wall|latency|elapsed|python"
_OTHER_WAY = r"compiled?|triton|flash|bf16|fp16|amp|mixed"  # a column of another variant beside the plain one


class CsvRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what it is of, and its times, each with its unit ('' where the heading has none)."""

    number: int  # in the file, the heading being 1
    size: str
    context: int | None = None
    batch: int | None = None
    precision: str = ""
    trains: bool | None = None  # whether it is of a training step; None: it does not say
    times: dict[str, tuple[float, str]] = {}  # by FORWARD, BACKWARD, BOTH, STEP
    others: dict[str, str] = {}  # columns that are neither


class CsvTimings(msgspec.Struct, frozen=True, kw_only=True):
    """A file of timings."""

    path: str
    columns: tuple[str, ...]
    rows: tuple[CsvRow, ...]


def read_timings(path: str | Path) -> CsvTimings:
    """Read a file; raises in one line where it is none, or has no column of sizes or of times."""
    path = Path(path).expanduser()
    table = _table(path, _text(path))
    if not table:
        raise FlopwiseError(f"{path} holds no table", "give a CSV with model size, context and times")
    header, *rows = table
    if len(header) > MOST_COLUMNS or len(rows) > MOST_ROWS:
        problem = f"{path} has {len(header):,} columns and {len(rows):,} rows"
        raise FlopwiseError(problem, f"a table of timings has up to {MOST_COLUMNS:,} and {MOST_ROWS:,}")
    meaning = _Columns(header)
    names = ", ".join(f"'{one_line(name, 40)}'" for name in header[:_NAMED])
    more = f" and {len(header) - _NAMED} more" if len(header) > _NAMED else ""
    for missing, what, such in (
        (not meaning.sizes, "the model's size", "model_size, size, model, workload, file"),
        (not meaning.times, "the time of a pass", "forward_mean_ms, backward_ms, step_s; or pass_type and avg_time_ms"),
    ):
        if missing:
            raise FlopwiseError(
                f"{path}: no column has {what}; columns found: {names}{more}", f"name one of them: {such}"
            )
    read = [meaning.row(number, row) for number, row in enumerate(rows, 2)]
    found = tuple(row for row in read if row is not None)
    if not any(row.times for row in found):
        raise FlopwiseError(f"{path}: no row has a time; columns found: {names}{more}", "are times and sizes numbers?")
    return CsvTimings(path=str(path), columns=tuple(header), rows=found)


def _text(path: Path) -> str:
    hint = "give the CSV that your benchmark wrote"
    check_file(path, hint)
    n_bytes = path.stat().st_size
    if n_bytes > LARGEST:
        limit = units.shown(LARGEST, "bytes")
        raise FlopwiseError(f"{path} has {units.shown(n_bytes, 'bytes')}: no table of timings has over {limit}", hint)
    raw = path.read_bytes()[:LARGEST]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise FlopwiseError(f"{path} is no text in UTF-8", f"{hint}; a spreadsheet saves one as CSV")
    return text


def _table(path: Path, text: str) -> list[list[str]]:
    """The rows, stripped; empty lines, lines after a # and a Markdown table's frame are left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    delimiter = max(_DELIMITERS, key=lambda one: (lines[0].count(one), -_DELIMITERS.index(one))) if lines else ","
    if delimiter == "|":
        return _markdown(lines)
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise FlopwiseError(f"{path} is no CSV: {error}", "is a quote left open?") from None
    comma = re.compile(r"(?<=\d),(?=\d)" if delimiter == ";" else r"(?!)")  # of a decimal, where columns have another
    return [[comma.sub(".", cell.strip()) for cell in row] for row in rows]


def _markdown(lines: Sequence[str]) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in cells if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


class _Columns:
    """What the columns mean."""

    def __init__(self, header: Sequence[str]) -> None:
        keys = [_key(name) for name in header]
        used: set[int] = set()

        def first(*patterns: str) -> int | None:
            places = (i for pattern in patterns for i, key in enumerate(keys) if re.fullmatch(pattern, key))
            place = next(places, None)
            used.update(() if place is None else (place,))
            return place

        self.size, self.case = first(*_SIZE), first(*_CASE)
        self.context, self.batch = first(_CONTEXT), first(_BATCH)
        self.mode, self.precision = first(*_MODE), first(*_PRECISION)
        self.sizes = self.size is not None or self.case is not None
        self.times: dict[str, tuple[int, str]] = {}
        whole = {} if self.mode is None else {OF_THE_ROW: rf"({_MEAN})(_({_MEAN}))*"}
        for phase, pattern in (whole | {name: rf"(.*_)?({words})(_.*)?" for name, words in _PHASES.items()}).items():
            ranked = [_rank(phase, key, pattern, i) for i, key in enumerate(keys) if i not in used]
            if best := min(filter(None, ranked), default=None):
                self.times[phase] = best[-2:]
                used.add(best[-2])
        self.ours = any(header[place] == "wall_ns" for place, _ in self.times.values())
        quiet = re.compile(rf"(unnamed.*|index)?|(.*_)?({_NO_MEAN}|{_MEAN}|{'|'.join(_UNITS.values())})(_.*)?")
        self.others = {header[i]: i for i, key in enumerate(keys) if i not in used and not quiet.fullmatch(key)}

    def row(self, number: int, cells: Sequence[str]) -> CsvRow | None:
        def cell(place: int | None) -> str:
            return cells[place] if place is not None and place < len(cells) else ""

        if not (size := cell(self.size) or cell(self.case)):
            return None
        if any(cell(place) and not _whole(cell(place)) for place in (self.context, self.batch)):
            return None  # a size that is none fits no trace
        mode, times = self._mode(cell(self.mode)), dict[str, tuple[float, str]]()
        for phase, (place, unit) in self.times.items():
            value = _number(cell(place))
            if value is not None and (phase or mode):
                times.setdefault(phase or mode, (value, unit))
        others = {one_line(name, 40): one_line(cell(i), 40) for name, i in self.others.items() if cell(i)}
        return CsvRow(
            number=number,
            size=one_line(size, 80),
            context=_whole(cell(self.context)),
            batch=_whole(cell(self.batch)),
            precision=cell(self.precision).lower()[:20],
            trains=mode != FORWARD if mode else None,
            times=times,
            others=others,
        )

    def _mode(self, text: str) -> str:
        key = _key(text)
        found = next((phase for phase, words in _PHASES.items() if re.fullmatch(rf"(.*_)?({words})(_.*)?", key)), "")
        return (
            BOTH if self.ours and found == BACKWARD else found
        )  # flopwise's phase 'backward' has the forward pass in it


def _rank(phase: str, key: str, pattern: str, place: int) -> tuple[int, bool, bool, int, str] | None:
    """How well a column is a phase's time, the least the best, with its place and unit; None where it is not."""
    bare, unit = _without_unit(key)
    if re.fullmatch(rf"(.*_)?({_NO_MEAN})(_.*)?", bare) or not re.fullmatch(pattern, bare):
        return None
    others = [q for q, words in _PHASES.items() if q != phase and re.fullmatch(rf"(.*_)?({words})(_.*)?", bare)]
    also = len(others) if phase not in (BOTH, OF_THE_ROW) else 0
    another_way = re.fullmatch(rf"(.*_)?({_OTHER_WAY})(_.*)?", bare) is not None
    no_mean = re.fullmatch(r"(.*_)?(mean|avg|average)(_.*)?", bare) is None
    return also, another_way, no_mean, place, unit


def _key(name: str) -> str:
    """A heading in one spelling.

    >>> _key("Forward Mean (ms)"), _key("forward+backward [s]"), _key("Unnamed: 0")
    ('forward_mean_ms', 'forward_backward_s', 'unnamed_0')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip()[:_LONGEST])
    return re.sub(r"[^0-9a-zµ]+", "_", words.lower()).strip("_")


def _without_unit(key: str) -> tuple[str, str]:
    """
    >>> _without_unit("forward_mean_ms"), _without_unit("forward_seconds"), _without_unit("forward_mean")
    (('forward_mean', 'ms'), ('forward', 's'), ('forward_mean', ''))
    """
    for unit, pattern in _UNITS.items():
        if found := re.search(rf"_?(?<![a-z])({pattern})(?=_|$)", key):
            return (key[: found.start()] + key[found.end() :]).strip("_"), unit
    return key, ""


def _number(text: str) -> float | None:
    """A time above zero; what follows it (a spread, a unit) is left out. None for anything else.

    >>> _number("12.5 ± 0.3"), _number("1,234.5"), _number("OOM"), _number("=1+1"), _number("-3"), _number("nan")
    (12.5, 1234.5, None, None, None, None)
    """
    found = re.match(r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+(?:[eE][+-]?\d{1,3})?)(?![\w.,])", text[:60])
    if found is None:
        return None
    value = float(found[1].replace(",", ""))
    return value if 0 < value < 1e15 else None


def _whole(text: str) -> int | None:
    """
    >>> _whole("512"), _whole("512.0"), _whole("many")
    (512, 512, None)
    """
    found = re.fullmatch(r"(\d{1,9})(?:\.0*)?", text)
    return int(found[1]) if found else None
