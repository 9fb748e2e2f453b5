"""What a user is shown of the machine."""

from collections.abc import Sequence

import msgspec

from flopwise.capture.doctor import Check
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE


def doctor_view(checks: Sequence[Check]) -> View:
    """Each check with what was found and what to do."""
    rows = tuple(msgspec.structs.asdict(check) for check in checks)
    columns = (
        Column("state", "", right=False),
        Column("name", "what", right=False),
        Column("found", "found", right=False, longest=LONGEST_LINE),
        Column("advice", "what to do", right=False, longest=LONGEST_LINE),
    )
    return [Table(title="this machine", columns=columns, rows=rows)], document("doctor", checks=rows)
