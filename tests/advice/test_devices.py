"""A trace of a whole machine: what each device did is explained as if it had been traced alone."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from tests.trace.rocprof_made import rocprof_file, write_rocprof

from flopwise.advice.explained import explain_devices
from flopwise.analysis.together import together
from flopwise.api.explain import explain
from flopwise.errors import FlopwiseError
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.explain_view import explanation_view
from flopwise.render.one_screen import text
from flopwise.trace.read import read_trace
from flopwise.trace.tables import OP_INPUTS, SIZED_OPS, TABLES

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"
NSYS = FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"
FIGURES = ("steps", "gpu_ns", "busy_ns", "window_ns", "launches", "bound", "phases", "classes", "kernels")


@pytest.fixture(scope="module")
def alone():
    """One process on one GPU, without the sizes that a file of several processes does not keep."""
    whole = read_trace(NSYS)
    return replace(whole, sized_ops=pl.DataFrame(schema=SIZED_OPS), op_inputs=pl.DataFrame(schema=OP_INPUTS))


def machine(trace, count, *, own_numbers=False, later_ns=0):
    """The trace of so many processes that do the same, on a GPU each, one later than the other by `later_ns`."""
    made = {}
    for name in TABLES:
        table = getattr(trace, name)
        copies = []
        for i in range(count):
            changes = [pl.col("process") + 100 * i, pl.col("start_ns") + i * later_ns]
            changes += [pl.col("end_ns") + i * later_ns] if "end_ns" in table.columns else []
            changes += [pl.col("device") + i] if "device" in table.columns and not own_numbers else []
            changes += (
                [pl.col("graph_node").replace_strict({-1: -1}, default=pl.col("graph_node") + 10**6 * i)]
                if ("graph_node" in table.columns)
                else []
            )
            copies.append(table.with_columns(changes).select(table.columns))
        made[name] = pl.concat(copies).sort("start_ns", maintain_order=True)
    return replace(trace, **made)


@pytest.mark.parametrize(("count", "own_numbers"), [(2, False), (3, False), (2, True)])
def test_each_device_is_explained_as_if_alone(alone, count, own_numbers):
    expected = explain_devices(alone)
    found = explain_devices(machine(alone, count, own_numbers=own_numbers, later_ns=12_345))
    assert expected.devices == ()
    assert len(found.devices) == count
    for one in found.devices:
        for figure in FIGURES:
            assert getattr(one, figure) == getattr(expected, figure), figure
        assert one.devices == ()
    assert len({(e.device, e.process) for e in found.devices}) == count
    assert found.together.shortest_ns == found.together.longest_ns == expected.window_ns
    assert found.together.waited_for == ""


def test_another_than_the_busiest_can_be_asked_for(alone):
    two = machine(alone, 2)
    found = explain_devices(two, device=1)
    assert found.device == 1
    assert [e.device for e in found.devices] == [0, 1]
    with pytest.raises(FlopwiseError) as refused:
        explain_devices(two, device=7)
    assert refused.value.hint == "devices in it: 0, 1"


def test_a_device_that_did_next_to_nothing_is_not_explained(alone):
    """Peers copy a few bytes to a device that runs nothing of the job."""
    stray = alone.kernels.head(1).with_columns(pl.col("device") + 5, end_ns=pl.col("start_ns") + 100)
    found = explain_devices(replace(alone, kernels=pl.concat([alone.kernels, stray]).sort("start_ns")))
    assert (found.devices, found.together) == ((), None)


def test_the_screen_says_how_many_and_full_lists_them(alone):
    found = explain_devices(machine(alone, 3))
    assert any(note.startswith("3 devices take") for note in explanation_screen(found).notes)
    listed = next(table for table in explanation_view(found).tables if table.key == "devices")
    assert [row["device"] for row in listed.rows] == ["device 0", "device 1", "device 2"]


def test_which_device_is_shown_stands_in_the_first_line_whatever_room_there_is(alone):
    """A past bug: the note was the last, and a full screen had no place for it."""
    found = explain_devices(machine(alone, 2))
    assert " on device 0 of 2, NVIDIA H200" in text(explanation_screen(found)).splitlines()[0]
    assert "2 devices take 99.8 ms each, traced; --device N explains another" in explanation_screen(found).notes[1]


def test_processes_on_one_device_are_not_called_devices(alone):
    """A past bug: '2 devices … --device N explains another', which was refused."""
    found = explain_devices(machine(alone, 2, own_numbers=True))
    shown = text(explanation_screen(found))
    assert " on NVIDIA H200, 1 of 2 processes" in shown.splitlines()[0]
    assert "--device" not in shown
    assert any(note.startswith("2 processes on one device take") for note in explanation_screen(found).notes)


def test_a_process_has_the_systems_number(alone):
    listed = next(
        table
        for table in explanation_view(explain_devices(machine(alone, 2, own_numbers=True))).tables
        if table.key == "devices"
    )
    assert {row["device"] for row in listed.rows} == {"device 0 of process 691"}


def test_of_very_many_devices_it_says_how_many_worked(alone, monkeypatch):
    monkeypatch.setattr("flopwise.advice.explained._MOST_DEVICES", 2)
    found = explain_devices(machine(alone, 5))
    assert (found.together.devices, found.together.worked) == (3, 5)
    screen = explanation_screen(found)
    assert screen.where == "device 0 of 5, NVIDIA H200"
    assert any(note.startswith("The 3 busiest of 5 devices take") for note in screen.notes)


def test_of_rocprofs_file_too(tmp_path):
    found = explain(write_rocprof(tmp_path / "two.json", rocprof_file(steps=6, gpus=2)))
    assert [e.device for e in found.devices] == [0, 1]
    assert sum(e.gpu_ns * e.steps for e in found.devices) > found.gpu_ns * found.steps


def with_communication(e, ns):
    from flopwise.analysis.shares import Share

    share = Share(name="communication", gpu_ns=ns, share=0.1, count=4)
    return type(e)(**{field: getattr(e, field) for field in e.__struct_fields__} | {"classes": (*e.classes, share)})


def test_who_communicates_least_is_who_the_others_wait_for(alone):
    e = explain_devices(alone)
    step = e.window_ns
    ranks = [with_communication(e, share * step) for share in (0.30, 0.02, 0.25, 0.28)]
    found = together(["rank0", "rank1", "rank2", "rank3"], ranks)
    assert found.waited_for == "rank1"
    assert found.others_communication_ns == pytest.approx(0.28 * step)
    even = [with_communication(e, share * step) for share in (0.30, 0.28)]
    assert together(["a", "b"], even).waited_for == ""
    assert together(["a", "b"], [e, ranks[0]]).waited_for == ""  # one of them does not communicate: another job
