"""What a serving engine says of an iteration in the name of its range: how many requests it prefills and decodes, and how much.

execute_8192_context_9(sq8155sk8430sqsq…)_generation_37(sq37sk34489sqsq…)     tokens in all; of each kind requests, sums over
                                                                              them of the tokens and of the context's tokens
execute_context_2(512)_generation_30(30)                                      vLLM: requests and tokens
execute_new_1_cached_3                                                        vLLM before: requests
step[EXTEND bs=15 toks=15360], step[DECODE bs=32]                             SGLang
[Executor] _forward_step 7: 2 ctx reqs, 30 gen reqs                           TensorRT-LLM
"""

import re

import msgspec

PREFILL, DECODE, MIXED, EMPTY = "prefill", "decode", "mixed", "empty"
_N = r"(\d{1,9})(?!\d)"  # more tokens than that are none, and the first digits of a number are another one
_CONTEXT = re.compile(rf"^execute_(?:\d+_)?context_{_N}\(([^)]*)\)_generation_{_N}\(([^)]*)\)")
_SUMS = re.compile(rf"^(?:sq)?{_N}(?:sk{_N})?")
_COUNTED = re.compile(rf"^execute_new_{_N}_cached_{_N}|^\[Executor\] _forward_step \d+: {_N} ctx reqs?, {_N} gen reqs?")
_STEP = re.compile(rf"^step\[(\w+)(?: bs={_N})?(?: toks={_N})?")


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration serves; None where its name does not say."""

    prefill_requests: int = 0
    prefill_tokens: int | None = None  # of prompts, read in this iteration
    prefill_context: int | None = None  # the tokens that these see, those of earlier chunks included
    decode_requests: int = 0
    decode_tokens: int | None = None  # made: one for each request, more with speculation
    decode_context: int | None = None  # tokens in the cache of the requests that decode: each is read once

    @property
    def kind(self) -> str:
        """PREFILL, DECODE, MIXED, or EMPTY."""
        if self.prefill_requests and self.decode_requests:
            return MIXED
        return PREFILL if self.prefill_requests else DECODE if self.decode_requests else EMPTY

    @property
    def output_tokens(self) -> int:
        """As many as requests that decode, where the name does not say."""
        return max(self.decode_tokens or 0, self.decode_requests)

    @property
    def known(self) -> int:
        """How many of its figures are given."""
        figures = (self.prefill_tokens, self.prefill_context, self.decode_tokens, self.decode_context)
        return sum(one is not None for one in figures)


def batch_of(name: str) -> Batch | None:
    """What the name of a range says.

    >>> batch_of("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)").decode_context
    32785
    >>> batch_of("step[EXTEND bs=15 toks=15360]").kind, batch_of("execute_new_1_cached_3").kind, batch_of("decode") is None
    ('prefill', 'mixed', True)
    """
    if match := _CONTEXT.match(name):
        (tokens, seen), (made, cached) = (_sums(match[group]) for group in (2, 4))
        return Batch(
            prefill_requests=int(match[1]),
            prefill_tokens=tokens,
            prefill_context=seen,
            decode_requests=int(match[3]),
            decode_tokens=made,
            decode_context=cached,
        )
    if match := _COUNTED.match(name):
        new, old = (int(match[first] or match[second]) for first, second in ((1, 3), (2, 4)))
        return Batch(prefill_requests=new, decode_requests=old)
    if match := _STEP.match(name):
        return _of_mode(match[1].upper(), int(match[2] or 0), int(match[3]) if match[3] else None)
    return None


def _sums(text: str) -> tuple[int | None, int | None]:
    match = _SUMS.match(text)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else (None, None)


def _of_mode(mode: str, requests: int, tokens: int | None) -> Batch:
    """SGLang's forward modes: which of the requests of a MIXED batch decode, it does not say."""
    if mode in ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND"):
        return Batch(decode_requests=requests, decode_tokens=tokens)
    return Batch(prefill_requests=requests if mode != "IDLE" else 0, prefill_tokens=tokens)
