"""One file per rule: `check(facts)` gives a finding, or None where nothing is wrong. A new rule is a file and a line here."""

from flopwise.advice.rules import (
    allocator_calls,
    checkpointing,
    cold_kernels,
    decode_attention,
    decode_batch,
    decode_matmul,
    eager_pieces,
    exposed_communication,
    exposed_optimizer,
    exposed_transfers,
    fp32_logits,
    fp32_matmul,
    fragmentation,
    graph_breaks,
    host_code,
    host_next,
    host_syncs,
    input_stalls,
    launch_bound,
    long_prefill,
    naive_attention,
    repeated_casts,
    slow_optimizer,
    slow_sdpa,
    small_batch,
    tf32_off,
    throttled,
    unaligned,
    unfused_chains,
    ungraphed_decode,
    zeroed_gradients,
)

_COMPUTE = (
    launch_bound,
    host_next,
    fp32_matmul,
    tf32_off,
    naive_attention,
    slow_sdpa,
    unfused_chains,
    eager_pieces,
    slow_optimizer,
)
_DATA = (fp32_logits, unaligned, small_batch, host_syncs, repeated_casts, zeroed_gradients, input_stalls, fragmentation)
_SYSTEM = (checkpointing, throttled, graph_breaks, exposed_communication, exposed_optimizer)
_HOST = (host_code, allocator_calls, cold_kernels, exposed_transfers)
_SERVING = (decode_matmul, decode_attention, decode_batch, long_prefill, ungraphed_decode)
ALL_RULES = (*_COMPUTE, *_DATA, *_SYSTEM, *_HOST, *_SERVING)
