"""`flopwise doctor`."""

import click

from flopwise.cli.options import output_options
from flopwise.cli.output import chosen, said, show


@click.command("doctor")
@click.option(
    "--calibrate", is_flag=True, help="Measure what this machine can do at most, in about a minute; account uses it."
)
@click.option("--device", default="auto", show_default=True, help="What to calibrate: auto, cpu, cuda, cuda:N.")
@output_options
def command(calibrate: bool, device: str, form: str | None, output: str | None) -> None:
    """Say what this machine can do: GPU, driver, torch, Triton, nsys, clocks, other processes on the GPU.

    Example: flopwise doctor
    """
    form = chosen(form, output)
    if calibrate:
        from flopwise.api.doctor import busy
        from flopwise.api.doctor import calibrate as measure
        from flopwise.render.ceilings_view import ceilings_view
        from flopwise.render.probing import probing

        if warning := busy():
            said(f"note: {warning}; the ceilings too")
        with probing() as on_event:
            found = measure(device, on_event=on_event)
        show(*ceilings_view(found), form, output)
        return
    from flopwise.api.doctor import doctor
    from flopwise.render.doctor_view import doctor_view

    show(*doctor_view(doctor()), form, output)
