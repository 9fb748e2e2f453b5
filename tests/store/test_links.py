"""What flopwise writes goes to files of its own: a link in a run's folder is not followed."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.store import Run, files
from flopwise.store.rows import append_row


@pytest.fixture
def stored(root, trials, points):
    with Run.create(root, "sweep", "s", "flopwise sweep", trials) as run:
        run.append(points[0])
    return run.path


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("not a row, and no newline")
    return path


@pytest.mark.parametrize("name", [files.POINTS, files.LOCK, files.TRAINING])
def test_a_resumed_run_does_not_write_through_a_link(stored, precious, name):
    (stored / name).unlink(missing_ok=True)
    (stored / name).symlink_to(precious)
    with pytest.raises(FlopwiseError, match="symbolic link") as refused:
        Run.reopen(stored)
    assert "remove it" in refused.value.hint
    assert precious.read_text() == "not a row, and no newline"
    (stored / name).unlink()
    Run.reopen(stored).close()


def test_rows_besides_the_points_do_not_either(stored, precious):
    (stored / files.TUNING).symlink_to(precious)
    with pytest.raises(FlopwiseError, match="symbolic link"):
        append_row(stored / files.TUNING, {"row": 1})
    assert precious.read_text() == "not a row, and no newline"


def test_logs_and_traces_are_not_written_elsewhere(stored, precious, tmp_path):
    (stored / "logs").mkdir()
    (stored / "logs" / "k.log").symlink_to(precious)
    (stored / "traces").symlink_to(tmp_path)
    with Run.reopen(stored) as run:
        for place in (lambda: run.log_path("k"), lambda: run.trace_path("t.json.gz")):
            with pytest.raises(FlopwiseError, match="symbolic link"):
                place()
        assert run.log_path("other").parent == stored / "logs"
