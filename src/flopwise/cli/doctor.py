"""`flopwise doctor`."""

import click

from flopwise.api.calibrate import calibrate as measure
from flopwise.api.doctor import busy, doctor
from flopwise.cli.options import output_options
from flopwise.cli.output import chosen_format, notify, show
from flopwise.render.ceilings_view import ceilings_view
from flopwise.render.doctor_view import doctor_view
from flopwise.render.progress import calibration_progress

_CALIBRATE = "Measure this machine's limits, in about a minute; predictions then use them."


@click.command("doctor")
@click.option("--calibrate", is_flag=True, help=_CALIBRATE)
@click.option("--device", default="auto", show_default=True, help="What to calibrate: auto, cpu, cuda, cuda:N.")
@output_options
def command(calibrate: bool, device: str, form: str | None, output: str | None) -> None:
    """Report what this machine can do: GPU, driver, torch, Triton, nsys, clocks, other processes on the GPU.

    Example: flopwise doctor
    """
    form = chosen_format(form, output)
    if not calibrate:
        show(doctor_view(doctor()), form, output)
        return
    if warning := busy():
        notify(f"note: {warning}; the ceilings too")
    with calibration_progress() as on_event:
        found = measure(device, on_event=on_event)
    show(ceilings_view(found), form, output)
