"""`flopwise VERB`: parses, calls the API's verb of the same name, renders. Nothing heavy is imported before it is needed."""

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import cast

import click

from flopwise import signals
from flopwise.errors import FlopwiseError, one_line
from flopwise.version import __version__

# What a user wants to do, and the verbs for it.
TASKS = {
    "Meet it": {
        "demo": "Explains a slow step, tunes it, compares; no GPU needed.",
        "doctor": "Reports what this machine can do, and how to fix what it cannot.",
    },
    "See why it is slow": {
        "run": "Runs your training script, unchanged: why it is slow, what to do.",
        "explain": "Where the time of a step went, and what to change, from a trace.",
        "course": "Answers a course's five questions of traces: one, or a grid.",
        "memory": "Who holds every byte of a workload or a snapshot.",
        "roofline": "Compares every operation with the machine's limits.",
    },
    "Before it runs": {
        "account": "Predicts what a step costs: FLOPs, memory, time, what fits.",
        "plan": "Lays a training run out on a cluster: days, memory, money.",
    },
    "Make it faster, and prove it": {
        "tune": "Tries the levers; keeps what is faster and still correct.",
        "compare": "Is B faster than A? The ratio with its confidence interval.",
    },
    "Measure": {
        "bench": "Times a workload: forward, backward, optimizer, the whole step.",
        "sweep": "Measures many workloads from a file; resumes.",
        "profile": "Captures a trace with PyTorch's profiler or Nsight Systems.",
        "lab": "Measures claims about GPUs on this machine, each with a verdict.",
    },
    "From text to a model": {
        "train": "Trains a model on your text, at speed; resumes to the bit.",
        "generate": "Lets a trained model speak; tokens/s beside the limit.",
    },
    "Keep and show": {
        "report": "Writes one page over runs, traces and snapshots; it opens offline.",
        "runs": "Lists, shows, tags and removes what was measured before.",
        "mcp": "Serves runs and traces to an agent, read-only (MCP).",
    },
}
VERBS = {verb: does for verbs in TASKS.values() for verb, does in verbs.items()}


class _Verbs(click.Group):
    """A verb's file has its name, and is imported when the verb is called; `--help` needs only the names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"flopwise.cli.{cmd_name}").command
        signals.interruptible()
        return cast(click.Command, command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, VERBS))
        for task, verbs in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(verb.ljust(longest), does) for verb, does in verbs.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            from flopwise.spec.fields import did_you_mean  # msgspec, which --help does without

            hint = f"{did_you_mean(args[0], VERBS)}verbs: {', '.join(VERBS)}"
            raise FlopwiseError(f"there is no verb '{args[0]}'", hint)
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="flopwise %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error (anywhere on the line).")
def flopwise(debug: bool) -> None:
    """Why a Transformer's step is slow on a GPU, what the limit is, what to change; and the proof.

    Try: flopwise demo
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: every error becomes one line and a hint, and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours = given.index("run") if "run" in given[:2] else len(given)  # what follows belongs to a script
    debug = "--debug" in given[:ours] or bool(os.environ.get("FLOPWISE_DEBUG"))
    given = [word for place, word in enumerate(given) if word != "--debug" or place > ours] or ["--help"]
    signals.handle(signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    try:
        sys.exit(flopwise.main(given, prog_name="flopwise", standalone_mode=False) or 0)
    except BrokenPipeError:  # the reader had enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last resort
        message, hint, code = _failure(error, next((word for word in given if word in VERBS), ""))
        if debug:
            traceback.print_exc()
        click.echo(f"error: {message}" + (f"\nhint: {hint}" if hint else ""), err=True)
        sys.exit(code)


def _failure(error: BaseException, verb: str) -> tuple[str, str, int]:
    """What is wrong in one line, a hint, and the exit code."""
    match error:
        case FlopwiseError():
            return error.message, error.hint, error.exit_code
        case click.ClickException():
            return (
                one_line(error.format_message()),
                f"{_example(verb)}see flopwise {verb + ' ' if verb else ''}--help",
                2,
            )
        case KeyboardInterrupt() | click.Abort():
            return "interrupted", "", 130
        case OSError() if error.filename is not None:  # a file that was to be read or made
            return one_line(f"cannot open {str(error.filename)[:200]}: {error.strerror}"), "check the path", 2
        case OSError():  # standard output has no name
            message = f"cannot write the output: {error.strerror}"
            return message, "is the disk full, or standard output closed?", 2
        case _:
            message = f"internal error: {type(error).__name__}: {one_line(str(error))}"
            return message, "run again with --debug and report it", 2


def _example(verb: str) -> str:
    """The line to type, from a verb's help."""
    command = flopwise.get_command(click.Context(flopwise), verb) if verb else None
    found = re.search(r"Example: (.+)", command.help or "") if command is not None else None
    return f"for example: {found[1].strip()}; " if found else ""


if __name__ == "__main__":
    main()
