"""The charts of a run of the lab as a file: a page, or one picture of all of them."""

from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.lab.results import LabRun
from flopwise.render.charts import save
from flopwise.render.lab_charts import stacked
from flopwise.store import StoredRun, find, runs_root
from flopwise.verbs.report import report


def write_pictures(found: LabRun, output: str | Path, runs: str | Path | None = None, command: str = "") -> Path:
    """Write the charts; the suffix decides: .html is the whole report, .svg and .png are the charts below each other."""
    place = Path(output).expanduser()
    if place.suffix == ".html":
        return report(StoredRun.load(find(found.run, runs_root(runs))), output=place, command=command)
    pictures = [picture for answer in found.answers() for picture in answer.pictures]
    if not pictures:
        raise FlopwiseError("there is nothing to draw", "none of the experiments measured anything")
    save(stacked(pictures), place)
    return place
