"""A workload is profiled, and its trace read back: phases and modules by their names, the profiler's cost beside."""

import gzip
import json

from flopwise.api.profile import profile
from flopwise.trace.kineto import read_kineto


def test_a_profile_holds_the_steps_with_their_phases_and_modules(tmp_path):
    run = profile("tiny", device="cpu", batch=1, context=8, seconds=0.2, steps=3, runs=tmp_path)
    (point,) = run.points
    assert point.status == "ok"
    assert point.traced_step_ns > 0
    path = run.path / "traces" / point.trace_file
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-written is left
    trace = read_kineto(path)
    ranges = {
        kind: [trace.names[i] for i in trace.ranges.filter(trace.ranges["kind"] == kind)["name"]]
        for kind in ("step", "module", "annotation")
    }
    assert len(ranges["step"]) == 3  # only the measured steps
    assert ranges["module"].count("blocks.1.attention.q") == 3
    for phase in ("forward", "loss", "backward", "optimizer"):
        assert ranges["annotation"].count(f"flopwise.{phase}") == 3
    assert trace.ops.filter(trace.ops["backward"]).height > 0
    assert "no kernel" in trace.notes[-1].text


def test_stacks_and_memory_are_recorded_only_if_asked_for(tmp_path):
    plain = profile("tiny", device="cpu", batch=1, context=8, seconds=0.2, steps=1, runs=tmp_path)
    full = profile(
        "tiny", device="cpu", batch=1, context=8, seconds=0.2, steps=1, stacks=True, memory=True, runs=tmp_path
    )
    kinds = []
    for run in (plain, full):
        with gzip.open(run.path / "traces" / run.points[0].trace_file) as file:
            kinds.append({event.get("cat") for event in json.load(file)["traceEvents"]})
    assert kinds[1] - kinds[0] >= {"python_function", "cpu_instant_event"}
