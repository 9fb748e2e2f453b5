"""Generated texts: the texts themselves, then how fast they came."""

import msgspec

from flopwise import units
from flopwise.records.generated import Generated
from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render.json import document
from flopwise.render.passages import Passages
from flopwise.render.table import View

_PROMPT = 400  # characters of it that are shown


def generate_view(found: Generated) -> View:
    """A row for each text; the speed is in the notes."""
    rows = tuple({"prompt": a, "text": b} for a, b in zip(found.prompts, found.texts, strict=True))
    columns = (Column("prompt", unit=SENTENCE), Column("text", unit=SENTENCE))
    table = Table("texts", f"{found.run}, step {found.step:,}", columns, rows, tuple(speed(found)))
    return View([table], document("generate", **msgspec.to_builtins(found)))


def generate_screen(found: Generated) -> Passages:
    """The texts as they are, each after its prompt."""
    texts = tuple((_end(prompt), text) for prompt, text in zip(found.prompts, found.texts, strict=True))
    return Passages(f"{found.run}, step {found.step:,}", texts, tuple(speed(found)))


def _end(prompt: str) -> str:
    return prompt if len(prompt) <= _PROMPT else f"…{prompt[-_PROMPT:]}"


def speed(found: Generated) -> list[str]:
    """Reading the prompt, then a token of each sequence at a time, beside the limit."""
    where = found.gpu or found.device
    said = [f"prompt: {found.prompt_tokens} tokens read in {units.duration(found.prefill_ns)}, on {where}"]
    if found.step_ns is not None and found.tokens_per_s is not None:
        each = f"then {units.duration(found.step_ns)} a token: {units.count(found.tokens_per_s)} tokens/s"
        said.append(f"{each} of {len(found.prompts)} sequence{'s' if len(found.prompts) > 1 else ''} (measured once)")
    if found.limit_ns is not None and found.step_ns is not None:
        share = units.percent(found.limit_ns / found.step_ns)
        moved = f"{units.size(found.weight_bytes)} of weights and the {found.cache} cache, read once a token"
        said.append(f"limit: {units.duration(found.limit_ns)} a token ({moved}); this is {share} of it")
    return said
