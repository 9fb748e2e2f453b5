"""Text as shards of tokens on disk, and batches of them: prepare.py writes, corpus.py opens, batches.py draws."""

from flopwise.lm.data.batches import Batches, Stream
from flopwise.lm.data.corpus import Corpus, open_corpus
from flopwise.lm.data.prepare import prepare

__all__ = ["Batches", "Corpus", "Stream", "open_corpus", "prepare"]
