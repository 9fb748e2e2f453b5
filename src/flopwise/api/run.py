"""A user's own training script, unchanged: run, watched, and ended when enough was seen of it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flopwise import signals
from flopwise.analysis.measured import MeasuredRun
from flopwise.api.watch import Watch
from flopwise.capture.busy import busy_cores, busy_machine
from flopwise.capture.loop.script import Program, after_import
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.redact import redacted_words

FAILED = 1
_HINT = (
    "it takes a loop with an optimizer of torch and a dozen steps; else: with flopwise.watch() as watch: … watch.step()"
)


class Enough(SystemExit):
    """Ends a script when all was seen: its `finally` clauses run, and `except Exception` does not stop it."""


def run(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int | None = None,
    traced: int = 2,
    seconds: float = 20.0,
    go_on: bool = False,
    runs: str | Path | None = None,
    command: str = "",
    note: Callable[[str], None] = lambda text: None,
) -> MeasuredRun | None:
    """Run a script as `python script.py arguments…` would, and watch its steps; `module`: as `python -m` would.

    `steps` are timed (None: as many as are needed), then `traced` are traced; then the script is ended, or with `go_on` runs
    to its own end. Warm-up takes at most `seconds`. None on all ranks of a job but the first.

    >>> flopwise.explain(flopwise.run("train.py", ["--batch", "8"]))        # doctest: +SKIP
    """

    def end() -> None:
        if not go_on:
            raise Enough(0)

    program = Program(str(script), [str(one) for one in arguments], module=module)
    watch = Watch(
        steps=steps,
        traced=traced,
        seconds=seconds,
        name=" ".join(redacted_words([program.name, *program.arguments])),
        kind="run",
        command=command,
        runs=runs,
        note=note,
        then=end,
    )
    watch.check_place()
    watch.busy_cores = busy_cores() if watch.alone else 0.0  # other ranks begin at the same time
    if watch.busy_cores:
        note(busy_machine(watch.busy_cores))
    forget, process = after_import("torch", watch.open), os.getpid()
    before = signals.handle(_terminate)  # unless the script has its own way to end
    try:
        with program.as_main():
            program.run()
        watch.exit_code = 0
    except Enough:
        pass
    except SystemExit as ended:
        watch.exit_code = _exit_code(ended, note)
    except KeyboardInterrupt:
        watch.close()
        if watch.run is not None:
            raise Interrupted(watch.run) from None
        raise
    except BaseException as error:  # noqa: BLE001  a script may raise anything
        program.show_error(error)
        watch.exit_code = FAILED
    finally:
        forget()
        signals.restore(before)
    if os.getpid() != process:
        raise SystemExit(watch.exit_code)  # a process that the script forked ends here, as it would without flopwise
    watch.close()
    if watch.run is None and watch.first_rank:
        raise _nothing_seen(watch)
    return watch.run


def _nothing_seen(watch: Watch) -> FlopwiseError:
    error = FlopwiseError(f"the script failed; {watch.missing()}" if watch.exit_code else watch.missing(), _HINT)
    error.exit_code = watch.exit_code or error.exit_code
    return error


def _exit_code(ended: SystemExit, note: Callable[[str], None]) -> int:
    if isinstance(ended.code, str):
        note(ended.code)
    return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else FAILED


def _terminate(signum: int, frame: object) -> None:
    """A kill ends the script as `sys.exit` would: what was timed is kept."""
    raise SystemExit(128 + signum)
