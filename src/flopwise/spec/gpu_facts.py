"""One kind of GPU, as its vendor describes it."""

import msgspec

from flopwise.spec import fields

PEAK_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. `None` where the vendor states no figure, or (for `cpu`) where it has to be measured.

    >>> from flopwise.spec.gpu import gpu
    >>> gpu("h100").peak("bf16") / 1e12
    989.4
    """

    name: str
    title: str
    peaks: dict[str, float]  # FLOP/s by dtype, dense, accumulating in fp32; fp32: the vector units, AMD's matrix cores
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

        >>> from flopwise.spec.gpu import gpu
        >>> gpu("a100").peak("fp8") is None
        True
        """
        fields.one_of("dtype", dtype, PEAK_DTYPES)
        return self.peaks.get(dtype)

    def ridge(self, dtype: str) -> float | None:
        """FLOPs per byte from which on the peak rate, not the bandwidth, is the limit.

        >>> from flopwise.spec.gpu import gpu
        >>> round(gpu("h100").ridge("bf16"))
        295
        """
        peak = self.peak(dtype)
        return peak / self.bandwidth_bytes_s if peak and self.bandwidth_bytes_s else None
