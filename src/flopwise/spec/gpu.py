"""What a GPU can do at most, as its vendor states it: dense peak rates, memory, caches, links; each with its source.

Peaks are dense. Vendors also print, or only print, the figure for 2:4 structured sparsity, twice as large; no dense
matmul can reach that one. On GeForce cards a half-precision matmul that accumulates in fp32, which is what training
uses, runs at half the headline rate: that half is the figure here. Memory is the datasheet's GB, 10⁹ bytes each; a
driver shows up to 7 % more (150.1e9 on an H200), of which the CUDA context and fragmentation take their part.
"""

import re
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

PEAK_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")

_T, _G, _KIB, _MIB = 10**12, 10**9, 2**10, 2**20
_Figures = tuple[float, float, int | None, float | None]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. `None` where the vendor states no figure, or (for `cpu`) where it has to be measured.

    >>> gpu("h100").peak("bf16") / 1e12
    989.4
    """

    name: str
    title: str
    peaks: dict[str, float]  # FLOP/s by dtype, dense, accumulating in fp32; fp32: the vector units
    memory_bytes: int | None
    bandwidth_bytes_s: float | None
    l2_bytes: int | None = None
    sms: int | None = None  # streaming multiprocessors; AMD: compute units; TPU: tensor cores
    shared_bytes_per_sm: int | None = None  # the most a block of threads may share; AMD: LDS
    link_bytes_s: float | None = None  # NVLink, Infinity Fabric, ICI: both directions added up, as vendors state it
    tensor_clock_hz: float | None = None  # the boost clock behind the matmul peaks
    tensor_flops_per_clock: int | None = None  # of one SM, bf16
    matmul_share_seen: float | None = None  # the best large matmul seen in practice, as a share of the bf16 peak
    matmul_source: str = ""
    capability: str = ""  # CUDA's
    sources: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()  # regular expressions of the names that drivers print

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of a matmul with inputs of this dtype, if the chip has it.

        >>> gpu("a100").peak("fp8") is None
        True
        """
        fields.one_of("dtype", dtype, PEAK_DTYPES)
        return self.peaks.get(dtype)

    def ridge(self, dtype: str) -> float | None:
        """FLOPs per byte from which on the peak rate, not the bandwidth, is the limit.

        >>> round(gpu("h100").ridge("bf16"))
        295
        """
        peak = self.peak(dtype)
        return peak / self.bandwidth_bytes_s if peak and self.bandwidth_bytes_s else None


_A100 = (
    "NVIDIA A100 Tensor Core GPU datasheet (2021) "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf",
    "NVIDIA A100 Tensor Core GPU Architecture whitepaper v1.0, table 4 "
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf",
)
_H100 = (
    "NVIDIA H100 Tensor Core GPU datasheet (dense is half of the printed, sparse figures) "
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, tables 2 and 3 "
    "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
)
_H200 = (
    "NVIDIA H200 Tensor Core GPU datasheet https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200",
    "L2 as the driver reports it (benchmarks/results/h200-2026-11)",
)
_GH200 = (
    "NVIDIA GH200 Grace Hopper Superchip datasheet https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip",
)
_B200 = (
    "NVIDIA HGX platform, B200: eight GPUs, printed sparse https://www.nvidia.com/en-us/data-center/hgx/",
    "NVIDIA Blackwell Architecture Technical Brief https://resources.nvidia.com/en-us-blackwell-architecture",
)
_L4 = ("NVIDIA L4 Tensor Core GPU datasheet https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet",)
_L40S = ("NVIDIA L40S datasheet https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",)
_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, appendix A "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
)
_ADA = (
    "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix A "
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf",
)
_RTX_50 = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
)
_MI300X = (
    "AMD Instinct MI300X Accelerator data sheet "
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
)
_TPU = ("Cloud TPU documentation, TPU v5p https://docs.cloud.google.com/tpu/docs/v5p",)
_CPU = ("measured, not specified",)

# Large bf16 matmuls, the best of many shapes: A100 271 of 312 TFLOP/s, H100 and H200 794 of 989, B200 1745 of 2250.
_SEEN = (
    "maximum achievable matmul FLOPS, S. Bekman, Machine Learning Engineering "
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table"
)


def _chip(
    tflops: tuple[float, ...],
    sms: int,
    shared: int,
    ghz: float | None,
    per_clock: int,
    cuda: str = "",
    share: float = 0,
) -> dict[str, Any]:
    """What cards with one kind of silicon share. TFLOP/s: fp32, tf32, half (bf16 and fp16 run at one rate everywhere), fp8."""
    fp32, tf32, half, *fp8 = (round(rate * 10) * _T / 10 for rate in tflops)
    return {
        "peaks": {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half} | ({"fp8": fp8[0]} if fp8 else {}),
        "sms": sms,
        "shared_bytes_per_sm": shared * _KIB,
        "capability": cuda,
        "tensor_flops_per_clock": per_clock,
        "tensor_clock_hz": ghz and ghz * 1e9,
        **({"matmul_share_seen": share, "matmul_source": _SEEN} if share else {}),
    }


_GA100 = _chip((19.5, 156, 312), 108, 164, 1.41, 2048, "8.0", 0.87)
# The full-rate Hopper: 132 SMs, 4096 bf16 FLOPs a clock each, 1830 MHz in matmuls and 1980 MHz elsewhere. On NVL's PCIe cards the
# same SMs run at a lower clock, which NVIDIA does not state for matmuls.
_GH100 = _chip((66.9, 494.7, 989.4, 1978.9), 132, 228, 1.83, 4096, "9.0", 0.80)
_GH100_NVL = _chip((60, 417.5, 835.5, 1670.5), 132, 228, None, 4096, "9.0", 0.80)
_GH100_PCIE = _chip((51.2, 378, 756, 1513), 114, 228, 1.62, 4096, "9.0", 0.80)
_GB100 = _chip((75, 1125, 2250, 4500), 148, 228, None, 8192, "10.0", 0.78)
_AD104 = _chip((30.3, 60, 121, 242.5), 58, 100, 2.04, 1024, "8.9")
_AD102_L40S = _chip((91.6, 183, 362, 733), 142, 100, 2.52, 1024, "8.9")
_GA102_3090 = _chip((35.6, 35.6, 71), 82, 100, 1.695, 512, "8.6")
_AD102_4090 = _chip((82.6, 82.6, 165.2, 330.3), 128, 100, 2.52, 512, "8.9")
_GB202_5090 = _chip((104.8, 104.8, 209.5, 419), 170, 100, 2.407, 512, "12.0")
_CDNA3 = _chip((163.4, 653.7, 1307.4, 2614.9), 304, 64, 2.1, 2048)
_TPU_V5P = {"peaks": {"bf16": 459.0 * _T}, "sms": 2}


def _card(
    name: str, title: str, chip: dict[str, Any], figures: _Figures, sources: tuple[str, ...], *drivers: str
) -> Gpu:
    """`figures`: memory in GB, its bandwidth in GB/s, L2 in MiB, links in GB/s."""
    sizes = zip(
        ("memory_bytes", "bandwidth_bytes_s", "l2_bytes", "link_bytes_s"), figures, (_G, _G, _MIB, _G), strict=True
    )
    stated: dict[str, Any] = {field: value and value * unit for field, value, unit in sizes}
    return Gpu(name=name, title=title, **chip, **stated, sources=sources, drivers=drivers)


_GPUS = (
    # name, title, chip, (memory GB, bandwidth GB/s, L2 MiB, links GB/s), sources, what drivers print
    _card("a100", "A100 SXM 80 GB", _GA100, (80, 2039, 40, 600), _A100, r"a100-sxm\w*-80gb"),
    _card("a100-40", "A100 SXM 40 GB", _GA100, (40, 1555, 40, 600), _A100, r"a100-sxm\w*-40gb"),
    _card("a100-pcie", "A100 PCIe 80 GB", _GA100, (80, 1935, 40, 600), _A100, r"a100.*80gb.*pcie", r"a100-pcie-80gb"),
    _card("a100-pcie-40", "A100 PCIe 40 GB", _GA100, (40, 1555, 40, 600), _A100, r"a100-pcie-40gb"),
    _card("h100", "H100 SXM 80 GB", _GH100, (80, 3352, 50, 900), _H100, r"h100( 80gb hbm3|[- ]sxm\w*)?"),
    _card("h100-pcie", "H100 PCIe 80 GB", _GH100_PCIE, (80, 2039, 50, 600), _H100, r"h100 pcie"),
    _card("h100-nvl", "H100 NVL 94 GB", _GH100_NVL, (94, 3938, 50, 600), _H100[:1], r"h100 nvl"),
    _card("h200", "H200 SXM 141 GB", _GH100, (141, 4800, 60, 900), (*_H200, *_H100), r"h200( 141gb.*| sxm\w*)?"),
    _card("h200-nvl", "H200 NVL 141 GB", _GH100_NVL, (141, 4800, 60, 900), _H200, r"h200 nvl"),
    _card("gh200", "GH200 96 GB HBM3", _GH100, (96, 4000, 50, 900), (*_GH200, *_H100), r"gh200( (480|120)gb| 96gb.*)?"),
    _card("gh200-144", "GH200 144 GB HBM3e", _GH100, (144, 4900, 60, 900), (*_GH200, *_H100), r"gh200 144g.*"),
    _card("b200", "B200 180 GB (HGX)", _GB100, (180, 8000, 126, 1800), _B200, r"b200"),
    _card("l4", "L4 24 GB", _AD104, (24, 300, 48, None), _L4, r"l4"),
    _card("l40s", "L40S 48 GB", _AD102_L40S, (48, 864, 96, None), _L40S, r"l40s"),
    _card("rtx3090", "GeForce RTX 3090 24 GB", _GA102_3090, (24, 936, 6, 112.5), _GA102, r"(geforce )?rtx 3090"),
    _card("rtx4090", "GeForce RTX 4090 24 GB", _AD102_4090, (24, 1008, 72, None), _ADA, r"(geforce )?rtx 4090"),
    _card("rtx5090", "GeForce RTX 5090 32 GB", _GB202_5090, (32, 1792, 96, None), _RTX_50, r"(geforce )?rtx 5090"),
    _card(
        "mi300x", "AMD Instinct MI300X 192 GB", _CDNA3, (192, 5300, 32, 896), _MI300X, r"(amd )?(instinct )?mi300x.*"
    ),
    _card("tpu-v5p", "Google TPU v5p 95 GB", _TPU_V5P, (95, 2765, None, 1200), _TPU, r"tpu v5p?"),
    Gpu(name="cpu", title="this machine's CPU", peaks={}, memory_bytes=None, bandwidth_bytes_s=None, sources=_CPU),
)

# What people type, and bare names that leave the variant open: the SXM module, with the larger memory.
_ALIASES = {
    **dict.fromkeys(("a100-80", "a100-sxm", "a100-80gb"), "a100"),
    **dict.fromkeys(("h100-sxm", "h100-sxm5", "h100-80"), "h100"),
    **{f"{rtx}{number}": f"rtx{number}" for rtx in ("", "rtx-") for number in ("3090", "4090", "5090")},
    "a100-40gb": "a100-40",
    "h200-sxm": "h200",
    "tpuv5p": "tpu-v5p",
    "v5p": "tpu-v5p",
}


def gpu_names() -> tuple[str, ...]:
    """Every GPU known by name.

    >>> gpu_names()[:2]
    ('a100', 'a100-40')
    """
    return tuple(one.name for one in _GPUS)


def gpu(name: str) -> Gpu:
    """The GPU of this name: ours (`h100`), or the one a driver prints.

    >>> gpu("NVIDIA H100 80GB HBM3").name, gpu("NVIDIA A100-SXM4-80GB").name, gpu("RTX 4090").name
    ('h100', 'a100', 'rtx4090')
    """
    fields.text("gpu", name)
    found = find_gpu(name)
    if found is None:
        raise FlopwiseError(
            f"there is no GPU {fields.show(name)}",
            f"{fields.did_you_mean(name.lower(), (*gpu_names(), *_ALIASES))}known: {', '.join(gpu_names())}",
        )
    return found


def find_gpu(name: str) -> Gpu | None:
    """As `gpu`, or None.

    >>> find_gpu("Voodoo 2") is None
    True
    """
    word = " ".join(name.lower().split())
    key = _ALIASES.get(word.replace(" ", "-"), word.replace(" ", "-"))
    exact = next((one for one in _GPUS if one.name == key or one.title.lower() == word), None)
    if exact is not None:
        return exact
    model = re.sub(r"^(nvidia|tesla|amd|graphics device)\s+", "", re.sub(r"^nvidia\s+", "", word))
    return next((one for one in _GPUS if any(re.fullmatch(d, model) for d in one.drivers)), None)
