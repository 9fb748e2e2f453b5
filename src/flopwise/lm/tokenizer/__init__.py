"""Byte-pair encoding: learnt here (training.py), stored in two formats (formats.py), encoded by tiktoken."""

from flopwise.lm.tokenizer.patterns import PATTERNS
from flopwise.lm.tokenizer.tokenizer import Tokenizer, read
from flopwise.lm.tokenizer.training import train

__all__ = ["PATTERNS", "Tokenizer", "read", "train"]
