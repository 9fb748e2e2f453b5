"""`flopwise doctor`."""

import click

from flopwise.api.doctor import busy, doctor
from flopwise.api.doctor import calibrate as measure
from flopwise.cli.output import Answer, answers, notify
from flopwise.render.machine_view import ceilings_view, doctor_view
from flopwise.render.progress import calibration_progress

_CALIBRATE = "Measure this machine's limits, in about a minute; predictions then use them."


@click.command("doctor")
@click.option("--calibrate", is_flag=True, help=_CALIBRATE)
@click.option("--device", default="auto", show_default=True, help="What to calibrate: auto, cpu, cuda, cuda:N.")
@answers()
def command(calibrate: bool, device: str) -> Answer:
    """Report what this machine can do: GPU, driver, torch, Triton, nsys, clocks, other processes on the GPU.

    \b
    Example: flopwise doctor
      This machine
    """
    if not calibrate:
        return Answer(doctor_view(doctor()), narrow=True)
    if warning := busy():
        notify(f"note: {warning}; the ceilings too")
    with calibration_progress() as on_event:
        return Answer(ceilings_view(measure(device, on_event=on_event)), narrow=True)
