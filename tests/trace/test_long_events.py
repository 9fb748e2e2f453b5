"""Events of years: dropped and counted, whatever the profiler, so that sums stay sums."""

import json

import pytest
from rocprof_made import rocprof_file, write_rocprof

from flopwise.api.explain import explain


@pytest.mark.parametrize("longest", [1e15, 1e300])
def test_an_event_of_years_is_dropped_and_sums_do_not_overflow(tmp_path, longest):
    """A past bug: twenty kernels of 31 years each summed up to less than nothing."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": i, "dur": longest if i % 2 else 1}
        for i in range(40)
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    e = explain(tmp_path / "t.json")
    assert (e.gpu_ns, e.note_keys[0]) == (20_000, "dropped")
    content = rocprof_file()
    for one in content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][1:]:
        one["end_timestamp"] = 2**60
    assert explain(write_rocprof(tmp_path / "r.json", content)).gpu_ns < 1e9
