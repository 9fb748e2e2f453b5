"""What the programs that train do by themselves: which kernels are fused, and what is exchanged behind the computing."""

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """One program, as it is set up by people who care for speed."""

    name: str
    title: str
    flash: bool = True  # attention in one kernel; else scores are written and read
    old_flash: bool = False  # a kernel that was written for Ampere
    passes: str = "fused"  # what lies between matmuls: 'eager', 'fused' by hand, or 'compiled'
    dropout: bool = False
    hides_gradients: bool = True  # data ranks exchange gradients behind the backward pass
    hides_gathers: bool = True  # and weights before they are needed
    hides_tensor: bool = False  # tensor ranks exchange in pieces, behind the matmul that makes or uses them
    once_a_host: bool = False  # a token goes to each host once, whatever number of its experts are there
    gathers_apart: bool = False  # weights are gathered one by one, so that a host's ports do not add up
    whole_state: bool = False  # data ranks share the weights or nothing: the optimizer alone is not sharded
    zero_bubble: bool = False  # it has such a schedule
    hides_experts: bool = False  # tokens travel to and from experts behind other micro-batches
    host: str = (
        "eager"  # how a kernel is launched: 'eager', 'compiled', or 'checkpointed': with random states kept apart
    )


SOFTWARE = (
    Software(name="megatron", title="Megatron-Core with Transformer Engine", hides_tensor=True, once_a_host=True),
    Software(
        name="megatron-overlap",
        title="Megatron-Core that moves tokens behind another micro-batch",
        hides_tensor=True,
        once_a_host=True,
        hides_experts=True,
    ),
    Software(
        name="torchtitan",
        title="torchtitan: FSDP2, torch.compile",
        passes="compiled",
        host="compiled",
        old_flash=True,
        whole_state=True,
        zero_bubble=True,
    ),
    Software(
        name="torchtitan-async",
        title="torchtitan with asynchronous tensor parallelism",
        passes="compiled",
        host="compiled",
        old_flash=True,
        hides_tensor=True,
        whole_state=True,
        zero_bubble=True,
    ),
    Software(name="automodel", title="PyTorch FSDP2 with Transformer Engine", once_a_host=True, whole_state=True),
    Software(
        name="pytorch", title="PyTorch FSDP without torch.compile", passes="eager", old_flash=True, whole_state=True
    ),
    Software(
        name="llm-foundry",
        title="MosaicML's llm-foundry: PyTorch FSDP with a fused loss",
        passes="eager",
        old_flash=True,
        whole_state=True,
    ),
    Software(
        name="megatron-2021",
        title="Megatron-LM of 2021: no flash attention, nothing hidden",
        flash=False,
        dropout=True,
        hides_gradients=False,
        hides_gathers=False,
        host="checkpointed",
    ),
    Software(
        name="deepspeed-2021",
        title="DeepSpeed of 2021 with weights in shards",
        flash=False,
        dropout=True,
        hides_gradients=True,
        gathers_apart=True,
        host="checkpointed",
    ),
)

# Programs that a layout is printed for: what of the above they are, the usual first; none: any.
PROGRAMS = {
    "torchrun": (),
    "torchtitan": ("torchtitan", "torchtitan-async"),
    "megatron": ("megatron", "megatron-overlap"),
    "accelerate": ("pytorch",),
}


def cannot(name: str, sharded: str, schedule: str) -> tuple[str, str] | None:
    """Why this software does not run such a layout, and what does; None where it does.

    >>> cannot("megatron", "none", "zero-bubble")
    ('megatron has no zero-bubble schedule', '--software torchtitan has')
    """
    one = software(name)
    if sharded == "optimizer" and one.whole_state:
        return f"{name} does not shard the optimizer alone", "--fsdp shards the weights, too; or --software megatron"
    if sharded == "gradients" and name.startswith("megatron"):
        return f"{name} does not shard gradients and keep the weights", "--sharded optimizer, or --fsdp for both"
    if schedule == "zero-bubble" and not one.zero_bubble:
        return f"{name} has no zero-bubble schedule", "--software torchtitan has"
    return None


def software(name: str) -> Software:
    """
    >>> software("torchtitan").passes
    'compiled'
    """
    found = next((one for one in SOFTWARE if one.name == name), None)
    if found is None:
        names = [one.name for one in SOFTWARE]
        raise FlopwiseError(
            f"there is no software {fields.show(name)}", f"{fields.did_you_mean(name, names)}known: {', '.join(names)}"
        )
    return found
