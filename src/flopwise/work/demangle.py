"""C++ names as people write them: a reader of the Itanium ABI's mangled names that never fails.

What it does not understand stays as it is: rare expressions in template arguments, names cut short by a profiler. Text is written
as by c++filt (`> >`, `char const*`). Work and length are bounded, so that no name, however made, takes long.

Grammar: https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from flopwise.work.declarators import (
    BUILTIN,
    D_BUILTIN,
    INNER,
    OF_LAMBDA,
    OPERATORS,
    PACK,
    QUALIFIERS,
    WRITTEN_AFTER,
    declared,
    each,
    last_part,
    listed,
    plain,
    pointed,
    qualified,
)
from flopwise.work.mangled import LONGEST_TEXT, NUMBER, Unreadable
from flopwise.work.mangled_values import Values

LONGEST = 4096  # characters of a mangled name that is read
_MOST_CHARACTERS = 2_000_000  # of one trace's names, about two seconds; real traces hold a few hundred names
_CLONE = re.compile(r"(\.[\w.]+|@[\w@.]+)?$")


@lru_cache(maxsize=1 << 14)
def demangled(name: str) -> str:
    """The name that a mangled one stands for; any other as it is.

    >>> demangled("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bLi64ELb1EEEvPT_i")
    'void aiter::add_rmsnorm_quant_kernel<__bf16, 64, true>(__bf16*, int)'
    >>> demangled("ampere_sgemm_128x64_nn"), demangled("_ZN5cut_short")
    ('ampere_sgemm_128x64_nn', '_ZN5cut_short')
    """
    if not name.startswith("_Z") or len(name) > LONGEST:
        return name
    reader = _Reader(name)
    try:
        text = reader.encoding()
        clone = _CLONE.match(name, reader.at)
        if clone is None or len(text) > LONGEST_TEXT:
            return name
        text = OF_LAMBDA.sub("auto", plain(text))
        return text + (f" [clone {clone[1]}]" if clone[1] and clone[1] != ".kd" else "")
    except (Unreadable, RecursionError, IndexError):
        return name


def demangled_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of a trace, mangled ones as people write them; past what any real trace holds, the rest stays as it is.

    >>> demangled_names(["_Z4gemmPf", "aten::mm"])
    ('gemm(float*)', 'aten::mm')
    """
    left, shown = _MOST_CHARACTERS, []
    for name in names:
        if name.startswith("_Z") and (left := left - len(name)) > 0:
            name = demangled(name)
        shown.append(name)
    return tuple(shown)


class _Reader(Values):
    """One mangled name, read from left to right. Every method reads what it is named after, and returns its text."""

    # Names

    def encoding(self, outer: bool = False) -> str:
        """A function with its parameters, or a variable; the result of an `outer` one is not written."""
        self.enter()
        if self.peek() in "TG":
            raise Unreadable  # vtables, guards: never a kernel
        name, after, returns = self._name(tag=True)
        self.depth -= 1
        if self.at >= len(self.text) or self.peek() in ("E", ".", "@"):
            return name
        result = self.read_type() if returns else ""
        text = f"{name}({self._parameters()}){after}"
        return declared(result, f" {text}") if result and not outer else text

    def _parameters(self) -> str:
        """Types up to the end of the function's encoding."""
        found = []
        while self.at < len(self.text) and self.peek() not in ("E", ".", "@", "Q"):
            found.append(plain(self.read_type()))
        return listed(found)

    def _name(self, tag: bool) -> tuple[str, str, bool]:
        """A name, the qualifiers that follow a member function's parameters, and whether its type begins with the result."""
        head = self.peek()
        if head == "N":
            return self._nested(tag)
        if head == "Z":
            return self._local(tag)
        if head == "S" and self.peek(2) != "St":
            base = self.substitution()
            if self.peek() != "I":
                raise Unreadable
            return base + self.arguments_list(tag), "", True
        base = f"std::{self.unqualified()}" if self.take("St") else self.unqualified()
        if self.peek() != "I":
            return base, "", False
        self.remember(base)
        return base + self.arguments_list(tag), "", True

    def _nested(self, tag: bool) -> tuple[str, str, bool]:
        self.need("N")
        self.enter()
        after = ""
        while self.peek() in QUALIFIERS:
            after = QUALIFIERS[self.take_one()] + after
        if self.peek() in ("R", "O"):
            after += " " + WRITTEN_AFTER[self.take_one()]
        path, template, remembered = "", False, False
        while not self.take("E"):
            path, template, remembered = self._component(path, tag)
        if not path:
            raise Unreadable
        if remembered:
            self.seen.pop()  # the whole is remembered as a type, if it is one
        self.depth -= 1
        return path, after, template

    def _component(self, path: str, tag: bool) -> tuple[str, bool, bool]:
        """One more part of a nested name: the path so far, whether it ends in template arguments, whether it was remembered."""
        self.enter()
        self.depth -= 1
        head = self.peek()
        if not path and head == "S":
            return ("std", False, False) if self.take("St") else (self.substitution(), False, False)
        if head == "I":
            if not path:
                raise Unreadable
            returns = not self._constructs
            return self.remember(path + self.arguments_list(tag)), returns, True
        self._constructs = head in ("C", "D") and self.peek(2)[1:].isdigit()
        if not path and head == "T":
            return self.remember(self.template_parameter()), False, True
        if not path and self.peek(2) in ("Dt", "DT"):
            return self.remember(self._decltype()), False, True
        if self._constructs:
            self.at += 2
            return self.remember(f"{path}::{'~' if head == 'D' else ''}{last_part(path)}"), False, True
        part = self.unqualified()
        return self.remember(each(path, str.__add__, f"::{part}") if path else part), False, True

    def _local(self, tag: bool) -> tuple[str, str, bool]:
        """Something declared inside a function: a lambda, most often."""
        self.need("Z")
        self.enter()
        around = self.arguments
        outer = plain(self.encoding(outer=True))
        self.need("E")
        if self.take("s"):
            self.discriminator()
            self.depth -= 1
            return f"{outer}::string literal", "", False
        if self.take("d"):
            NUMBER.match(self.text, self.at) and self.match(NUMBER)
            self.need("_")
        inner, after, template = self._name(tag=True)
        self.discriminator()
        if not tag:
            self.arguments = around
        self.depth -= 1
        return f"{outer}::{inner}", after, template

    def unqualified(self) -> str:
        self.take("L")  # internal linkage
        head = self.peek()
        if head.isdigit():
            text = self.source_name()
        elif head == "U":
            text = self._unnamed()
        else:
            text = self._operator_name()
        while self.take("B"):
            text += f"[abi:{self.source_name()}]"
        return text

    def _unnamed(self) -> str:
        """A lambda or a type without a name."""
        if self.take("Ut"):
            return f"{{unnamed type#{self.count()}}}"
        self.need("Ul")
        self.in_lambda += 1
        types = []
        while not self.take("E"):
            types.append(plain(self.read_type()))
        self.in_lambda -= 1
        parameters = OF_LAMBDA.sub(lambda found: f"auto:{int(found[1]) + 1}", listed(types))
        return f"{{lambda({parameters})#{self.count()}}}"

    def _operator_name(self) -> str:
        if self.take("cv"):
            return f"operator {plain(self.read_type())}"
        code = self.peek(2)
        if code not in OPERATORS:
            raise Unreadable
        self.at += 2
        word = OPERATORS[code]
        return f"operator {word}" if word[0].isalpha() else f"operator{word}"

    # Template arguments

    def arguments_list(self, tag: bool) -> str:
        self.need("I")
        found: list[str] = []
        if tag:
            self.arguments = found  # they may refer to those before them
        while not self.take("E"):
            found.append(self.argument())
        text = ", ".join(shown for one in found if (shown := plain(one)))
        return f"<{text} >" if text.endswith(">") else f"<{text}>"

    def argument(self) -> str:
        self.enter()
        if self.take("X"):
            text = self.expression()
            self.need("E")
        elif self.take("J"):
            parts = []
            while not self.take("E"):
                parts.append(self.argument())
            text = "".join(part if part.startswith(PACK) else PACK + part for part in parts) or PACK
        elif self.peek() == "L":
            text = self.literal()
        elif self.peek(2) in ("Tn", "Ty"):  # clang says what kind of parameter it is for
            kind = self.take_one() + self.take_one()
            if kind == "Tn":
                self.read_type()
            text = self.argument()
        else:
            text = self.read_type()
        self.depth -= 1
        return text

    # Types

    def read_type(self) -> str:
        self.enter()
        head = self.peek()
        if head in BUILTIN and head:
            self.at += 1
            text = BUILTIN[head]
        else:
            text = self._compound(head)
        self.depth -= 1
        return text

    def _compound(self, head: str) -> str:
        if head in QUALIFIERS:
            words = ""
            while self.peek() in QUALIFIERS:
                words = QUALIFIERS[self.take_one()] + words
            return self.remember(each(self.read_type(), qualified, words))
        if head in WRITTEN_AFTER:
            self.at += 1
            return self.remember(each(self.read_type(), pointed, WRITTEN_AFTER[head]))
        reads: dict[str, Callable[[], str]] = {
            "F": self._function,
            "A": self._array,
            "M": self._member_pointer,
            "D": self._d_type,
            "u": self._vendor,
            "U": self._vendor_qualified,
            "S": self._substituted,
            "T": self._parameter_type,
        }
        if head in reads:
            return reads[head]()
        if head == "N" or head == "Z" or head.isdigit():
            return self.remember(self._name(tag=False)[0])
        raise Unreadable

    def _substituted(self) -> str:
        if self.peek(2) == "St":
            return self.remember(self._name(tag=False)[0])
        text = self.substitution()
        return self.remember(text + self.arguments_list(False)) if self.peek() == "I" else text

    def _parameter_type(self) -> str:
        if self.peek(2) in ("Ts", "Tu", "Te"):
            self.at += 2
            return self.remember(self._name(tag=False)[0])
        text = self.remember(self.template_parameter())
        return self.remember(text + self.arguments_list(False)) if self.peek() == "I" else text

    def _function(self) -> str:
        self.need("F")
        self.take("Y")
        result, found = self.read_type(), []
        while not self.take("E"):
            if self.peek() in ("R", "O") and self.peek(2)[1:] == "E":
                self.at += 1
                continue
            found.append(plain(self.read_type()))
        return self.remember(declared(result, f" {INNER}({listed(found)})"))

    def _array(self) -> str:
        self.need("A")
        size = ""
        if self.peek().isdigit():
            size = self.match(NUMBER)[0]
        elif self.peek() != "_":
            size = self.expression()
        self.need("_")
        return self.remember(declared(self.read_type(), f" {INNER} [{size}]"))

    def _member_pointer(self) -> str:
        self.need("M")
        owner, member = plain(self.read_type()), self.read_type()
        return self.remember(pointed(member, f" {owner}::*"))

    def _d_type(self) -> str:
        two = self.peek(2)
        if two in D_BUILTIN:
            self.at += 2
            return D_BUILTIN[two]
        if two in ("Dt", "DT"):
            return self.remember(self._decltype())
        if self.take("Dp"):
            return self.remember(self.read_type())
        if self.take("DF"):
            bits = self.match(NUMBER)[0]
            if self.take("b"):
                return "__bf16"
            return f"_Float{bits}x" if self.take("x") else self._float(bits)
        if self.take("Do"):
            return self.read_type()
        if self.take("Dv"):
            size = self.match(NUMBER)[0]
            self.need("_")
            return self.remember(f"{self.read_type()} __vector({size})")
        raise Unreadable

    def _float(self, bits: str) -> str:
        self.need("_")
        return f"_Float{bits}"

    def _decltype(self) -> str:
        self.at += 2
        text = self.expression()
        self.need("E")
        return f"decltype({text})"

    def _vendor(self) -> str:
        self.need("u")
        text = self.source_name()
        return self.remember(text + self.arguments_list(False) if self.peek() == "I" else text)

    def _vendor_qualified(self) -> str:
        self.need("U")
        if self.peek() in "lt":
            raise Unreadable
        word = self.source_name()
        if self.peek() == "I":
            word += self.arguments_list(False)
        return self.remember(each(self.read_type(), qualified, f" {word}"))
