"""Where a report's numbers come from: the machine, the versions, the command."""

from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.records.run import Environment
from flopwise.render.report.evidence import ReportPart, Section, Shown
from flopwise.render.report.words import short_command
from flopwise.render.table import Column, Table
from flopwise.version import __version__


def provenance(part: ReportPart) -> Section | None:
    """What was read, on which machine it was captured, and by which command."""
    facts: dict[str, Any] = {}
    if part.run is not None:
        header = part.run.header
        facts |= {"run": header.id, "begun": header.created_at, "command": short_command(header.command)}
        point = next((p for p in part.run.points if p.environment), None)
        place = next((r.place for r in part.lab.results if r.place), None) if part.lab else None
        facts |= _environment(point.environment if point else place.environment if place else None)
    if part.explanation is not None:
        facts |= {"trace": Path(part.explanation.path).name, "profiler": part.explanation.source}
        facts.setdefault("GPU", part.explanation.gpu)
    if part.memory is not None and part.memory.path:
        facts |= {"snapshot": Path(part.memory.path).name}
    if part.roofline is not None:
        facts["ceilings"] = f"{part.roofline.ceilings.how}, of {part.roofline.ceilings.gpu}"
    facts["page made by"] = f"flopwise {__version__}"
    rows = tuple({"what": what, "value": value} for what, value in facts.items() if value)
    columns = (Column("what", "what", right=False), Column("value", "which", right=False, longest=1000))
    table = Table(title="Provenance", columns=columns, rows=rows, notes=part.notes)
    return Section(key="provenance", title="Where these numbers come from", blocks=(Shown(table, how=""),))


def _environment(there: Environment | None) -> dict[str, Any]:
    if there is None:
        return {}
    gpu = there.gpu
    return {
        "GPU": f"{gpu.name}, {units.size(gpu.memory_bytes)}, {gpu.sm_count} SMs" if gpu else "none: the CPU",
        "driver": gpu.driver if gpu else "",
        "CPU": f"{there.cpu}, {there.cpu_cores} cores, torch uses {there.cpu_threads}" if there.cpu else "",
        "torch": there.torch,
        "CUDA": there.cuda,
        "Triton": there.triton,
        "Python": there.python,
        "flopwise, when measured": there.flopwise,
        "system": there.os,
        "commit": f"{there.git_commit}{' with changes' if there.git_dirty else ''}" if there.git_commit else "",
        "switches": ", ".join(f"{k}={v}" for k, v in there.switches.items()),
    }
