"""Names of kernels and files for people: short, and no two of one table the same."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

LIMIT = 70
_SCREEN = 80
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous class\)::")
# What distinguishes instances of a template: the functor, the reduction, the operation or the kernel it wraps.
_DISTINGUISHING = re.compile(
    r"\b(\w*[Ff]unctor\w*|\w+Ops|\w+_kernel_cuda|\w+_kernel_impl|\w+_kernel(?=\()|cutlass_\w+)|\bstd::(\w+)(?=<)"
)
_WRAPPERS = re.compile(r"gpu_kernel_impl\w*|[AB]?(?:Unary|Binary)Functor|array|tuple|pair|integral_constant|function")
_ELEMENTS = re.compile(r"\b(float|double|bool|long|BFloat16|Half|Float8_\w+|complex)\b")
_NAME = re.compile(r"[\w:~.$ →*&\[\]@/,-]+")  # of a function; anything else is shown as it is
_TRACE = re.compile(r"\.(json|sqlite)(\.gz)?$")
_NUMBERS = re.compile(r"(?<![\w:])\d+\b")


def short_name(name: str, limit: int = LIMIT) -> str:
    """A kernel's name for people: the template argument that says what it does, without the rest.

    >>> short_name("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float> > >(ReduceOp<float>)")
    'at::native::reduce_kernel<MeanOps>'
    >>> short_name("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>(cutlass_80_simt_sgemm_256x128::Params)")
    'cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>'
    """
    head, body = _parts(name)
    return _cut(_joined(head, body, _operation(body)), limit)


def unique_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with a short one that no other of them has: as short as `short_name`, else longer, else numbered.

    >>> list(unique_names(["k<AddFunctor<float>>(int)", "k<AddFunctor<Half>>(int)", "k<MulFunctor<float>>(int)"]).values())
    ['k<AddFunctor, float>', 'k<AddFunctor, Half>', 'k<MulFunctor>']
    """
    given = list(dict.fromkeys(names))
    left, unique = given, dict[str, str]()
    forms: tuple[Callable[[str], str], ...] = (short_name, _with_elements, _with_numbers)
    for form in forms:
        shown = {name: form(name) for name in left}
        times = Counter((*shown.values(), *unique.values()))
        unique |= {name: text for name, text in shown.items() if times[text] == 1}
        left = [name for name in left if name not in unique]
    taken = set(unique.values())
    for name in left:
        text = _numbered(short_name(name), taken)
        taken.add(text)
        unique[name] = text
    return {name: unique[name] for name in given}


def stored_in(path: str | Path) -> str:
    """Where a run lies, on one line of a screen: of a long path its end, which names the run.

    >>> stored_in("runs/20261117-bench")
    'Stored in runs/20261117-bench'
    >>> stored_in("/mnt/" + 12 * "scratch/" + "runs/20261117-bench")[:40]
    'Stored in …/scratch/scratch/scratch/scra'
    """
    whole, room = str(path), _SCREEN - len("Stored in ")
    if len(whole) > room:
        parts = Path(whole).parts
        ends = ["/".join(("…", *parts[place:])) for place in range(1, len(parts))]
        whole = next((end for end in ends if len(end) <= room), whole)
    return f"Stored in {whole}"


def apart(names: Sequence[str]) -> list[str]:
    """Several files' names without what all of them begin with, and without the suffix of a trace.

    >>> apart(["h200-small-bf16.kineto.json.gz", "h200-small-fp32.nsys.sqlite.gz"]), apart(["a.json"])
    (['bf16.kineto', 'fp32.nsys'], ['a'])
    """
    bare = [_TRACE.sub("", name) for name in names]
    alike = [len(set(letters)) == 1 for letters in zip(*bare, strict=False)]
    same = bare[0][: alike.index(False)] if False in alike else ""
    begin = max(same.rfind(mark) + 1 for mark in "-_/. ")
    left = [name[begin:] for name in bare]
    return left if all(left) and len(set(left)) == len(set(names)) else list(names)


def _numbered(text: str, taken: set[str]) -> str:
    """The text, or the first of `text #2`, `text #3`… that is free."""
    number, free = 1, text
    while free in taken:
        number += 1
        free = f"{text} #{number}"
    return free


def _with_elements(name: str) -> str:
    """With every distinguishing word, and the types of the elements."""
    head, body = _parts(name)
    return _cut(_joined(head, body, [*_distinguishing(body), *_distinct(_ELEMENTS, body)]), 2 * LIMIT)


def _with_numbers(name: str) -> str:
    """With the numbers as well: sizes in the template, and the lambda's number."""
    head, body = _parts(name)
    words = [*_distinguishing(body), *_distinct(_ELEMENTS, body), "-".join(_NUMBERS.findall(body))]
    return _cut(_joined(head, body, [word for word in words if word]), 2 * LIMIT)


def _parts(name: str) -> tuple[str, str]:
    """The name before the template's arguments, and the arguments; those of the call are left out.

    >>> _parts("void at::native::copy<4, Op<float> >(int, Op<float>)")
    ('at::native::copy', '4, Op<float> ')
    >>> _parts("</script><img src=x>")
    ('</script><img src=x>', '')
    """
    text = _ANONYMOUS.sub("", name.removeprefix("void ")).replace("->", "→")
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


def _joined(head: str, body: str, words: Sequence[str]) -> str:
    return f"{head}<{', '.join(words)}>" if words else f"{head}<…>" if body else head


def _operation(body: str) -> list[str]:
    """The innermost functor, with the operation it is given; a wrapper only where there is nothing else."""
    words = _distinguishing(body)
    wrapped = [word for word in words if not _WRAPPERS.fullmatch(word)]
    functors = [word for word in wrapped if "unctor" in word]
    others = [word for word in wrapped if "unctor" not in word]
    if functors:
        operations = [
            found[2] for found in _DISTINGUISHING.finditer(body) if found[2] and not _WRAPPERS.fullmatch(found[2])
        ]
        return [functors[-1], *dict.fromkeys(operations)]
    return others[:1] or words[-1:]


def _distinguishing(body: str) -> list[str]:
    found = dict.fromkeys(match[1] or match[2] for match in _DISTINGUISHING.finditer(body))
    return [word for word in found if not re.fullmatch(r"gpu_kernel_impl\w*|array|tuple|pair|function", word)]


def _distinct(pattern: re.Pattern[str], text: str) -> list[str]:
    return list(dict.fromkeys(pattern.findall(text)))


def _cut(text: str, limit: int) -> str:
    """Cut in the middle: names that begin alike often end differently."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def short_paths(paths: Sequence[str]) -> list[str]:
    """The last part of each path, with as many folders before it as it takes; the same file twice is numbered.

    >>> short_paths(["runs/a/trace.json", "runs/b/trace.json", "step.json"])
    ['a/trace.json', 'b/trace.json', 'step.json']
    >>> short_paths(["a/t.json", "a/t.json"])
    ['t.json', 't.json #2']
    """
    parts = {path: Path(path).parts for path in paths}
    shown: dict[str, str] = {}
    for length in range(1, max((len(found) for found in parts.values()), default=0) + 1):
        ends = {
            path: "/".join(found[-length:]).replace("//", "/") for path, found in parts.items() if path not in shown
        }
        times = Counter((*ends.values(), *shown.values()))
        shown |= {path: end for path, end in ends.items() if times[end] == 1}
    seen: Counter[str] = Counter()
    labels = []
    for path in paths:
        seen[path] += 1
        label = shown.get(path, path)
        labels.append(label if seen[path] == 1 else f"{label} #{seen[path]}")
    return labels
