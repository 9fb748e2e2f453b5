"""The reference pages that are made from the code: every verb with its options, and every lever.

python -m flopwise.cli.reference > docs/reference/cli.md
python -m flopwise.cli.reference levers > docs/reference/levers.md
"""

import re
import sys
from collections.abc import Iterable, Sequence

import click

from flopwise.cli.main import VERBS, flopwise
from flopwise.cli.options import LEVERS_TOLD
from flopwise.spec.recipe import CHOICES, Recipe

_CLI = """# The command line

Made from the program by `python -m flopwise.cli.reference`; `flopwise VERB --help` says the same. What the levers do:
[levers](levers.md).
"""
_LEVERS = """# The levers

Everything that changes how a step runs without changing what it computes. Each is an option of `bench`, `profile`, `memory`,
`account`, `roofline` and `tune` (`--precision bf16`), a name in a [sweep file](sweeps.md), a line of a recipe (`--recipe
FILE.toml`) and an argument from Python (`flopwise.bench("tiny", precision="bf16")`). The defaults are what plain PyTorch code
does. What our own kernels do, and how near the limit they are: [kernels](../explanation/kernels.md). Made from the code by
`python -m flopwise.cli.reference levers`.

| lever | values (the default is bold) | what it changes |
|---|---|---|
"""
# What each value means, where its name does not say it.
VALUES: dict[str, dict[str, str]] = {
    "precision": {
        "fp32": "IEEE single precision; TF32 is off, and the record proves it",
        "tf32": "fp32 weights, matmuls on tensor cores with 10 bits of mantissa",
        "bf16": "autocast over fp32 weights",
        "fp16": "autocast over fp32 weights, with loss scaling",
        "bf16-pure": "weights, gradients and optimizer state in bf16",
        "bf16-master": "weights and gradients in bf16; our optimizer keeps what the weights lack of fp32",
    },
    "attention": {
        "naive": "written out: the scores go through memory",
        "sdpa": "PyTorch's `scaled_dot_product_attention`, which chooses its backend",
        "sdpa-flash": "the same, its FlashAttention backend",
        "sdpa-cudnn": "the same, cuDNN's backend",
        "flex": "PyTorch's FlexAttention",
        "flash": "our FlashAttention-2 in Triton",
    },
    "norm": {"eager": "written out", "torch": "PyTorch's function", "triton": "our kernel (RMSNorm)"},
    "activation": {
        "eager": "written out",
        "torch": "PyTorch's function",
        "triton": "our kernel",
        "cuda": "our kernel in CUDA C++ (GeLU alone)",
    },
    "rope": {"eager": "written out", "triton": "our kernel"},
    "projections": {
        "separate": "one matmul each",
        "fused": "queries, keys and values in one matmul, SwiGLU's gate and up in another",
    },
    "loss": {
        "full": "all logits at once",
        "chunked": "logits in chunks, never all of them",
        "fused": "chunks, with the head's matmul and our kernel",
    },
    "optimizer": {
        "adamw-loop": "AdamW written out, tensor by tensor",
        "foreach": "PyTorch's, over lists of tensors",
        "fused": "PyTorch's fused kernel",
        "flopwise": "our kernel: all tensors in one launch",
        "flopwise-bf16": "the same, with its moments in bf16: for β₂ up to 0.99 (here 0.95); with 0.999 they never decay",
    },
    "compile": {
        "off": "eager",
        "default": "`torch.compile` of the whole model",
        "max-autotune": "the same, with kernels tried out",
        "blocks": "one Transformer block, compiled once and used for every layer; and the loss",
    },
    "graph": {"off": "every kernel launched by the host", "on": "the whole step in one CUDA graph"},
    "overlap": {
        "off": "the optimizer comes after the backward pass",
        "on": "a block's weights are updated, and its gradients dropped, as soon as its backward is done; on a GPU beside the "
        "next block's. Not with fp16; compiled whole, all gradients come at the end, and nothing is gained",
    },
}


def cli_reference() -> str:
    """Every verb: what it does, its usage, its options."""
    contents = "\n".join(f"- [`flopwise {verb}`](#flopwise-{verb}): {told}" for verb, told in VERBS.items())
    parent = click.Context(flopwise, info_name="flopwise")
    sections = [_command(verb, flopwise.get_command(parent, verb), parent, 2) for verb in VERBS]
    return "\n".join([_CLI, contents, "", *sections]).rstrip() + "\n"


def levers_reference() -> str:
    """Every lever: its values, what they mean, the default."""
    default = Recipe()
    rows = [
        f"| [`{lever}`](#{lever}) | {', '.join(_bold(value, getattr(default, lever)) for value in values)} "
        f"| {LEVERS_TOLD[lever]} |"
        for lever, values in CHOICES.items()
    ]
    rows.append(f"| [`checkpoint`](#checkpoint) | **`off`**, N | {LEVERS_TOLD['checkpoint']} |")
    sections = [
        f"## {lever}\n\n| value | |\n|---|---|\n" + "".join(f"| `{v}` | {VALUES[lever][v]} |\n" for v in values)
        for lever, values in CHOICES.items()
    ]
    sections.append(
        "## checkpoint\n\n`off` keeps all activations for the backward pass; N keeps only the inputs of every N blocks, and "
        "computes the rest again.\n"
    )
    return _LEVERS + "\n".join(rows) + "\n\n" + "\n".join(sections)


def _bold(value: str, default: str) -> str:
    return f"**`{value}`**" if value == default else f"`{value}`"


def _command(name: str, command: click.Command | None, parent: click.Context, level: int) -> str:
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {context.command_path}\n", f"    {usage}\n", *_paragraphs(command.help or "")]
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    if table := _options(option for option in options if "--help" not in option.opts):
        parts.append(table)
    if isinstance(command, click.Group):
        inner = ((one, command.get_command(context, one)) for one in command.list_commands(context))
        parts += [_command(one, found, context, level + 1) for one, found in inner]
    return "\n".join(parts)


def _paragraphs(text: str) -> Sequence[str]:
    """The help as Markdown: an example is code, words in capitals stay as they are."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        line = " ".join(paragraph.split())
        example = re.match(r"(Example|Try): (.*)", line)
        found.append(f"For example:\n\n    {example[2]}\n" if example else f"{_escaped(line)}\n")
    return found


def _options(options: Iterable[click.Option]) -> str:
    rows = []
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        value = "" if option.is_flag else f" `{option.make_metavar(click.Context(flopwise))}`"
        told = _escaped(option.help or "")
        if option.show_default and not option.is_flag and option.default is not None:
            told += f" (default: {option.default})"
        rows.append(f"| {names}{value.replace('|', chr(92) + '|')} | {told.replace('|', chr(92) + '|')} |")
    return "| option | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""


def _escaped(text: str) -> str:
    return re.sub(r"([<>*\[\]])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(levers_reference() if sys.argv[1:] == ["levers"] else cli_reference())
