"""The facts must agree with each other: a sparse peak or a mistyped digit breaks a law."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.datasheet import from_datasheet
from flopwise.spec.gpu import PEAK_DTYPES, find_gpu, gpu, gpu_names, gpus_of_size

REAL = [name for name in gpu_names() if name not in ("cpu", "tpu-v5p")]
GEFORCE = [name for name in REAL if gpu(name).title.startswith("GeForce")]
BEFORE_AMPERE = [name for name in REAL if gpu(name).capability.startswith("7.")]
AMD = [name for name in REAL if name.startswith("mi")]
WITH_TF32 = [name for name in REAL if gpu(name).peak("tf32")]


@pytest.mark.parametrize("name", [n for n in gpu_names() if gpu(n).tensor_clock_hz])
def test_the_peak_is_units_times_clock_times_work_per_clock(name):
    one = gpu(name)
    built = one.sms * one.tensor_flops_per_clock * one.tensor_clock_hz
    assert one.peak("fp16") == pytest.approx(built, rel=0.02)


@pytest.mark.parametrize("name", REAL)
def test_half_precision_has_one_rate_and_fp8_twice_it(name):
    one = gpu(name)
    assert one.peak("bf16") in (None, one.peak("fp16"))
    assert one.peak("fp8") is None or one.peak("fp8") == pytest.approx(2 * one.peak("fp16"), rel=0.02)


def test_bf16_and_tf32_came_with_ampere():
    assert {name for name in REAL if gpu(name).peak("bf16") is None} == set(BEFORE_AMPERE)
    no_tf32 = {name for name in REAL if gpu(name).peak("tf32") is None}
    assert no_tf32 == {*BEFORE_AMPERE, "mi210", "mi250x", "mi355x", "mi350x"}
    assert {name for name in REAL if gpu(name).peak("fp8")} == {
        name
        for name in REAL
        if gpu(name).capability in ("8.9", "9.0", "10.0", "10.3", "12.0") or name.startswith("mi3")
    }


@pytest.mark.parametrize("name", WITH_TF32)
def test_tf32_runs_at_half_the_half_precision_rate(name):
    assert gpu(name).peak("tf32") == pytest.approx(gpu(name).peak("bf16") / 2, rel=0.02)


@pytest.mark.parametrize("name", [name for name in GEFORCE if name in WITH_TF32])
def test_geforce_tf32_is_the_vector_rate_because_fp32_accumulation_is_halved(name):
    assert gpu(name).peak("tf32") == pytest.approx(gpu(name).peak("fp32"), rel=0.02)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [  # of the whitepapers' tables, with fp32 accumulation, without sparsity
        ("rtx2080ti", "fp16", 53.8), ("rtx2080", "fp16", 40.3), ("rtx2070", "fp16", 29.9), ("rtx2080ti", "fp32", 13.4),
        ("rtx3080", "fp16", 59.5), ("rtx3070", "fp16", 40.6), ("rtx3090", "fp32", 35.6), ("rtx4080", "fp16", 97.5),
        ("rtx4090", "fp8", 330.3), ("rtx5090", "bf16", 209.5), ("rtx5080", "bf16", 112.6), ("rtx5070ti", "fp32", 43.9),
    ],
)  # fmt: skip
def test_geforce_rates_are_those_of_the_whitepapers(name, dtype, tflops):
    assert gpu(name).peak(dtype) / 1e12 == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize("name", REAL)
def test_no_ridge_is_beyond_what_chips_are_built_for(name):
    """A sparse peak, or a bandwidth in the wrong unit, would put it outside; the H20 has memory beyond its matmuls' need."""
    assert (
        (30 if name.startswith("h20") and "0-nvl" not in name and name != "h200" else 60)
        < gpu(name).ridge("fp16")
        < 420
    )


@pytest.mark.parametrize("name", [name for name in REAL if name not in AMD])
def test_matmuls_in_half_precision_are_faster_than_vectors_by_what_tensor_cores_bring(name):
    ratio = gpu(name).peak("fp16") / gpu(name).peak("fp32")
    assert 1.9 < ratio < 32


@pytest.mark.parametrize(("name", "lecture_flops"), [("a100", 312e12), ("h100", 1979e12 / 2)])
def test_the_lectures_peaks_are_dense(name, lecture_flops):
    assert gpu(name).peak("bf16") == pytest.approx(lecture_flops, rel=0.001)


def test_every_gpu_names_its_sources_and_only_known_dtypes():
    for name in gpu_names():
        one = gpu(name)
        assert one.sources, name
        assert set(one.peaks) <= set(PEAK_DTYPES), name
        assert (one.matmul_share_seen is None) == (one.matmul_source == ""), name
        assert name == "cpu" or all("https://" in source or "driver" in source for source in one.sources), name


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-SXM4-40GB", "a100-40"), ("NVIDIA A100 80GB PCIe", "a100-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("Tesla A100-PCIE-40GB", "a100-pcie-40"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 120GB", "gh200"), ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA B200", "b200"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("GeForce RTX 5090", "rtx5090"), ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI300X OAM", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100"), ("Tesla V100-SXM2-16GB", "v100-16"), ("Tesla V100-PCIE-16GB", "v100-pcie-16"),
        ("Tesla V100S-PCIE-32GB", "v100s"), ("Tesla T4", "t4"), ("NVIDIA A10", "a10"), ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"), ("4080 Super", "rtx4080super"), ("mi250", "mi210"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"), ("NVIDIA GeForce RTX 3060", "rtx3060"), ("GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"), ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
        ("NVIDIA RTX A6000", "rtxa6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"), ("NVIDIA L40", "l40"),
        ("NVIDIA H800", "h800"), ("NVIDIA A800-SXM4-80GB", "a800"), ("NVIDIA H20", "h20"), ("NVIDIA H20-3e", "h20-141"),
        ("NVIDIA GB200", "gb200"), ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"), ("NVIDIA GeForce RTX 2080 SUPER", "rtx2080super"),
        ("AMD Instinct MI210", "mi210"), ("AMD Instinct MI250", "mi210"),
        ("AMD Instinct MI325X", "mi325x"), ("AMD Instinct MI355X", "mi355x"), ("AMD Instinct MI300A", "mi300a"),
        ("TPU v5p", "tpu-v5p"), ("H100", "h100"), ("h100-sxm5", "h100"), ("RTX-4090", "rtx4090"), ("cpu", "cpu"),
    ],
)  # fmt: skip
def test_a_name_as_a_driver_prints_it_is_one_entry(printed, name):
    assert gpu(printed).name == name


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA L20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "RTX 3050",
        "Tesla P100-PCIE-16GB",
        "NVIDIA A10G",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H200 SUPER",
    ],
)
def test_a_near_relative_is_not_taken_for_it(other):
    assert find_gpu(other) is None


def test_an_unknown_gpu_gets_near_names():
    with pytest.raises(FlopwiseError) as error:
        gpu("h10")
    assert "there is no GPU 'h10'" in error.value.message
    assert "did you mean 'h100'?" in error.value.hint


@pytest.mark.parametrize(
    ("processors", "memory_bytes", "name"),
    [  # as drivers count them: numSms and totalGlobalMem of traces
        (304, 206141652992, "mi300x"), (104, 68702699520, "mi210"), (108, 42297524224, "a100-40"), (80, 34079899648, "v100"),
        (68, 11554586624, "rtx2080ti"), (132, 84978434048, "h100"), (132, 150109880320, "h200"), (40, 15843721216, "t4"),
        (108, 84987740160, "a100"), (148, 191514279936, "b200"), (110, 68702699520, "mi250x"), (78, 101974671360, "h20"),
    ],
)  # fmt: skip
def test_a_gpu_without_a_name_is_known_by_its_size(processors, memory_bytes, name):
    assert gpus_of_size(processors, memory_bytes)[0].name == name


@pytest.mark.parametrize(
    ("processors", "memory_bytes"), [(108, 8 * 10**10 * 2), (107, 84987740160), (0, 0), (-1, -1), (304, 0)]
)
def test_no_gpu_has_such_a_size(processors, memory_bytes):
    assert gpus_of_size(processors, memory_bytes) == ()


def test_what_a_size_stands_for_has_one_set_of_rates():
    """Variants of one size differ in their links and bandwidth; where also in their peaks, the module comes before the card."""
    for name in REAL:
        one = gpu(name)
        found = gpus_of_size(one.sms, one.memory_bytes, one.capability)[0]
        assert found.peaks == one.peaks or (found.name, name) in OF_ONE_SIZE, name


OF_ONE_SIZE = {("h200", "h200-nvl"), ("v100", "v100-pcie"), ("v100", "v100s"), ("v100-16", "v100-pcie-16"), ("a40", "rtxa6000"),
               ("h100", "h800"), ("l40", "l40s"), ("l40", "rtx6000ada"), ("h100-nvl", "gh200"), ("mi355x", "mi350x")}  # fmt: skip


def test_a_name_of_two_gpus_names_neither():
    """Drivers print 'AMD Instinct MI250X / MI250' for both: 110 or 104 compute units tell which."""
    assert find_gpu("AMD Instinct MI250X / MI250") is None
    assert find_gpu("AMD Instinct MI250X").name == "mi250x"


def test_a_card_with_no_bf16_is_accounted_for_in_what_it_has():
    assert from_datasheet(gpu("v100")).matmul.keys() == {"fp32", "fp16"}
