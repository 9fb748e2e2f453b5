"""`flopwise runs`: list, show, check, tag, rm."""

from functools import partial

import click

from flopwise.api.runs import stored_result
from flopwise.cli.options import runs_option
from flopwise.cli.output import Answer, answers, chosen_format, format_option, notify, output_option, show_answer
from flopwise.errors import FlopwiseError
from flopwise.render.listings import runs_listing
from flopwise.render.runs_view import checks_view, runs_view
from flopwise.render.views import screen_of, view_of
from flopwise.scrub.scrub import scrub
from flopwise.spec.fields import did_you_mean
from flopwise.store import check_run, find, list_runs, remove, run_folders, runs_root, tag, untag


class _Commands(click.Group):
    """A run or a script where a command should be is told from a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            script = f"to run a script: flopwise run {args[0]}"
            close = did_you_mean(args[0], self.commands)
            hint = f"{script}; " if args[0].endswith(".py") else close or f"to see one: flopwise runs show {args[0]}; "
            raise FlopwiseError(f"'{args[0]}' is not a command of runs", f"{hint}commands: {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


@click.group("runs", cls=_Commands, invoke_without_command=True)
@runs_option
@format_option
@output_option
@click.pass_context
def command(context: click.Context, runs: str | None, form: str | None, output: str | None) -> None:
    """List the stored runs, newest first.

    \b
    Example: flopwise runs
      5 runs in .flopwise/runs
    """
    if context.invoked_subcommand is None:
        root = runs_root(runs)
        form, found = chosen_format(form, output), list_runs(root)
        answer = Answer(partial(runs_view, found, root), screen=partial(runs_listing, found, root) if found else None)
        show_answer(answer, form, output)


@command.command("show")
@click.argument("run")
@runs_option
@answers(screens=True)
def show_run(run: str, runs: str | None) -> Answer:
    """Show a run again: `last`, `last~1`, an id or its start, a tag, or a path.

    Example: flopwise runs show last
    """
    found = stored_result(run, runs)
    return Answer(partial(view_of, found), screen=partial(screen_of, found))


@command.command("check")
@click.argument("run", nargs=-1)
@click.option("--repair", is_flag=True, help="Take out what is damaged, and leave what is sound; nothing is deleted.")
@runs_option
@answers()
def check_runs(run: tuple[str, ...], repair: bool, runs: str | None) -> Answer:
    """Read all of the runs named, or of every run, against their checksums; exit 1 if something is damaged.

    Example: flopwise runs check
    """
    root = runs_root(runs)
    paths = [find(one, root) for one in run] if run else run_folders(root)
    found = [check_run(path, repair) for path in paths]
    return Answer(partial(checks_view, found, root), lambda: int(any(one.damage for one in found)))


@command.command("tag")
@click.argument("run")
@click.argument("name")
@runs_option
def tag_run(run: str, name: str, runs: str | None) -> None:
    """Give a run a name of its own; a name moves from the run that had it.

    Example: flopwise runs tag last baseline
    """
    notify(f"{tag(runs_root(runs), run, name).name} is now '{name}'")


@command.command("untag")
@click.argument("name")
@runs_option
def untag_run(name: str, runs: str | None) -> None:
    """Take a name away from the run that has it.

    Example: flopwise runs untag baseline
    """
    notify(f"{untag(runs_root(runs), name).name} is no longer '{name}'")


@command.command("rm")
@click.argument("run", nargs=-1, required=True)
@runs_option
def remove_runs(run: tuple[str, ...], runs: str | None) -> None:
    """Remove runs and everything in them.

    Example: flopwise runs rm last
    """
    for path in remove(runs_root(runs), list(run)):
        notify(f"removed {path.name}")


@command.command("scrub")
@click.argument("file")
@click.option("-o", "--output", required=True, metavar="OUT", help="Where the safe copy goes; it must not exist yet.")
def scrub_trace(file: str, output: str) -> None:
    """Write a copy of a trace that is safe to share: no environment, host, user, paths or other private metadata.

    Example: flopwise runs scrub trace.json.gz -o safe.json.gz
    """
    notify(f"wrote {scrub(file, output)}")
