"""Attention of decoding reads its cache slowly.

Looks for: a trace of a server in which all iterations decode, with the tokens in the cache and the sizes of keys and values
known, and attention that reads them at less than {REACHED_BANDWIDTH:%} of the memory's bandwidth.
Saving: attention's time − the cache's bytes at {REACHED_BANDWIDTH:%} of the bandwidth.
Fix: another attention backend of the engine, one that splits long contexts over all of the GPU; a cache in 8 bits has half the
bytes.
"""

from flopwise import units
from flopwise.advice.constants import REACHED_BANDWIDTH
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import ATTENTION_PART
from flopwise.work.operation import ATTENTION

CODE = "# engine: compare its attention backends on this batch and context; try a cache in fp8"
RULE = Rule(__name__, (ATTENTION_PART,), code=CODE)


def check(facts: Facts) -> Finding | None:
    served, spent, bandwidth = facts.decoding, facts.class_ns(ATTENTION), facts.bandwidth
    if served is None or not served.decode_cache_bytes or not spent or not bandwidth:
        return None
    least = served.decode_cache_bytes / (REACHED_BANDWIDTH * bandwidth) * 1e9
    if least >= spent:
        return None
    size, rate = units.size(served.decode_cache_bytes), served.decode_cache_bytes / spent * 1e9
    arithmetic = (
        f"{units.duration(spent)} − {size} at {units.percent(REACHED_BANDWIDTH, 0)} of {units.rate(bandwidth, 'B/s')} "
        f"({units.duration(least)}) = {units.duration(spent - least)}"
    )
    share = units.percent(rate / bandwidth, 0)
    title = f"attention reads the cache at {units.rate(rate, 'B/s')}, {share} of the memory's bandwidth"
    kernels = describe(facts.kernels(lambda kernel: kernel.kind == ATTENTION))
    saving = gpu_time_saved(facts, spent - least, arithmetic, LOW)
    return RULE.finding(
        facts,
        title,
        saving,
        (f"the cache of a batch: {size}, if every layer sees all of it", *kernels),
        evidence_ns=spent,
        attention_ns=spent,
        cache_bytes=served.decode_cache_bytes,
        bytes_per_s=rate,
    )
