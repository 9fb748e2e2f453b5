"""Let a trained model speak, and say how fast it does beside what the GPU's memory allows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise.analysis.reach import limit
from flopwise.lm.data import open_corpus
from flopwise.predict.flops import model_flops
from flopwise.records.generated import Generated
from flopwise.spec import fields
from flopwise.spec.recipe import recipe_from
from flopwise.store import find, runs_root
from flopwise.store.training import corpus_folder, read_training
from flopwise.training.checkpoint import newest
from flopwise.training.speaking import Speaker

CACHES = ("fp32", "bf16", "fp16")


def generate(
    run: str | Path = "last",
    *,
    prompt: Sequence[str] | str = "",
    tokens: int = 100,
    batch: int = 1,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    cache: str | None = None,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    runs: str | Path | None = None,
    **levers: Any,
) -> Generated:
    """`tokens` after every prompt, each said `batch` times; `levers` as for `bench` (`precision`, `attention`, `graph`, …).

    `run` is one of `train`: its last checkpoint, or the one at `checkpoint`. `temperature` 0 takes the likeliest token; `cache`
    is the dtype of keys and values, by default what is computed in.

    >>> flopwise.generate("last", prompt="The", tokens=20, device="cpu").texts        # doctest: +SKIP
    (' loss fell, and nobody knew why.',)
    """
    fields.whole("tokens", tokens, 1, 1_000_000)
    fields.whole("batch", batch, 1, 100_000)
    fields.number("temperature", temperature, 0.0, 100.0)
    fields.number("top_p", top_p, 0.0, 1.0)
    fields.whole("seed", seed, 0, 2**63)
    training = read_training(find(run, runs_root(runs)))
    recipe = recipe_from(levers)
    cache = cache or (recipe.compute if recipe.compute in CACHES else "fp32")
    fields.one_of("cache", cache, CACHES)
    speaker = Speaker(Path(checkpoint) if checkpoint is not None else newest(training.path), recipe, device)
    tokenizer = open_corpus(corpus_folder(training.path, training.begun.settings), check=False).tokenizer()
    said = [prompt] if isinstance(prompt, str) else list(prompt)
    end = next(iter(tokenizer.special.values()), None)
    ids = [tokenizer.encode(one) or [end or 0] for one in said for _ in range(batch)]
    drawn = speaker.speak(ids, tokens, temperature, top_p, seed, cache)
    texts = [_text(tokenizer, row[len(given) :], end) for row, given in zip(drawn.tokens, ids, strict=True)]
    gpu = speaker.environment.gpu
    seen = max(map(len, ids)) + tokens // 2
    flops = model_flops(speaker.spec, len(ids), seen, "decode").total
    # Half of the new tokens are in the cache on average, of what was allocated for all.
    read = speaker.weight_bytes + drawn.cache_bytes * seen / (max(map(len, ids)) + tokens)
    most = limit(float(flops), recipe.compute, gpu.name, read) if gpu is not None else None
    return Generated(
        run=training.path.name,
        step=speaker.step,
        device=str(speaker.device),
        gpu=gpu.name if gpu is not None else "",
        recipe=recipe.changed(),
        prompts=tuple(one for one in said for _ in range(batch)),
        texts=tuple(texts),
        prompt_tokens=drawn.prompt_tokens,
        new_tokens=drawn.new_tokens,
        prefill_ns=drawn.prefill_ns,
        decode_ns=drawn.decode_ns,
        decode_steps=drawn.decode_steps,
        cache_bytes=drawn.cache_bytes,
        cache=cache,
        weight_bytes=speaker.weight_bytes,
        limit_ns=most.limit_ns if most is not None else None,
    )


def _text(tokenizer: Any, ids: list[int], end: int | None) -> str:
    """Until the end of the text; a token that the model has and the tokenizer does not is left out."""
    ids = ids[: ids.index(end)] if end is not None and end in ids else ids
    text: str = tokenizer.decode(one for one in ids if one < tokenizer.size)
    return text
