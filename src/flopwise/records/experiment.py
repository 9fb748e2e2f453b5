"""Where an experiment ran. No torch here."""

import msgspec

from flopwise.records.run import Environment
from flopwise.spec.gpu import Gpu, find_gpu


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an experiment ran."""

    device: str  # 'cpu', 'cuda:0'
    environment: Environment | None = None
    load: float | None = None  # threads that wanted to run, in the minute before

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def name(self) -> str:
        """The chip.

        >>> Place(device="cpu").name
        'cpu'
        """
        there = self.environment
        chip = (there.gpu.name if there.gpu else "") if there and self.on_gpu else there.cpu if there else ""
        return chip or self.device

    @property
    def gpu(self) -> Gpu | None:
        """The GPU's data sheet, if it is a known one."""
        return find_gpu(self.name) if self.on_gpu else None

    @property
    def bandwidth(self) -> float | None:
        """The GPU memory's specified bytes per second, where known."""
        return self.gpu.bandwidth_bytes_s if self.gpu else None

    @property
    def torch(self) -> str:
        """The version, as 'torch 2.11.0'; '' where it is not known."""
        return f"torch {self.environment.torch}" if self.environment and self.environment.torch else ""
