"""The lab's pages: the list of experiments, and on each page the charts and tables of a stored run.

    python benchmarks/lab_pages.py                # only the list, docs/explanation/lab/index.md
    python benchmarks/lab_pages.py RUN [RUN…]     # and what these runs measured, on the page of each of their experiments

On a page, what lies between the two marks is replaced; the text around it is written by hand. Where several runs have an
experiment, the last one named is shown. No GPU.
"""

import re
import sys
from pathlib import Path

from flopwise.experiments.catalog import experiments
from flopwise.experiments.results import Answer, read_lab
from flopwise.render.charts import save
from flopwise.render.lab_charts import picture_chart
from flopwise.render.table import escaped, markdown
from flopwise.store import find, runs_root

PAGES = Path(__file__).parents[1] / "docs" / "explanation" / "lab"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
INDEX = """# The lab

`flopwise lab` holds claims about GPUs against the machine it runs on. Each experiment states a claim, measures it, draws it, and
ends in a verdict: confirmed, refuted here, inconclusive, or not measurable here; always with the numbers. On a CPU several
are refuted: that is a result, too.

    flopwise lab                              # the list
    flopwise lab data-types warmup            # some of them
    flopwise lab all --quick --device cpu     # all, in less than two minutes
    flopwise report last -o report.html       # the claims, verdicts, charts and tables on one page

Each runs in a process of its own: one that crashes, runs out of memory or of time is a row with its reason, and the rest go on.
Results are a run like any other. From Python: `flopwise.lab("warmup").answers()`.

| experiment | claim |
| :--- | :--- |
"""
ADDING = """

## Adding one

1. `src/flopwise/experiments/claims/my_claim.py` with its `EXPERIMENT`; it is found by being there. `measure(bench)` yields rows:
   frozen structs (`Row`, or `Timed` for what `bench.time` measured) with the unit at the end of each field's name (`wall_ns`,
   `peak_bytes`, `done_flops_per_s`, `idle_share`). Rows of several kinds have a tag, the JSON field `part`.
2. `judge(rows, place)` yields checks (`experiments/verdict.py`): `said` for what was measured, `require` for what must be there,
   `within`, `each` and `holds` for the conditions of the claim. One refuted check refutes the claim, otherwise one inconclusive
   check leaves it open. `draw` and `tabulate` give pictures and tables. All three are pure; torch is imported inside `measure`.
3. `tests/experiments/test_my_claim.py`: made-up rows that confirm and that refute, and a quick run on the CPU.
4. `docs/explanation/lab/my-claim.md`: why it is so, and the two marks between which `python benchmarks/lab_pages.py RUN` puts
   charts and tables.

In quick mode an experiment has about five seconds on two CPU cores. What needs a GPU says so by `bench.needs_gpu("…")`.
"""


def index() -> str:
    """The page with the list."""
    lines = [f"| [{one.name}]({one.name}.md) | {escaped(one.claim)} |" for one in experiments().values()]
    how = ADDING + "\nThe list above is made from the code by `python benchmarks/lab_pages.py`.\n"
    return INDEX + "\n".join(lines) + how


def measured(answer: Answer) -> str:
    """What a run found, as the page shows it; the charts lie beside the page."""
    name, place = answer.result.experiment, answer.result.place
    where = ", ".join(word for word in (place.name, place.torch) if word) if place else "an unknown machine"
    said = f"On {where}: **{answer.verdict.word}**: {answer.verdict.why}"
    parts = [f"> {answer.claim}", escaped(said).replace("\\*\\*", "**")]
    for number, picture in enumerate(answer.pictures, 1):
        save(picture_chart(picture), PAGES / f"{name}-{number}.svg")
        parts += [f"![{escaped(picture.title)}]({name}-{number}.svg)", *([picture.caption] if picture.caption else [])]
    parts += [markdown(table).strip() for table in answer.tables]
    return "\n\n".join(parts)


def fill(page: Path, text: str) -> None:
    """Replace what lies between the marks."""
    whole = page.read_text(encoding="utf-8")
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not marked.search(whole):
        sys.exit(f"{page} has no {BEGIN} … {END}")
    page.write_text(marked.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", whole), encoding="utf-8")


def main(runs: list[str]) -> None:
    (PAGES / "index.md").write_text(index(), encoding="utf-8")
    latest = {a.result.experiment: a for run in runs for a in read_lab(find(run, runs_root(None))).answers()}
    for name, answer in latest.items():
        fill(PAGES / f"{name}.md", measured(answer))
        print(f"{name}: {answer.verdict.word}")


if __name__ == "__main__":
    main(sys.argv[1:])
