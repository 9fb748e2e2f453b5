"""The same rows for TensorBoard, where it is asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.records.training import Steps

FOLDER = "tensorboard"


def check_board(wanted: bool) -> None:
    """Refuse what cannot be written, before anything is done."""
    if not wanted:
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise FlopwiseError("--tensorboard needs the package tensorboard", "pip install tensorboard") from None


@contextmanager
def board(run: Path, wanted: bool) -> Iterator[Callable[[Steps], None]]:
    """Writes rows into a run's folder; nothing, where it is not wanted."""
    if not wanted:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / FOLDER))

    def write(row: Steps) -> None:
        first = row.step - len(row.losses) + 1
        for place, loss in enumerate(row.losses):
            if loss is not None:
                writer.add_scalar("loss", loss, first + place)
        scalars = {"rate": row.rate, "step ms": row.wall_ns / len(row.losses) / 1e6, "evaluation loss": row.evaluation}
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(name, value, row.step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()
