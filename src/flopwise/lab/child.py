"""An experiment in its own process. `run`, called by the worker, tells its place, what it is doing, and each row. [torch]"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flopwise.lab.experiment import Place
from flopwise.spec.workload import Workload

CALL = "flopwise.lab.child:run"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how."""

    experiment: str
    device: str = "auto"
    quick: bool = False
    workload: Workload | None = None
    folder: str = ""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One word of an experiment to who follows it; one of the three is there."""

    place: Place | None = None
    doing: str = ""
    row: dict[str, Any] | None = None


def run(argument: str, tell: Callable[[str], None]) -> None:
    """Run the experiment."""
    import torch

    from flopwise.capture.build import resolve_device
    from flopwise.capture.environment import environment
    from flopwise.capture.memory_limit import limit_memory
    from flopwise.lab.bench import Bench
    from flopwise.lab.catalog import experiments

    def say(word: Word) -> None:
        tell(msgspec.json.encode(word).decode())

    asked = msgspec.json.decode(argument, type=Asked)
    device = resolve_device(asked.device)
    if device.type == "cpu":
        limit_memory()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    say(Word(place=Place(device=str(device), environment=environment(device), load=load)))
    torch.manual_seed(0)
    bench = Bench(device, asked.quick, asked.workload, Path(asked.folder), lambda text: say(Word(doing=text)))
    for row in experiments()[asked.experiment].measure(bench):
        say(Word(row=row))
