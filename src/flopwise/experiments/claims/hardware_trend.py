"""`hardware-trend`: peak rate, memory bandwidth and links of a data centre's GPUs, one generation after another.

The ridge point is the peak rate over the bandwidth: the FLOPs that have to be done with each byte, or the chip waits for memory.
The figures are those of the data sheets (`flopwise.spec.gpu`, each with its source); next to them what a matmul and a copy
reach on this machine.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Row, fields, select
from flopwise.experiments.verdict import Check, holds, require, said
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "Peak rate, bandwidth and links from V100 to B200: what grew faster, and the ridge point over the years."
CLAIM = "A GPU's peak rate grew faster than its memory's bandwidth, and its links no faster: each byte must be used more often."
YEARS = {"v100": 2017, "a100": 2020, "h100": 2022, "h200": 2023, "b200": 2024}  # announced
FEWEST = 3  # generations; of fewer there is no trend
HALF = ("bf16", "fp16")  # a V100 has only the second
PEAK, BANDWIDTH, LINKS, MEMORY = GROWN = ("peak rate", "bandwidth", "links", "memory")


class Chip(Row, frozen=True, kw_only=True, tag_field="part", tag="chip"):
    gpu: str
    title: str
    year: int
    peak_flops_per_s: float  # a dense matmul in 16 bits
    memory_bytes_per_s: float
    link_bytes_per_s: float | None
    memory_bytes: int | None

    @property
    def ridge(self) -> float:
        """FLOPs for each byte from memory."""
        return self.peak_flops_per_s / self.memory_bytes_per_s

    @property
    def figures(self) -> dict[str, float | None]:
        found = (self.peak_flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s, self.memory_bytes)
        return dict(zip(GROWN, found, strict=True))


class Here(Row, frozen=True, kw_only=True, tag_field="part", tag="here"):
    """What this machine reaches."""

    format: str
    n: int
    matmul_flops_per_s: float
    copy_bytes_per_s: float

    @property
    def ridge(self) -> float:
        return self.matmul_flops_per_s / self.copy_bytes_per_s


Rows = Sequence[Chip | Here]


def measure(bench: "Bench") -> Iterator[Chip | Here]:
    for name, year in YEARS.items():
        found = find_gpu(name)
        peak = next((rate for half in HALF if found and (rate := found.peak(half))), None)
        if found is None or peak is None or found.bandwidth_bytes_s is None:  # not in the table
            continue
        yield Chip(
            gpu=name,
            title=found.title,
            year=year,
            peak_flops_per_s=peak,
            memory_bytes_per_s=found.bandwidth_bytes_s,
            link_bytes_per_s=found.link_bytes_s,
            memory_bytes=found.memory_bytes,
        )
    yield _here(bench)


def _here(bench: "Bench") -> Here:
    """A large matmul, and a copy of more than the cache holds."""
    import torch

    name, n, numbers = ("bf16", 8192, 2**28) if bench.on_gpu else ("fp32", 1024, 2**25)
    bench.doing(f"a matmul of {n} × {n} and a copy here")
    a, b, x = bench.randn(n, n, dtype=name), bench.randn(n, n, dtype=name), bench.randn(numbers)
    product = bench.time(partial(torch.mm, a, b, out=torch.empty_like(a)), seconds=0.1)
    copy = bench.time(partial(torch.empty_like(x).copy_, x), seconds=0.1)
    work, moved = matmul_flops(n, n, n), 2 * x.nbytes
    rates = {"matmul_flops_per_s": 1e9 * work / product.took_ns, "copy_bytes_per_s": 1e9 * moved / copy.took_ns}
    return Here(format=name, n=n, **rates)


def growth(old: Chip, new: Chip) -> dict[str, float | None]:
    """How many times as much the newer one has."""
    pairs = ((name, old.figures[name], value) for name, value in new.figures.items())
    return {name: value / before if value and before else None for name, before, value in pairs}


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    chips = sorted(select(rows, Chip), key=lambda chip: chip.year)
    yield require("generations", len(chips) >= FEWEST, f"only {len(chips)} GPUs are in the table.")
    old, new = chips[0], chips[-1]
    grown = growth(old, new)
    years, ridges = new.year - old.year, ", ".join(f"{chip.gpu.upper()} {chip.ridge:.0f}" for chip in chips)
    times = ", ".join(f"{name} × {value:.1f}" for name, value in grown.items() if value)
    yield said(
        f"from {old.gpu.upper()} to {new.gpu.upper()}, in {years} years: {times}. FLOPs per byte at the ridge: {ridges}."
    )
    falls = [b.gpu.upper() for a, b in pairwise(chips) if b.ridge < a.ridge]
    yield said(f"Not at every step: {' and '.join(falls)} has a lower ridge than the one before." if falls else "")
    for here in select(rows, Here):
        yield said(
            f"This machine: {units.rate(here.matmul_flops_per_s, 'FLOP/s')} in {here.format} and "
            f"{units.rate(here.copy_bytes_per_s, 'B/s')}, a ridge of {here.ridge:.0f}."
        )
    peak, bandwidth, links = grown[PEAK] or 0.0, grown[BANDWIDTH] or 0.0, grown[LINKS]
    yield holds("faster than the bandwidth", peak > bandwidth, peak=peak, bandwidth=bandwidth)
    yield holds("links no faster", None if links is None else links <= bandwidth, links=links or 0.0)


def draw(rows: Rows, place: Place) -> list[Picture]:
    chips = sorted(select(rows, Chip), key=lambda chip: chip.year)
    grown = [
        {"chip": _label(chip), "times": value, "what": name}
        for chip in chips
        for name, value in growth(chips[0], chip).items()
        if value
    ]
    ridges = [{"chip": _label(chip), "ridge": chip.ridge} for chip in chips]
    first = chips[0].gpu.upper() if chips else ""
    return [
        line(
            grown, Axis("chip", "announced"), Axis("times", f"times {first}", log=True), colour="what", words=GROWN
        ).titled(
            "Growth since the first generation",
            "What lies between peak rate and bandwidth has to come from using each byte again.",
        ),
        line(ridges, Axis("chip", "announced"), Axis("ridge", "FLOPs per byte")).titled(
            "Ridge point of 16-bit matmuls", "Below it, a kernel waits for memory."
        ),
    ]


def _label(chip: Chip) -> str:
    return f"{chip.gpu.upper()}, {chip.year}"


def tabulate(rows: Rows, place: Place) -> list[Table]:
    chips: list[dict[str, Any]] = [fields(chip) | {"ridge": chip.ridge} for chip in select(rows, Chip)]
    headings = columns(title="GPU", year="announced", peak_flops_per_s="16-bit matmuls", memory_bytes_per_s="memory")
    headings |= columns(link_bytes_per_s="links", memory_bytes="size", ridge="FLOPs per byte")
    here = columns(
        "format", n="matmul", matmul_flops_per_s="matmul's rate", copy_bytes_per_s="copy", ridge="FLOPs per byte"
    )
    measured = [fields(row) | {"ridge": row.ridge} for row in select(rows, Here)]
    return [table_of("as specified", headings, chips), table_of("as measured here", here, measured)]


EXPERIMENT = Experiment(23, "hardware-trend", LINE, CLAIM, (Chip, Here), measure, judge, draw, tabulate)
