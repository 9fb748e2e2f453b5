"""A recipe as lines of PyTorch, for your own training loop."""

from flopwise.spec.recipe import OWN_OPTIMIZERS, WITH_MASTERS, Recipe, levers_to_apply

_PRECISION = {
    "tf32": "torch.set_float32_matmul_precision('high')",
    "bf16": "with torch.autocast('cuda', dtype=torch.bfloat16):  # around the forward pass and the loss",
    "fp16": "scaler = torch.amp.GradScaler('cuda')  # and torch.autocast('cuda', dtype=torch.float16) around forward and loss",
    "bf16-pure": "model = model.to(torch.bfloat16)  # weights, gradients and optimizer state",
    "bf16-master": "model = model.to(torch.bfloat16)  # fp32 weights in flopwise.kernels.adamw.AdamW(…, master=True).set_masters",
    **{
        name: "from flopwise.kernels.fp8_linear import linear, usual_scaling  # in the blocks, weights in bf16 with masters: "
        f"y = linear(x, weight, bias, usual_scaling(by_rows={by_rows}))"
        for name, by_rows in (("fp8", False), ("fp8-rowwise", True))
    },
}
_ATTENTION = {
    "sdpa": "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # if causal",
    "sdpa-flash": "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # from torch.nn.attention",
    "sdpa-cudnn": "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # from torch.nn.attention",
    "flex": "y = torch.compile(flex_attention)(q, k, v, block_mask=causal)  # from torch.nn.attention.flex_attention",
    "flash": "from flopwise.kernels.attention_triton import flash_attention  # y = flash_attention(q, k, v, causal=True)",
}
_NORM = {
    "torch": "y = F.rms_norm(x, weight.shape, weight, eps)",
    "triton": "from flopwise.kernels.rms_norm import rms_norm  # and add_rms_norm, with the residual",
}
_ACTIVATION = {
    "torch": "y = F.silu(gate) * up  # F.gelu(x, approximate='tanh')",
    "triton": "from flopwise.kernels.swiglu import swiglu  # y = swiglu(gate, up)",
    "cuda": "from flopwise.kernels.gelu import GELU  # y = GELU['cuda'](x)",
}
_LOSS = {
    "chunked": "loss = 0  # for chunk in hidden.chunk(n): add F.cross_entropy(chunk @ head.T, …) under checkpoint",
    "fused": "from flopwise.kernels.cross_entropy import linear_cross_entropy  # of hidden states and the head's weight",
}
_OPTIMIZER = {
    "foreach": "optimizer = torch.optim.AdamW(model.parameters(), foreach=True)",
    "fused": "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
    "flopwise": "from flopwise.kernels.adamw import AdamW  # optimizer = AdamW(model.parameters(), lr)",
    # with the betas that were measured: of 0.999 a second moment in bf16 would never decay
    "flopwise-bf16": "from flopwise.kernels.adamw import AdamW"
    "  # AdamW(model.parameters(), lr, betas=(0.9, 0.95), state_dtype=torch.bfloat16)",
}
_COMPILE = {
    "default": "model = torch.compile(model, dynamic=False)",
    "max-autotune": "model = torch.compile(model, mode='max-autotune-no-cudagraphs', dynamic=False)",
    "reduce-overhead": "model = torch.compile(model, mode='reduce-overhead', dynamic=False)"
    "  # each step: torch.compiler.cudagraph_mark_step_begin(); clone what is kept beyond it",
    "blocks": "for block in model.blocks: block.compile(dynamic=False)",
}
_GRAPH = {
    "on": "with torch.cuda.graph(graph): step()  # after three warm-up steps on a side stream; then graph.replay()"
}
_PROJECTIONS = {"fused": "q, k, v = self.qkv(x).split(sizes, -1)  # one weight for the three; the same for gate and up"}
_OVERLAP = {
    "on": "p.register_post_accumulate_grad_hook(hook)  # on every weight; at the last of a block: side.wait_stream("
    "torch.cuda.current_stream()), then the block's own optimizer.step() in torch.cuda.stream(side). Drop its gradients once "
    "the current stream has waited for that; forward and backward on a torch.cuda.Stream(priority=-1)"
}
_ROPE = {"triton": "from flopwise.kernels.rope import rope_pair  # q, k = rope_pair(q, k, cos, sin)"}
LINES = {
    "precision": _PRECISION,
    "attention": _ATTENTION,
    "norm": _NORM,
    "activation": _ACTIVATION,
    "rope": _ROPE,
    "loss": _LOSS,
    "optimizer": _OPTIMIZER,
    "projections": _PROJECTIONS,
    "compile": _COMPILE,
    "graph": _GRAPH,
    "overlap": _OVERLAP,
}


def lines_by_lever(recipe: Recipe, since: Recipe | None = None) -> dict[str, str]:
    """The line for each lever in which a recipe differs from another (by default: the plainest).

    >>> lines_by_lever(Recipe(optimizer="fused"))
    {'optimizer': 'optimizer = torch.optim.AdamW(model.parameters(), fused=True)'}
    """
    start = since or Recipe()
    found = {
        lever: lines[value]
        for lever, lines in LINES.items()
        if (value := getattr(recipe, lever, None)) != getattr(start, lever, None) and value in lines
    }
    if recipe.checkpoint and recipe.checkpoint != start.checkpoint:
        found["checkpoint"] = (
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # for each segment of blocks"
        )
    return found


# What plain PyTorch cannot do in a line or two of a user's own code.
_OURS = {
    "precision": WITH_MASTERS,
    "norm": ("triton",),
    "activation": ("triton",),
    "rope": ("triton",),
    "projections": ("fused",),
    "loss": ("fused", "chunked"),
    "optimizer": OWN_OPTIMIZERS,
    "overlap": ("on",),
}


def lines_for_own_code(recipe: Recipe, written: Recipe) -> dict[str, str]:
    """The line for each lever that is put onto a user's own step: of plain PyTorch where it has one.

    >>> lines_for_own_code(Recipe(optimizer="fused", loss="fused"), Recipe())["loss"]
    'by flopwise.apply alone'
    """
    changed = levers_to_apply(recipe, written)
    ours = {lever: "by flopwise.apply alone" for lever, value in changed.items() if value in _OURS.get(lever, ())}
    return lines_by_lever(recipe, written) | ours


def toml_by_lever(recipe: Recipe, written: Recipe | None = None) -> dict[str, str]:
    """The line for each lever in a file for `--recipe`; what is so by default, or as the code is written, needs none.

    >>> toml_by_lever(Recipe(precision="bf16", checkpoint=2))
    {'precision': 'precision = "bf16"', 'checkpoint': 'checkpoint = 2'}
    """
    changed = levers_to_apply(recipe, written or Recipe())
    return {k: f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in changed.items()}


def recipe_toml(recipe: Recipe, written: Recipe | None = None) -> str:
    """The recipe as a file for `--recipe`, and for `flopwise.apply`."""
    return "\n".join(toml_by_lever(recipe, written).values()) or "# nothing to change"
