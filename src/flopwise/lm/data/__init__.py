"""Text as shards of tokens on disk: shards.py writes, corpus.py opens. batches.py draws batches from them, with torch."""

from flopwise.lm.data.corpus import Corpus, open_corpus
from flopwise.lm.data.shards import prepare

__all__ = ["Corpus", "open_corpus", "prepare"]
