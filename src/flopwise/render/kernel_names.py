"""Kernels' names for people: short, and no two of one table the same."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

LIMIT = 70
_NAMELESS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous class\)::")
# What tells one instance of a template from another: its functor, its reduction, the operation or the kernel it wraps.
_TELLING = re.compile(
    r"\b(\w*[Ff]unctor\w*|\w+Ops|\w+_kernel_cuda|\w+_kernel_impl|\w+_kernel(?=\()|cutlass_\w+)|\bstd::(\w+)(?=<)"
)
_WRAPPERS = re.compile(r"gpu_kernel_impl\w*|[AB]?(?:Unary|Binary)Functor|array|tuple|pair|integral_constant|function")
_ELEMENTS = re.compile(r"\b(float|double|bool|long|BFloat16|Half|Float8_\w+|complex)\b")
_NAME = re.compile(r"[\w:~.$ →*&\[\]@/,-]+")  # a function's; what does not look like one is shown as it is
_NUMBERS = re.compile(r"(?<![\w:])\d+\b")


def shortened(name: str, limit: int = LIMIT) -> str:
    """A kernel's name for people: the template that tells what it does, without the rest.

    >>> shortened("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float> > >(ReduceOp<float>)")
    'at::native::reduce_kernel<MeanOps>'
    >>> shortened("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>(cutlass_80_simt_sgemm_256x128::Params)")
    'cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>'
    """
    head, body = _parts(name)
    return _cut(_composed(head, body, _most_telling(body)), limit)


def told_apart(names: Iterable[str]) -> dict[str, str]:
    """Each name with a short one that no other of them has: as short as `shortened`, else longer, else numbered.

    >>> list(told_apart(["k<AddFunctor<float>>(int)", "k<AddFunctor<Half>>(int)", "k<MulFunctor<float>>(int)"]).values())
    ['k<AddFunctor, float>', 'k<AddFunctor, Half>', 'k<MulFunctor>']
    """
    given = list(dict.fromkeys(names))
    left, found = given, dict[str, str]()
    forms: tuple[Callable[[str], str], ...] = (shortened, _with_elements, _with_numbers)
    for form in forms:
        shown = {name: form(name) for name in left}
        times = Counter((*shown.values(), *found.values()))
        found |= {name: text for name, text in shown.items() if times[text] == 1}
        left = [name for name in left if name not in found]
    taken = set(found.values())
    for name in left:
        text = _numbered(shortened(name), taken)
        taken.add(text)
        found[name] = text
    return {name: found[name] for name in given}


def _numbered(text: str, taken: set[str]) -> str:
    """The text, or the first of `text #2`, `text #3`… that is free."""
    number, free = 1, text
    while free in taken:
        number += 1
        free = f"{text} #{number}"
    return free


def _with_elements(name: str) -> str:
    """With every telling word, and the types of the elements."""
    head, body = _parts(name)
    return _cut(_composed(head, body, [*_telling(body), *_distinct(_ELEMENTS, body)]), 2 * LIMIT)


def _with_numbers(name: str) -> str:
    """With the numbers as well: sizes in the template, and which of the lambdas of a function it is."""
    head, body = _parts(name)
    words = [*_telling(body), *_distinct(_ELEMENTS, body), "-".join(_NUMBERS.findall(body))]
    return _cut(_composed(head, body, [word for word in words if word]), 2 * LIMIT)


def _parts(name: str) -> tuple[str, str]:
    """What stands before the template's arguments, and the arguments; those of the call are left out.

    >>> _parts("void at::native::copy<4, Op<float> >(int, Op<float>)")
    ('at::native::copy', '4, Op<float> ')
    >>> _parts("</script><img src=x>")
    ('</script><img src=x>', '')
    """
    text = _NAMELESS.sub("", name.removeprefix("void ")).replace("->", "→")
    head, opened, rest = text.partition("<")
    if not _NAME.fullmatch(head.partition("(")[0]):
        return text, ""
    if not opened or "(" in head:
        return text.partition("(")[0] or text, ""
    depth = 1
    for at in re.finditer(r"[<>]", rest):
        depth += 1 if at[0] == "<" else -1
        if not depth:
            return head, rest[: at.start()]
    return head, rest


def _composed(head: str, body: str, words: Sequence[str]) -> str:
    return f"{head}<{', '.join(words)}>" if words else f"{head}<…>" if body else head


def _most_telling(body: str) -> list[str]:
    """The innermost functor, with the operation it is given; a wrapper only where there is nothing else."""
    words = _telling(body)
    wrapped = [word for word in words if not _WRAPPERS.fullmatch(word)]
    functors = [word for word in wrapped if "unctor" in word]
    others = [word for word in wrapped if "unctor" not in word]
    if functors:
        operations = [found[2] for found in _TELLING.finditer(body) if found[2] and not _WRAPPERS.fullmatch(found[2])]
        return [functors[-1], *dict.fromkeys(operations)]
    return others[:1] or words[-1:]


def _telling(body: str) -> list[str]:
    found = dict.fromkeys(match[1] or match[2] for match in _TELLING.finditer(body))
    return [word for word in found if not re.fullmatch(r"gpu_kernel_impl\w*|array|tuple|pair|function", word)]


def _distinct(pattern: re.Pattern[str], text: str) -> list[str]:
    return list(dict.fromkeys(pattern.findall(text)))


def _cut(text: str, limit: int) -> str:
    """Cut in the middle: names that begin alike often end differently."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"
