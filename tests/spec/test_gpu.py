"""The facts must agree with each other: a sparse peak or a mistyped digit breaks a law."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.gpu import PEAK_DTYPES, find_gpu, gpu, gpu_names

DATA_CENTRE = ("a100", "a100-40", "a100-pcie", "a100-pcie-40", "h100", "h100-pcie", "h100-nvl", "h200", "h200-nvl",
               "gh200", "gh200-144", "b200", "l4", "l40s")  # fmt: skip
GEFORCE = ("rtx3090", "rtx4090", "rtx5090")


@pytest.mark.parametrize("name", [n for n in gpu_names() if gpu(n).tensor_clock_hz])
def test_the_peak_is_units_times_clock_times_work_per_clock(name):
    one = gpu(name)
    built = one.sms * one.tensor_flops_per_clock * one.tensor_clock_hz
    assert one.peak("bf16") == pytest.approx(built, rel=0.02)


@pytest.mark.parametrize("name", [n for n in gpu_names() if n not in ("cpu", "tpu-v5p")])
def test_half_precision_has_one_rate_and_fp8_twice_it(name):
    one = gpu(name)
    assert one.peak("bf16") == one.peak("fp16")
    assert one.peak("fp8") is None or one.peak("fp8") == pytest.approx(2 * one.peak("bf16"), rel=0.02)


@pytest.mark.parametrize("name", [*DATA_CENTRE, *GEFORCE, "mi300x"])
def test_tf32_runs_at_half_the_half_precision_rate(name):
    assert gpu(name).peak("tf32") == pytest.approx(gpu(name).peak("bf16") / 2, rel=0.02)


@pytest.mark.parametrize("name", GEFORCE)
def test_geforce_tf32_is_the_vector_rate_because_fp32_accumulation_is_halved(name):
    assert gpu(name).peak("tf32") == pytest.approx(gpu(name).peak("fp32"), rel=0.02)


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
        ("TPU v5p", "tpu-v5p"), ("H100", "h100"), ("h100-sxm5", "h100"), ("RTX-4090", "rtx4090"), ("cpu", "cpu"),
    ],
)  # fmt: skip
def test_a_name_as_a_driver_prints_it_is_one_entry(printed, name):
    assert gpu(printed).name == name


@pytest.mark.parametrize(
    "other", ["NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 3090 Ti", "Tesla T4", "GB200"]
)
def test_a_near_relative_is_not_taken_for_it(other):
    assert find_gpu(other) is None


def test_an_unknown_gpu_gets_near_names():
    with pytest.raises(FlopwiseError) as error:
        gpu("h10")
    assert "there is no GPU 'h10'" in error.value.message
    assert "did you mean 'h100'?" in error.value.hint
