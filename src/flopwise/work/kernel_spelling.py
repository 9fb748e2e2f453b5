"""One spelling for a kernel's name: the profilers' demanglers write the same function in different ways."""

import re

LONGEST_MATCHED = (
    4096  # characters of a name that patterns look at: the longest real ones have 2,000, and some patterns backtrack
)
_REWRITTEN = (
    (re.compile(r"\(anonymous namespace\)|<unnamed>"), "unnamed"),
    (re.compile(r"\(instance (\d+)\)"), r"#\1"),
    (re.compile(r"\(bool\)1\b"), "true"),
    (re.compile(r"\(bool\)0\b"), "false"),
)
_INNERMOST = re.compile(r"\([^()]*\)")  # of arguments, or a cast
_UNSIGNED = re.compile(r"\b(\d+)u?l{0,2}\b")
_DROPPED = re.compile(r"\bvoid\b|\bconst\b|[\s{}\[\]]")


def one_spelling(name: str) -> str:
    """What Kineto's and nsys's names of one kernel have in common: templates and their arguments, not those of functions.

    >>> one_spelling("void f<4, g(int&)::{lambda(float)#1}, std::array<char*, 2ul> >(int, float const*)")
    'f<4,g::lambda#1,std::array<char*,2>>'
    >>> one_spelling("void f<(int)4, void g(int &)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2)")
    'f<4,g::lambda#1,std::array<char*,2>>'
    """
    if len(name) > LONGEST_MATCHED:
        return name
    for pattern, common in _REWRITTEN:
        name = pattern.sub(common, name)
    while (shorter := _INNERMOST.sub("", name)) != name:
        name = shorter
    return _DROPPED.sub("", _UNSIGNED.sub(r"\1", name))
