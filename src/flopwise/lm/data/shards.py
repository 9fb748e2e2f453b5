"""Text files to token shards: piece by piece in parallel; what is finished is kept, whatever ends the rest."""

import contextlib
import io
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from flopwise.atomic import write_atomically
from flopwise.errors import FlopwiseError
from flopwise.lm.data.corpus import DTYPES, MANIFEST, TOKENIZER, Corpus, problem, read_manifest, unwritable
from flopwise.lm.jobs import cores
from flopwise.lm.text import Paths, Piece, border, cut, text_files
from flopwise.lm.tokenizer.tokenizer import Tokenizer
from flopwise.records.corpus import EVALUATION, TRAIN, CorpusManifest, Shard, TextPiece

PIECE_BYTES = 16 << 20  # of text: about 4 million tokens
HELD_OUT = 0.01


def prepare(
    paths: Paths,
    tokenizer: Tokenizer,
    folder: str | Path,
    held_out: float = HELD_OUT,
    piece_bytes: int = PIECE_BYTES,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Encode text files into a folder of shards. The end of every piece of text, `held_out` of it, is for evaluation.

    The first special token, if any, ends each file. Called again after it was stopped, it keeps the shards that are whole
    and whose text is the same. `progress` is called with the bytes of text that are done and with all. One process at a time.
    """
    _check(held_out, piece_bytes)
    folder = Path(folder)
    groups = _groups(cut(text_files(paths), piece_bytes, tuple(tokenizer.special)), piece_bytes)
    manifest = CorpusManifest(
        dtype="uint16" if tokenizer.size <= 1 << 16 else "uint32",
        vocabulary=tokenizer.size,
        tokenizer=tokenizer.fingerprint,
        held_out=held_out,
        piece_bytes=piece_bytes,
    )
    known = _known(folder, manifest)
    total = sum(piece.end - piece.start for group in groups for piece in group)
    done: dict[int, TextPiece] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / TOKENIZER)
        work = _Work(folder, manifest, tokenizer, known)
        with contextlib.closing(work.write_all(groups, threads)) as finished:
            for piece in finished:
                done[piece.number] = piece
                # What an earlier call finished stays listed until it is looked at: this call may be stopped too.
                listed = done if len(done) == len(groups) else {**known, **done}
                pieces = tuple(listed[number] for number in sorted(listed))
                manifest = msgspec.structs.replace(manifest, pieces=pieces, complete=listed is done)
                write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                if progress is not None:
                    progress(min(total, sum(one.text_bytes for one in done.values())), total)
    except OSError as error:
        raise unwritable(folder, error) from None
    _remove(folder, {shard.file for piece in known.values() for shard in piece.shards}, manifest)
    return Corpus(folder, manifest)


def _check(held_out: float, piece_bytes: int) -> None:
    if not 0 <= held_out < 1:
        raise FlopwiseError(f"held_out = {held_out} is not a share", "use 0 or more, and less than 1")
    if piece_bytes < 1:
        raise FlopwiseError(f"piece_bytes = {piece_bytes} is not a size", "use 1 or more")


def _groups(pieces: Iterable[Piece], most: int) -> list[list[Piece]]:
    """Small files together, up to about the size of a piece."""
    groups: list[list[Piece]] = []
    size = most
    for piece in pieces:
        if size + piece.end - piece.start > most:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.end - piece.start
    return groups


def _known(folder: Path, wanted: CorpusManifest) -> dict[int, TextPiece]:
    """The pieces that an earlier call wrote, which must have had the same settings."""
    found = read_manifest(folder)
    if found is None:
        return {}
    if msgspec.structs.replace(found, pieces=(), complete=False) != wanted:
        text = f"{folder} holds a corpus of another tokenizer or with other settings"
        raise FlopwiseError(text, "choose another folder, or remove this one")
    return {piece.number: piece for piece in found.pieces}


def _remove(folder: Path, files: Iterable[str], manifest: CorpusManifest) -> None:
    """Remove shards of an earlier call that are in the manifest no more, and what a killed one had begun to write."""
    listed = {shard.file for piece in manifest.pieces for shard in piece.shards}
    begun = {path.name for kind in (".*.bin-*", f".{MANIFEST}-*", f".{TOKENIZER}-*") for path in folder.glob(kind)}
    for name in (set(files) | begun) - listed:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


class _Work:
    """What the threads do: a piece of text becomes a shard for training and one for evaluation."""

    def __init__(
        self, folder: Path, manifest: CorpusManifest, tokenizer: Tokenizer, known: dict[int, TextPiece]
    ) -> None:
        self.folder, self.manifest, self.tokenizer, self.known = folder, manifest, tokenizer, known
        self.special = tuple(tokenizer.special)

    def write_all(self, groups: Sequence[Sequence[Piece]], threads: int | None) -> Generator[TextPiece, None, None]:
        """Every piece when it is written, in any order."""
        count = max(1, cores() if threads is None else threads)
        with ThreadPoolExecutor(count) as pool:  # encoding and checksums release the GIL
            futures = [pool.submit(self.write, number, group) for number, group in enumerate(groups)]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def write(self, number: int, group: Sequence[Piece]) -> TextPiece:
        raw = b"".join(map(self._text, group))
        new = TextPiece(number=number, text_bytes=len(raw), text_crc32=zlib.crc32(raw))
        old = self.known.get(number)
        if old is not None and msgspec.structs.replace(old, shards=()) == new and not self._problems(old):
            return old
        at = border(io.BytesIO(raw), round(len(raw) * (1 - self.manifest.held_out)), len(raw), self.special)
        shards = [self._shard(TRAIN, number, raw[:at]), self._shard(EVALUATION, number, raw[at:])]
        return msgspec.structs.replace(new, shards=tuple(shard for shard in shards if shard is not None))

    def _problems(self, piece: TextPiece) -> bool:
        return any(problem(self.folder, shard, self.manifest.dtype) for shard in piece.shards)

    def _text(self, piece: Piece) -> bytes:
        raw = piece.read()
        piece.decode(raw)  # here, so that the message names the file and the place in it
        return raw + self.special[0].encode() if self.special and piece.is_last else raw

    def _shard(self, part: str, number: int, raw: bytes) -> Shard | None:
        tokens = self.tokenizer.encode_array(raw.decode())
        if not len(tokens):
            return None
        content = tokens.astype(DTYPES[self.manifest.dtype]).tobytes()
        file = f"{part}-{number:05d}.bin"
        write_atomically(self.folder / file, content)
        return Shard(part=part, file=file, tokens=len(tokens), crc32=zlib.crc32(content))
