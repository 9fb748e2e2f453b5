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
from flopwise.trace.attribute import attribute
from flopwise.trace.read import read_trace
from flopwise.trace.rocprof import is_rocprof, read_rocprof


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
