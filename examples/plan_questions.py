"""A lecture's questions about training on many GPUs, answered before any is rented: python examples/plan_questions.py"""

import flopwise
from flopwise.predict.fit import largest_model
from flopwise.spec.cluster import cluster
from flopwise.spec.gpu import gpu

H100, DGX = gpu("h100"), cluster("dgx-h100")


def days_of_70b() -> tuple[float, float, float]:
    """70B on 15T tokens with 1,024 H100s: by 6ND at MFU 0.5; with attention counted; at the MFU that is predicted."""
    given = flopwise.plan("llama3-70b", gpu="h100", gpus=1024, tokens=15e12, mfu=0.5)
    predicted = flopwise.plan("llama3-70b", gpu="h100", gpus=1024, tokens=15e12)
    return 6 * 70e9 * 15e12 / (1024 * H100.peak("bf16") * 0.5) / 86400, given.days, predicted.days


def layers_on_eight(most: int = 80) -> int:
    """The deepest model of Llama 3 70B's width that some layout fits on eight H100s, with AdamW in mixed precision."""
    fitting = 0
    while fitting < most:
        try:
            flopwise.plan("llama3-70b", gpu="h100", gpus=8, context=4096, set={"n_layers": fitting + 1})
        except flopwise.FlopwiseError:
            break
        fitting += 1
    return fitting


def fsdp_tokens(share: float = 1.0) -> float:
    """Tokens of a GPU's micro-batch from which on gathers hide: 2 bytes and 2 FLOPs a token for each weight.

    All GPUs of a host gather the same weights, so each byte enters the host once, over all of its adapters.
    """
    return share * H100.peak("bf16") / (DGX.host * DGX.between_bytes_s)


def tensor_ranks(d_ff: int, share: float = 1.0) -> float:
    """Tensor ranks up to which an MLP hides what they exchange."""
    return d_ff * DGX.inside_bytes_s / (share * H100.peak("bf16"))


if __name__ == "__main__":
    rule, counted, predicted = days_of_70b()
    print(
        f"70B on 15T tokens with 1,024 H100s: {rule:.1f} days by 6ND at MFU 0.5, {counted:.1f} with attention counted,"
    )
    print(f"  {predicted:.1f} at the MFU that flopwise predicts")
    naive = largest_model(8 * H100.memory_bytes)
    layers = layers_on_eight()
    size = flopwise.plan("llama3-70b", gpu="h100", gpus=8, context=4096, set={"n_layers": layers}).parameters
    print(f"Largest model on 8 H100s: {naive / 1e9:.0f}B by 16 bytes a parameter, {size / 1e9:.1f}B with activations")
    print(
        f"FSDP hides its gathers from {fsdp_tokens():,.0f} tokens a GPU on at the peak, {fsdp_tokens(0.5):,.0f} at half of it"
    )
    print(
        f"Tensor ranks of an MLP 28,672 wide hide up to {tensor_ranks(28672):.0f}, {tensor_ranks(28672, 0.5):.0f} at half"
    )
