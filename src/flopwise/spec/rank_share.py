"""One rank's part of a workload that several share."""

from typing import Any

import msgspec

from flopwise.spec.model import ModelSpec
from flopwise.spec.parallel import tensor_ranks
from flopwise.spec.workload import Workload


def rank_share(w: Workload) -> Workload:
    """One rank's part of a step that several share, as a step of its own: its matmuls and activations, nothing exchanged.

    >>> from flopwise.spec.workload import workload
    >>> rank_share(workload("small", batch=8, parallel="fsdp2", ranks=4)).label()
    'small b2 t512 train'
    """
    recipe, spec = w.recipe, w.subject
    if recipe.parallel == "off" or not isinstance(spec, ModelSpec):
        return w
    changes: dict[str, Any] = {}
    if (tensor := tensor_ranks(recipe)) > 1:
        changes = {field: getattr(spec, field) // tensor for field in ("n_heads", "n_kv_heads", "d_ff")}
        changes["head_dim"] = spec.head_dim
    if recipe.parallel == "pp":
        changes["n_layers"] = -(-spec.n_layers // recipe.ranks)
    alone = msgspec.structs.replace(recipe, parallel="off", ranks=1)
    subject = msgspec.structs.replace(spec, **changes)
    return msgspec.structs.replace(w, subject=subject, recipe=alone, batch=w.batch // recipe.data_ranks)
