"""`flopwise VERB`: parses, calls the API's verb of the same name, renders. Nothing heavy is imported before it is needed."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import cast

import click

from flopwise.errors import FlopwiseError, one_line
from flopwise.version import __version__

VERBS = {
    "demo": "The story so far on this machine in about a minute; no GPU needed.",
    "doctor": "What this machine can do, and what to do about what it cannot.",
    "bench": "Times forward, backward, optimizer and the whole step of a workload.",
    "sweep": "Measures many workloads from a file, each in its own process; resumes.",
    "compare": "Is B faster than A? The ratio with its confidence interval.",
    "profile": "Captures a trace of a workload by PyTorch's profiler or Nsight Systems.",
    "explain": "Where the time of a step went, from either profiler's trace.",
    "account": "What a step must cost, before it is run: FLOPs, memory, time, what fits.",
    "roofline": "Every operation against what the machine can do at most.",
    "memory": "Who holds every byte of a workload or a snapshot, at the peak and over time.",
    "report": "One page over runs, traces and snapshots, which opens without a network.",
    "tune": "Tries the levers, keeps what is faster and still right, and proves it.",
    "lab": "Claims about GPUs, each measured on this machine, with a verdict that may be 'refuted here'.",
    "runs": "Lists, shows, tags and removes runs.",
}


class _Verbs(click.Group):
    """Verbs are imported when they are called; `--help` needs only their names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return cast(click.Command, importlib.import_module(f"flopwise.cli.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            from flopwise.spec.fields import did_you_mean

            raise FlopwiseError(
                f"there is no verb '{args[0]}'", f"{did_you_mean(args[0], VERBS)}verbs: {', '.join(VERBS)}"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="flopwise %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error (anywhere on the line).")
def flopwise(debug: bool) -> None:
    """Why a Transformer's step is slow on a GPU, what the limit is, what to change; and the proof.

    Try: flopwise bench tiny --device cpu
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: every error becomes one line and a hint, and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or bool(os.environ.get("FLOPWISE_DEBUG"))
    given = [word for word in given if word != "--debug"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    try:
        sys.exit(flopwise.main(given, prog_name="flopwise", standalone_mode=False) or 0)
    except FlopwiseError as error:
        _say(error.message, error.hint, debug)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        verb = next((word for word in given if word in VERBS), "")
        _say(one_line(error.format_message()), f"see flopwise {verb + ' ' if verb else ''}--help", debug)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted", "", debug)
        sys.exit(130)
    except BrokenPipeError:  # the reader had enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:  # standard output has no name: this is a file that was to be read or made
            _say(one_line(f"cannot open {str(error.filename)[:200]}: {error.strerror}"), "check the path", debug)
            sys.exit(2)
        _say(f"cannot write the output: {error.strerror}", "is the disk full, or standard output closed?", debug)
        sys.exit(2)
    except Exception as error:  # noqa: BLE001  the last resort: a fault of ours, in one line
        _say(
            f"internal error: {type(error).__name__}: {one_line(str(error))}",
            "run again with --debug and report it",
            debug,
        )
        sys.exit(2)


def _say(message: str, hint: str, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(f"error: {message}" + (f"\nhint: {hint}" if hint else ""), err=True)


if __name__ == "__main__":
    main()
