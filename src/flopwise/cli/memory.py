"""`flopwise memory WORKLOAD, RUN or SNAPSHOT`."""

from pathlib import Path
from typing import Any

import click

from flopwise.cli.options import command_line, output_options, run_options, workload_arguments, workload_options
from flopwise.cli.output import PICTURE, chosen, said, show


@click.command("memory")
@click.argument("target")
@workload_options
@click.option(
    "--device",
    metavar="auto|cpu|cuda[:N]",
    help="Where to run. Of a snapshot: which GPU; without it, the one with the highest peak.",
)
@click.option("--steps", type=int, default=3, show_default=True, help="How many steps are recorded, after warm-up.")
@click.option(
    "--stacks",
    is_flag=False,
    flag_value="python",
    metavar="python|all|off",
    help="Which stacks are recorded (python without it; all: on a GPU C++ too); and whole stacks in JSON, not only your frames.",
)
@click.option("--predict", "--dry", is_flag=True, help="Run nothing: predict it on fake tensors, for any size and GPU.")
@click.option("--gpu", default="", metavar="NAME", help="With --predict: h200, h100, a100, …, cpu.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until it is ended.")
@click.option("--tag", help="A name for the run.")
@run_options
@output_options
def command(
    target: str,
    device: str | None,
    stacks: str | None,
    tag: str | None,
    quiet: bool,
    form: str | None,
    output: str | None,
    **given: Any,
) -> int:
    """Say who holds the memory of TARGET at the peak and over time, the largest allocations, and what leaks.

    Example: flopwise memory tiny --device cpu

    TARGET is a workload, as for bench: it is run, recorded and kept. Or a run that was kept (last, an id, a tag, a path). Or
    what torch.cuda.memory._dump_snapshot wrote (.pickle, .pickle.gz), which is read without being run. With -o FILE.svg,
    .png or .html the timeline is drawn, stacked by owner.
    """
    form = chosen(form, output, draws=True)
    drawn = form == PICTURE
    from flopwise.api.memory import memory, outcome
    from flopwise.records.run import INTERRUPTED
    from flopwise.render.memory_view import memory_view, of_device, timeline_chart
    from flopwise.render.progress import ShownProgress

    arguments = {name: value for name, value in workload_arguments(given).items() if value != {}}
    found = memory(
        target,
        device=device or "auto",
        record=stacks or "python",
        stacks=stacks not in (None, "off"),
        tag=tag or "",
        command=command_line(),
        progress=ShownProgress(quiet=quiet),
        **given,
        **arguments,
    )
    if found.status == INTERRUPTED:
        said(f"interrupted: {'what was recorded until then is shown' if found.devices else 'nothing was recorded'}")
    if not found.label:
        found = of_device(found, device)
    if drawn and output is not None and found.devices:
        from flopwise.render.charts import save

        save(timeline_chart(found), Path(output).expanduser())
        said(f"wrote {output}")
        return outcome(found)
    show(*memory_view(found), "table" if drawn else form, None if drawn else output)
    return outcome(found)
