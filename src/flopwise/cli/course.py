"""`flopwise course TRACE…`."""

from functools import partial
from typing import Any

import click

from flopwise.api.course import course
from flopwise.cli.options import runs_option
from flopwise.cli.output import Answer, answers
from flopwise.render.course_view import course_screen, course_view

_CSV = "Times without a profiler: size, context and forward, backward or step, under any usual headings."


@click.command("course")
@click.argument("target", nargs=-1, required=True)
@click.option("--csv", metavar="FILE", help=_CSV)
@click.option("--context", type=int, metavar="N", help="Tokens per sequence, of traces that do not tell.")
@click.option("--batch", type=int, metavar="N", help="Sequences per step, of traces that do not tell.")
@runs_option
@answers(screens=True)
def command(target: tuple[str, ...], **given: Any) -> Answer:
    """Answer a course's five questions of traces: forward time, top kernels, matmul's share, softmax against matmul.

    \b
    Example: flopwise course traces/*.sqlite --csv timings.csv -o report.md
      wrote report.md

    TARGET is a trace of PyTorch or Nsight Systems, a folder of traces, or a run with traces (profile, sweep). Each trace takes
    the row of the CSV with its size and context; these come from its run, the sizes of its ops, or a name like
    small_ctx512.sqlite. Ranges of your own script are recognised: forward, backward, optimizer, scaled dot product attention.
    """
    report = course(target, **given)
    return Answer(course_view(report), screen=partial(course_screen, report))
