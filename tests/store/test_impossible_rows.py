"""Numbers that no program can have, in the files of a run: the row is left out with a line, or the file is refused in one."""

import json
import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.records.possible import MOST_NS, impossible
from flopwise.records.run import PhaseMemory, PhaseTimes, RunHeader
from flopwise.store import StoredRun
from flopwise.store.rows import read_table
from flopwise.units import unit_of
from fuzzing import CORPORA, TARGETS, tried

ODD = [-1, -(10**9), 2**63, 10**30, 10**400, -(10**400), 1e308, -1e308]
JSON = [target for target in TARGETS if target.name in ("store-header", "store-rows", "ceilings", "plan", "config")]


def places(value, path=()):
    """Where the numbers of a document are."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, one in items for place in places(one, (*path, key))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []


def put(document, place, value):
    *inner, last = place
    for key in inner:
        document = document[key]
    document[last] = value


@pytest.mark.parametrize("target", JSON, ids=lambda target: target.name)
def test_no_odd_number_anywhere_in_a_file_breaks_its_reader(tmp_path, target):
    """Each is answered or refused in one line, whatever number is spoiled."""
    chance = random.Random(7)
    sound = (text for name, text in target.corpus.items() if not re.match(r"[0-9a-f]{8}\.", name))
    usual = [text for text in sound if tried(target, text, tmp_path) == ("", "")]
    assert usual
    for text in usual[-2:]:
        lines = text.splitlines() if target.name == "store-rows" else [text]
        found = [(n, place) for n, line in enumerate(lines) for place in places(json.loads(line))]
        for n, place in chance.sample(found, min(40, len(found))):
            document = json.loads(lines[n])
            put(document, place, chance.choice([*ODD, True]))
            changed = [*lines[:n], json.dumps(document).encode(), *lines[n + 1 :]]
            assert not (wrong := tried(target, b"\n".join(changed) + b"\n", tmp_path).wrong), (place, wrong)


@pytest.mark.parametrize("value", ODD)
def test_a_time_that_no_step_takes_is_not_shown(tmp_path, value):
    for name in ("run.json", "points.jsonl"):
        (tmp_path / name).write_bytes((CORPORA / "store-whole" / name).read_bytes())
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seal", None)
    rows[0]["phases"][0]["wall_ns"][0] = value
    (tmp_path / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.json").unlink(missing_ok=True)
    run = StoredRun.load(tmp_path)
    assert len(run.points) == len(rows) - 1
    assert any("line 1 " in warning and "\n" not in warning for warning in run.warnings)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5))
def test_times_are_possible_if_each_of_them_is(wall_ns):
    times = PhaseTimes(phase="step", wall_ns=tuple(wall_ns))
    assert (impossible(times) == "") == all(0 <= one <= MOST_NS for one in wall_ns)
    assert impossible((PhaseTimes(phase="step", wall_ns=(1,)), times)) == impossible(times)


def test_sizes_by_owner_are_looked_at():
    sizes = {"start_bytes": 1, "peak_bytes": 2, "end_bytes": 1, "reserved_bytes": 3}
    assert impossible(PhaseMemory(phase="step", **sizes)) == ""
    assert impossible(PhaseMemory(phase="step", **sizes | {"peak_bytes": -2})) == "peak_bytes = -2"


def test_what_has_a_unit_in_its_name_is_a_quantity():
    assert unit_of("wall_ns") == "ns"
    assert impossible(RunHeader(id="a", kind="bench", created_at="", created_ns=-5)) == "created_ns = -5"


def test_a_table_of_nothing_but_damage_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("flopwise.store.rows.MOST_DAMAGED", 50)
    table = tmp_path / "points.jsonl"
    table.write_bytes(b"{}\n" * 50)
    warnings = read_table(table, PhaseTimes).warnings
    assert len(warnings) == 21
    assert "30 more lines" in warnings[-1]
    for line in (b"{}\n", b"\n"):
        table.write_bytes(line * 51)
        with pytest.raises(FlopwiseError, match="more than 50 of its lines"):
            read_table(table, PhaseTimes)


def test_a_long_table_with_some_damage_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("flopwise.store.rows.MOST_DAMAGED", 50)
    sound = b'{"phase":"step","wall_ns":[5]}\n'
    (tmp_path / "points.jsonl").write_bytes((sound * 3 + b"{}\n") * 49)
    assert len(read_table(tmp_path / "points.jsonl", PhaseTimes).rows) == 147


@pytest.mark.parametrize("name", ["peak_flops_s", "bus_bytes_s", "flops_per_s"])
def test_a_rate_is_no_time(name):
    kind = msgspec.defstruct("Rates", [(name, float)])
    assert impossible(kind(9.9e14)) == ""
    assert impossible(kind(-1.0)).startswith(name)
