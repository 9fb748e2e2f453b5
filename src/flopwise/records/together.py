"""Several devices at one job: how long their steps are, and which one the others wait for."""

import msgspec

from flopwise import units


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Of devices, or of the traces of several ranks. Times are nanoseconds of one step."""

    devices: int  # that are explained
    shortest_ns: float  # the shortest of the devices' steps
    longest_ns: float
    waited_for: str = ""  # who comes last to the collectives, if one does: its own kernels of communication are short
    its_communication_ns: float = 0.0
    others_communication_ns: float = 0.0  # median of the others
    worked: int = 0  # devices with work, explained or not; 0: not counted

    def describe(self) -> str:
        """Who waits for whom; empty where nobody does.

        >>> Together(devices=2, shortest_ns=1, longest_ns=1, waited_for="device 1", its_communication_ns=1e6,
        ...          others_communication_ns=5e6).describe()
        'the others wait for device 1: it communicates for 1.00 ms of a step, they for 5.00 ms'
        """
        if not self.waited_for:
            return ""
        its, others = units.duration(self.its_communication_ns), units.duration(self.others_communication_ns)
        return f"the others wait for {self.waited_for}: it communicates for {its} of a step, they for {others}"
