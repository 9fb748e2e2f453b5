"""`flopwise compare A B`."""

import click

from flopwise import units
from flopwise.api.compare import compare
from flopwise.cli.options import runs_option
from flopwise.cli.output import FORMATS, check_place, chosen_format, notify, output_option, show, write_text
from flopwise.render.comparison_view import annotations, comparison_view
from flopwise.spec import fields

_GITHUB = "github"
_PHASE = "Which phase: step, forward, loss, backward, optimizer."
_FORMAT = "By default the suffix of -o, or table; github: annotations for a pull request."


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--phase", default="step", show_default=True, help=_PHASE)
@click.option(
    "--clock", metavar="wall|gpu|launch", help="Which clock; by default wall, and of a single pair every one."
)
@click.option("--fail-above", metavar="PERCENT", help="Exit 1 if B is slower than A by more (3%).")
@click.option("--mixed", is_flag=True, help="Let --fail-above judge runs of different GPUs, drivers or torch.")
@runs_option
@click.option("--format", "form", metavar="|".join((*FORMATS, _GITHUB)), help=_FORMAT)
@output_option
def command(
    a: str,
    b: str,
    phase: str,
    clock: str | None,
    fail_above: str | None,
    mixed: bool,
    runs: str | None,
    form: str | None,
    output: str | None,
) -> int:
    """Say whether run B is faster than run A: the ratio of their times with its confidence interval.

    \b
    Example: flopwise compare last~1 last
      B compared with A: step, wall clock, with 95 % intervals, …

    Exit code: 0; 1 if --fail-above is exceeded; 3 if a verdict is inconclusive, or with --fail-above a point of A is missing
    in B, a row is damaged, or A is no baseline for B: measured with another GPU (without one: CPU), driver, torch or CUDA, and
    --mixed is not given. Both beside each other are a fairer comparison:
    flopwise bench tiny --versus attention=naive. --format github writes annotations for a pull request: an error where the
    gate fails.
    """
    if form is not None:
        fields.one_of("format", form, (*FORMATS, _GITHUB))
    github = form == _GITHUB
    form = chosen_format(None if github else form, None if github else output)
    check_place(output)
    gate = None if fail_above is None else units.parse_percent(fail_above)
    compared = compare(a, b, phase=phase, clock=clock, threshold=gate or 0.03, mixed=mixed, runs=runs)
    if github:
        write_text(annotations(compared, gate), output)
    else:
        show(comparison_view(compared), form, output, narrow=True)
    if refused := compared.refused(gate):
        notify(f"error: {refused}")
        notify("hint: measure A again where B was measured; --mixed lets the gate judge all the same")
    return compared.exit_code(gate)
