"""Inference: prefill reads the prompt at once, decode writes one token at a time past a cache of keys and values."""

import msgspec

from flopwise.predict.flops import matmul_parameters, model_flops
from flopwise.spec.dtypes import named
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload


class InferencePart(msgspec.Struct, frozen=True, kw_only=True):
    """The least that prefill, or one step of decoding, must do."""

    part: str  # 'prefill', 'decode'
    tokens: int  # it produces or reads
    flops: int
    read_bytes: int
    write_bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / (self.read_bytes + self.write_bytes)


class InferenceLimit(msgspec.Struct, frozen=True, kw_only=True):
    """No faster than this on a GPU, by its datasheet."""

    part: str
    gpu: str
    seconds: float
    tokens_per_s: float
    bound: str  # 'compute', 'bandwidth'


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of sequences of one length."""

    batch: int
    context: int
    dtype: str
    weights_bytes: int
    kv_cache_bytes: int
    kv_cache_bytes_per_token: int  # of one sequence
    prefill: InferencePart
    decode: InferencePart


def kv_cache_bytes(spec: ModelSpec, batch: int, context: int, item_bytes: int = 2) -> int:
    """Keys and values of every layer, KV head and position.

    >>> from flopwise.spec.model import preset
    >>> kv_cache_bytes(preset("llama3-8b"), batch=1, context=8192) // 2**20
    1024
    """
    return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * context * batch * item_bytes


def inference(spec: ModelSpec, batch: int, context: int, recipe: Recipe) -> Inference:
    """What a prompt of `context` tokens takes, and then each further token with that much behind it.

    >>> from flopwise.spec.model import preset
    >>> round(inference(preset("llama3-8b"), 1, 8192, Recipe(precision="bf16")).decode.intensity, 2)  # far below any ridge
    1.2
    """
    item = named(recipe.precision).n_bytes  # weights are stored as they are computed with
    weights = spec.parameters() * item
    read_once = matmul_parameters(spec) * item  # of the embedding only the rows asked for
    cache = kv_cache_bytes(spec, batch, context, item)
    logits = batch * spec.vocab * item
    return Inference(
        batch=batch,
        context=context,
        dtype=recipe.precision,
        weights_bytes=weights,
        kv_cache_bytes=cache,
        kv_cache_bytes_per_token=kv_cache_bytes(spec, 1, 1, item),
        prefill=InferencePart(
            part="prefill",
            tokens=batch * context,
            flops=model_flops(spec, batch, context, "prefill").causal,  # the least: no faster than the limit from it
            read_bytes=read_once,
            write_bytes=cache + logits,  # of the last token
        ),
        decode=InferencePart(
            part="decode",
            tokens=batch,
            flops=model_flops(spec, batch, context, "decode").total,
            read_bytes=read_once + cache,
            write_bytes=kv_cache_bytes(spec, batch, 1, item) + logits,
        ),
    )


def generation_part(workload: Workload) -> InferencePart | None:
    """What a step of generation must do at least, with weights and cache in half precision; None of any other step.

    >>> from flopwise.spec.workload import workload
    >>> generation_part(workload("small", phase="decode", batch=8)).tokens, generation_part(workload("small"))
    (8, None)
    """
    if not workload.generates or not isinstance(workload.subject, ModelSpec):
        return None
    found = inference(workload.subject, workload.batch, workload.context, Recipe(precision="bf16"))
    return found.decode if workload.phase == "decode" else found.prefill


def inference_limit(part: InferencePart, gpu: Gpu, dtype: str) -> InferenceLimit | None:
    """The larger of FLOPs over the peak rate and bytes over the bandwidth; None where the GPU states no such figures.

    >>> from flopwise.spec.gpu import gpu
    >>> from flopwise.spec.model import preset
    >>> inference_limit(inference(preset("llama3-8b"), 1, 8192, Recipe(precision="bf16")).decode, gpu("h100"), "bf16").bound
    'bandwidth'
    """
    peak, bandwidth = gpu.peak(dtype), gpu.bandwidth_bytes_s
    if not peak or not bandwidth:
        return None
    compute_s, memory_s = part.flops / peak, (part.read_bytes + part.write_bytes) / bandwidth
    seconds, bound = max((compute_s, "compute"), (memory_s, "bandwidth"), key=lambda limit: limit[0])
    rate = part.tokens / seconds
    return InferenceLimit(part=part.part, gpu=gpu.name, seconds=seconds, tokens_per_s=rate, bound=bound)
