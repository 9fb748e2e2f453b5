"""The lab's page: verdict, figures and one picture of each experiment, from stored runs. No GPU.

    python benchmarks/lab_pages.py [RUN…]     # by default the runs below benchmarks/results

What lies between two marks of docs/appendix/lab.md is replaced; the text around it is written by hand. Where several runs have an
experiment, the last one named is shown.
"""

import re
import sys
from pathlib import Path

from flopwise.experiments.results import Answer, read_lab
from flopwise.render.charts import save
from flopwise.render.lab_charts import picture_chart
from flopwise.render.table import escaped
from flopwise.store import find, runs_root

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "appendix" / "lab.md"
PICTURES = PAGE.with_suffix("")
RESULTS = ROOT / "benchmarks" / "results" / "h200-2026-11"
RUNS = ("lab", "lab-warmup", "lab-attention", "lab-again", "lab-claims")
STORED = [RESULTS / name for name in RUNS if (RESULTS / name).is_dir()]
SECTION = re.compile(r"(?<=<!-- measured: )(\S+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def answers(runs: list[Path]) -> dict[str, Answer]:
    """What was measured last, by experiment."""
    found = (read_lab(find(str(run), runs_root(None))) for run in runs)
    return {answer.result.experiment: answer for run in found for answer in run.answers()}


def measured(answer: Answer) -> str:
    """Claim, verdict and picture, as the page shows them."""
    name, place = answer.result.experiment, answer.result.place
    where = ", ".join(word for word in (place.name, place.torch) if word) if place else "an unknown machine"
    why = escaped(answer.verdict.why)
    picture = answer.pictures[0]
    drawn = f"![{escaped(picture.title)}]({PICTURES.name}/{name}.svg)\n\n{picture.caption}"
    said = f"**{answer.verdict.word[0].upper()}{answer.verdict.word[1:]}**, {where}: {why}"
    return f"> {escaped(answer.claim)}\n\n{said}\n\n{drawn}\n"


def filled(page: str, found: dict[str, Answer]) -> str:
    """The page with what these answers say."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"{name} -->\n\n{measured(found[name])}\n" if name in found else match[0]

    return SECTION.sub(section, page)


def main(runs: list[str]) -> None:
    found = answers([Path(run) for run in runs] or STORED)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, answer in found.items():
        save(picture_chart(answer.pictures[0]), PICTURES / f"{name}.svg")
        print(f"{name}: {answer.verdict.word}")


if __name__ == "__main__":
    main(sys.argv[1:])
