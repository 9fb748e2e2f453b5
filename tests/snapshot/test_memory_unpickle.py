"""A pickle from outside builds plain data or nothing: real payloads, bombs, cut and wrong files."""

import contextlib
import copyreg
import gzip
import io
import os
import pickle
import resource
import struct
import zipfile

import pytest

from flopwise.errors import FlopwiseError
from flopwise.snapshot import unpickle
from flopwise.snapshot.unpickle import _PlainUnpickler, check, read_pickle, unpickled

PLAIN = {
    "segments": [{"size": 2**40, "ok": True, "no": None, "x": 0.5, "t": (1, -2), "s": "é" * 300}],
    "device_traces": [[]],
}


class Runs:
    """Pickled, it is a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Restored:
    """Pickled, it is made by NEWOBJ and BUILD; unpickled by anyone's unpickler it would write a file."""

    def __setstate__(self, state):
        with open(state["path"], "w"):
            pass


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back_as_it_was(protocol):
    assert unpickled(pickle.dumps(PLAIN, protocol=protocol), "x") == PLAIN


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "ran"


def raw_payloads(command):
    text = b"X" + struct.pack("<I", len(command)) + command
    short = b"\x8c" + bytes([len(command)]) + command
    return {
        "GLOBAL and REDUCE": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "INST": b"\x80\x02(" + text + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x11open('ran', 'w').x\x85R.",
        "getattr of an import": b"\x80\x02cbuiltins\n__import__\nX\x02\0\0\0os\x85R.",
        "inside a list in a dict": b"\x80\x02}X\x01\0\0\0a]cos\nsystem\n" + text + b"\x85Ras.",
        "after a frame": b"\x80\x04\x95" + struct.pack("<Q", 40) + b"cos\nsystem\n" + text + b"\x85R.",
        "copyreg": b"\x80\x02ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR.",
        "NEWOBJ_EX": b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT4": b"\x80\x02\x84\x01\0\0\0.",
        "PERSID": b"\x80\x02Pfile\n.",
        "BINPERSID": b"\x80\x02NQ.",
        "BUILD on a dict": b"\x80\x02}}X\x01\0\0\0a" + text + b"sb.",
        "BUILD on a list": b"\x80\x02]Nb.",
        "set": b"\x80\x04\x8f.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
        "out-of-band buffer": b"\x80\x05\x97.",
    }


@pytest.mark.parametrize("kind", raw_payloads(b""))
def test_a_payload_is_refused_before_it_runs(kind, mark, monkeypatch):
    monkeypatch.chdir(mark.parent)
    payload = raw_payloads(f"touch {mark}".encode())[kind]
    copyreg.add_extension("os", "system", 1)
    try:
        with pytest.raises(FlopwiseError, match="refused"):
            unpickled(payload, "evil.pickle")
        with contextlib.suppress(Exception):  # and where the first wall had a hole: the second alone
            _PlainUnpickler(io.BytesIO(payload)).load()
    finally:
        copyreg.remove_extension("os", "system", 1)
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "wrapped", [lambda x: x, lambda x: {"segments": [x], "device_traces": []}], ids=["bare", "nested"]
)
def test_what_python_pickles_is_refused_whatever_the_protocol(protocol, wrapped, mark):
    pickled = pickle.dumps(wrapped(Runs(f"touch {mark}")), protocol=protocol)
    with pytest.raises(FlopwiseError, match=r"posix.system|an old pickle protocol"):
        unpickled(pickled, "evil.pickle")
    assert not mark.exists()
    pickle.loads(pickled)  # the payload is real: anyone else runs it
    assert mark.exists()


def test_an_object_with_state_is_refused(mark):
    thing = Restored()
    thing.path = str(mark)
    with pytest.raises(FlopwiseError, match="Restored"):
        unpickled(pickle.dumps([thing]), "evil.pickle")
    assert not mark.exists()


BOMBS = {
    "dicts": b"\x80\x02" + b"}" * 3_000_000 + b".",
    "dicts with an entry": b"\x80\x02" + b"}NNs" * 3_000_000 + b".",
    "nested tuples": b"\x80\x02N" + b"\x85" * 9_000_000 + b".",
    "memo slot by LONG_BINPUT": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "string of 2**60": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "string of 2**64 - 1": b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
    "string of 4 GiB": b"\x80\x02X\xff\xff\xff\xffx.",
    "LONG4 of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "LONG1 of 255": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N",
    "memo by text": b"\x80\x02Np99999999999\n.",
    "integer by text": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_gets_one_line_and_little_memory(kind):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FlopwiseError, match=r"refused|cut off"):
        unpickled(BOMBS[kind], "bomb.pickle")
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    )  # KiB on Linux; a bomb would be gigabytes


def test_nesting_a_million_deep_is_no_trouble():
    value = unpickled(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "deep.pickle")
    assert isinstance(value, list)


def test_a_gzip_bomb_stops_at_the_limit(tmp_path):
    path = tmp_path / "bomb.pickle.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(b"\x00" * 2**20)
    assert path.stat().st_size < 100_000
    with pytest.raises(FlopwiseError, match="unpacks to more than 5 MiB"):
        read_pickle(path, most_bytes=4 * 2**20)
    with pytest.raises(FlopwiseError, match=r"unpacks to more than 33 MiB, .* times its size"):
        read_pickle(path)
    (tmp_path / "large.pickle").write_bytes(bytes(5 * 2**20))
    with pytest.raises(FlopwiseError, match=r"larger than 4\.00 MiB"):
        read_pickle(tmp_path / "large.pickle", most_bytes=4 * 2**20)


def test_more_events_than_anyone_records_are_refused(monkeypatch):
    monkeypatch.setattr(unpickle, "_MOST_DICTS", 8_000)
    event = b"}(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0sizeM\0\2u"
    with pytest.raises(FlopwiseError, match="more than 8,000 events"):
        unpickled(b"\x80\x02](" + event * 9_000 + b"e.", "events.pickle")
    assert len(unpickled(b"\x80\x02](" + event * 1000 + b"e.", "events.pickle")) == 1000


@pytest.mark.parametrize("value", [b"\x8c\x02xy", b"M\1\2", b"J\1\2\3\4", b"\x8a\x01a", b"K\1]", b"h\0K\1"])
def test_more_numbers_or_texts_than_any_snapshot_has_are_refused(value, monkeypatch):
    """A past bug: 100 MB of them took two gigabytes."""
    begins = b"\x80\x04]\x94("
    monkeypatch.setattr(unpickle, "_MOST_VALUE_BYTES", 4_000_000)
    with pytest.raises(FlopwiseError, match="more numbers and texts than any snapshot"):
        unpickled(begins + value * 100_001 + b"e.", "values.pickle")
    assert unpickled(begins + value * 20_000 + b"e.", "values.pickle")


def test_a_text_of_megabytes_is_refused():
    size = 17 * 2**20
    with pytest.raises(FlopwiseError, match=r"a text of 17\.0 MiB"):
        unpickled(b"\x80\x04\x8d" + struct.pack("<Q", size) + b"a" * size + b".", "text.pickle")


def test_gzip_reads_the_same(tmp_path):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(PLAIN))
    (tmp_path / "a.pickle.gz").write_bytes(gzip.compress(pickle.dumps(PLAIN)))
    assert read_pickle(tmp_path / "a.pickle") == read_pickle(tmp_path / "a.pickle.gz") == PLAIN


def test_every_truncation_gets_one_line(tmp_path):
    whole = pickle.dumps(PLAIN)
    for length in range(len(whole)):
        with pytest.raises(FlopwiseError, match=r"cut off|empty|no pickle"):
            unpickled(whole[:length], "cut.pickle")
    packed, path = gzip.compress(whole), tmp_path / "cut.pickle.gz"
    for length in range(0, len(packed), 7):
        path.write_bytes(packed[:length])
        with pytest.raises(FlopwiseError, match=r"cut off|empty|no pickle|damaged"):
            read_pickle(path)


WRONG = {
    "JSON": (b' {"traceEvents": []}', "it is JSON"),
    "HTML": (b"<!doctype html><html>", "web page"),
    "zip": (b"PK\x03\x04rest", "torch.save"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\n", "LFS pointer"),
    "empty": (b"", "empty"),
    "text": (b"hello", "no pickle"),
    "not an opcode": (b"\x80\x04\xfe\xfe", "no pickle opcode"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_named(kind):
    content, said = WRONG[kind]
    with pytest.raises(FlopwiseError, match=said):
        unpickled(content, "wrong")


def test_torch_save_and_missing_files_and_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("data.pkl", b"x")
    for name, said in (("model.pt", "torch.save"), ("none.pickle", "there is no file"), (".", "cannot read")):
        with pytest.raises(FlopwiseError, match=said):
            read_pickle(tmp_path / name)


def test_a_key_that_cannot_be_one_is_damage():
    with pytest.raises(FlopwiseError, match="unhashable"):
        unpickled(b"\x80\x02}]Ns.", "x")


def test_what_torch_itself_writes_from_cpp_is_admitted():
    # Protocol 2 with BINPUT and LONG1 of eight bytes, as torch's own pickler writes integers.
    value = (
        b"\x80\x02}q\x00(X\x04\x00\x00\x00addrq\x01\x8a\x08"
        + struct.pack("<q", 2**47)
        + b"X\x01\x00\x00\x00bq\x02\x88u."
    )
    check(value, "x")
    assert unpickled(value, "x") == {"addr": 2**47, "b": True}


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_protocol_is_called_so(protocol):
    with pytest.raises(FlopwiseError, match=r"an old pickle protocol \(0 or 1\)"):
        unpickled(pickle.dumps(PLAIN, protocol=protocol), "x")
