"""Ranks of a job explained together, with what to change."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from flopwise.advice.findings import rank_findings
from flopwise.advice.rank_facts import RankFacts
from flopwise.analysis.ranks.explained import explain_ranks
from flopwise.analysis.ranks.files import rank_files
from flopwise.analysis.ranks.planned import beside_plan
from flopwise.capture.runners import LOCAL
from flopwise.errors import FlopwiseError
from flopwise.records.plan import Plan
from flopwise.records.ranks import RanksExplanation
from flopwise.spec.links import links
from flopwise.store import StoredRun


def ranks_verdict(run: StoredRun) -> str:
    """What the ranks of a run tell together; '' where it has one, or where they cannot be joined."""
    files = rank_files([run])
    try:
        return explained_ranks(files).verdict if files else ""
    except FlopwiseError:
        return ""


def explained_ranks(
    paths: Sequence[str | Path],
    *,
    name: str = "",
    link: str = "",
    gpu: str = "",
    on: str = LOCAL,
    plan: Plan | None = None,
) -> RanksExplanation:
    """Of the files of a job's ranks, beside what was planned; raises NotTogether where they are none."""
    given = links(link) if link else None
    found = explain_ranks(paths, name=name, link=given, gpu=gpu, on=on)
    found = msgspec.structs.replace(found, findings=rank_findings(RankFacts(found)))
    return beside_plan(found, plan) if plan is not None else found
