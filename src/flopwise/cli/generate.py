"""`flopwise generate RUN`."""

from functools import partial
from typing import Any

import click

from flopwise.api.generate import CACHES, generate
from flopwise.cli import options
from flopwise.cli.output import Answer, answers
from flopwise.render.views import screen_of, view_of

_LEVERS = ("precision", "attention", "norm", "activation", "rope", "compile", "graph")


@click.command("generate")
@click.argument("run", default="last")
@click.option("--prompt", multiple=True, default=("",), help="What to go on from; several give several texts.")
@click.option("--tokens", type=int, default=100, show_default=True, metavar="N", help="How many to add.")
@click.option("--batch", type=int, default=1, show_default=True, metavar="N", help="Texts for each prompt.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0: always the likeliest token.")
@click.option(
    "--top-p", type=float, default=0.95, show_default=True, help="From the fewest tokens that have this share."
)
@click.option("--seed", type=int, default=0, help="The same seed says the same.")
@click.option("--cache", metavar="|".join(CACHES), help="Keys and values in this dtype; by default as computed.")
@click.option("--checkpoint", metavar="FILE", help="Another than the run's last.")
@options.levers(*_LEVERS)
@options.device_option
@options.runs_option
@answers()
def command(**given: Any) -> Answer:
    """Let a trained model go on from a prompt; tokens per second beside what the memory allows.

    \b
    Example: flopwise generate last --prompt "import " --tokens 20 --device cpu
      20261118-024643-train-tiny-479e, step 200

    RUN is one of flopwise train.
    """
    levers = {name: value for name in _LEVERS if (value := given.pop(name)) is not None}
    found = generate(given.pop("run"), **given, **levers)
    return Answer(partial(view_of, found), screen=partial(screen_of, found))
