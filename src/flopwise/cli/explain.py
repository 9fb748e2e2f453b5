"""`flopwise explain TARGET…`."""

from pathlib import Path

import click

from flopwise.cli.options import output_options
from flopwise.cli.output import PICTURE, chosen, said, show


@click.command("explain")
@click.argument("target", nargs=-1, required=True)
@click.option("--against", metavar="TARGET", help="Say what changed from TARGET to this, kernel by kernel.")
@click.option(
    "--timings", metavar="RUN", help="The same workload without a profiler, to set its clock beside the trace's."
)
@click.option("--gpu", metavar="NAME", help="h100, h200, …: whose limits; a trace names its own GPU.")
@click.option("--runs", metavar="DIR", help="Where runs are kept.")
@output_options
def command(
    target: tuple[str, ...],
    against: str | None,
    timings: str | None,
    gpu: str | None,
    runs: str | None,
    form: str | None,
    output: str | None,
) -> None:
    """Say where the time of a step went: what to change and what that saves, from the ideal to the measured step, by phase,
    class and module, the top kernels, and why the GPU was idle.

    Example: flopwise explain last

    TARGET is a run with a trace (`flopwise profile`), or a file: .json, .json.gz from PyTorch; .sqlite, .sqlite.gz,
    .nsys-rep from Nsight Systems. Several targets give one table. -o FILE.svg, .png or .html draws the waterfall of one.
    """
    form = chosen(form, output, draws=True)
    picture = form == PICTURE
    from flopwise.analysis.explanation import changes
    from flopwise.api.explain import explain
    from flopwise.errors import FlopwiseError
    from flopwise.render.changes_view import changes_view
    from flopwise.render.explain_view import explanations_view

    if against is not None and len(target) != 1:
        raise FlopwiseError(
            "--against takes one target", "for example: flopwise explain after.json --against before.json"
        )
    if picture and (against is not None or len(target) != 1):
        raise FlopwiseError("a picture is of one target", "leave out the others, or -o another suffix")
    if len(target) == 1 and against is None and not picture:
        _explain_one(target[0], timings, gpu, runs, form, output)
        return
    found = [explain(one, timings=timings, gpu=gpu, runs=runs) for one in target]
    if picture and output is not None:
        from flopwise.render.charts import save
        from flopwise.render.waterfall_chart import waterfall_chart

        save(waterfall_chart(found[0].waterfall, Path(found[0].path).name), Path(output).expanduser())
        said(f"wrote {output}")
        return
    if against is None:
        show(*explanations_view(found), form, output)
        return
    before = explain(against, gpu=gpu, runs=runs)
    show(*changes_view(before, found[0], changes(before, found[0])), form, output)


def _explain_one(
    target: str, timings: str | None, gpu: str | None, runs: str | None, form: str, output: str | None
) -> None:
    """One trace in full, with what is wrong and what to do about it."""
    from flopwise.advice.findings import findings
    from flopwise.advice.gather import facts_of
    from flopwise.analysis.reading import explain_target
    from flopwise.render.explain_view import explanation_view
    from flopwise.render.findings_view import findings_view

    read = explain_target(target, timings=timings, gpu=gpu, runs=runs)
    facts = facts_of(read, gpu)
    tables, document = explanation_view(read.explanation)
    advice, inner = findings_view(findings(facts), facts.step_ns)
    show([tables[0], advice[0], *tables[1:], *advice[1:]], document | {"findings": inner["findings"]}, form, output)
