"""`flopwise doctor`."""

import click

from flopwise.cli.options import output_options
from flopwise.cli.output import chosen, show


@click.command("doctor")
@output_options
def command(form: str | None, output: str | None) -> None:
    """Say what this machine can do: GPU, driver, torch, Triton, nsys, clocks, other processes on the GPU.

    Example: flopwise doctor
    """
    form = chosen(form, output)
    from flopwise.render.doctor_view import doctor_view
    from flopwise.verbs.doctor import doctor

    show(*doctor_view(doctor()), form, output)
