"""What every experiment is held to."""

import json

import msgspec
import pytest

from flopwise.experiments.verdict import VERDICTS
from flopwise.render.lab_charts import picture_chart
from flopwise.render.table import shown


@pytest.fixture
def pure():
    """Judges made-up or measured rows, and holds the experiment to its laws; returns the verdict.

    Rows are read as they are stored, and stored as they were read; what is drawn and tabulated can be shown.
    """

    def judged(experiment, rows, place):
        stored = json.loads(json.dumps(rows, allow_nan=False))
        typed = experiment.read(stored)
        assert experiment.read(msgspec.to_builtins(typed)) == typed
        verdict = experiment.verdict(typed, place)
        assert verdict.word in VERDICTS
        assert verdict.why.endswith(".")
        assert experiment.verdict(experiment.read(stored), place) == verdict
        for table in experiment.tabulate(typed, place):
            assert len(shown(table).cells) == len(table.rows)
            assert not table.rows or all(any(key in row for row in table.rows) for key in table.keys)
        for picture in experiment.draw(typed, place):
            named = (*picture.x.fields, *picture.y.fields, picture.colour, picture.column)
            assert not picture.rows or all(any(name in row for row in picture.rows) for name in named if name)
            assert picture_chart(picture).to_dict(format="vega-lite")
        return verdict

    return judged
