"""A look at the steps of transformers' Trainer: `Trainer(..., callbacks=[FlopwiseCallback()])`."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl

from flopwise.api.watch import Watch


class FlopwiseCallback(TrainerCallback):  # type: ignore[misc]
    """Times and traces some of the first steps, and prints why they are slow and what to change.

    `stop`: training ends when enough was seen. `watch.run` is the stored run.
    """

    def __init__(
        self, *, steps: int | None = None, traced: int = 2, stop: bool = False, runs: str | Path | None = None
    ) -> None:
        self.watch = Watch(steps=steps, traced=traced, name="transformers Trainer", runs=runs)
        self.stop = stop

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watch.open()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.stop and self.watch.over:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watch.show()
