"""`flopwise explain TARGET…`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from flopwise.analysis.host_explanation import HostExplanation
from flopwise.api.explain import explain, with_gpu_work
from flopwise.cli.options import runs_option
from flopwise.cli.output import Answer, answers
from flopwise.errors import FlopwiseError
from flopwise.render.charts import save
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.explain_view import changes_view, explanation_view, explanations_view
from flopwise.render.host_screen import host_screen
from flopwise.render.host_view import host_view
from flopwise.render.listings import changes_listing, explanations_listing
from flopwise.render.step_charts import waterfall_chart

_TIMINGS = "A run of the same workload without a profiler, for the step's real time."

_CAPTURE = "The trace in which the CUDA graphs of TARGET were captured. [default: looked for beside TARGET]"

_MODEL = "Of a server: the model, for its bytes (bf16, one GPU) where the trace has no shapes."


@click.command("explain")
@click.argument("target", nargs=-1, required=True)
@click.option("--against", metavar="TARGET", help="Show what changed from TARGET to this, kernel by kernel.")
@click.option("--timings", metavar="RUN", help=_TIMINGS)
@click.option("--capture", metavar="FILE", help=_CAPTURE)
@click.option("--model", default="", metavar="NAME|hf:PATH", help=_MODEL)
@click.option("--gpu", metavar="NAME", help="h100, h200, …: the GPU of the trace, if the trace does not name it.")
@click.option(
    "--device", type=int, metavar="N", help="Of a trace of several devices: the one to explain. [default: the busiest]"
)
@runs_option
@answers(draws=True, screens=True)
def command(target: tuple[str, ...], against: str | None, timings: str | None, picture: bool, **given: Any) -> Answer:
    """Show where the time of a step went and what to change.

    \b
    Example: flopwise explain trace.json.gz
      trace.json.gz: kineto trace on NVIDIA H200
      GPU-bound: the GPU is busy 92% of the 60.5 ms that the step takes …

    The answer is one screen: the verdict; the step now, reachable (with all changes found that leave the training as it is)
    and at its limit; where the time goes; the changes worth most. --full has every finding with its arithmetic, GPU time by
    phase, class and module, and the top kernels; of a trace without GPU work, the CPU's time by phase, module and op.
    TARGET is a run with a trace (`flopwise profile`), or a file: .json, .json.gz from PyTorch or rocprofv3; .sqlite,
    .sqlite.gz, .nsys-rep from Nsight Systems. Several targets give a line each. -o FILE.svg, .png or .html draws the
    waterfall of one.
    """
    if against is not None and len(target) != 1:
        hint = "for example: flopwise explain after.json --against before.json"
        raise FlopwiseError("--against takes one target", hint)
    if picture and (against is not None or len(target) != 1):
        raise FlopwiseError("a picture is of one target", "leave out the others, or -o another suffix")
    explained = [explain(one, timings=timings, **given) for one in target]
    if against is None and len(explained) == 1 and isinstance(explained[0], HostExplanation) and not picture:
        return Answer(host_view(explained[0]), screen=partial(host_screen, explained[0]))
    if len(explained) > 1:
        listed = partial(explanations_listing, explained)
        return Answer(lambda: explanations_view([*map(with_gpu_work, explained)]), screen=listed)
    first = with_gpu_work(explained[0])
    if against is not None:
        before = with_gpu_work(explain(against, gpu=given["gpu"], runs=given["runs"]))
        return Answer(partial(changes_view, before, first), screen=partial(changes_listing, before, first))
    name = Path(first.path).name
    return Answer(
        partial(explanation_view, first),
        write=lambda place: save(waterfall_chart(first.waterfall, name), place),
        screen=partial(explanation_screen, first),
    )
