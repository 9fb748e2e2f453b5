"""The clusters that are known: hosts as their makers and clouds describe them, with the sources.

What one GPU sends to other hosts is its host's network for GPU traffic, shared among its GPUs.
"""

from typing import Any

from flopwise.spec.cluster_facts import Cluster
from flopwise.spec.links import LINKS

_NV = "https://docs.nvidia.com"
_BASEPOD = (
    f"{_NV}/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"
)
_A100 = (f"DGX A100 user guide: 8 ConnectX-6 of 200 Gb/s {_NV}/dgx/dgxa100-user-guide/",)
_H100 = (f"DGX BasePOD, DGX H100 and H200: 8 ConnectX-7 of 400 Gb/s {_BASEPOD}",)
_B200 = (f"DGX BasePOD, DGX B200: 8 ConnectX-7 of 400 Gb/s {_BASEPOD}",)
_B300 = ("DGX B300: 8 ConnectX-8 of 800 Gb/s https://www.nvidia.com/en-us/data-center/dgx-b300/",)
_GB200 = ("DGX GB200: 72 ConnectX-7 of 400 Gb/s https://www.nvidia.com/en-us/data-center/dgx-gb200/",)
_GB300 = (
    "GB300 NVL72: 4 ConnectX-8 for the 4 GPUs of a tray "
    f"{_NV}/enterprise-reference-architectures/nvl72-ai-factory/latest/components.html",
)
_MI300X = (
    "MI300X platform: 7 Infinity Fabric links of 128 GB/s https://www.amd.com/en/products/accelerators/instinct/mi300.html",
    "a 400 Gb/s adapter for each GPU, as of Azure's ND MI300X v5",
)
_AWS = ("Amazon EC2 accelerated instances, network https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html",)
_GCP = ("Google Cloud, GPU network bandwidth https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth",)
_AZURE = ("Azure ND family sizes https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nd-family",)
_HGX = ("HGX H100 with a 400 Gb/s NDR adapter for each GPU, as Lambda and CoreWeave rent them",)
_VTRAIN = ("vTrain (arXiv 2312.12391): nodes of 8 A100 with 800 Gb/s of InfiniBand",)
_DEEPSEEK = ("DeepSeek-V3 (arXiv 2505.09343): nodes of 8 H800 with 400 GB/s of NVLink and 8 × 400 Gb/s of InfiniBand",)
_META = (
    "The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.1: 400 Gb/s RoCE for each GPU; pods of 3,072 GPUs, "
    "1:7 oversubscribed above",
)


def _hosts(
    name: str, title: str, gpu: str, inside: str, gbit: float, sources: tuple[str, ...], **others: float
) -> Cluster:
    """Hosts of eight GPUs on one board; `inside` by its name in spec/links.py, `gbit` that each GPU sends in a second."""
    between = gbit * 1e9 / 8
    facts: dict[str, Any] = {"domain": 8, "inside_bytes_s": LINKS[inside], "between_bytes_s": between, **others}
    return Cluster(name=name, title=title, gpu=gpu, sources=sources, **facts)


def _racks(name: str, title: str, gpu: str, gbit: float, sources: tuple[str, ...], **others: float) -> Cluster:
    """72 GPUs in hosts of four, all on NVLink."""
    return _hosts(name, title, gpu, "nvlink5", gbit, sources, domain=72, host=4, **others)


# The first of a GPU is its usual one. Blackwell Ultra may take 1,100 and 1,400 W where the B200 and GB200 take 1,000 and 1,200.
CLUSTERS = (
    _hosts("dgx-a100", "DGX A100", "a100", "nvlink3", 200, _A100),
    _hosts("dgx-a100-40", "DGX A100, GPUs of 40 GB", "a100-40", "nvlink3", 200, _A100),
    _hosts("dgx-h100", "DGX H100", "h100", "nvlink4", 400, _H100),
    _hosts("hgx-h800", "HGX H800 with 8 × 400 Gb/s", "h800", "nvlink4", 400, _DEEPSEEK, inside_bytes_s=200e9),
    _hosts("dgx-h200", "DGX H200", "h200", "nvlink4", 400, _H100),
    _hosts("dgx-b200", "DGX B200", "b200", "nvlink5", 400, _B200),
    _hosts("dgx-b300", "DGX B300", "b300", "nvlink5", 800, _B300, power=1.1),
    _racks("gb200-nvl72", "GB200 NVL72", "gb200", 400, _GB200),
    _racks("gb300-nvl72", "GB300 NVL72", "gb300", 800, _GB300, power=1400 / 1200),
    _hosts("mi300x", "MI300X platform", "mi300x", "xgmi3", 400, _MI300X),
    _hosts("hgx-h100", "HGX H100 with 8 × 400 Gb/s", "h100", "nvlink4", 400, _HGX),
    _hosts("a100-800g", "A100 with 800 Gb/s a host", "a100", "nvlink3", 100, _VTRAIN),
    _hosts("aws-p4d", "AWS p4d.24xlarge", "a100-40", "nvlink3", 50, _AWS),
    _hosts("aws-p4de", "AWS p4de.24xlarge", "a100", "nvlink3", 50, _AWS),
    _hosts("aws-p5", "AWS p5.48xlarge", "h100", "nvlink4", 400, _AWS),
    _hosts("aws-p5en", "AWS p5en.48xlarge", "h200", "nvlink4", 400, _AWS),
    _hosts("aws-p6-b200", "AWS p6-b200.48xlarge", "b200", "nvlink5", 400, _AWS),
    _hosts("gcp-a3-high", "Google Cloud A3 High", "h100", "nvlink4", 100, _GCP),
    _hosts("gcp-a3-mega", "Google Cloud A3 Mega", "h100", "nvlink4", 200, _GCP),
    _hosts("gcp-a3-ultra", "Google Cloud A3 Ultra", "h200", "nvlink4", 400, _GCP),
    _hosts("gcp-a4", "Google Cloud A4", "b200", "nvlink5", 400, _GCP),
    _racks("gcp-a4x", "Google Cloud A4X", "gb200", 400, _GCP),
    _hosts("azure-nd-a100", "Azure NDm A100 v4", "a100", "nvlink3", 200, _AZURE),
    _hosts("azure-nd-h100", "Azure ND H100 v5", "h100", "nvlink4", 400, _AZURE),
    _hosts("azure-nd-h200", "Azure ND H200 v5", "h200", "nvlink4", 400, _AZURE),
    _hosts("azure-nd-mi300x", "Azure ND MI300X v5", "mi300x", "xgmi3", 400, _AZURE),
    _hosts("grand-teton", "Meta Grand Teton H100", "h100", "nvlink4", 400, _META, oversubscribed=7.0, spine=3072),
)
