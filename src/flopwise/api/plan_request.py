"""What a plan is asked for: fields of the layout that are given and go together, and the batch in sequences."""

import math
import re
from typing import Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.predict.parallel.search import Question
from flopwise.spec import fields
from flopwise.spec.cluster import Cluster
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.layout import CONTEXT_WAYS, PRECISIONS, RECOMPUTED, SCHEDULES, SHARDED
from flopwise.spec.software import PROGRAMS, cannot
from flopwise.spec.software import software as software_named

MOST_GPUS = 1_000_000
_USUAL_TOKENS, _TOKENS_OF_A_GPU = 2**22, 1024  # of a step, by default; and not less of each GPU
_NOTED, _REFUSED = 0.01, 0.25  # a batch in tokens, rounded to sequences that ranks can share: by how much it may differ
# The command line's words for a layout's fields.
RANKS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "dp": "data"}
_NUMBERS = ("micro_batch", "virtual", "shard_ranks")
_WORDS = {
    "sharded": SHARDED,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTED,
    "context_way": CONTEXT_WAYS,
    "precision": PRECISIONS,
}


def fixed_fields(given: dict[str, Any], fsdp: bool) -> dict[str, Any]:
    known = (*RANKS, *_NUMBERS, "software", "offload", *_WORDS)
    fields.known("a layout", given, known)
    fixed = {RANKS.get(name, name): value for name, value in given.items() if value not in (None, False)}
    fields.flag("offload", fixed.get("offload", False))
    for name in (*RANKS.values(), *_NUMBERS):
        if name in fixed:
            word = next((word for word, field in RANKS.items() if field == name), name)
            fields.whole(word, fixed[name], 1, MOST_GPUS)
    for name, words in _WORDS.items():
        if name in fixed:
            fields.one_of(name, fixed[name], words)
    if fsdp and fixed.setdefault("sharded", "weights") != "weights":
        raise FlopwiseError("fsdp shards the weights", f"omit --fsdp, or --sharded {fixed['sharded']}")
    _check_sharding(fixed)
    name = fixed.get("software", "megatron")
    software_named(name)
    if (why := cannot(name, fixed.get("sharded", ""), fixed.get("schedule", ""))) is not None:
        raise FlopwiseError(*why)
    return fixed


def for_program(program: str | None, layout: dict[str, Any]) -> dict[str, Any]:
    """The layout with what the program asks for: its software, and no ranks that it does not have."""
    if program is None:
        return layout
    fields.one_of("program", program, PROGRAMS)
    if not (runs := PROGRAMS[program]):
        return layout
    if (given := layout.get("software")) not in (None, *runs):
        software_named(str(given))
        raise FlopwiseError(f"{program} does not run {given}", f"--software {runs[0]}")
    layout = layout | {"software": given or runs[0]}
    for word, what in (("pp", "pipeline"), ("ep", "expert")) if program == "accelerate" else ():
        if layout.get(word) not in (None, 1):
            hint = f"--{word} 1, or --flags torchtitan"
            raise FlopwiseError(f"accelerate's ParallelismConfig has no {what} ranks", hint)
        layout[word] = 1
    return layout


def _check_sharding(fixed: dict[str, Any]) -> None:
    """Raise where an option would be without effect."""
    if "shard_ranks" in fixed and fixed.setdefault("sharded", "weights") != "weights":
        message = f"shard_ranks share the weights, and sharded = {fixed['sharded']} does not"
        raise FlopwiseError(message, "--fsdp, or omit --shard-ranks")
    shared = fixed.get("sharded", "none")
    if shared != "none" and fixed.get("data") == 1 and fixed.get("context", 1) == 1:
        raise FlopwiseError(f"one data rank has nobody to share the {shared} with", "--dp 2 or more, or --sharded none")


def check_pipeline(layers: int, fixed: dict[str, Any]) -> None:
    """Raise where schedule, ranks and parts do not go together."""
    ranks, parts, schedule = (fixed.get(name) for name in ("pipeline", "virtual", "schedule"))
    if ranks == 1 and (schedule in ("interleaved", "zero-bubble") or (parts or 1) > 1):
        what = f"the {schedule} schedule" if schedule in SCHEDULES[1:] else f"virtual = {parts}"
        raise FlopwiseError(f"{what} needs a pipeline", "--pp 2 or more")
    if parts is None:
        return
    if schedule in ("1f1b", "zero-bubble") and parts > 1:
        message = f"{schedule} has one part of the model on each rank, not {parts}"
        raise FlopwiseError(message, "--schedule interleaved, or omit --virtual")
    if schedule == "interleaved" and parts == 1:
        raise FlopwiseError("interleaved has several parts of the model on each rank", "--virtual 2 or more")
    if parts > 1:
        _check_parts(layers, ranks, parts)


def _check_parts(layers: int, ranks: int | None, parts: int) -> None:
    many = [ranks] if ranks else range(2, layers + 3)
    if not any(_divides(layers, one * parts) for one in many):
        most = range(2, (layers + 2) // (ranks or 2) + 1)
        able = [str(one) for one in most if _divides(layers, (ranks or 2) * one)]
        among = f"{ranks} × {parts} parts" if ranks else f"{parts} parts on each rank"
        hint = f"--virtual {' or '.join(able[:4])}" if able else "omit --virtual"
        raise FlopwiseError(f"{layers} layers do not divide into {among}", hint)


def _divides(layers: int, parts: int) -> bool:
    """Also with the embedding and the loss counted as layers."""
    return layers % parts == 0 or (layers + 2) % parts == 0


def batch_of(given: int | str | None, context: int, gpus: int, fixed: dict[str, Any]) -> int:
    """Sequences of a step. A number of tokens is rounded to sequences that many ranks can share."""
    micro, data = fixed.get("micro_batch", 1), fixed.get("data", 1)
    usual = max(_USUAL_TOKENS, _TOKENS_OF_A_GPU * gpus)
    count, tokens = _asked_batch(given)
    if count is not None and not tokens:
        fields.whole("global_batch", count, 1, 100_000_000)
        if count % micro:
            divided = ", ".join(str(2**n) for n in range(7) if count % 2**n == 0)
            message = f"a batch of {count} sequences does not divide into micro-batches of {micro}"
            raise FlopwiseError(message, f"--micro-batch {divided}, or another --global-batch")
        return count
    asked = count or usual
    if micro > max(1, (1 + _REFUSED) * asked / context):
        message = (
            f"a micro-batch of {micro} is more than the batch: {units.count(asked)} tokens in sequences of {context}"
        )
        raise FlopwiseError(message, "a smaller --micro-batch, or a larger --global-batch")
    made = _rounded(asked, context, gpus, micro * data)
    if count is not None and abs(made * context / count - 1) > _REFUSED:
        shared = f" for {data} data ranks with micro-batches of {micro}" if micro * data > 1 else ""
        nearest = units.several(made, "sequence")
        message = f"{units.count(count)} tokens are not near whole sequences of {context}{shared}: {nearest} would be"
        raise FlopwiseError(message, f"--global-batch {made}")
    return made


def _asked_batch(given: int | str | None) -> tuple[int | None, bool]:
    """Its number, if there is one, and whether that is of tokens."""
    if given is None or isinstance(given, int):
        return given, False
    fields.text("global_batch", given)
    match = re.fullmatch(r"(.+?)[- ]?tok(?:ens?)?", given.strip())
    try:
        return units.parse_count(match[1] if match else given), match is not None
    except FlopwiseError:
        hint = "sequences (1024), or tokens: 4M-tokens"
        raise FlopwiseError(f"global_batch = {fields.show(given)} is not allowed", hint) from None


def batch_note(given: int | str | None, question: Question) -> str:
    """Where the tokens of a step are not those that were asked for."""
    count, tokens = _asked_batch(given)
    made = question.batch * question.context
    if not tokens or count is None or abs(made / count - 1) <= _NOTED:
        return ""
    return f"A step has {units.count(made)} tokens, not {units.count(count)}: {question.batch:,} sequences divide among ranks."


def memory_note(limit: int, where: Cluster) -> str:
    own = where.memory_bytes or gpu_named(where.gpu).memory_bytes
    return f"The limit of {limit / 1e9:.0f} GB is above the GPU's {own / 1e9:.0f} GB." if own and limit > own else ""


def one_link(link: str, question: Question) -> bool:
    return bool(link) and "," not in link and question.gpus > question.cluster.domain


def _rounded(tokens: int, context: int, gpus: int, ranks: int = 1) -> int:
    """
    >>> _rounded(4_000_000, 8192, 1024), _rounded(4_000_000, 8192, 24), _rounded(100, 8192, 8), _rounded(2**22, 8192, 8, 3)
    (512, 480, 1, 480)
    """
    exact = tokens / context
    unit = math.lcm(gpus // (gpus & -gpus), ranks)  # what is odd of them, and what is given
    while unit * 8 <= exact:
        unit *= 2
    return max(1, round(exact / unit)) * unit
