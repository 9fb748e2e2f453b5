"""`flopwise memory WORKLOAD, RUN or SNAPSHOT`."""

from functools import partial
from typing import Any

import click

from flopwise.api.memory import memory, outcome
from flopwise.cli import options
from flopwise.cli.output import Answer, answers, kept, notify
from flopwise.records.run import INTERRUPTED
from flopwise.render.charts import save
from flopwise.render.memory_charts import timeline_chart
from flopwise.render.memory_screen import memory_screen
from flopwise.render.memory_view import memory_view, of_device
from flopwise.render.progress import TerminalProgress

_DEVICE = "Where to run. Of a snapshot: which GPU; by default, the one with the highest peak."
_STACKS = "Which stacks are recorded (default: python; all: on a GPU C++ too); JSON then has whole stacks, not only your frames."

_MODEL = (
    "Of a snapshot: the model that ran; what was allocated before the recording is compared with its parameters' sizes."
)


@click.command("memory")
@click.argument("target")
@options.workload_options
@click.option("--device", metavar="auto|cpu|cuda[:N]", help=_DEVICE)
@click.option("--steps", type=int, default=3, show_default=True, help="How many steps are recorded, after warm-up.")
@click.option("--stacks", is_flag=False, flag_value="python", metavar="python|all|off", help=_STACKS)
@click.option("--predict", "--dry", is_flag=True, help="Run nothing: predict it on fake tensors, for any size and GPU.")
@click.option("--gpu", default="", metavar="NAME", help="With --predict: h200, h100, a100, …, cpu.")
@click.option("--model", default="", metavar="NAME|hf:PATH|FILE:FACTORY", help=_MODEL)
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until it is stopped.")
@options.tag_option
@options.run_options
@answers(draws=True, screens=True)
def command(
    target: str, device: str | None, stacks: str | None, tag: str | None, quiet: bool, picture: bool, **given: Any
) -> Answer:
    """Show who holds the memory of TARGET at the peak and over time, the largest allocations, and what leaks.

    \b
    Example: flopwise memory tiny --device cpu
      tiny b4 t128 train on the CPU: memory
      55 % of the peak is activations.

    TARGET is a workload, as for bench: it is run, recorded and stored. Or a stored run (last, an id, a tag, a path). Or
    what torch.cuda.memory._dump_snapshot wrote (.pickle, .pickle.gz), which is read without being run. With -o FILE.svg,
    .png or .html the timeline is drawn, stacked by owner.
    """
    arguments = {name: value for name, value in options.workload_arguments(given).items() if value != {}}
    measure = partial(
        memory,
        target,
        device=device or "auto",
        record=stacks or "python",
        stacks=stacks not in (None, "off"),
        tag=tag or "",
        command=options.command_line(),
        progress=TerminalProgress(quiet=quiet),
        **given,
        **arguments,
    )
    found, _ = kept(measure)
    if found.status == INTERRUPTED:
        notify(f"interrupted: {'what was recorded until then is shown' if found.devices else 'nothing was recorded'}")
    shown = found if found.label else of_device(found, device)
    write = (lambda place: save(timeline_chart(shown), place)) if shown.devices else None
    return Answer(memory_view(shown), partial(outcome, found), write, screen=partial(memory_screen, shown))
