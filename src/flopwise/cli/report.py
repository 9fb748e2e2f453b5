"""`flopwise report TARGET… -o FILE`."""

from pathlib import Path

import click

from flopwise.api.report import check_suffix, report
from flopwise.cli.options import command_line, runs_option
from flopwise.cli.output import check_place, notify


@click.command("report")
@click.argument("target", nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="FILE", default="report.html", show_default=True, help="The page: .html or .md."
)
@click.option("--pictures", is_flag=True, help="For .md: draw the charts into a folder next to it.")
@runs_option
def command(target: tuple[str, ...], output: str, pictures: bool, runs: str | None) -> None:
    """Write one page over runs, traces and snapshots: the verdict, what to change, the evidence; it opens offline.

    \b
    Example: flopwise report last -o report.html
      report.html

    TARGET is a run (last, an id, a tag, a path), a trace (.json, .json.gz from PyTorch or rocprofv3; .sqlite, .nsys-rep
    from Nsight Systems) or a memory snapshot (.pickle). Several targets give one page; a job's ranks, or a folder of
    their traces, are one target. report.md is for a comment on GitHub.
    """
    check_place(output)
    check_suffix(Path(output))
    report(*target, output=output, pictures=pictures, runs=runs, command=command_line())
    if pictures and Path(output).suffix == ".html":
        notify("--pictures is for .md: the page draws its charts itself")
    click.echo(output)
