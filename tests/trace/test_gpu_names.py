"""What the GPUs of a trace are called: each device by its own name; by size only as far as a size tells."""

import gzip
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from rocprof_made import mi300x, rocprof_file, write_rocprof

from flopwise.api.explain import explain
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.one_screen import text
from flopwise.spec.gpu import find_gpu
from flopwise.trace.gpu_names import MOST_GPUS, Described, device_name, name_on
from flopwise.trace.read import read_trace
from flopwise.trace.tables import NO_ID, DeviceName

CALLS, WORK = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
FIXTURES = Path(__file__).parent / "fixtures"
H200, A100, MI250 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI250X / MI250"


@pytest.mark.parametrize(
    ("described", "name", "key"),
    [
        (Described(H200, 132, 150109880320, "9.0"), H200, None),
        (Described("", 132, 150109880320, "9.0"), "H200 SXM 141 GB", "gpu_by_size"),
        (Described(MI250, 104, 68702699520, ""), "AMD Instinct MI210, or one die of an MI250, 64 GB", "gpu_by_size"),
        (Described(MI250, 110, 68702699520, ""), "AMD Instinct MI250X, one die, 64 GB", "gpu_by_size"),
        (Described("", 142, 47 * 10**9, "8.9"), "", "gpu_unsure"),  # an L40, or an L40S with twice its rate
        (Described("", 46, 83 * 10**8), "", "gpu_unsure"),  # an RTX 2080 or 3070, if the capability is not known
        (Described("", 46, 83 * 10**8, "8.6"), "GeForce RTX 3070 8 GB", "gpu_by_size"),
        (Described("Voodoo", 3, 10**9, "9.0"), "Voodoo", None),
        (Described("", 2, 95 * 10**9), "Google TPU v5p 95 GB", "gpu_by_size"),
    ],
)  # fmt: skip
def test_a_size_is_believed_as_far_as_it_tells(described, name, key):
    found = device_name(described)
    assert (found.name, found.note.key if found.note else None) == (name, key)


def test_the_note_names_what_else_has_this_size():
    note = device_name(Described("", 132, 150109880320, "9.0")).note.text
    assert note.endswith(
        "taken for H200 SXM 141 GB, but H200 NVL 141 GB and GH200 144 GB HBM3e have as many: --gpu names it"
    )
    unsure = device_name(Described("", 142, 47 * 10**9, "8.9")).note.text
    assert unsure.endswith("it is L40 48 GB, L40S 48 GB or RTX 6000 Ada 48 GB: --gpu says which")


def test_a_name_as_long_as_a_book_is_no_gpus_and_takes_no_time():
    """A past bug: a name of a megabyte took minutes to compare with what drivers print."""
    assert find_gpu("a100" + "80gb" * 250_000) is None


def test_of_devices_with_one_number_the_first_counts_and_others_are_bounded(tmp_path):
    listed = [{"id": 0, "name": H200}, {"id": 0, "name": A100}, *({"id": i, "name": A100} for i in range(1, 3000))]
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    (tmp_path / "t.json").write_text(json.dumps({"deviceProperties": listed, "traceEvents": [op]}))
    trace = read_trace(tmp_path / "t.json")
    assert (trace.gpu, len(trace.gpus)) == (H200, MOST_GPUS - 1)


def test_a_device_that_is_not_listed_has_the_name_that_all_have():
    one, other = DeviceName("a"), DeviceName("b")
    assert name_on({(NO_ID, 0): one, (NO_ID, 1): one}, 9, 5) == one
    assert name_on({(NO_ID, 0): one, (NO_ID, 1): other}, 9, 5) == DeviceName()
    assert name_on({(NO_ID, 0): one, (5, 0): other}, 0, 5) == other
    assert name_on({}, 0, 0) == DeviceName()


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory):
    """The H200 trace, and all of its work once more on an A100 that the same process drives."""
    packed = (FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz").read_bytes()
    content = json.loads(gzip.decompress(packed))
    first = content["deviceProperties"][0]
    second = {**first, "id": 1, "name": A100, "numSms": 108, "totalGlobalMem": 85 * 10**9, "computeMajor": 8}
    content["deviceProperties"].append(second)
    kinds = {name: [e for e in content["traceEvents"] if e.get("cat") in name] for name in (CALLS, WORK)}
    calls, work = {e["args"].get("correlation"): e for e in kinds[CALLS]}, kinds[WORK]
    for one in work:
        number = one["args"]["correlation"] + 10**7
        args = {**one["args"], "device": 1, "correlation": number}
        content["traceEvents"].append({**one, "pid": 1, "dur": 0.9 * one["dur"], "args": args})
        call = calls.get(one["args"]["correlation"])
        if call is not None:
            content["traceEvents"].append({**call, "args": {**call["args"], "correlation": number}})
    path = tmp_path_factory.mktemp("kinds") / "two.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    return path


def test_the_limits_of_a_device_are_its_own(two_kinds):
    """A past bug: every device had the first one's name, and its limit."""
    first, second = explain(two_kinds), explain(two_kinds, device=1)
    assert (first.gpu, second.gpu) == (H200, A100)
    assert second.reach.limit_ns == pytest.approx(first.reach.limit_ns * 989.4 / 312, rel=0.01)
    assert [one.gpu for one in first.devices] == [H200, A100]


def test_nsys_numbers_gpus_by_process(tmp_path):
    path = tmp_path / "two.sqlite"
    with gzip.open(FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz") as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file)
    with sqlite3.connect(path) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(TARGET_INFO_GPU)")]
        other = {
            "id": "5",
            "cuDevice": "5",
            "name": "''",
            "smCount": "108",
            "totalMemory": "84987740160",
            "computeMajor": "8",
        }
        chosen = ", ".join(other.get(name, f'"{name}"') for name in columns)
        db.execute(f"INSERT INTO TARGET_INFO_GPU SELECT {chosen} FROM TARGET_INFO_GPU")
        (pid,) = db.execute("SELECT pid FROM TARGET_INFO_CUDA_DEVICE").fetchone()
        db.execute("UPDATE TARGET_INFO_CUDA_DEVICE SET gpuId = 5")  # CUDA_VISIBLE_DEVICES=5: its number 0
    db.close()
    trace = read_trace(path)
    process = trace.kernels["process"][0]
    assert (process >> 24) & 0xFFFFFF == pid
    assert (trace.gpu, name_on(trace.gpus, 0, process).name) == (H200, "A100 SXM 80 GB")
    assert explain(path).gpu == "A100 SXM 80 GB"


def test_rocprof_says_that_a_name_is_a_guess(tmp_path):
    content = rocprof_file()
    content["rocprofiler-sdk-tool"][0]["agents"][1] = mi300x(product="")
    found = explain(write_rocprof(tmp_path / "r.json", content))
    assert "gpu_by_size" in found.note_keys
    assert " on AMD Instinct MI300X 192 GB (by size)" in text(explanation_screen(found)).splitlines()[0]
