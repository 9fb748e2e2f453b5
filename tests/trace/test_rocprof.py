"""rocprofv3's JSON: every record is in the trace once, launches lead to their kernels, and no file breaks the reader."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.trace.rocprof_made import rocprof_file, write_rocprof

from flopwise.analysis.explanation import explain_trace
from flopwise.api.explain import explain
from flopwise.errors import FlopwiseError
from flopwise.snapshot.unpickle import read_pickle
from flopwise.trace import input_file, rocprof, rocprof_names, rocprof_stream, spilled, window
from flopwise.trace.attribute import attribute
from flopwise.trace.read import read_trace
from flopwise.trace.rocprof import is_rocprof, read_rocprof
from flopwise.trace.tables import TABLES


@pytest.fixture
def made(tmp_path):
    return write_rocprof(tmp_path / "4242_results.json", rocprof_file())


def test_every_record_is_there_once_and_time_begins_at_zero(made):
    trace = read_trace(made)
    heights = {
        name: getattr(trace, name).height for name in ("kernels", "copies", "launches", "syncs", "ranges", "ops")
    }
    assert heights == {"kernels": 9, "copies": 3, "launches": 12, "syncs": 3, "ranges": 3, "ops": 0}
    assert (trace.source, trace.gpu, trace.notes) == ("rocprof", "AMD Instinct MI300X", ())
    assert trace.ranges["start_ns"].to_list() == [0, 1_000_000, 2_000_000]
    assert trace.kernels["process"].unique().to_list() == [4242]
    assert set(trace.copies["kind"]) == {"HtoD"}


def test_each_kernel_has_its_launch_and_its_class(made):
    table = attribute(read_trace(made)).table
    assert set(table["attributed"]) == {"launch"}
    by_name = dict(table.select(table["name"].cast(str), table["class"].cast(str)).iter_rows())
    assert by_name == {
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x1_SN": "matmul",
        "void aiter::add_rmsnorm_quant_kernel<__bf16, 64>(__bf16*)": "normalisation",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
        "(int, at::native::FillFunctor<float>)": "memory",
        "Memcpy HtoD": "memory",
    }


def test_it_is_explained(made):
    explained = explain(made)
    (one,) = explained if isinstance(explained, list | tuple) else (explained,)
    assert (one.gpu, one.steps) == ("AMD Instinct MI300X", 3)
    assert sum(part.gpu_ns for part in one.classes) == pytest.approx(one.gpu_ns)


def test_gzip_and_an_object_without_a_list_are_read_alike(made, tmp_path):
    plain = read_rocprof(made)
    packed = tmp_path / "results.json.gz"
    packed.write_bytes(gzip.compress(made.read_bytes()))
    content = rocprof_file()
    single = write_rocprof(tmp_path / "single.json", {"rocprofiler-sdk-tool": content["rocprofiler-sdk-tool"][0]})
    for other in (read_trace(packed), read_trace(single)):
        assert other.kernels.equals(plain.kernels)
        assert other.names == plain.names


def test_gpus_keep_their_numbers(tmp_path):
    trace = read_trace(write_rocprof(tmp_path / "two.json", rocprof_file(steps=4, gpus=2)))
    assert trace.kernels["device"].to_list() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3


def test_a_gpu_that_only_has_its_architectures_name_is_known_by_its_size(tmp_path):
    content = rocprof_file()
    content["rocprofiler-sdk-tool"][0]["agents"][1]["product_name"] = ""
    assert read_trace(write_rocprof(tmp_path / "r.json", content)).gpu == "AMD Instinct MI300X 192 GB"


def test_records_without_a_time_are_dropped_and_counted(tmp_path):
    content = rocprof_file()
    kernels = content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"]
    kernels[0]["end_timestamp"] = 5
    del kernels[1]["start_timestamp"]
    trace = read_trace(write_rocprof(tmp_path / "r.json", content))
    assert trace.kernels.height == 7
    assert [note.text for note in trace.notes] == ["2 records without a usable time or of a negative duration: dropped"]


def test_without_kernels_it_says_so(tmp_path):
    content = rocprof_file()
    content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"] = []
    assert [note.key for note in read_trace(write_rocprof(tmp_path / "r.json", content)).notes] == ["no_kernels"]


@pytest.mark.parametrize("tool", [[], {}, [{}], [{"buffer_records": {"kernel_dispatch": []}}]])
def test_a_file_of_nothing_is_refused(tmp_path, tool):
    with pytest.raises(FlopwiseError, match="has no kernel"):
        read_trace(write_rocprof(tmp_path / "r.json", {"rocprofiler-sdk-tool": tool}))


def test_a_file_cut_short_is_refused(made, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_bytes(made.read_bytes()[:-500])
    assert is_rocprof(cut)
    with pytest.raises(FlopwiseError) as refused:
        read_trace(cut)
    assert "copy the whole file again" in refused.value.hint


def test_the_two_dialects_of_kinds(tmp_path):
    """Newer versions write a kind and an operation as text."""
    content = rocprof_file()
    for call in content["rocprofiler-sdk-tool"][0]["buffer_records"]["hip_api"]:
        call["operation"] = ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize"][call["operation"]]
        call["kind"] = "HIP_RUNTIME_API"
    assert read_trace(write_rocprof(tmp_path / "r.json", content)).syncs.height == 3


def test_an_odd_kind_leaves_the_others_their_places(tmp_path):
    content = rocprof_file()
    content["rocprofiler-sdk-tool"][0]["strings"]["buffer_records"][0] = 7
    assert read_trace(write_rocprof(tmp_path / "r.json", content)).syncs.height == 3


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.just([]), st.just({})
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(tmp_path, data):
    content = rocprof_file(steps=1)
    node = content["rocprofiler-sdk-tool"]
    for _ in range(data.draw(st.integers(1, 7))):
        if not isinstance(node, dict | list) or not node:
            break
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        parent, node = node, node[key]
    parent[key] = data.draw(VALUES)
    path = write_rocprof(tmp_path / "r.json", content)
    try:
        trace = read_trace(path)
    except FlopwiseError:
        return
    explained = explain_trace(trace) if trace.kernels.height else None
    assert explained is None or explained.gpu_ns >= 0


@pytest.mark.parametrize(
    "text", ['{"rocprofiler-sdk-tool": [', '{"rocprofiler-sdk-tool": 7}', '{"rocprofiler-sdk-tool": [[[[]]]]}']
)
def test_what_only_begins_like_one_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FlopwiseError, match="is not rocprofv3's JSON"):
        read_trace(path)


def test_a_pytorch_trace_is_not_taken_for_one(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": []}))
    assert not is_rocprof(path)
    assert not is_rocprof(tmp_path / "none.json")


def _tables(trace):
    return {name: getattr(trace, name).to_dicts() for name in TABLES} | {"names": trace.names, "notes": trace.notes}


@pytest.mark.parametrize("chunk", [1, 7, 100, 1000])
def test_the_pieces_in_which_a_file_is_read_change_nothing(made, monkeypatch, chunk):
    whole = read_rocprof(made)
    monkeypatch.setattr(rocprof_stream, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(rocprof_stream, "MOST_CHUNK_BYTES", chunk)
    assert _tables(read_rocprof(made)) == _tables(whole)


def test_lists_are_read_in_any_order(made, tmp_path):
    content = rocprof_file()
    (process,) = content["rocprofiler-sdk-tool"]
    backwards = {key: process[key] for key in reversed(process)}
    other = read_rocprof(write_rocprof(tmp_path / "r.json", {"rocprofiler-sdk-tool": [backwards]}))
    mine, theirs = explain_trace(read_rocprof(made)), explain_trace(other)
    assert other.ranges.height == 3
    assert [(one.name, one.gpu_ns) for one in mine.kernels] == [(one.name, one.gpu_ns) for one in theirs.kernels]


def test_of_a_long_file_whole_steps_are_kept(tmp_path, monkeypatch):
    path = write_rocprof(tmp_path / "r.json", rocprof_file(steps=40))
    whole = read_rocprof(path)
    for module in (window, rocprof):
        monkeypatch.setattr(module, "MOST_ROWS", 400)
    for module in (spilled, rocprof):
        monkeypatch.setattr(module, "PIECE_ROWS", 10)
    monkeypatch.setattr(rocprof_stream, "CHUNK_BYTES", 1000)
    part = read_rocprof(path)
    steps, rest = divmod(part.kernels.height, 3)
    assert (rest, part.notes[0].key) == (0, "window")
    assert 3 < steps < 30
    assert part.launches.height == 4 * steps
    cut, all_of_it = explain_trace(part), explain_trace(whole)
    assert cut.steps == steps
    assert {one.name: one.gpu_ns for one in cut.kernels} == pytest.approx(
        {one.name: one.gpu_ns for one in all_of_it.kernels}
    )


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("EVENT_BYTES", 100, "is larger than 0 MiB"),
        ("MOST_LISTS", 3, "more than 3 lists"),
        ("NESTING", 2, "nested more than 2 deep"),
        ("_MANY", 2, "say next to nothing"),
    ],
)
def test_what_no_profiler_writes_is_refused_in_one_line(made, monkeypatch, limit, value, said):
    monkeypatch.setattr(rocprof_stream, limit, value)
    monkeypatch.setattr(rocprof_stream, "_SHORTEST", 10_000)
    monkeypatch.setattr(rocprof_stream, "CHUNK_BYTES", 200)
    with pytest.raises(FlopwiseError, match=said) as refused:
        read_rocprof(made)
    assert "\n" not in refused.value.message
    assert refused.value.hint


def test_names_beyond_the_limit_are_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rocprof_names, "MAX_NAMES", 4)
    trace = read_rocprof(write_rocprof(tmp_path / "r.json", rocprof_file(steps=9)))
    assert "names" in [note.key for note in trace.notes]
    assert len(trace.names) <= 5
    assert trace.kernels.height == 27


@pytest.mark.parametrize(("name", "reads"), [("json", read_trace), ("sqlite", read_trace), ("pickle", read_pickle)])
def test_a_gzip_file_of_empty_parts_is_refused_early(made, tmp_path, monkeypatch, name, reads):
    monkeypatch.setattr(input_file, "MEMBERS_FREE", 10_000)
    many = tmp_path / f"many.{name}.gz"
    start = input_file.SQLITE_MAGIC if name == "sqlite" else made.read_bytes()
    many.write_bytes(gzip.compress(start) + gzip.compress(b"") * 50_000)
    with pytest.raises(FlopwiseError, match="less than half of its size"):
        reads(many)


def test_a_gzip_file_of_two_parts_is_read(made, tmp_path):
    halves = made.read_bytes()[:5000], made.read_bytes()[5000:]
    (tmp_path / "two.json.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    assert read_trace(tmp_path / "two.json.gz").kernels.height == 9
