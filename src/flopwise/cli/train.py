"""`flopwise train WORKLOAD --text FILE…`."""

from functools import partial
from typing import Any

import click

from flopwise.api.report import report
from flopwise.api.train import first_process, train
from flopwise.cli import options
from flopwise.cli.output import Answer, answers, kept
from flopwise.errors import FlopwiseError
from flopwise.records.training import FAILED, Training
from flopwise.render.train_progress import TerminalTraining
from flopwise.render.views import screen_of, view_of

_TEXT = "Text to train on: files of UTF-8. Learns a tokenizer first."
_EVERY = "Steps between {}; by default at the end alone."


@click.command("train")
@click.argument("workload", required=False)
@click.option("--preset", metavar="NAME", help="The same as WORKLOAD.")
@click.option("--text", multiple=True, metavar="FILE", help=_TEXT)
@click.option("--data", metavar="DIR", help="A corpus prepared before (RUN/corpus); with --text, where to prepare it.")
@click.option("--tokenizer", metavar="FILE", help="tokenizer.json or .tiktoken, instead of learning one.")
@click.option("--steps", type=int, metavar="N", help="Updates of the weights.  [default: 1000]")
@click.option("--rate", type=float, help="The learning rate at its peak; by default by the model's width.")
@click.option("--warmup-steps", type=int, metavar="N", help="Steps until the peak; then half a cosine down to a tenth.")
@click.option("--clip", type=float, help="The most the gradients' norm may be; 0: any.  [default: 1]")
@click.option("--accumulate", type=int, default=1, metavar="N", help="Batches before an update.")
@click.option("--evaluate-every", type=int, default=0, metavar="N", help=_EVERY.format("evaluations on held-out text"))
@click.option("--checkpoint-every", type=int, default=0, metavar="N", help=_EVERY.format("checkpoints"))
@click.option("--log-every", type=int, default=10, metavar="N", help="Steps between rows of the log.")
@click.option("--seed", type=int, default=0, help="Of the weights, and of the order of the text.")
@click.option("--tensorboard", is_flag=True, help="Write for TensorBoard, too.")
@click.option("--resume", metavar="RUN", help="Go on with a run from its last checkpoint; --steps may be raised.")
@options.workload_options
@options.device_option
@options.tag_option
@options.run_options
@answers(pages=True, screens=True)
def command(workload: str | None, preset: str | None, quiet: bool, tag: str | None, **given: Any) -> Answer:
    """Train a model on text, with any recipe; what it learnt, how fast, and what it waited for.

    \b
    Example: flopwise train tiny --text book.txt --steps 200 --device cpu
      tiny b4 t128 train on cpu
      Trained: the loss fell from 6.26 to 3.61 in 200 steps.

    WORKLOAD is a preset (tiny, small, gpt2, …) or hf:PATH/config.json. Every row is in RUN/training.jsonl. Ctrl-C writes a
    checkpoint; --resume RUN goes on from the last one. Several GPUs: torchrun --nproc-per-node 8 -m flopwise train …
    """
    if workload and preset:
        raise FlopwiseError("WORKLOAD and --preset are the same: both are given", "leave out one of them")
    arguments = options.workload_arguments(given) | {"command": options.command_line()}
    begin = partial(train, workload or preset or "", progress=TerminalTraining(quiet=quiet), **arguments, **given)
    if not first_process():  # the first shows it, and what went wrong
        _, stopped = kept(begin)
        raise SystemExit(130 if stopped else 0)
    run, stopped = options.tagged(begin, tag, given["runs"])
    return Answer(
        partial(view_of, run),
        lambda: 130 if stopped else _code(run),
        lambda place: report(run.path, output=place, command=options.command_line()),
        table_too=True,
        screen=partial(screen_of, run),
    )


def _code(run: Training) -> int:
    if run.status == FAILED:
        raise FlopwiseError(run.reason, f"--resume {run.path.name} goes on from its last checkpoint, if it has one")
    return 0
