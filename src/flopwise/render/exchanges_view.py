"""Measured collectives: the model that their sizes give, as a table, for programs and in a line."""

from collections.abc import Sequence
from typing import Any

from flopwise import units
from flopwise.analysis.exchanges import Exchange, exchange, link_fits
from flopwise.records.run import Point
from flopwise.records.table import Table
from flopwise.render.table import columns
from flopwise.spec.operations import OpSpec

RATES = ("algorithm_bytes_per_s", "bus_bytes_per_s")
_MOST_TOLD = 3  # models that a screen names
_FIT = "latency plus bus bytes over bus bandwidth, fitted to the medians by the least relative error"


def rates(point: Point) -> dict[str, float]:
    """The two bandwidths of a collective; nothing of any other step."""
    one = exchange(point)
    return {name: getattr(one, name) for name in RATES} if one is not None else {}


def exchange_document(point: Point) -> dict[str, Any] | None:
    one = exchange(point)
    fields = ("kind", "ranks", "backend", "device", "message_bytes", "time_ns", *RATES)
    return {name: getattr(one, name) for name in fields} if one is not None else None


def describe(one: Exchange) -> str:
    """A measured collective in a sentence."""
    what = f"{one.kind} of {units.rate(one.message_bytes, 'B')} over {units.several(one.ranks, 'rank')}"
    speed = f"algorithm bandwidth {units.rate(one.algorithm_bytes_per_s, 'B/s')}"
    speed += (
        f", bus bandwidth {units.rate(one.bus_bytes_per_s, 'B/s')}" if one.ranks > 1 else ", and no link between ranks"
    )
    return f"{what[0].upper()}{what[1:]} by {one.backend}: {units.duration(one.time_ns)}; {speed}."


def rounded(point: Point) -> str:
    """Where fewer bytes were sent than asked for."""
    one, op = exchange(point), point.trial.workload.subject
    if one is None or not isinstance(op, OpSpec) or one.message_bytes == op.dims["bytes"]:
        return ""
    return f"{one.message_bytes:,} of {op.dims['bytes']:,} bytes: whole elements, as many for each rank"


def fit_rows(points: Sequence[Point]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "kind": one.time.kind,
            "ranks": one.time.ranks,
            "backend": one.backend,
            "device": one.device,
            "sizes": one.sizes,
            "latency_ns": one.time.latency_ns,
            "bus_bytes_per_s": one.time.bus_bytes_s,
            "error_share": one.error,
        }
        for one in link_fits(points)
    )


def describe_fits(points: Sequence[Point]) -> tuple[str, ...]:
    """The models in a line each, where they are few; what no size made longer has no bandwidth."""
    fits = link_fits(points)
    if len(fits) > _MOST_TOLD:
        return (f"Latency and bandwidth, fitted for each of {len(fits)} (collective, ranks, backend): --full",)
    return tuple(
        f"{one.time.kind}, {units.several(one.time.ranks, 'rank')}, {one.backend} on {one.device}: "
        f"latency {units.duration(one.time.latency_ns)}, "
        f"bus {units.rate(one.time.bus_bytes_s, 'B/s') if one.time.bus_bytes_s else 'not known'} "
        f"(fitted to {one.sizes} sizes{f', error {units.percent(one.error, 0)}' if one.error is not None else ''})"
        for one in fits
    )


def fit_tables(points: Sequence[Point]) -> list[Table]:
    """The model of each backend, kind and number of ranks; no table where no two sizes were measured."""
    rows = fit_rows(points)
    shown = columns(
        "kind: collective | ranks: ranks | backend: backend | device: device | latency_ns | "
        "bus_bytes_per_s: bus bandwidth | error_share: median error | sizes: sizes"
    )
    return [Table("links", "Latency and bandwidth", shown, rows, (_FIT,))] if rows else []
