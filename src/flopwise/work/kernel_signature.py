"""The parts of a kernel's name: the function's own name, its namespaces, and the words of its template arguments.

What a kernel does is in the function's own name; a generic one (`vectorized_elementwise_kernel`, `cutlass::Kernel2`) runs
what its first telling template argument names. The parameters of the function, and those of functions inside the arguments,
say nothing: a Philox state is handed to attention, an index to a layer norm.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_BRACKET = re.compile(r"[<>()]")
_UNNAMED = re.compile(r"\(anonymous (?:namespace|class)\)::|<unnamed>::|\{anonymous\}::")
_WORD = re.compile(r"[()]|[A-Za-z_]\w*(?P<scope>\s*::)?")
_AFTER_NAME = re.compile(r"(?:\s*\[clone [^\]]*\]|\.kd|\.cold)+$")
_SOURCE_NAME = re.compile(r"\d+")
_TOKEN = re.compile(r"S[0-9A-Z]*_|T[0-9]*_|L[a-z]n?\d+E|(\d{1,5})")  # what was said before, numbers, identifiers
_NESTED = re.compile(r"_ZL?(?:N[rVK]*|L)?(?:St|S[a-z0-9A-Z]*_)?")


class Signature(NamedTuple):
    """What is in a name, as far as classes are told by it."""

    own: str  # 'vectorized_elementwise_kernel'
    scope: str  # 'at::native'
    arguments: str  # of the template, as written; of a mangled name what follows the own name

    def words(self) -> Iterator[str]:
        """The names in the template's arguments from left to right: without namespaces and without parameters of functions.

        >>> list(signature("void f<4, at::native::silu_kernel(at::Iterator&)::{lambda()#1}, std::array<char*, 2> >(int)").words())
        ['silu_kernel', 'lambda', 'array', 'char']
        """
        if self.arguments.startswith("\0"):
            yield from _mangled_words(self.arguments[1:])
            return
        depth = 0
        for found in _WORD.finditer(self.arguments):
            word = found[0]
            if word == "(":
                depth += 1
            elif word == ")":
                depth -= 1
            elif depth <= 0 and found["scope"] is None:
                yield word


@lru_cache(maxsize=1 << 10)
def signature(name: str) -> Signature:
    """Take a name apart; one that is no C++ signature is its own name.

    >>> signature("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(Params)")
    Signature(own='kernel', scope='internal::gemvx', arguments='int, float')
    >>> signature("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*)").own
    'softmax_warp_forward'
    >>> signature("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdIfEEEEvT_")[:2]
    ('kentry', 'ck_tile')
    """
    if name.startswith("_Z") and (found := _mangled(name)) is not None:
        return found
    if "(" not in name and "<" not in name:
        scope, _, own = _AFTER_NAME.sub("", name).rpartition("::")
        return Signature(own.removeprefix("void "), scope, "")
    text = _UNNAMED.sub("", name) if "an" in name or "<un" in name else name
    path, arguments = _head(text)
    path = path.strip()
    scope, _, own = path[path.rfind(" ") + 1 :].rpartition("::")
    return Signature(_AFTER_NAME.sub("", own), scope, arguments)


def _head(text: str) -> tuple[str, str]:
    """What stands before the parameters without any template arguments, and the last of those."""
    path, arguments = "", ""
    depth = since = opened = 0
    for found in _BRACKET.finditer(text):
        mark, at = found[0], found.start()
        if mark in "<(":
            if depth == 0:
                path, arguments = path + text[since:at], "" if " " in text[since:at].strip() else arguments
                if mark == "(" and not path.endswith("operator"):
                    return path, arguments
                opened = at + 1
            depth += 1
        elif mark == ">" and text[at - 1 : at] == "-":
            continue
        elif depth:
            depth -= 1
            if depth == 0:
                since = at + 1
                arguments = text[opened:at] if mark == ">" else arguments
    if depth:  # cut short
        return path, text[opened:]
    return path + text[since:], arguments


def _mangled(name: str) -> Signature | None:
    """The same of a mangled name, by its length-prefixed identifiers alone; None where there are none."""
    start = _NESTED.match(name)
    at = start.end() if start else 2
    parts: list[str] = []
    while (length := _SOURCE_NAME.match(name, at)) is not None:
        end = length.end() + int(length[0][:5])
        part = name[length.end() : end]
        if len(part) < end - length.end():
            break
        parts.append(part)
        at = end
    if not parts:
        return None
    scope = "::".join(part for part in parts[:-1] if not part.startswith("_GLOBAL__N"))
    return Signature(parts[-1], scope, "\0" + name[at:])


def _mangled_words(text: str) -> Iterator[str]:
    """Identifiers of a mangled name's rest; one that another follows at once is a namespace."""
    at = 0
    while (found := _TOKEN.search(text, at)) is not None:
        at = found.end()
        if (length := found[1]) is None:
            continue
        word = text[at : at + int(length)]
        if len(word) > 1 and (word[0].isalpha() or word[0] == "_"):
            at += len(word)
            if not text[at : at + 1].isdigit():
                yield word
