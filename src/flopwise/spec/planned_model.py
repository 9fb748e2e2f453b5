"""A model as a plan sees it: the shape of a decoder, with experts and latent attention where it has them."""

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts in place of the MLP, of which each token goes to a few."""

    count: int
    chosen: int  # by each token
    d_ff: int  # of one expert
    shared_d_ff: int = 0  # of the expert that all tokens go to; 0: there is none
    dense_layers: int = 0  # that have a plain MLP: the first ones

    def __post_init__(self) -> None:
        for field in ("count", "chosen", "d_ff"):
            fields.whole(field, getattr(self, field), 1, 10_000_000)
        for field in ("shared_d_ff", "dense_layers"):
            fields.whole(field, getattr(self, field), 0, 10_000_000)
        if self.chosen > self.count:
            raise FlopwiseError(f"a token cannot choose {self.chosen} of {self.count} experts", "choose fewer")


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose keys and values come from a narrow latent vector (DeepSeek's MLA)."""

    q_rank: int  # 0: queries are projected in one step
    kv_rank: int
    plain_dim: int  # of a head's query and key, without positions
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for field in ("kv_rank", "plain_dim", "value_dim"):
            fields.whole(field, getattr(self, field), 1, 1_000_000)
        for field in ("q_rank", "rope_dim"):
            fields.whole(field, getattr(self, field), 0, 1_000_000)


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster is to train.

    >>> from flopwise.spec.model import preset
    >>> one = PlannedModel(spec=preset("llama3-8b"))
    >>> one.parameters() == one.active_parameters() == preset("llama3-8b").parameters()
    True
    """

    spec: ModelSpec
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if self.experts is not None and self.experts.dense_layers > self.spec.n_layers:
            raise FlopwiseError(
                f"dense_layers = {self.experts.dense_layers} is more than n_layers = {self.spec.n_layers}", "give fewer"
            )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def expert_layers(self) -> int:
        return self.spec.n_layers - self.experts.dense_layers if self.experts else 0

    def attention_parameters(self) -> int:
        """Of one layer, without norms and biases."""
        spec = self.spec
        if (a := self.latent) is None:
            return spec.d_model * spec.head_dim * 2 * (spec.n_heads + spec.n_kv_heads)
        head = a.plain_dim + a.rope_dim
        queries = (
            spec.d_model * a.q_rank + a.q_rank * spec.n_heads * head if a.q_rank else spec.d_model * spec.n_heads * head
        )
        keys = spec.d_model * (a.kv_rank + a.rope_dim) + a.kv_rank * spec.n_heads * (a.plain_dim + a.value_dim)
        return queries + keys + spec.n_heads * a.value_dim * spec.d_model

    def mlp_parameters(self, d_ff: int) -> int:
        return (3 if self.spec.mlp == "swiglu" else 2) * self.spec.d_model * d_ff

    def expert_parameters(self) -> int:
        """Of all experts of one layer but the shared one."""
        return self.experts.count * self.mlp_parameters(self.experts.d_ff) if self.experts else 0

    def parameters(self) -> int:
        """All of them: what memory holds."""
        return self._parameters(self.experts.count if self.experts else 0)

    def active_parameters(self) -> int:
        """Those that a token goes through: what is computed."""
        return self._parameters(self.experts.chosen if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        spec, found = self.spec, self.spec.parameters()
        if self.latent:
            usual = spec.d_model * spec.head_dim * 2 * (spec.n_heads + spec.n_kv_heads)
            found += spec.n_layers * (self.attention_parameters() - usual)
        if (e := self.experts) is not None:
            router = spec.d_model * e.count
            one = experts * self.mlp_parameters(e.d_ff) + self.mlp_parameters(e.shared_d_ff) + router
            found += self.expert_layers * (one - self.mlp_parameters(spec.d_ff))
        return found
