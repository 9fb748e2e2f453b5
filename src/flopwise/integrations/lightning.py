"""A look at the steps of a Lightning Trainer: `Trainer(..., callbacks=[FlopwiseCallback()])`."""

from pathlib import Path
from typing import Any

from flopwise.api.watch import Watch

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class FlopwiseCallback(Callback):  # type: ignore[misc]
    """Times and traces some of the first steps, and prints why they are slow and what to change.

    `stop`: training ends when enough was seen. `watch.run` is the stored run.
    """

    def __init__(
        self, *, steps: int | None = None, traced: int = 2, stop: bool = False, runs: str | Path | None = None
    ) -> None:
        super().__init__()
        self.watch = Watch(steps=steps, traced=traced, name="Lightning Trainer", runs=runs)
        self.stop = stop

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch.open()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.stop and self.watch.over:
            trainer.should_stop = True
            trainer.limit_train_batches = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.show()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.watch.close()
