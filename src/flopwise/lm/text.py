"""Text files in pieces of a bounded size, cut only where no token of any pattern ends up on both sides."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from flopwise.errors import FlopwiseError

# A letter or digit, then a space or newline: both patterns end a token here, and neither looks back.
_BORDER = re.compile(r"[^\W_](?=[ \n])")
_WINDOW = 1 << 12  # bytes read to find a border; more if there is none
_WIDEST = 1 << 22  # after so many bytes without a border a word is cut: memory stays bounded

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Piece(NamedTuple):
    """A range of bytes of a text file."""

    path: Path
    start: int
    end: int
    is_last: bool  # of its file

    def read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                raw = file.read(self.end - self.start)
        except OSError as error:
            raise unreadable(self.path, error) from None
        if len(raw) != self.end - self.start:
            raise FlopwiseError(
                f"{self.path} became shorter while it was read", "wait until it is written, then try again"
            )
        return raw

    def decode(self, raw: bytes) -> str:
        """Text of the bytes. What is not UTF-8 is refused: replaced bytes would never come back."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            at = self.start + error.start
            text = f"{self.path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {at:,}"
            raise FlopwiseError(text, "convert it, as with: iconv -f latin1 -t utf-8") from None


def text_files(paths: Paths) -> list[Path]:
    """The files, each once named; none, or files that are all empty, are refused."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = [Path(path) for path in given]
    try:
        sizes = [path.stat().st_size for path in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    folder = next((path for path in files if not path.is_file()), None)
    if folder is not None:
        raise FlopwiseError(f"{folder} is not a file", "give text files")
    if sum(sizes) == 0:
        names = ", ".join(map(str, files)) or "no file was given"
        raise FlopwiseError(
            f"there is no text: {names}{' is empty' if files else ''}", "give a text file that is not empty"
        )
    return files


def cut(files: Sequence[Path], piece_bytes: int, special: Sequence[str] = ()) -> list[Piece]:
    """Every file in pieces of about `piece_bytes`; a special token is never cut."""
    pieces = []
    for path in files:
        size, start = path.stat().st_size, 0
        try:
            with path.open("rb") as file:
                while size - start > piece_bytes:
                    end = border(file, start + piece_bytes, size, special)
                    pieces.append(Piece(path, start, end, end == size))
                    start = end
        except OSError as error:
            raise unreadable(path, error) from None
        if start < size:
            pieces.append(Piece(path, start, size, True))
    return pieces


def border(file: BinaryIO, at: int, size: int, special: Sequence[str] = ()) -> int:
    """The first offset from `at` on where the text can be cut."""
    reach = max((len(token.encode()) for token in special), default=0)
    begin = max(0, at - reach)
    window = _WINDOW
    while True:
        file.seek(begin)
        # Bytes that are no UTF-8, as a character cut in two at either end, are kept as they are and are never a border.
        text = file.read(at - begin + window + reach).decode("utf-8", "surrogateescape")
        whole = at + window + reach >= size
        offset, done = begin, 0
        for match in _BORDER.finditer(text):
            offset += len(text[done : match.end()].encode("utf-8", "surrogateescape"))
            done = match.end()
            if offset >= at and (whole or done <= len(text) - reach) and not _in_special(text, done, special):
                return offset
        if whole:
            return size
        if window >= _WIDEST:
            return _character(file, at)
        window *= 8


def _in_special(text: str, at: int, special: Sequence[str]) -> bool:
    return any(text.find(token, max(0, at - len(token) + 1), at + len(token) - 1) >= 0 for token in special)


def _character(file: BinaryIO, at: int) -> int:
    """The first offset from `at` on where a character begins."""
    file.seek(at)
    return at + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def unreadable(path: Path, error: OSError) -> FlopwiseError:
    reason = (error.strerror or str(error)).lower()
    return FlopwiseError(f"cannot read {path}: {reason}", "check the path")
