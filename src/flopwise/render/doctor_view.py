"""What this machine can do, as a table."""

from collections.abc import Sequence

import msgspec

from flopwise.capture.doctor import Check
from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render.json import document
from flopwise.render.table import View


def doctor_view(checks: Sequence[Check]) -> View:
    """Each check with its result and what to do."""
    rows = tuple(msgspec.structs.asdict(check) for check in checks)
    words = (Column("found", "result", SENTENCE), Column("advice", "what to do", SENTENCE))
    columns = (Column("name", "check"), Column("state"), *words)
    return View([Table("doctor", "This machine", columns, rows)], document("doctor", checks=rows))
