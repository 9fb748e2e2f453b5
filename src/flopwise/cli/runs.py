"""`flopwise runs`: list, show, tag, rm."""

import click

from flopwise.cli.options import output_options
from flopwise.cli.output import chosen, said, show

_RUNS = click.option("--runs", metavar="DIR", help="Where runs are kept.")


@click.group("runs", invoke_without_command=True)
@_RUNS
@output_options
@click.pass_context
def command(context: click.Context, runs: str | None, form: str | None, output: str | None) -> None:
    """List the runs kept here, newest first.

    Example: flopwise runs
    """
    if context.invoked_subcommand is not None:
        return
    form = chosen(form, output)
    from flopwise.render.runs_view import runs_view
    from flopwise.store import list_runs, runs_root

    root = runs_root(runs)
    show(*runs_view(list_runs(root), root), form, output)


@command.command("show")
@click.argument("run")
@_RUNS
@output_options
def show_run(run: str, runs: str | None, form: str | None, output: str | None) -> None:
    """Show a run again: `last`, `last~1`, an id or its start, a tag, or a path.

    Example: flopwise runs show last
    """
    form = chosen(form, output)
    from flopwise.render.run_view import run_view
    from flopwise.store import StoredRun, find, runs_root

    stored = StoredRun.load(find(run, runs_root(runs)))
    if stored.header.kind == "tune":
        from flopwise.render.tune_view import tune_view
        from flopwise.store.tuning import read_tuning

        show(*tune_view(read_tuning(stored)), form, output)
        return
    if stored.header.kind == "lab":
        from flopwise.experiments.results import read_lab
        from flopwise.render.lab_view import lab_view

        show(*lab_view(read_lab(stored.path)), form, output)
        return
    show(*run_view(stored), form, output)


@command.command("tag")
@click.argument("run")
@click.argument("name")
@_RUNS
def tag_run(run: str, name: str, runs: str | None) -> None:
    """Give a run a name of its own; a name moves from the run that had it.

    Example: flopwise runs tag last baseline
    """
    from flopwise.store import runs_root, tag

    said(f"{tag(runs_root(runs), run, name).name} is now '{name}'")


@command.command("untag")
@click.argument("name")
@_RUNS
def untag_run(name: str, runs: str | None) -> None:
    """Take a name away from the run that has it.

    Example: flopwise runs untag baseline
    """
    from flopwise.store import runs_root, untag

    said(f"{untag(runs_root(runs), name).name} is no longer '{name}'")


@command.command("rm")
@click.argument("run", nargs=-1, required=True)
@_RUNS
def remove_runs(run: tuple[str, ...], runs: str | None) -> None:
    """Remove runs and everything in them.

    Example: flopwise runs rm last
    """
    from flopwise.store import remove, runs_root

    for path in remove(runs_root(runs), list(run)):
        said(f"removed {path.name}")


@command.command("scrub")
@click.argument("file")
@click.option("-o", "--output", required=True, metavar="OUT", help="Where the safe copy goes; it must not exist yet.")
def scrub_trace(file: str, output: str) -> None:
    """Write a copy of a trace that is safe to share: no environment, host, user, paths or other private metadata.

    Example: flopwise runs scrub trace.json.gz -o safe.json.gz
    """
    from flopwise.scrub.scrub import scrub

    said(f"wrote {scrub(file, output)}")
