"""A mangled name as it is read: the place, what was read before, and the bounds that keep any name from taking long."""

import re

from flopwise.work.declarators import AUTO, OF_LAMBDA, STANDARD

LONGEST_TEXT = 1 << 13  # characters of what a name stands for: substitutions can double it again and again
_DEEPEST = 100
_MOST_STEPS = 20_000
NUMBER = re.compile(r"\d{1,9}")
_SEQUENCE = re.compile(r"([0-9A-Z]{0,6})_")


class Unreadable(Exception):
    """The name is not one that this reader knows."""


class Mangled:
    """The text, the place, and what S_ and T_ stand for there. Methods named after a thing read it, and return its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 2
        self.seen: list[str] = []  # what S_, S0_, S1_… stand for
        self.arguments: list[str] | None = None  # what T_, T0_… stand for: those of the function's template
        self._steps = self.depth = 0
        self._constructs = False
        self.in_lambda = 0

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def take_one(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def need(self, token: str) -> None:
        if not self.take(token):
            raise Unreadable

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise Unreadable
        self.at = found.end()
        return found

    def enter(self) -> None:
        self._steps += 1
        self.depth += 1
        if self._steps > _MOST_STEPS or self.depth > _DEEPEST:
            raise Unreadable

    def remember(self, text: str) -> str:
        if len(text) > LONGEST_TEXT:
            raise Unreadable
        self.seen.append(text)
        return text

    def source_name(self) -> str:
        length = int(self.match(NUMBER)[0])
        text = self.peek(length)
        if len(text) < length or not length:
            raise Unreadable
        self.at += length
        return "(anonymous namespace)" if text.startswith("_GLOBAL__N") else text

    def count(self) -> int:
        """The number of an unnamed thing: nothing, or one less than it."""
        number = NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
        self.need("_")
        return int(number[0]) + 2 if number else 1

    def discriminator(self) -> None:
        if self.take("__"):
            self.match(NUMBER)
            self.need("_")
        elif self.peek() == "_" and self.peek(2)[1:].isdigit():
            self.at += 2

    def substitution(self) -> str:
        self.need("S")
        if self.peek() in STANDARD and not self.peek().isupper():
            return f"std::{STANDARD[self.take_one()]}"
        index = _number_36(self.match(_SEQUENCE)[1])
        if index >= len(self.seen):
            raise Unreadable
        text = self.seen[index]
        return OF_LAMBDA.sub(self.argument_of, text) if AUTO in text and not self.in_lambda else text

    def argument_of(self, parameter: re.Match[str]) -> str:
        index = int(parameter[1])
        known = self.arguments or []
        return known[index] if index < len(known) else parameter[0]

    def template_parameter(self) -> str:
        self.need("T")
        digits = self.match(_SEQUENCE)[1]
        index = int(digits) + 1 if digits.isdigit() else 0
        if digits and not digits.isdigit():
            raise Unreadable
        if self.in_lambda:
            return f"{AUTO}{index}{AUTO}"
        if self.arguments is None or index >= len(self.arguments):
            raise Unreadable
        return self.arguments[index]


def _number_36(digits: str) -> int:
    return int(digits, 36) + 1 if digits else 0
