"""The GPUs that are known: what each can do at most as its vendor states it, with the sources.

Peaks are dense. Vendors also print, or only print, the figure for 2:4 structured sparsity, twice as large; no dense
matmul can reach that one. On GeForce cards a half-precision matmul that accumulates in fp32, which is what training
uses, runs at half the headline rate: that half is the figure here. Their rates are SMs × boost clock × work per clock, which
is how NVIDIA's tables come about. Memory is the datasheet's GB, 10⁹ bytes each.
"""

from typing import Any

from flopwise.spec.gpu_facts import Gpu

_T, _G, _KIB, _MIB = 10**12, 10**9, 2**10, 2**20
_Figures = tuple[float, float, float | None, float | None]

_NV, _AMD = "https://www.nvidia.com/en-us", "https://www.amd.com/en/products/accelerators/instinct"
_V100 = (
    f"NVIDIA V100 Tensor Core GPU datasheet {_NV}/data-center/v100/",
    "NVIDIA Tesla V100 GPU Architecture whitepaper v1.1, table 1 "
    "https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf",
)
_TURING = (
    "NVIDIA Turing GPU Architecture whitepaper, appendices A to C "
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf",
)
_RTX_20 = (*_TURING, f"GeForce RTX 20 series, specifications {_NV}/geforce/20-series/")
_A100 = (
    "NVIDIA A100 Tensor Core GPU datasheet (2021) "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf",
    "NVIDIA A100 Tensor Core GPU Architecture whitepaper v1.0, table 4 "
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf",
)
_A800 = (f"NVIDIA A800: an A100 whose NVLink runs at 400 GB/s {_NV}/data-center/a100/", *_A100)
_A10 = (f"NVIDIA A10 datasheet {_NV}/data-center/products/a10-gpu/",)
_A30 = (f"NVIDIA A30 datasheet {_NV}/data-center/products/a30-gpu/", *_A100[1:])
_A40 = (f"NVIDIA A40 datasheet {_NV}/data-center/a40/",)
_A6000 = (f"NVIDIA RTX A6000 datasheet {_NV}/design-visualization/rtx-a6000/",)
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
_H800 = (f"NVIDIA H800: an H100 whose NVLink runs at 400 GB/s {_NV}/data-center/h100/", *_H100)
_H20 = (
    "NVIDIA H20 has no public datasheet: dense peaks, SMs, memory and L2 as reported by reviews, "
    "https://zangshuxian.com/new/674733024499207168",
)
_GH200 = (
    "NVIDIA GH200 Grace Hopper Superchip datasheet https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip",
)
_B200 = (
    "NVIDIA HGX platform, B200: eight GPUs, printed sparse https://www.nvidia.com/en-us/data-center/hgx/",
    "NVIDIA Blackwell Architecture Technical Brief https://resources.nvidia.com/en-us-blackwell-architecture",
)
_GB200 = (f"NVIDIA GB200 NVL72: 72 GPUs, printed sparse {_NV}/data-center/gb200-nvl72/", *_B200[1:])
_B300 = (
    f"NVIDIA HGX platform, B300: eight GPUs, printed sparse {_NV}/data-center/hgx/",
    "B300, G. Lockwood (dense peaks) https://glennklockwood.com/garden/processors/B300",
)
_GB300 = (f"NVIDIA GB300 NVL72: 72 GPUs, printed sparse {_NV}/data-center/gb300-nvl72/",)
_L4 = ("NVIDIA L4 Tensor Core GPU datasheet https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet",)
_L40 = (f"NVIDIA L40 datasheet {_NV}/data-center/l40/",)
_L40S = ("NVIDIA L40S datasheet https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",)
_RTX_6000_ADA = (f"NVIDIA RTX 6000 Ada Generation datasheet {_NV}/design-visualization/rtx-6000/",)
_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, appendix A "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
)
_RTX_30 = (*_GA102, f"GeForce RTX 30 series, specifications {_NV}/geforce/graphics-cards/30-series/")
_ADA = (
    "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix A "
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf",
)
_RTX_40 = (*_ADA, f"GeForce RTX 40 series, specifications {_NV}/geforce/graphics-cards/40-series/")
_RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
)
_RTX_PRO = (
    *_RTX_BLACKWELL,
    f"NVIDIA RTX PRO 6000 Blackwell, specifications {_NV}/products/workstations/professional-desktop-gpus/rtx-pro-6000/",
)
_RTX_50 = (*_RTX_BLACKWELL, f"GeForce RTX 50 series, specifications {_NV}/geforce/graphics-cards/50-series/")
_AMD_UNITS = (
    "AMD GPU specifications (compute units, LDS, L2) https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html",
)
_MI200 = (f"AMD Instinct MI210, MI250 and MI250X, specifications {_AMD}/mi200.html", *_AMD_UNITS)
_MI300X = (
    "AMD Instinct MI300X Accelerator data sheet "
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
)
_MI300A = (f"AMD Instinct MI300A, specifications {_AMD}/mi300/mi300a.html", *_AMD_UNITS)
_MI325X = (f"AMD Instinct MI325X, specifications {_AMD}/mi300/mi325x.html", *_AMD_UNITS)
_MI350 = (f"AMD Instinct MI355X and MI350X, specifications {_AMD}/mi350.html", *_AMD_UNITS)
_TPU = ("Cloud TPU documentation, TPU v5p https://docs.cloud.google.com/tpu/docs/v5p",)
_CPU = ("measured, not specified",)

# Large bf16 matmuls, the best of many shapes: A100 271 of 312 TFLOP/s, H100 and H200 794 of 989, B200 1745 of 2250.
_SEEN = (
    "maximum achievable matmul FLOPS, S. Bekman, Machine Learning Engineering "
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table"
)


def _chip(
    tflops: tuple[float | None, ...],
    sms: int,
    shared: int,
    ghz: float | None,
    per_clock: int | None,
    cuda: str = "",
    share: float = 0,
) -> dict[str, Any]:
    """What cards with one kind of silicon share. TFLOP/s: fp32, tf32, half, fp8; None or left out where it has none.

    bf16 and fp16 run at one rate wherever there is bf16: from Ampere on, and on AMD's."""
    halves = ("fp16",) if cuda.startswith("7.") else ("bf16", "fp16")
    rates = zip((("fp32",), ("tf32",), halves, ("fp8",)), tflops, strict=False)
    peaks = {dtype: round(rate * 10) * _T / 10 for dtypes, rate in rates if rate for dtype in dtypes}
    return {
        "peaks": peaks,
        "sms": sms,
        "shared_bytes_per_sm": shared * _KIB,
        "capability": cuda,
        "tensor_flops_per_clock": per_clock,
        "tensor_clock_hz": ghz and ghz * 1e9,
        **({"matmul_share_seen": share, "matmul_source": _SEEN} if share else {}),
    }


_GEFORCE = {
    "7.5": (64, 64),
    "8.6": (128, 100),
    "8.9": (128, 100),
    "12.0": (128, 100),
}  # FP32 lanes, shared KiB of an SM


def _geforce(cuda: str, sms: int, ghz: float) -> dict[str, Any]:
    """A GeForce: from an SM 512 FLOPs a clock in half precision, accumulated in fp32; half of that in TF32, twice in FP8."""
    lanes, shared = _GEFORCE[cuda]
    fp32, half = 2 * lanes * sms * ghz / 1000, 512 * sms * ghz / 1000
    tf32 = None if cuda == "7.5" else half / 2
    fp8 = 2 * half if cuda in ("8.9", "12.0") else None
    return _chip((fp32, tf32, half, fp8), sms, shared, ghz, 512, cuda)


_GV100 = _chip((15.7, None, 125), 80, 96, 1.53, 1024, "7.0")
_GV100_PCIE = _chip((14, None, 112), 80, 96, 1.38, 1024, "7.0")
_GV100S = _chip((16.4, None, 130), 80, 96, 1.597, 1024, "7.0")
_TU104_T4 = _chip((8.1, None, 65), 40, 64, 1.59, 1024, "7.5")  # fp32 accumulation at the full rate
_GA100 = _chip((19.5, 156, 312), 108, 164, 1.41, 2048, "8.0", 0.87)
_GA100_A30 = _chip((10.3, 82, 165), 56, 164, 1.44, 2048, "8.0")
_GA102_A10 = _chip((31.2, 62.5, 125), 72, 100, 1.695, 1024, "8.6")
_GA102_A40 = _chip((37.4, 74.8, 149.7), 84, 100, 1.74, 1024, "8.6")
_GA102_A6000 = _chip((38.7, 77.4, 154.8), 84, 100, 1.8, 1024, "8.6")
# The full-rate Hopper: 132 SMs, 4096 bf16 FLOPs a clock each, 1830 MHz in matmuls and 1980 MHz elsewhere. On NVL's PCIe cards the
# same SMs run at a lower clock, which NVIDIA does not state for matmuls; nor does it for the H20, whose matmuls are held back.
_GH100 = _chip((66.9, 494.7, 989.4, 1978.9), 132, 228, 1.83, 4096, "9.0", 0.80)
_GH100_NVL = _chip((60, 417.5, 835.5, 1670.5), 132, 228, None, 4096, "9.0", 0.80)
_GH100_PCIE = _chip((51.2, 378, 756, 1513), 114, 228, 1.62, 4096, "9.0", 0.80)
_GH100_H20 = _chip((44, 74, 148, 296), 78, 228, None, None, "9.0")
_GB100 = _chip((75, 1125, 2250, 4500), 148, 228, None, 8192, "10.0", 0.78)
_GB100_GRACE = _chip((80, 1250, 2500, 5000), 152, 228, None, 8192, "10.0", 0.78)
_GB110 = _chip((75, 1125, 2250, 4500), 148, 228, None, 8192, "10.3")
_GB110_GRACE = _chip((83.3, 1250, 2500, 5000), 152, 228, None, 8192, "10.3")
_AD104 = _chip((30.3, 60, 121, 242.5), 58, 100, 2.04, 1024, "8.9")
_AD102_L40 = _chip((90.5, 90.5, 181, 362), 142, 100, 2.49, 512, "8.9")
_AD102_L40S = _chip((91.6, 183, 362, 733), 142, 100, 2.52, 1024, "8.9")
_AD102_6000 = _chip((91.1, 182.1, 364.2, 728.5), 142, 100, 2.505, 1024, "8.9")
_GB202_PRO = _chip((126, 251.9, 503.8, 1007.6), 188, 100, 2.617, 1024, "12.0")
# AMD: fp32 is the matrix cores' rate, at which libraries multiply in fp32; CDNA 2 and 4 have no TF32.
_CDNA2 = _chip((45.3, None, 181), 104, 64, 1.7, 1024)
_CDNA2_X = _chip((47.9, None, 191.5), 110, 64, 1.7, 1024)
_CDNA3 = _chip((163.4, 653.7, 1307.4, 2614.9), 304, 64, 2.1, 2048)
_CDNA3_APU = _chip((122.6, 490.3, 980.6, 1961.2), 228, 64, 2.1, 2048)
_CDNA4 = _chip((157.3, None, 2516.6, 5033.2), 256, 160, 2.4, 4096)
_CDNA4_350 = _chip((144.2, None, 2306.9, 4613.7), 256, 160, 2.2, 4096)
_TPU_V5P = {"peaks": {"bf16": 459.0 * _T}, "sms": 2}


def _card(
    name: str, title: str, chip: dict[str, Any], figures: _Figures, sources: tuple[str, ...], *drivers: str
) -> Gpu:
    """`figures`: memory in GB, its bandwidth in GB/s, L2 in MiB, links in GB/s."""
    sizes = zip(
        ("memory_bytes", "bandwidth_bytes_s", "l2_bytes", "link_bytes_s"), figures, (_G, _G, _MIB, _G), strict=True
    )
    stated: dict[str, Any] = {field: value and int(value * unit) for field, value, unit in sizes}
    return Gpu(name=name, title=title, **chip, **stated, sources=sources, drivers=drivers)


def _rtx(
    model: str,
    cuda: str,
    sms: int,
    ghz: float,
    memory: float,
    bandwidth: float,
    l2: float | None,
    link: float | None = None,
) -> Gpu:
    """A GeForce RTX by its model, `3080 Ti`."""
    series = {"7.5": _RTX_20, "8.6": _RTX_30, "8.9": _RTX_40, "12.0": _RTX_50}[cuda]
    name = f"rtx{model.replace(' ', '').lower()}"
    figures = (memory, bandwidth, l2, link)
    driver = rf"(geforce )?(rtx )?{model.lower()}( \d+gb)?"
    return _card(name, f"GeForce RTX {model} {memory:g} GB", _geforce(cuda, sms, ghz), figures, series, driver)


GPUS = (
    # name, title, chip, (memory GB, bandwidth GB/s, L2 MiB, links GB/s), sources, what drivers print
    _card("a100", "A100 SXM 80 GB", _GA100, (80, 2039, 40, 600), _A100, r"a100-sxm\w*-80gb"),
    _card("a100-40", "A100 SXM 40 GB", _GA100, (40, 1555, 40, 600), _A100, r"a100-sxm\w*-40gb"),
    _card("a100-pcie", "A100 PCIe 80 GB", _GA100, (80, 1935, 40, 600), _A100, r"a100.*80gb.*pcie", r"a100-pcie-80gb"),
    _card("a100-pcie-40", "A100 PCIe 40 GB", _GA100, (40, 1555, 40, 600), _A100, r"a100-pcie-40gb"),
    _card("a800", "A800 SXM 80 GB", _GA100, (80, 2039, 40, 400), _A800, r"a800-sxm\w*-80gb"),
    _card("h100", "H100 SXM 80 GB", _GH100, (80, 3352, 50, 900), _H100, r"h100( 80gb hbm3|[- ]sxm\w*)?"),
    _card("h100-pcie", "H100 PCIe 80 GB", _GH100_PCIE, (80, 2039, 50, 600), _H100, r"h100 pcie"),
    _card("h100-nvl", "H100 NVL 94 GB", _GH100_NVL, (94, 3938, 50, 600), _H100[:1], r"h100 nvl"),
    _card("h800", "H800 SXM 80 GB", _GH100, (80, 3352, 50, 400), _H800, r"h800( 80gb hbm3|[- ]sxm\w*)?"),
    _card("h800-pcie", "H800 PCIe 80 GB", _GH100_PCIE, (80, 2039, 50, 400), _H800, r"h800 pcie"),
    _card("h20", "H20 96 GB", _GH100_H20, (96, 4000, 60, 900), _H20, r"h20( 96gb.*)?"),
    _card("h20-141", "H20 141 GB", _GH100_H20, (141, 4800, 60, 900), _H20, r"h20-3e", r"h20 141gb.*"),
    _card("h200", "H200 SXM 141 GB", _GH100, (141, 4800, 60, 900), (*_H200, *_H100), r"h200( 141gb.*| sxm\w*)?"),
    _card("h200-nvl", "H200 NVL 141 GB", _GH100_NVL, (141, 4800, 60, 900), _H200, r"h200 nvl"),
    _card("gh200", "GH200 96 GB HBM3", _GH100, (96, 4000, 50, 900), (*_GH200, *_H100), r"gh200( (480|120)gb| 96gb.*)?"),
    _card("gh200-144", "GH200 144 GB HBM3e", _GH100, (144, 4900, 60, 900), (*_GH200, *_H100), r"gh200 144g.*"),
    _card("b200", "B200 180 GB (HGX)", _GB100, (180, 8000, 126, 1800), _B200, r"b200( sxm\w*)?"),
    _card("gb200", "GB200 186 GB (one GPU)", _GB100_GRACE, (186, 8000, 126, 1800), _GB200, r"gb200"),
    _card("b300", "B300 288 GB (HGX)", _GB110, (288, 8000, None, 1800), _B300, r"b300( sxm.*)?"),
    _card("gb300", "GB300 288 GB (one GPU)", _GB110_GRACE, (288, 8000, None, 1800), _GB300, r"gb300"),
    _card("v100", "V100 SXM2 32 GB", _GV100, (32, 900, 6, 300), _V100, r"v100-sxm\w*-32gb.*"),
    _card("v100-16", "V100 SXM2 16 GB", _GV100, (16, 900, 6, 300), _V100, r"v100-sxm\w*-16gb"),
    _card("v100-pcie", "V100 PCIe 32 GB", _GV100_PCIE, (32, 900, 6, None), _V100, r"v100-pcie-32gb"),
    _card("v100-pcie-16", "V100 PCIe 16 GB", _GV100_PCIE, (16, 900, 6, None), _V100, r"v100-pcie-16gb"),
    _card("v100s", "V100S PCIe 32 GB", _GV100S, (32, 1134, 6, None), _V100, r"v100s-pcie-32gb"),
    _card("t4", "T4 16 GB", _TU104_T4, (16, 320, 4, None), _TURING, r"t4"),
    _card("a10", "A10 24 GB", _GA102_A10, (24, 600, 6, None), _A10, r"a10"),
    _card("a30", "A30 24 GB", _GA100_A30, (24, 933, 24, 200), _A30, r"a30"),
    _card("a40", "A40 48 GB", _GA102_A40, (48, 696, 6, 112.5), _A40, r"a40"),
    _card("rtxa6000", "RTX A6000 48 GB", _GA102_A6000, (48, 768, 6, 112.5), _A6000, r"rtx a6000"),
    _card("l4", "L4 24 GB", _AD104, (24, 300, 48, None), _L4, r"l4"),
    _card("l40", "L40 48 GB", _AD102_L40, (48, 864, 96, None), _L40, r"l40"),
    _card("l40s", "L40S 48 GB", _AD102_L40S, (48, 864, 96, None), _L40S, r"l40s"),
    _card("rtx6000ada", "RTX 6000 Ada 48 GB", _AD102_6000, (48, 960, 96, None), _RTX_6000_ADA, r"rtx 6000 ada.*"),
    _card(
        "rtxpro6000",
        "RTX PRO 6000 Blackwell 96 GB",
        _GB202_PRO,
        (96, 1792, 128, None),
        _RTX_PRO,
        r"rtx pro 6000 blackwell (workstation|server) edition",
    ),
    # model, capability, SMs, boost GHz, memory GB, bandwidth GB/s, L2 MiB, NVLink GB/s
    _rtx("2060", "7.5", 30, 1.68, 6, 336, 3),
    _rtx("2070", "7.5", 36, 1.62, 8, 448, 4),
    _rtx("2080", "7.5", 46, 1.71, 8, 448, 4, 50),
    _rtx("2060 SUPER", "7.5", 34, 1.65, 8, 448, 4),
    _rtx("2070 SUPER", "7.5", 40, 1.77, 8, 448, 4, 50),
    _rtx("2080 SUPER", "7.5", 48, 1.815, 8, 496, 4, 50),
    _rtx("2080 Ti", "7.5", 68, 1.545, 11, 616, 5.5, 100),
    _rtx("3060", "8.6", 28, 1.777, 12, 360, 3),
    _rtx("3060 Ti", "8.6", 38, 1.665, 8, 448, 4),
    _rtx("3070", "8.6", 46, 1.725, 8, 448, 4),
    _rtx("3070 Ti", "8.6", 48, 1.77, 8, 608, 4),
    _rtx("3080", "8.6", 68, 1.71, 10, 760, 5),
    _rtx("3080 Ti", "8.6", 80, 1.665, 12, 912, 6),
    _rtx("3090", "8.6", 82, 1.695, 24, 936, 6, 112.5),
    _rtx("3090 Ti", "8.6", 84, 1.86, 24, 1008, 6, 112.5),
    _rtx("4060", "8.9", 24, 2.46, 8, 272, 24),
    _rtx("4060 Ti", "8.9", 34, 2.535, 8, 288, 32),
    _rtx("4070", "8.9", 46, 2.475, 12, 504, 36),
    _rtx("4070 SUPER", "8.9", 56, 2.475, 12, 504, 48),
    _rtx("4070 Ti", "8.9", 60, 2.61, 12, 504, 48),
    _rtx("4070 Ti SUPER", "8.9", 66, 2.61, 16, 672, 48),
    _rtx("4080", "8.9", 76, 2.505, 16, 717, 64),
    _rtx("4080 SUPER", "8.9", 80, 2.55, 16, 736, 64),
    _rtx("4090", "8.9", 128, 2.52, 24, 1008, 72),
    _rtx("5060", "12.0", 30, 2.497, 8, 448, None),
    _rtx("5060 Ti", "12.0", 36, 2.572, 8, 448, None),
    _rtx("5070", "12.0", 48, 2.512, 12, 672, 48),
    _rtx("5070 Ti", "12.0", 70, 2.452, 16, 896, 48),
    _rtx("5080", "12.0", 84, 2.617, 16, 960, 64),
    _rtx("5090", "12.0", 170, 2.407, 32, 1792, 96),
    # An MI250 or MI250X is two GPUs to its driver, and to a trace: the figures are those of one.
    _card(
        "mi210",
        "AMD Instinct MI210, or one die of an MI250, 64 GB",
        _CDNA2,
        (64, 1638, 8, 300),
        _MI200,
        r"(amd )?(instinct )?mi2[15]0( .*)?",
    ),
    _card(
        "mi250x",
        "AMD Instinct MI250X, one die, 64 GB",
        _CDNA2_X,
        (64, 1638, 8, 400),
        _MI200,
        r"(amd )?(instinct )?mi250x(?! ?/).*",  # of either, drivers print MI250X / MI250
    ),
    _card(
        "mi300x", "AMD Instinct MI300X 192 GB", _CDNA3, (192, 5300, 32, 896), _MI300X, r"(amd )?(instinct )?mi300x.*"
    ),
    _card(
        "mi300a",
        "AMD Instinct MI300A 128 GB",
        _CDNA3_APU,
        (128, 5300, 24, 768),
        _MI300A,
        r"(amd )?(instinct )?mi300a.*",
    ),
    _card(
        "mi325x", "AMD Instinct MI325X 256 GB", _CDNA3, (256, 6000, 32, 896), _MI325X, r"(amd )?(instinct )?mi325x.*"
    ),
    _card(
        "mi355x", "AMD Instinct MI355X 288 GB", _CDNA4, (288, 8000, 32, 1075), _MI350, r"(amd )?(instinct )?mi355x.*"
    ),
    _card(
        "mi350x",
        "AMD Instinct MI350X 288 GB",
        _CDNA4_350,
        (288, 8000, 32, 1075),
        _MI350,
        r"(amd )?(instinct )?mi350x.*",
    ),
    _card("tpu-v5p", "Google TPU v5p 95 GB", _TPU_V5P, (95, 2765, None, 1200), _TPU, r"tpu v5p?"),
    Gpu(name="cpu", title="this machine's CPU", peaks={}, memory_bytes=None, bandwidth_bytes_s=None, sources=_CPU),
)

# What people type, and bare names that leave the variant open: the SXM module, with the larger memory.
_NUMBERS = [one.name.removeprefix("rtx") for one in GPUS if one.name.startswith("rtx")]
ALIASES = {
    **dict.fromkeys(("a100-80", "a100-sxm", "a100-80gb"), "a100"),
    **dict.fromkeys(("h100-sxm", "h100-sxm5", "h100-80"), "h100"),
    **dict.fromkeys(("v100-32", "v100-sxm2", "v100-32gb"), "v100"),
    **{f"{rtx}{number}": f"rtx{number}" for rtx in ("", "rtx-", "geforce-rtx-") for number in _NUMBERS},
    "a100-40gb": "a100-40",
    "v100-16gb": "v100-16",
    "h200-sxm": "h200",
    "a6000": "rtxa6000",
    "mi250": "mi210",
    "tpuv5p": "tpu-v5p",
    "v5p": "tpu-v5p",
}
