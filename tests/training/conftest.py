import random

import pytest

from flopwise.lm import tokenizer as bpe
from flopwise.lm.data import prepare

WORDS = ["the", "loss", "fell", "and", "rose", "again", "while", "nobody", "watched", "it", "train"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text that can be learnt: eleven words in random order."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(6000)))
    return path


@pytest.fixture(scope="session")
def corpus(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepare([text], bpe.train([text], 270), folder, held_out=0.1)
    return folder
