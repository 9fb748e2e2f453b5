"""The text of C++ types: where a declarator goes, what a qualifier belongs to; and the codes of mangled names."""

import re
from collections.abc import Callable

INNER = "\x00"  # where a declarator goes into a type: `void (\x00)(int)`
AUTO = "\x02"  # around the number of a parameter of a generic lambda: of its call operator the argument
OF_LAMBDA = re.compile(f"{AUTO}([0-9]+){AUTO}")
PACK = "\x01"  # before each type of a pack: what is said of the pack is said of each


def _codes(text: str) -> dict[str, str]:
    """`code word` in each part of a text between semicolons.

    >>> _codes("v void ; j unsigned int")
    {'v': 'void', 'j': 'unsigned int'}
    """
    return {code: word for code, _, word in (part.strip().partition(" ") for part in text.split(" ; "))}


BUILTIN = _codes(
    "v void ; w wchar_t ; b bool ; c char ; a signed char ; h unsigned char ; s short ; t unsigned short ; i int ; "
    "j unsigned int ; l long ; m unsigned long ; x long long ; y unsigned long long ; n __int128 ; o unsigned __int128 ; "
    "f float ; d double ; e long double ; g __float128 ; z ..."
)
D_BUILTIN = _codes(
    "Dd decimal64 ; De decimal128 ; Df decimal32 ; Dh half ; Di char32_t ; Ds char16_t ; Du char8_t ; Da auto ; "
    "Dc decltype(auto) ; Dn decltype(nullptr)"
)
STANDARD = _codes("a allocator ; b basic_string ; s string ; i istream ; o ostream ; d iostream")
SUFFIX = _codes("i  ; j u ; l l ; m ul ; x ll ; y ull")  # of a literal of this type
OPERATORS = _codes(
    "nw new ; na new[] ; dl delete ; da delete[] ; ps + ; ng - ; ad & ; de * ; co ~ ; pl + ; mi - ; ml * ; dv / ; rm % ; "
    "an & ; or | ; eo ^ ; aS = ; pL += ; mI -= ; mL *= ; dV /= ; rM %= ; aN &= ; oR |= ; eO ^= ; ls << ; rs >> ; "
    "lS <<= ; rS >>= ; eq == ; ne != ; lt < ; gt > ; le <= ; ge >= ; ss <=> ; nt ! ; aa && ; oo || ; pp ++ ; mm -- ; "
    "cm , ; pm ->* ; pt -> ; cl () ; ix [] ; qu ?"
)
UNARY = frozenset(["ps", "ng", "ad", "de", "co", "nt", "pp", "mm"])
WRITTEN_AFTER = {"P": "*", "R": "&", "O": "&&"}
QUALIFIERS = {"r": " __restrict", "V": " volatile", "K": " const"}


def last_part(path: str) -> str:
    """The last part of a path, without template arguments.

    >>> last_part("a::b<c::d>")
    'b'
    """
    return path.partition("<")[0].rpartition("::")[2]


def plain(text: str) -> str:
    """A type without a declarator: `void (int)`, `int [3]`; a pack as a list."""
    if PACK in text:
        text = ", ".join(part for part in text.split(PACK) if part)
    return text.replace(f" {INNER} [", " [").replace(INNER, "") if INNER in text else text


def listed(types: list[str]) -> str:
    return ", ".join(one for one in types if one not in ("void", ""))


def each(kind: str, change: Callable[[str, str], str], words: str) -> str:
    """What is said of a pack, said of each of its types."""
    if not kind.startswith(PACK):
        return change(kind, words)
    return "".join(PACK + change(part, words) for part in kind.split(PACK) if part) or PACK


def declared(kind: str, words: str) -> str:
    """A type with words where its declarator goes: at its end, or inside a function's or an array's."""
    return kind.replace(INNER, words.lstrip(), 1) if INNER in kind else kind + words


def qualified(kind: str, words: str) -> str:
    r"""A type that is const, volatile or the like; of an array its elements are, of a method its object.

    >>> qualified("char \x00 [3]", " const").replace("\x00", "…")
    'char const … [3]'
    """
    before, inner, after = kind.partition(INNER)
    if after.startswith("("):
        return kind + words if before.endswith(" ") else f"{before}{words}{inner}{after}"
    space = " " if inner and before.endswith(" ") else ""
    return f"{before.rstrip() if inner else before}{words}{space}{inner}{after}"


def pointed(kind: str, mark: str) -> str:
    r"""A pointer or a reference; to a function or an array in brackets, as `void (*)(int)`.

    >>> pointed("int&", "&&"), pointed("void \x00(int)", "*").replace("\x00", "")
    ('int&', 'void (*)(int)')
    """
    before, inner, after = kind.partition(INNER)
    if mark[0] == "&" and before.endswith("&"):  # a reference to a reference is one
        return f"{before[:-1] if before.endswith('&&') and mark == '&' else before}{inner}{after}"
    if not inner:
        return kind + mark
    if before.endswith(("*", "&")):
        return f"{before}{mark}{inner}{after}"
    return f"{before}({mark.lstrip()}{inner}){after}"
