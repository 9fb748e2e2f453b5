"""How every integration ends: the look is closed, and the first rank prints its screen."""

from flopwise.api.watch import Watch
from flopwise.errors import FlopwiseError


def tell(watch: Watch) -> None:
    """Close a look and print what it found; a look that found nothing is one line, never an error in a training job."""
    watch.close()
    if not watch.first_rank:
        return
    try:
        print(watch.screen())  # noqa: T201
    except FlopwiseError as error:
        print(f"flopwise: {error.message}")  # noqa: T201
