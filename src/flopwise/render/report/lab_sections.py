"""The lab in a report: per experiment its claim, its verdict, its pictures and its tables."""

from collections import Counter
from functools import partial

from flopwise.experiments.results import Answer, LabRun
from flopwise.render.lab_charts import picture_chart
from flopwise.render.lab_view import verdicts_table
from flopwise.render.report.evidence import MEASURED, Block, ChartBlock, Section, TableBlock, slug

_LONGEST = 60  # of a key: a number after it must not be cut off


def lab_sections(found: LabRun) -> list[Section]:
    """All verdicts first, where there are several; then each experiment."""
    answers = found.answers()
    how = "" if any(answer.as_stored for answer in answers) else MEASURED
    first = Section(key="lab", title="Verdicts", blocks=(TableBlock(verdicts_table(found, answers), how, whole=True),))
    seen: Counter[str] = Counter()
    sections = []
    for answer in answers:
        key = slug(f"lab-{answer.result.experiment}")[:_LONGEST]
        seen[key] += 1
        sections.append(_section(answer, key if seen[key] == 1 else f"{key}--{seen[key]}"))
    return [first, *sections]


def _section(answer: Answer, key: str) -> Section:
    name = answer.result.experiment
    blocks: list[Block] = [f"Claim: {answer.claim}", f"Verdict: {answer.verdict.word}: {answer.verdict.why}"]
    blocks += [
        ChartBlock(
            f"{key}-{i}",
            partial(picture_chart, one, titled=False),
            _caption(one.title, one.caption),
            doubtful=answer.as_stored,
        )
        for i, one in enumerate(answer.pictures, 1)
    ]
    blocks += [TableBlock(table) for table in answer.tables]
    blocks += answer.problems
    if answer.result.quick:
        blocks.append("Measured with --quick: fewer sizes and samples.")
    return Section(key=key, title=name, blocks=tuple(blocks))


def _caption(title: str, caption: str) -> str:
    return f"{title}. {caption}" if caption else title
