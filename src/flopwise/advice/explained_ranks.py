"""Ranks of a job explained together, with what to change."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from flopwise.advice.findings import rank_findings
from flopwise.advice.rank_facts import RankFacts
from flopwise.analysis.ranks.explained import explain_ranks
from flopwise.capture.runners import LOCAL
from flopwise.records.ranks import RanksExplanation
from flopwise.spec.links import links


def explained_ranks(
    paths: Sequence[str | Path], *, name: str = "", link: str = "", gpu: str = "", on: str = LOCAL
) -> RanksExplanation:
    """Of the files of a job's ranks; raises NotTogether where they are none."""
    given = links(link) if link else None
    found = explain_ranks(paths, name=name, link=given, gpu=gpu, on=on)
    return msgspec.structs.replace(found, findings=rank_findings(RankFacts(found)))
