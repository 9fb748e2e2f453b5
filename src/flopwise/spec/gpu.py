"""What a GPU can do at most, as its vendor states it: dense peak rates, memory, caches, links; each with its source.

Peaks are dense. Vendors print the figure for 2:4 structured sparsity beside or instead of it, twice as large; no dense
matmul can reach that one. On GeForce cards a half-precision matmul that accumulates in fp32, which is what training
uses, runs at half the headline rate: that half is the figure here. Memory is the datasheet's GB, 10⁹ bytes each; a
driver shows up to 7 % more (150.1e9 on an H200), of which the CUDA context and fragmentation take their part.
"""

import re

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")

_T, _G, _GB, _KIB, _MIB = 10**12, 10**9, 10**9, 2**10, 2**20


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
        fields.one_of("dtype", dtype, DTYPES)
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
_BLACKWELL_RTX = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
)
_MI300X = (
    "AMD Instinct MI300X Accelerator data sheet "
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
)
_TPU_V5P = ("Cloud TPU documentation, TPU v5p https://docs.cloud.google.com/tpu/docs/v5p",)

# Large bf16 matmuls, the best of many shapes: A100 271 of 312 TFLOP/s, H100 and H200 794 of 989, B200 1745 of 2250.
_SEEN = (
    "maximum achievable matmul FLOPS, S. Bekman, Machine Learning Engineering "
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table"
)


def _hopper(
    name: str, title: str, memory: float, bandwidth: float, sources: tuple[str, ...], drivers: tuple[str, ...], l2: int
) -> Gpu:
    """The full-rate Hopper: 132 SMs, 4096 bf16 FLOPs a clock each, 1830 MHz in matmuls and 1980 MHz elsewhere."""
    return Gpu(
        name=name, title=title, peaks=_rates(66.9, 494.7, 989.4, 1978.9), memory_bytes=int(memory * _GB),
        bandwidth_bytes_s=bandwidth * _G, l2_bytes=l2 * _MIB, sms=132, shared_bytes_per_sm=228 * _KIB,
        link_bytes_s=900 * _G, tensor_clock_hz=1.83e9, tensor_flops_per_clock=4096, matmul_share_seen=0.80,
        matmul_source=_SEEN, capability="9.0", sources=(*sources, *_H100), drivers=drivers,
    )  # fmt: skip


def _nvl(
    name: str, title: str, memory: float, bandwidth: float, link: float, sources: tuple[str, ...], driver: str, l2: int
) -> Gpu:
    """Hopper on a PCIe card: the same SMs at a lower clock, which NVIDIA does not state for matmuls."""
    return Gpu(
        name=name, title=title, peaks=_rates(60, 417.5, 835.5, 1670.5), memory_bytes=int(memory * _GB),
        bandwidth_bytes_s=bandwidth * _G, l2_bytes=l2 * _MIB, sms=132, shared_bytes_per_sm=228 * _KIB,
        link_bytes_s=link * _G, tensor_flops_per_clock=4096, matmul_share_seen=0.80, matmul_source=_SEEN,
        capability="9.0", sources=sources, drivers=(driver,),
    )  # fmt: skip


def _a100(name: str, title: str, memory: int, bandwidth: float, drivers: tuple[str, ...]) -> Gpu:
    return Gpu(
        name=name, title=title, peaks=_rates(19.5, 156, 312), memory_bytes=memory * _GB,
        bandwidth_bytes_s=bandwidth * _G, l2_bytes=40 * _MIB, sms=108, shared_bytes_per_sm=164 * _KIB,
        link_bytes_s=600 * _G, tensor_clock_hz=1.41e9, tensor_flops_per_clock=2048, matmul_share_seen=0.87,
        matmul_source=_SEEN, capability="8.0", sources=_A100, drivers=drivers,
    )  # fmt: skip


def _rates(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    """TFLOP/s as FLOP/s; bf16 and fp16 run at one rate on every chip here."""
    rates = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half} | ({} if fp8 is None else {"fp8": fp8})
    return {dtype: round(rate * 10) * _T / 10 for dtype, rate in rates.items()}


_GPUS = (
    _a100("a100", "A100 SXM 80 GB", 80, 2039, (r"a100-sxm\w*-80gb",)),
    _a100("a100-40", "A100 SXM 40 GB", 40, 1555, (r"a100-sxm\w*-40gb",)),
    _a100("a100-pcie", "A100 PCIe 80 GB", 80, 1935, (r"a100.*80gb.*pcie", r"a100-pcie-80gb")),
    _a100("a100-pcie-40", "A100 PCIe 40 GB", 40, 1555, (r"a100-pcie-40gb",)),
    _hopper("h100", "H100 SXM 80 GB", 80, 3352, (), (r"h100", r"h100 80gb hbm3", r"h100-sxm\w*", r"h100 sxm\w*"), 50),
    Gpu(
        name="h100-pcie", title="H100 PCIe 80 GB", peaks=_rates(51.2, 378, 756, 1513), memory_bytes=80 * _GB,
        bandwidth_bytes_s=2039 * _G, l2_bytes=50 * _MIB, sms=114, shared_bytes_per_sm=228 * _KIB,
        link_bytes_s=600 * _G, tensor_clock_hz=1.62e9, tensor_flops_per_clock=4096, matmul_share_seen=0.80,
        matmul_source=_SEEN, capability="9.0", sources=_H100, drivers=(r"h100 pcie",),
    ),
    _nvl("h100-nvl", "H100 NVL 94 GB", 94, 3938, 600, _H100[:1], r"h100 nvl", 50),
    _hopper("h200", "H200 SXM 141 GB", 141, 4800, _H200, (r"h200", r"h200 141gb.*", r"h200 sxm\w*"), 60),
    _nvl("h200-nvl", "H200 NVL 141 GB", 141, 4800, 900, _H200, r"h200 nvl", 60),
    _hopper("gh200", "GH200 96 GB HBM3", 96, 4000, _GH200, (r"gh200 (480|120)gb", r"gh200 96gb.*", r"gh200"), 50),
    _hopper("gh200-144", "GH200 144 GB HBM3e", 144, 4900, _GH200, (r"gh200 144g.*",), 60),
    Gpu(
        name="b200", title="B200 180 GB (HGX)", peaks=_rates(75, 1125, 2250, 4500), memory_bytes=180 * _GB,
        bandwidth_bytes_s=8000 * _G, l2_bytes=126 * _MIB, sms=148, shared_bytes_per_sm=228 * _KIB,
        link_bytes_s=1800 * _G, tensor_flops_per_clock=8192, matmul_share_seen=0.78,
        matmul_source=_SEEN, capability="10.0", sources=_B200, drivers=(r"b200",),
    ),
    Gpu(
        name="l4", title="L4 24 GB", peaks=_rates(30.3, 60, 121, 242.5), memory_bytes=24 * _GB,
        bandwidth_bytes_s=300 * _G, l2_bytes=48 * _MIB, sms=58, shared_bytes_per_sm=100 * _KIB,
        tensor_clock_hz=2.04e9, tensor_flops_per_clock=1024, capability="8.9", sources=_L4, drivers=(r"l4",),
    ),
    Gpu(
        name="l40s", title="L40S 48 GB", peaks=_rates(91.6, 183, 362, 733), memory_bytes=48 * _GB,
        bandwidth_bytes_s=864 * _G, l2_bytes=96 * _MIB, sms=142, shared_bytes_per_sm=100 * _KIB,
        tensor_clock_hz=2.52e9, tensor_flops_per_clock=1024, capability="8.9", sources=_L40S, drivers=(r"l40s",),
    ),
    Gpu(
        name="rtx3090", title="GeForce RTX 3090 24 GB", peaks=_rates(35.6, 35.6, 71), memory_bytes=24 * _GB,
        bandwidth_bytes_s=936 * _G, l2_bytes=6 * _MIB, sms=82, shared_bytes_per_sm=100 * _KIB,
        link_bytes_s=112.5 * _G, tensor_clock_hz=1.695e9, tensor_flops_per_clock=512, capability="8.6",
        sources=_GA102, drivers=(r"(geforce )?rtx 3090",),
    ),
    Gpu(
        name="rtx4090", title="GeForce RTX 4090 24 GB", peaks=_rates(82.6, 82.6, 165.2, 330.3), memory_bytes=24 * _GB,
        bandwidth_bytes_s=1008 * _G, l2_bytes=72 * _MIB, sms=128, shared_bytes_per_sm=100 * _KIB,
        tensor_clock_hz=2.52e9, tensor_flops_per_clock=512, capability="8.9", sources=_ADA,
        drivers=(r"(geforce )?rtx 4090",),
    ),
    Gpu(
        name="rtx5090", title="GeForce RTX 5090 32 GB", peaks=_rates(104.8, 104.8, 209.5, 419), memory_bytes=32 * _GB,
        bandwidth_bytes_s=1792 * _G, l2_bytes=96 * _MIB, sms=170, shared_bytes_per_sm=100 * _KIB,
        tensor_clock_hz=2.407e9, tensor_flops_per_clock=512, capability="12.0", sources=_BLACKWELL_RTX,
        drivers=(r"(geforce )?rtx 5090",),
    ),
    Gpu(
        name="mi300x", title="AMD Instinct MI300X 192 GB", peaks=_rates(163.4, 653.7, 1307.4, 2614.9),
        memory_bytes=192 * _GB, bandwidth_bytes_s=5300 * _G, l2_bytes=32 * _MIB, sms=304,
        shared_bytes_per_sm=64 * _KIB, link_bytes_s=896 * _G, tensor_clock_hz=2.1e9, tensor_flops_per_clock=2048,
        sources=_MI300X, drivers=(r"(amd )?(instinct )?mi300x.*",),
    ),
    Gpu(
        name="tpu-v5p", title="Google TPU v5p 95 GB", peaks={"bf16": 459.0 * _T}, memory_bytes=95 * _GB,
        bandwidth_bytes_s=2765 * _G, sms=2, link_bytes_s=1200 * _G, sources=_TPU_V5P, drivers=(r"tpu v5p?",),
    ),
    Gpu(
        name="cpu", title="this machine's CPU", peaks={}, memory_bytes=None, bandwidth_bytes_s=None,
        sources=("measured, not specified",),
    ),
)  # fmt: skip

# What people type, and bare names that leave the variant open: the SXM module, with the larger memory.
_ALIASES = {
    "a100-80": "a100", "a100-sxm": "a100", "a100-80gb": "a100", "a100-40gb": "a100-40", "h100-sxm": "h100",
    "h100-sxm5": "h100", "h100-80": "h100", "h200-sxm": "h200", "3090": "rtx3090", "4090": "rtx4090",
    "5090": "rtx5090", "rtx-3090": "rtx3090", "rtx-4090": "rtx4090", "rtx-5090": "rtx5090", "tpuv5p": "tpu-v5p",
    "v5p": "tpu-v5p",
}  # fmt: skip


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
    exact = next((one for one in _GPUS if one.name == key), None)
    if exact is not None:
        return exact
    model = re.sub(r"^(nvidia|tesla|amd|graphics device)\s+", "", re.sub(r"^nvidia\s+", "", word))
    return next((one for one in _GPUS if any(re.fullmatch(d, model) for d in one.drivers)), None)
