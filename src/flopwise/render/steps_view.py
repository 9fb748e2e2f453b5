"""Every step of a trace, what the host did while the GPU waited, and copies between host and GPU, as tables."""

import msgspec

from flopwise import units
from flopwise.analysis.blame import HostBlame
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.step_times import STEADY
from flopwise.records.table import Table
from flopwise.render.json import picked
from flopwise.render.table import columns

STEPS, BLAME, TRANSFERS, ITERATIONS = "steps", "blame", "transfers", "iterations"
_MOST = 50  # steps that are listed; all of them are in the JSON
_MOST_BLAMED = 8


def steps_table(e: Explanation) -> Table:
    """One row per step; cold ones and outliers say so."""
    rows = tuple(
        picked(one, "number name ns busy_ns launches")
        | {
            "idle_share": 1 - one.busy_ns / max(one.ns, 1),
            "kind": (one.why and f"{one.kind}: {one.why}") or one.kind if one.kind != STEADY else _outlier(one.outlier),
        }
        for one in e.step_times
    )
    heading = (
        "number: step | name: mark | ns: time [ms] | busy_ns: GPU busy [ms] | idle_share: GPU idle | launches [count]"
    )
    shown = columns(f"{heading} | kind: remark")
    return Table(STEPS, "Every step, as traced", shown, rows, _spread(e), most=_MOST)


def iterations_table(e: Explanation) -> Table:
    """A server's iterations by kind, and what limits decoding."""
    found = e.serving
    rows = tuple(msgspec.structs.asdict(one) for one in (found.kinds if found is not None else ()))
    shown = columns(
        "kind: iterations | count | ns: median [ms] | requests [count] | decode_requests: decoding [count] | "
        "prefill_tokens: prompts' tokens [count] | context_tokens: tokens in the cache [count] | "
        "tokens_per_s: tokens/s [count] | in_graphs: in CUDA graphs [share]"
    )
    return Table(ITERATIONS, "Iterations of the server, as traced", shown, rows, _limits(e))


def _limits(e: Explanation) -> tuple[str, ...]:
    found = e.serving
    if found is None:
        return ()
    token = (
        f"an output token takes {units.duration(found.output_token_ns)} (median), "
        f"{units.duration(found.output_token_mean_ns or 0.0)} on average, prefills between included"
        if found.output_token_ns is not None
        else ""
    )
    weights = (
        f"weights read by an iteration: {units.size(found.weights_bytes)}" if found.weights_bytes is not None else ""
    )
    per_token = f"cache of one token: {units.size(found.cache_bytes_per_token)}" if found.cache_bytes_per_token else ""
    cache = (
        f"cache read by an iteration that decodes: {units.size(found.decode_cache_bytes)}"
        if found.decode_cache_bytes
        else ""
    )
    return tuple(filter(None, (token, weights, per_token, cache)))


def _outlier(outlier: bool) -> str:
    return "outlier" if outlier else ""


def _spread(e: Explanation) -> tuple[str, ...]:
    found = e.step_spread
    if found is None or e.steps < 2:
        return ()
    quartiles = f"half of them between {units.duration(found.low_ns)} and {units.duration(found.high_ns)}"
    of = f"{found.steps} steady steps" if found.steps > 1 else "1 steady step"
    lines = [f"{of}: median {units.duration(found.median_ns)}, {quartiles}"]
    if found.outliers:
        lines.append(f"outliers: {', '.join(map(str, found.outliers[:_MOST_BLAMED]))}")
    if found.micro_batches > 1:
        lines.append(f"{found.micro_batches:.3g} micro-batches a step")
    if len(e.step_times) > _MOST:
        lines.append(f"and {len(e.step_times) - _MOST} more steps: in the JSON")
    return tuple(lines)


def blame_table(e: Explanation) -> Table:
    """What the host did while the GPU was idle; of one thing in several places, what was launched after the longest."""
    by_name: dict[tuple[str, str], list[HostBlame]] = {}
    for one in e.blame:
        by_name.setdefault((one.what, one.cause), []).append(one)
    summed = [
        picked(some[0], "what cause before")
        | {name: sum(getattr(one, name) for one in some) for name in ("idle_ns", "count")}
        for some in by_name.values()
    ]
    rows = tuple(sorted(summed, key=lambda row: -row["idle_ns"]))
    shown = columns(
        "what: the host was in | cause | idle_ns: GPU idle, traced [ms] | count: gaps | before: launched next"
    )
    return Table(BLAME, "What the host did while the GPU was idle", shown, rows, most=_MOST_BLAMED)


def transfers_table(e: Explanation) -> Table:
    """Copies between host and GPU by direction."""
    rows = tuple(picked(one, "kind count bytes gpu_ns exposed_ns bytes_per_s") for one in e.transfers)
    shown = columns(
        "kind: direction | count | bytes [bytes] | gpu_ns: time [ms] | exposed_ns: with nothing beside [ms] | "
        "bytes_per_s: rate [bytes_per_s]"
    )
    return Table(TRANSFERS, "Copies between host and GPU", shown, rows)
