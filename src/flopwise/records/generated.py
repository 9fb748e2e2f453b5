"""What `generate` answers: texts, and how fast they came."""

import msgspec

from flopwise.records.printed import Printed


class Generated(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """Texts of one call. Times are of this one call: measured once, not sampled."""

    run: str
    step: int  # of the checkpoint
    device: str
    gpu: str = ""
    recipe: dict[str, str] = {}
    prompts: tuple[str, ...]
    texts: tuple[str, ...]  # what came after each prompt, until its end
    prompt_tokens: int
    new_tokens: int
    prefill_ns: int
    decode_ns: int
    decode_steps: int
    cache_bytes: int
    cache: str  # dtype
    weight_bytes: int
    limit_ns: float | None = None  # of one step: weights and cache, each read once, at the GPU's bandwidth

    @property
    def step_ns(self) -> float | None:
        """One token of every sequence."""
        return self.decode_ns / self.decode_steps if self.decode_steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """New ones; each prompt's first came with its reading. Where prompts differ in length, the longer are read meanwhile."""
        return (
            (self.new_tokens - len(self.prompts)) * 1e9 / self.decode_ns
            if self.decode_ns and self.decode_steps
            else None
        )

    def headline(self) -> str:
        return f"{self.new_tokens} tokens of {self.run}, step {self.step}"
