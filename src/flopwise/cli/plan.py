"""`flopwise plan MODEL`."""

from functools import partial
from typing import Any

import click

from flopwise import units
from flopwise.api.plan import plan
from flopwise.cli.options import assignments
from flopwise.cli.output import Answer, answers
from flopwise.errors import FlopwiseError
from flopwise.render.charts import save
from flopwise.render.plan_charts import plan_chart
from flopwise.render.plan_flags import flags_screen, flags_view
from flopwise.render.plan_screen import plan_screen
from flopwise.render.plan_view import plan_view
from flopwise.spec import fields
from flopwise.spec.layout import CONTEXT_WAYS, PRECISIONS, RECOMPUTED, SCHEDULES, SHARDED
from flopwise.spec.software import PROGRAMS, SOFTWARE

_CLUSTER = "dgx-h100, aws-p5, gb200-nvl72, …, or FILE.toml."
_LINK = "Other links: nvlink4,ib400 (within a domain, then between), 25GB/s, …"
_MFU = "Days at this share of the peak instead of the predicted one: 0.5 or 50%."


@click.command("plan")
@click.argument("model")
@click.option("--gpu", metavar="NAME", help="h100, h200, b200, …: its usual cluster.")
@click.option("--cluster", metavar="NAME|FILE.toml", help=_CLUSTER)
@click.option("--gpus", metavar="N", help="By default the fewest on which it fits.")
@click.option("--nodes", type=int, metavar="N", help="The same in hosts.")
@click.option("--link", default="", metavar="NAME,NAME", help=_LINK)
@click.option("--tokens", metavar="N", help="Of the whole run, for days and GPU-hours: 15T, 300B.")
@click.option("--price", type=float, metavar="DOLLARS", help="Of a GPU for an hour.")
@click.option("--mfu", metavar="SHARE", help=_MFU)
@click.option(
    "--global-batch", metavar="N|4M-tokens", help="Of a step: sequences or tokens. [default: 4M tokens, or 1K a GPU]"
)
@click.option("--context", metavar="N", help="Tokens per sequence. [default: 8192, or the model's most]")
@click.option("--tp", type=int, metavar="N", help="Tensor ranks.")
@click.option("--pp", type=int, metavar="N", help="Pipeline ranks.")
@click.option("--cp", type=int, metavar="N", help="Context ranks.")
@click.option("--ep", type=int, metavar="N", help="Expert ranks.")
@click.option("--dp", type=int, metavar="N", help="Data ranks.")
@click.option("--fsdp", is_flag=True, help="--sharded weights.")
@click.option("--sharded", metavar="|".join(SHARDED), help="What the data ranks share.")
@click.option(
    "--shard-ranks", type=int, metavar="N", help="Data ranks that share the weights; groups of them have copies."
)
@click.option("--micro-batch", type=int, metavar="N", help="Sequences that go through the model at once.")
@click.option("--schedule", metavar="|".join(SCHEDULES), help="Of the pipeline.")
@click.option("--virtual", type=int, metavar="N", help="Parts of the model on each pipeline rank.")
@click.option("--recompute", metavar="|".join(RECOMPUTED), help="Activations that are computed again.")
@click.option("--context-way", metavar="|".join(CONTEXT_WAYS), help="How context ranks share attention.")
@click.option("--precision", metavar="|".join(PRECISIONS), help="What the matmuls compute in. [default: bf16]")
@click.option("--software", metavar="|".join(one.name for one in SOFTWARE), help="What trains. [default: megatron]")
@click.option("--offload", is_flag=True, help="The optimizer's state in the host's memory.")
@click.option(
    "--uneven", type=float, default=1.0, metavar="X", help="Tokens of the busiest expert rank over the mean: 1.3."
)
@click.option("--measured", metavar="RUN", help="A run of op:all-reduce, …: its links instead of the datasheet's.")
@click.option("--memory-limit", metavar="SIZE", help="Of a GPU, instead of its memory: 70GB.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="A field of the model: n_layers=40.")
@click.option("--flags", metavar="|".join(PROGRAMS), help="Print the layout as flags for this program.")
@answers(draws=True, screens=True)
def command(
    model: str,
    gpus: str | None,
    context: str | None,
    tokens: str | None,
    mfu: str | None,
    memory_limit: str | None,
    changes: tuple[str, ...],
    flags: str | None,
    picture: bool,
    **given: Any,
) -> Answer:
    """Plan a training run of MODEL on a cluster: the layout, step time, MFU, memory, days and money; nothing is run.

    \b
    Example: flopwise plan llama3-70b --gpu h100 --gpus 1024 --tokens 15T
      llama3-70b, 70.6B parameters on 1,024 × H100 SXM 80 GB

    MODEL is a preset (llama3-8b, gpt3-175b, mixtral-8x7b, qwen3-235b-a22b, deepseek-v3, …) or hf:PATH/config.json. All layouts
    of data, tensor, context, pipeline and expert ranks that fit the GPUs' memory are compared; options fix parts of them.
    -o plan.json keeps the plan for `flopwise explain RANKS --plan plan.json`; -o FILE.svg, .png or .html draws the
    time and memory of each layout.
    """
    if flags is not None:
        fields.one_of("flags", flags, PROGRAMS)
        if picture:
            raise FlopwiseError("--flags prints lines, and -o asks for a picture", "-o FILE.txt, or omit --flags")
    found = plan(
        model,
        gpus=None if gpus is None else _count(gpus),
        context=None if context is None else _count(context),
        program=flags,
        tokens=None if tokens is None else units.parse_count(tokens),
        mfu=None if mfu is None else units.parse_share(mfu),
        memory_limit=None if memory_limit is None else units.parse_size(memory_limit),
        set=assignments(changes) or None,
        **given,
    )
    if flags is not None:
        return Answer(partial(flags_view, found, flags), screen=partial(flags_screen, found, flags), typed=True)
    return Answer(
        partial(plan_view, found),
        write=lambda place: save(plan_chart(found), place),
        screen=partial(plan_screen, found),
    )


def _count(text: str) -> int:
    """`1024` or `1K`; what is out of range is said by its name later."""
    return int(text) if text.removeprefix("-").isdecimal() else units.parse_count(text)
