"""Whatever the bytes: an answer or one line. Fixed seeds; thousands of mutations."""

import copy
import pickle
import random

from gen_snapshot import made

from flopwise.errors import FlopwiseError
from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import report
from flopwise.snapshot.unpickle import unpickled
from quick import tenth

VALUES = (
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    2**70,
    0.5,
    float("nan"),
    "",
    "alloc",
    "x" * 999,
    [],
    [[]],
    {},
    {"a": 1},
    (),
    ("a",),
)


def small():
    return made(steps=1, blocks=1, annotations=True)[0]


def outcome(make):
    try:
        return report(make())
    except FlopwiseError:
        return None


def test_bytes_changed_inserted_removed_and_cut():
    random.seed(5)
    whole = pickle.dumps(small(), protocol=4)
    answered, tried = 0, tenth(2000)
    for _ in range(tried):
        mutated = bytearray(whole)
        for _ in range(random.choice((1, 1, 1, 2, 8))):
            at = random.randrange(2, len(mutated))
            match random.randrange(6):  # mostly changes: what shifts the rest seldom stays a pickle
                case 0 | 4 | 5:
                    mutated[at] = random.randrange(256)
                case 1:
                    mutated.insert(at, random.randrange(256))
                case 2:
                    del mutated[at]
                case _:
                    del mutated[at : at + random.randrange(200)]
        answered += outcome(lambda content=bytes(mutated): snapshot_of(unpickled(content, "fuzzed"))) is not None
    assert 0.05 < answered / tried < 0.95  # both happen, else the mutations test nothing


def test_values_replaced_and_keys_removed():
    random.seed(6)
    whole = pickle.dumps(small())
    answered, tried = 0, tenth(250)
    for _ in range(tried):
        raw = pickle.loads(whole)
        for _ in range(random.choice((1, 2))):
            holder = random.choice(places(raw))
            key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if random.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(random.choice(VALUES))
            if not places(raw):
                break
        answered += outcome(lambda raw=raw: snapshot_of(raw)) is not None
    assert 0.1 < answered / tried < 0.9


def places(value):
    """The dicts and lists inside that hold something, whichever kind is rarer with the same chance."""
    found, waiting, seen = [], [value], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list) and id(one) not in seen and one:
            seen.add(id(one))
            found.append(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found
