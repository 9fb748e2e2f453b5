"""Attention of decoding reads its cache slowly.

Looks for: a trace of a server in which all iterations decode, with the tokens in the cache and the sizes of keys and values
known, and attention that reads them at less than {REACHED_BANDWIDTH:%} of the memory's bandwidth.
Saving: attention's time − the cache's bytes at {REACHED_BANDWIDTH:%} of the bandwidth.
Fix: another attention backend of the engine, one that splits long contexts over all of the GPU; a cache in 8 bits has half the
bytes.
"""

from flopwise import units
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, reading_saved
from flopwise.records.finding import Finding
from flopwise.records.waterfall import ATTENTION_PART
from flopwise.work.operation import ATTENTION

CODE = "# engine: compare its attention backends on this batch and context; try a cache in fp8"
RULE = Rule(__name__, (ATTENTION_PART,), code=CODE)


def check(facts: Facts) -> Finding | None:
    served, spent = facts.decoding, facts.class_ns(ATTENTION)
    n_bytes = served.decode_cache_bytes if served is not None else None
    if not n_bytes or not spent:
        return None
    if (found := reading_saved(facts, spent, n_bytes)) is None:
        return None
    saving, rate = found
    return RULE.finding(
        facts,
        f"attention reads the cache at {rate}",
        saving,
        (
            f"the cache of a batch: {units.size(n_bytes)}, if every layer sees all of it",
            *describe(facts.kernels(lambda kernel: kernel.kind == ATTENTION)),
        ),
        evidence_ns=spent,
        attention_ns=spent,
        cache_bytes=n_bytes,
        bytes_per_s=n_bytes / spent * 1e9,
    )
