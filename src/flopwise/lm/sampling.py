"""Text drawn from a model: prompts read at once, then a token of each at a time, with a cache of keys and values."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopwise.errors import FlopwiseError
from flopwise.lm.generation import Place, keep_keys
from flopwise.lm.precision import autocast
from flopwise.lm.transformer import Transformer

_WARMUPS = 3  # before a CUDA graph is captured
# cuDNN's attention is planned anew for every length, and a cache has another with every token.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Drawn:
    """Tokens of every sequence, prompts included, and how long it took."""

    tokens: list[list[int]]
    prompt_tokens: int  # of all sequences
    new_tokens: int
    prefill_ns: int  # reading the prompts
    decode_ns: int  # all tokens after it, one of each sequence at a time
    decode_steps: int
    cache_bytes: int


class Sampler:
    """A model that speaks. It takes the model's attention over: the model is for this alone from then on."""

    def __init__(self, model: Transformer, batch: int, positions: int, cache: torch.dtype, graph: bool = False) -> None:
        self.model, self.device, self.graph = model.eval(), model.head_weight.device, graph
        self.place, self.positions = Place(), positions
        self.cache_bytes = keep_keys(model, batch, positions, cache, self.place)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.tokens = self.known = self.token  # of a draw: [B, total], and which of them were given
        self._take: Callable[[Tensor], Tensor] = torch.argmax

    @torch.no_grad()
    def draw(
        self, prompts: Sequence[Sequence[int]], new: int, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0
    ) -> Drawn:
        """`new` tokens after every prompt. Of prompts of several lengths the shortest is read at once, the rest on the way."""
        random = torch.Generator(self.device).manual_seed(seed)
        shortest, longest = min(map(len, prompts)), max(map(len, prompts))
        total = longest + new
        given = torch.zeros(len(prompts), total, dtype=torch.long)
        known = torch.zeros(len(prompts), total, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            given[row, : len(prompt)], known[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long), True
        self.tokens, self.known = given.to(self.device), known.to(self.device)
        self.place.move(0)
        begun = self._now()
        logits = self._logits(self.tokens[:, :shortest], 0)
        read_ns = self._now() - begun
        if not logits.isfinite().all():
            raise FlopwiseError("the model's logits are not numbers", "try an earlier --checkpoint or --precision fp32")
        self.place.move(shortest)
        self._take = lambda logits: choose(logits, temperature, top_p, random)
        steps = total - shortest - 1
        advance = self._advance
        if self.graph and steps:
            self.place.fix(self.positions, self.device)
            advance = self._captured(random, shortest)
        begun = self._now()
        self._write(logits)
        for _ in range(steps):
            advance()
        decode_ns = self._now() - begun
        rows = self.tokens.tolist()
        return Drawn(
            tokens=[row[: len(prompt) + new] for row, prompt in zip(rows, prompts, strict=True)],
            prompt_tokens=sum(map(len, prompts)),
            new_tokens=new * len(prompts),
            prefill_ns=read_ns,
            decode_ns=decode_ns,
            decode_steps=steps,
            cache_bytes=self.cache_bytes,
        )

    def _logits(self, tokens: Tensor, past: int | Tensor) -> Tensor:
        with autocast(self.model.recipe, self.device.type):
            logits: Tensor = self.model.head(self.model.hidden(tokens, past)[:, -1:])
        return logits.float()

    def _advance(self) -> None:
        """The next place: its token is drawn from what the model makes of the last one."""
        if self.place.index is not None:
            logits = self._logits(self.token, self.place.index)
        else:
            with sdpa_kernel(_ANY_LENGTH):
                logits = self._logits(self.token, self.place.length)
        self.place.advance()
        self._write(logits)

    def _write(self, logits: Tensor) -> None:
        """A token of every sequence at its place: the prompt's where it is longer, else one that is drawn."""
        column = self.place.column
        chosen = torch.where(self.known[:, column], self.tokens[:, column], self._take(logits[:, -1])[:, None])
        self.tokens[:, column] = chosen
        self.token.copy_(chosen)

    def _captured(self, random: torch.Generator, start: int) -> Callable[[], None]:
        """All that one token takes, drawing it included, as a CUDA graph."""
        drawn, take = self.tokens.clone(), self._take
        self._take = lambda logits: logits.argmax(-1)  # a warm-up draws nothing from the seed
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self.place.move(start)  # it writes where the next tokens will
                self._advance()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._take = take
        self.place.move(start)
        self.tokens.copy_(drawn)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(random)
        with torch.cuda.graph(graph):
            self._advance()
        self.place.move(start)
        return graph.replay

    def _now(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()


def choose(logits: Tensor, temperature: float, top_p: float, random: torch.Generator | None = None) -> Tensor:
    """A token for every row [B, V]: at temperature 0 the likeliest; else from the fewest that together have `top_p`.

    >>> choose(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, 1.0)
    tensor([1])
    >>> choose(torch.tensor([[0.0, 9.0, 1.0]]), 1.0, 0.5)
    tensor([1])
    """
    if temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(-1)
    likely = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = likely.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[..., 0] = False  # the likeliest is always one of them
        likely = torch.zeros_like(likely).scatter_(-1, order, ordered.masked_fill(beyond, 0))
    return torch.multinomial(likely, 1, generator=random).squeeze(-1)
