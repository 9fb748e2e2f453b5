"""An agent that asks for a damaged run is told what of it is lost, by every tool that reads one."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from flopwise.records.run import STEP, Environment, PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run, StoredRun, files
from flopwise.store.rows import append_row

pytest.importorskip("mcp")
from flopwise.integrations.mcp.folder import Folder
from flopwise.integrations.mcp.server import answered
from flopwise.integrations.mcp.tools import MOST_NOTES

TRACES = Path(__file__).parents[1] / "trace" / "fixtures"
TRACE = "h200-small-bf16-compiled-2steps.kineto.json.gz"
TRIALS = [Trial(workload=workload("tiny", batch=n + 1), sampling=Sampling(samples=9), device="cuda") for n in range(3)]


def stored(root, name, kind="profile", trials=TRIALS, **more):
    """A run of some points, the first of which is traced."""
    with Run.create(root, kind, name, "flopwise profile", trials) as run:
        shutil.copy(TRACES / TRACE, run.trace_path(TRACE))
        for n, trial in enumerate(trials):
            phases = (PhaseTimes(phase=STEP, wall_ns=(1_000_000,) * 9),)
            traced = {"trace_file": TRACE} if n == 0 else {}
            run.append(Point(key=trial.key(), trial=trial, status="ok", phases=phases, **traced, **more))
    return run.path


def change_a_row(path):
    spoil(path / "points.jsonl")


def lose_a_row(path):
    rows = (path / "points.jsonl").read_bytes().split(b"\n")
    (path / "points.jsonl").write_bytes(b"\n".join((rows[0], *rows[2:])))


def change_the_header(path):
    text = (path / "run.json").read_bytes()
    (path / "run.json").write_bytes(text.replace(b"flopwise profile", b"flopwise profilf"))


def spoil(table, *lines):
    rows = table.read_bytes().split(b"\n")
    for line in lines or (1,):
        rows[line] = rows[line].replace(b'"status":"ok"', b'"status":"ko"')
    table.write_bytes(b"\n".join(rows))


CALLS = {
    "runs": lambda run, whole: {},
    "summary": lambda run, whole: {"target": run},
    "findings": lambda run, whole: {"target": run},
    "kernels": lambda run, whole: {"target": run},
    "summary with its timings": lambda run, whole: {"target": whole, "timings": run},
    "compare": lambda run, whole: {"a": run, "b": whole},
    "compare the other way": lambda run, whole: {"a": whole, "b": run},
}


def ask(folder, call, *names):
    return answered(folder, call.split()[0], CALLS[call](*names)).model_dump_json()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("damage", [change_a_row, lose_a_row, change_the_header])
@pytest.mark.parametrize("call", CALLS)
def test_every_tool_says_what_is_lost(call, damage, tmp_path):
    path, whole = stored(tmp_path / "runs", "one"), stored(tmp_path / "runs", "two")
    folder = Folder.at(tmp_path, tmp_path / "runs")
    assert "damaged" not in ask(folder, call, path.name, whole.name)
    damage(path)
    said = [json.dumps(line)[1:-1] for line in StoredRun.load(path).left_out]
    assert said
    answer = ask(folder, call, path.name, whole.name)
    assert any(line in answer for line in said), answer
    if call in ("compare", "compare the other way", "summary"):
        assert all(line in answer for line in said), answer


def test_a_run_with_its_trace_is_still_shown_and_says_why_the_trace_is_not(tmp_path):
    path = stored(tmp_path / "runs", "one")
    folder = Folder.at(tmp_path, tmp_path / "runs")
    assert answered(folder, "summary", {"target": path.name}).structured_content["trace"] is not None
    change_a_row(path)
    answer = answered(folder, "summary", {"target": path.name})
    assert not answer.is_error
    assert answer.structured_content["trace"] is None
    assert len(answer.structured_content["run"]["points"]) == 2
    assert "its trace is not explained" in answer.structured_content["run"]["warnings"][0]


class Row(msgspec.Struct):
    """As much of a row as every table has."""

    row: str = "ended"
    status: str = "ok"


@pytest.mark.parametrize(("kind", "table"), [("tune", files.TUNING), ("train", files.TRAINING), ("lab", files.LAB)])
@pytest.mark.parametrize("call", ["runs", "summary"])
def test_rows_of_a_tuning_a_training_or_the_lab_count_too(call, kind, table, tmp_path):
    path = stored(tmp_path / "runs", "one", kind, () if kind != "tune" else TRIALS[:1])
    for _ in range(3):
        append_row(path / table, Row())
    folder = Folder.at(tmp_path, tmp_path / "runs")
    assert "damaged" not in ask(folder, call, path.name, path.name)
    spoil(path / table)
    assert f"{table}: line 2 is damaged" in ask(folder, call, path.name, path.name)


def test_very_many_lines_are_counted(tmp_path):
    trials = [msgspec.structs.replace(TRIALS[0], group=str(n)) for n in range(MOST_NOTES + 10)]
    path = stored(tmp_path / "runs", "one", "bench", trials)
    spoil(path / "points.jsonl", *range(1, MOST_NOTES + 8))
    warnings = answered(Folder.at(tmp_path, tmp_path / "runs"), "runs", {}).structured_content["runs"][0]["warnings"]
    assert "7 more lines cannot be read" in warnings[-1]
    assert len(warnings) == MOST_NOTES + 1


def test_a_comparison_across_environments_says_so(tmp_path):
    here = Environment(flopwise="1", python="3", torch="2.11.0")
    there = msgspec.structs.replace(here, torch="2.13.0")
    a, b = (stored(tmp_path / "runs", torch.torch, environment=torch) for torch in (here, there))
    folder = Folder.at(tmp_path, tmp_path / "runs")
    found = answered(folder, "compare", {"a": a.name, "b": b.name}).structured_content
    assert "A torch 2.11.0; B torch 2.13.0" in found["different_environments"]
    same = answered(folder, "compare", {"a": a.name, "b": a.name}).structured_content
    assert same["different_environments"] == ""
