"""Events written as a beginning and an end read as whole ones do."""

from pathlib import Path
from typing import Any

import pytest
from test_kineto import TABLES, event, small_events, text_of

from flopwise.trace import kineto_stream
from flopwise.trace.kineto import read_kineto


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.json"
    path.write_text(text)
    return path


def halved(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ops, ranges and calls as a beginning and an end each, which says no more than where and when; in order of time."""
    halves: list[tuple[float, int, dict[str, Any]]] = []
    for e in events:
        if e["ph"] != "X" or e["cat"] in ("kernel", "gpu_memcpy"):
            halves.append((e["ts"], 1, e))
            continue
        halves.append((e["ts"], 1, {k: v for k, v in e.items() if k != "dur"} | {"ph": "B"}))
        end = round(e["ts"] + e["dur"], 3)
        halves.append((end, 0, {"ph": "E", "pid": e["pid"], "tid": e["tid"], "ts": end}))
    return [half for _, _, half in sorted(halves, key=lambda half: half[:2])]


@pytest.mark.parametrize("base_us", [0, 3_845_976_557_080, 1_790_857_026_000_000])
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_beginnings_and_ends_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_us: int, chunk: int
) -> None:
    """Whatever the chunks, and with absolute epochs (in quarters of a microsecond, which is what floats hold of these)."""
    monkeypatch.setattr(kineto_stream, "CHUNK_BYTES", chunk)
    events = [e | {k: round(4 * e[k]) / 4 for k in ("ts", "dur") if k in e} for e in small_events()]
    events = [e | {"ts": e["ts"] + base_us} for e in events]
    expected, trace = (
        read_kineto(written(tmp_path, text_of(events))),
        read_kineto(written(tmp_path, text_of(halved(events)))),
    )
    for name in TABLES:
        assert (
            getattr(trace, name).drop("name", strict=False).equals(getattr(expected, name).drop("name", strict=False))
        ), name
    assert not trace.notes


def test_halves_without_the_other_are_counted(tmp_path: Path) -> None:
    events = small_events()
    lone = [{"ph": "E", "pid": 9, "tid": 77, "ts": 1.0}, {**event("cpu_op", "x", 1, 1), "ph": "B"}]
    trace = read_kineto(written(tmp_path, text_of(events + lone)))
    assert [(note.key, note.text[:8]) for note in trace.notes] == [("unpaired", "2 events")]
    assert trace.ops.equals(read_kineto(written(tmp_path, text_of(events))).ops)
