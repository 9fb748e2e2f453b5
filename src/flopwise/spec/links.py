"""Links between GPUs by name: what one GPU sends in one direction, which NCCL's bus bandwidth cannot exceed."""

import re

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

# Bytes per second of one GPU in one direction. NVLink: half of what NVIDIA's datasheets of the V100, A100, H100 and B200 state
# for both directions; xgmi3: half of the 7 × 128 GB/s of an MI300X; PCIe: 16 lanes, after
# encoding; InfiniBand and Ethernet: one port of the named Gbit/s.
LINKS = {
    "nvlink2": 150e9,
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "xgmi3": 448e9,
    "pcie3": 15.75e9,
    "pcie4": 31.5e9,
    "pcie5": 63e9,
    "pcie6": 121e9,
    "ib100": 12.5e9,
    "ib200": 25e9,
    "ib400": 50e9,
    "ib800": 100e9,
    "eth10": 1.25e9,
    "eth25": 3.125e9,
    "eth100": 12.5e9,
    "eth200": 25e9,
    "eth400": 50e9,
}
_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(G|M|T)B/s", re.IGNORECASE)
_SCALE = {"M": 1e6, "G": 1e9, "T": 1e12}


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second within a host and between hosts; None: not known."""

    inside: float | None = None
    between: float | None = None


def links(text: str) -> Links:
    """One link for all, or two: within a host, then between hosts.

    >>> links("nvlink4,ib400"), links("12.5GB/s").between
    (Links(inside=450000000000.0, between=50000000000.0), 12500000000.0)
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > 2:
        raise FlopwiseError(f"--link {text} names more than two links", "within a host, then between: nvlink4,ib400")
    found = [_bytes_s(word) for word in words]
    return Links(inside=found[0], between=found[-1])


def _bytes_s(word: str) -> float:
    if (number := _NUMBER.fullmatch(word)) is not None and float(number[1]) > 0:
        return float(number[1]) * _SCALE[number[2].upper()]
    if word.lower() not in LINKS:
        near = fields.did_you_mean(word.lower(), tuple(LINKS))
        raise FlopwiseError(f"there is no link {fields.show(word)}", f"{near}known: {', '.join(LINKS)}; or 25GB/s")
    return LINKS[word.lower()]
