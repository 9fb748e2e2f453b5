"""On the CPU: matmuls in fp64.

Looks for: matmuls and attention with an input in fp64, in a trace captured with shapes.
Saving: half of their time: a vector register holds twice as many numbers in fp32, and half the bytes are moved.
Fix: make the data and the model fp32; often one array of NumPy's, which is fp64 by default, makes all that follows fp64.
"""

from flopwise import units
from flopwise.advice.host_facts import HostFacts
from flopwise.records.finding import MEDIUM, Finding

CODE = """model = model.float()
batch = torch.as_tensor(array, dtype=torch.float32)"""


def check(facts: HostFacts) -> Finding | None:
    spent = facts.explanation.double_ns * facts.explanation.op_time_left
    if spent <= 0:
        return None
    saved = spent / 2
    return Finding(
        rule="cpu_double",
        title=f"matmuls in fp64 take {units.duration(spent)}",
        values={"double_ns": spent},
        saving_ns=saved,
        arithmetic=f"{units.duration(spent)} × (1 − 1/2) = {units.duration(saved)}",
        evidence=(f"{units.duration(spent)} in matmuls and attention with an input in fp64",),
        code=CODE,
        confidence=MEDIUM,
        draws_on={"matmuls": saved},
    )
