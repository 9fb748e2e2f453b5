"""Values in mangled names: literals, and expressions among template arguments."""

import re
from abc import abstractmethod
from collections.abc import Callable

from flopwise.work.declarators import OPERATORS, SUFFIX, UNARY, plain
from flopwise.work.mangled import Mangled, Unreadable

_LITERAL = re.compile(r"(n?)([0-9a-f]{1,64})E")


class Values(Mangled):
    """Reads values; what they are made of is read by who reads names and types."""

    @abstractmethod
    def encoding(self, outer: bool = False) -> str:
        """A function with its parameters, or a variable; the result of an `outer` one is not written."""

    @abstractmethod
    def read_type(self) -> str:
        """A type."""

    @abstractmethod
    def argument(self) -> str:
        """A template's argument."""

    @abstractmethod
    def arguments_list(self, tag: bool) -> str:
        """A template's arguments; `tag`: those of the function's own name, which T_ stands for."""

    @abstractmethod
    def unqualified(self) -> str:
        """A name without what it is in."""

    def literal(self) -> str:
        self.need("L")
        if self.take("_Z"):
            around = self.arguments
            text = plain(self.encoding())
            self.arguments = around
            self.need("E")
            return text
        code = self.peek()
        kind = plain(self.read_type())
        if self.take("E"):
            return "nullptr" if kind == "decltype(nullptr)" else kind
        sign, digits = self.match(_LITERAL).groups()
        value = f"-{digits}" if sign else digits
        if kind == "bool":
            return "true" if digits == "1" else "false"
        return f"{value}{SUFFIX[code]}" if code in SUFFIX else f"({kind}){value}"

    def expression(self) -> str:
        self.enter()
        text = self._expressed()
        self.depth -= 1
        return text

    def _expressed(self) -> str:
        head, two = self.peek(), self.peek(2)
        if head == "L":
            return self.literal()
        if head == "T":
            return plain(self.template_parameter())
        if two in ("fp", "fL"):
            raise Unreadable
        if head == "X":
            return self.argument()
        special: dict[str, Callable[[], str]] = {
            "cl": self._call,
            "cv": self._conversion,
            "sr": self._scoped,
            "sZ": self._pack_size,
            "st": self._size_of,
            "sp": self.expression,
            "il": self._list,
        }
        if two in special:
            self.at += 2
            return special[two]()
        if two in OPERATORS:
            self.at += 2
            word = OPERATORS[two]
            if two in UNARY:
                self.take("_")
                inner = self.expression()
                return f"{word}({inner})" if two != "ad" or "(" in inner else f"&{inner}"
            left, right = self.expression(), self.expression()
            return f"({left}){word}({right})"
        if head.isdigit():
            name = self.unqualified()
            return name + self.arguments_list(False) if self.peek() == "I" else name
        raise Unreadable

    def _until_end(self) -> str:
        found = []
        while not self.take("E"):
            found.append(self.expression())
        return ", ".join(one for one in found if one)

    def _call(self) -> str:
        called = self.expression()
        return f"{called}({self._until_end()})"

    def _conversion(self) -> str:
        kind = plain(self.read_type())
        value = self._until_end() if self.take("_") else self.expression()
        return f"({kind})({value})"

    def _scoped(self) -> str:
        owner = plain(self.read_type())
        name = self.unqualified()
        return f"{owner}::{name}" + (self.arguments_list(False) if self.peek() == "I" else "")

    def _pack_size(self) -> str:
        return f"sizeof...({plain(self.template_parameter())})"

    def _size_of(self) -> str:
        return f"sizeof ({plain(self.read_type())})"

    def _list(self) -> str:
        return f"{{{self._until_end()}}}"
