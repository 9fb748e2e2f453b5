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
    from flopwise.render.views import doctor_table
    from flopwise.verbs.doctor import doctor

    table, document = doctor_table(doctor())
    show([table], document, form, output)
