"""A training in this process, from settings to the last step; what it needs torch for, so that its callers do not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from flopwise import units
from flopwise.capture.build import resolve_device
from flopwise.capture.environment import environment
from flopwise.errors import FlopwiseError
from flopwise.lm import tokenizer as bpe
from flopwise.lm.data import Corpus, prepare
from flopwise.lm.ranks import Ranks, joined, ranks_here
from flopwise.lm.text import text_files
from flopwise.lm.tokenizer.tokenizer import SPECIAL
from flopwise.lm.tokenizer.training import check_size
from flopwise.records.run import Environment
from flopwise.records.training import Settings, Stopped
from flopwise.spec.workload import Workload
from flopwise.training.constants import HELD_OUT, HELD_OUT_OF_SMALL, SMALL_TEXT_BYTES
from flopwise.training.loop import Loop, OnSteps

Note = Callable[[str], None]


class Job:
    """The device and the processes of a training; `build` makes its model, `run` trains it."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device, self.ranks = device, ranks
        self._loop: Loop | None = None

    @property
    def environment(self) -> Environment:
        return environment(self.device)

    def build(self, workload: Workload, settings: Settings, corpus: Corpus) -> int:
        """Make the model; returns how many parameters it has."""
        with _memory_errors():
            self._loop = Loop(workload, settings, corpus, self.device, self.ranks)
        return self._loop.parameters

    def restore(self, checkpoint: Path) -> int:
        """Go on from a checkpoint; returns its step."""
        assert self._loop is not None
        return self._loop.restore(checkpoint)

    def run(self, start: int, folder: Path, on_steps: OnSteps, stop: Callable[[], bool]) -> Stopped:
        assert self._loop is not None
        with _memory_errors():
            return self._loop.run(start, folder, on_steps, stop)


@contextmanager
def job(device: str) -> Iterator[Job]:
    """This process's part; under torchrun each has a GPU of its own."""
    ranks = ranks_here()
    if ranks.world > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{ranks.local_rank}"
    there = resolve_device(device)
    with joined(ranks, there):
        yield Job(there, ranks)


Texts = Sequence[str | Path]


def check_text(texts: Texts, vocabulary: int, tokenizer: str | Path | None) -> None:
    """Refuse what cannot become a corpus, before there is a run."""
    text_files(texts)
    if tokenizer is None:
        check_size(vocabulary, SPECIAL)


def corpus_of(texts: Texts, tokenizer: str | Path | None, vocabulary: int, folder: Path, note: Note) -> Corpus:
    """Text as tokens in a folder; the tokenizer is read from a file, or learnt from the text."""
    size = sum(file.stat().st_size for file in text_files(texts))
    if tokenizer is None:
        note(f"learning a vocabulary of {vocabulary:,} tokens from {units.size(size)} of text")
        encoding = bpe.train(texts, vocabulary, note=note)
        if encoding.size < vocabulary:
            note(f"the text has only {encoding.merges:,} merges: {encoding.size:,} tokens of {vocabulary:,} are used")
    else:
        encoding = bpe.read(tokenizer)
        if encoding.size > vocabulary:
            text = f"{tokenizer} has {encoding.size:,} tokens, and the model's vocabulary is {vocabulary:,}"
            raise FlopwiseError(text, f"--set vocab={encoding.size}")
    held_out = HELD_OUT_OF_SMALL if size < SMALL_TEXT_BYTES else HELD_OUT
    made = prepare(texts, encoding, folder, held_out=held_out)
    note(f"{made.tokens('train'):,} tokens to train on, {made.tokens('evaluation'):,} held out")
    return made


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        hint = "a smaller --batch with --accumulate, --precision bf16, --loss chunked or --checkpoint 1 take less"
        raise FlopwiseError(f"out of memory: {str(error).partition('.')[0] or 'no more is free'}", hint) from None
