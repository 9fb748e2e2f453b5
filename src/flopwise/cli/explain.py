"""`flopwise explain TARGET…`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.ranks.files import files_of, rank_files
from flopwise.analysis.ranks.reading import rank_in_name
from flopwise.analysis.ranks.selection import NotTogether
from flopwise.api.explain import explain, explain_one, with_gpu_work
from flopwise.capture.runners import LOCAL
from flopwise.cli.options import runs_option
from flopwise.cli.output import Answer, answers, notify
from flopwise.errors import FlopwiseError
from flopwise.records.ranks import RanksExplanation
from flopwise.render.charts import save
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.explain_view import changes_view, explanation_view, explanations_view
from flopwise.render.host_screen import host_screen
from flopwise.render.host_view import host_view
from flopwise.render.listings import changes_listing, explanations_listing
from flopwise.render.ranks_charts import ranks_chart
from flopwise.render.ranks_plan import planned_chart, planned_listing
from flopwise.render.ranks_screen import ranks_screen
from flopwise.render.ranks_view import ranks_view
from flopwise.render.step_charts import waterfall_chart
from flopwise.trace.tables import NO_ID

_TIMINGS = "A run of the same workload without a profiler, for the step's real time."

_CAPTURE = "The trace in which the CUDA graphs of TARGET were captured. [default: looked for beside TARGET]"

_LINK = "Of several ranks: nvlink4, pcie5, ib400, 25GB/s, … (NAME,NAME: within and between hosts). [default: the GPU's]"

_ON = "Of several ranks: read them here, or on a Ray cluster, whose nodes see the files at the same paths."

_PLAN = "Of several ranks: set what flopwise plan -o FILE.json predicted beside them."

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
@click.option("--link", default="", metavar="NAME|GB/s", help=_LINK)
@click.option("--on", default=LOCAL, show_default=True, metavar="local|ray|ray://HOST:PORT", help=_ON)
@click.option("--plan", "planned", metavar="FILE", help=_PLAN)
@runs_option
@answers(draws=True, screens=True)
def command(
    target: tuple[str, ...], against: str | None, link: str, on: str, planned: str | None, picture: bool, **given: Any
) -> Answer:
    """Show where the time of a step went and what to change.

    \b
    Example: flopwise explain trace.json.gz
      trace.json.gz: kineto trace on NVIDIA H200
      GPU-bound: the GPU is busy 92% of the 60.5 ms that the step takes …

    The answer is one screen: the verdict; the step now, reachable (with all changes found that leave the training as it is)
    and at its limit; where the time goes; the changes worth most. --full has every finding with its arithmetic, GPU time by
    phase, class and module, and the top kernels; of a trace without GPU work, the CPU's time by phase, module and op.
    TARGET is a run with a trace (`flopwise profile`), or a file: .json, .json.gz from PyTorch or rocprofv3; .sqlite,
    .sqlite.gz, .nsys-rep from Nsight Systems. Files of a job's ranks, or a folder of them, are explained together: for which rank
    the others wait, and why. Several other targets give a line each. -o FILE.svg, .png or .html draws the waterfall of one, or
    the ranks of a job over time; with --plan, the way from the planned step to the measured one.
    """
    if against is None and (together := _ranks(target, link, on, planned, given)) is not None:
        drawn, shown = (ranks_chart, ranks_screen) if planned is None else (planned_chart, planned_listing)
        return Answer(
            partial(ranks_view, together),
            write=lambda place: save(drawn(together), place),
            screen=partial(shown, together),
        )
    target = tuple(str(file) for one in target for file in files_of(Path(one).expanduser()))
    _check(target, against, picture)
    explained = [explain_one(one, **given) for one in target]
    if against is None and len(explained) == 1 and isinstance(explained[0], HostExplanation) and not picture:
        return Answer(host_view(explained[0]), screen=partial(host_screen, explained[0]))
    if len(explained) > 1:
        listed = partial(explanations_listing, explained)
        return Answer(lambda: explanations_view([*map(with_gpu_work, explained)]), screen=listed)
    before = explain_one(against, gpu=given["gpu"], runs=given["runs"]) if against is not None else None
    return _of_one(with_gpu_work(explained[0]), with_gpu_work(before) if before is not None else None)


def _check(target: tuple[str, ...], against: str | None, picture: bool) -> None:
    if against is not None and len(target) != 1:
        hint = "for example: flopwise explain after.json --against before.json"
        raise FlopwiseError("--against takes one target", hint)
    if picture and (against is not None or len(target) != 1):
        raise FlopwiseError("a picture is of one target", "leave out the others, or -o another suffix")


def _of_one(first: Explanation, before: Explanation | None) -> Answer:
    """A trace, or what changed in it."""
    if before is not None:
        return Answer(partial(changes_view, before, first), screen=partial(changes_listing, before, first))
    name = Path(first.path).name
    return Answer(
        partial(explanation_view, first),
        write=lambda place: save(waterfall_chart(first.waterfall, name), place),
        screen=partial(explanation_screen, first),
    )


def _ranks(
    target: tuple[str, ...], link: str, on: str, planned: str | None, given: dict[str, Any]
) -> RanksExplanation | None:
    """The ranks of one job together; None where the targets are something else."""
    single = [f"--{name}" for name in ("timings", "device", "capture", "model") if given[name] not in (None, "")]
    if not rank_files(target, given["runs"]) or single:
        why = f"{single[0]} is of one trace" if single else "the targets are not files of a job's ranks"
        _refuse({"--link": bool(link), "--on": on != LOCAL, "--plan": planned is not None}, why)
        return None
    try:
        asked_for = {"link": link, "on": on, "gpu": given["gpu"], "runs": given["runs"], "plan": planned}
        found = explain(target[0] if len(target) == 1 else target, **asked_for)
    except NotTogether as error:
        if link or planned is not None:
            raise
        if len(target) == 1 or all(rank_in_name(one) != NO_ID for one in target):
            notify(f"explained one by one: {error.message}")
        return None
    return found if isinstance(found, RanksExplanation) else None


def _refuse(given: dict[str, bool], why: str) -> None:
    """Options that only ranks have."""
    for option, asked in given.items():
        if asked:
            raise FlopwiseError(f"{option} is of several ranks, and {why}", f"omit {option}")
