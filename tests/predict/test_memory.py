"""Memory on shapes: bytes go with their block, and no code of ours runs as it goes."""

import sys

from flopwise.predict.shapes.memory import Memory, Storage


def test_bytes_live_as_long_as_their_block():
    memory = Memory()
    first, second = Storage(memory, 1000, ("a", "m", "o")), Storage(memory, 512, ("b", "m", "o"))
    first.now_owned_by("c")
    assert memory.live == {("a", "m", "o"): 0, ("b", "m", "o"): 512, ("c", "m", "o"): 1024}
    del first
    assert (memory.live_bytes, memory.peak_bytes) == (512, 1536)
    third = Storage(memory, 512, ("b", "m", "o"))
    assert (memory.live_bytes, memory.peak_bytes) == (1024, 1536)  # what went made room
    del second, third
    assert memory.live_bytes == 0


def test_an_interrupt_is_not_lost_as_a_block_goes():
    """Python prints and forgets what is raised in code that runs because an object goes; so none may run."""
    memory, ran = Memory(), []
    block = Storage(memory, 1000, ("a", "m", "o"))
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del block
    finally:
        sys.setprofile(None)
    assert ran == []
    assert memory.live_bytes == 0
