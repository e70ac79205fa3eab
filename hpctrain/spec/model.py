"""Keys of a job file's model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    model_validator,
)

from hpctrain.spec.fields import (
    Arguments,
    Boolean,
    EntryPoint,
    Fraction,
    OptionalCount,
    OptionalText,
    Plain,
    Positive,
    Section,
)
from hpctrain.spec.moe import MoeSpec
from hpctrain.spec.transformer import TransformerDims


class ModelSpec(Section):
    """The model: a preset, explicit dimensions, or a function of your own."""

    scalar_key: ClassVar[str | None] = "preset"

    preset: OptionalText = Field(
        None, description="Name of a published shape; further keys of this section override it."
    )
    module: EntryPoint = Field(
        None,
        description="Your own model, as package.module:function; called with `args`, returns a "
        "torch.nn.Module. Excludes preset and dimensions.",
    )
    args: Arguments = Field(
        default_factory=dict, description="Keyword arguments of the function named by `module`."
    )
    layers: OptionalCount = Field(None, description="Transformer blocks.")
    hidden: OptionalCount = Field(None, description="Width of the residual stream.")
    heads: OptionalCount = Field(None, description="Attention (query) heads; divides hidden.")
    kv_heads: OptionalCount = Field(
        None, description="Key-value heads of grouped-query attention; divides heads. [heads]"
    )
    ffn_hidden: OptionalCount = Field(
        None,
        description="Inner width of the feed-forward network. [4·hidden for gelu; 8/3·hidden "
        "rounded up to a multiple of 64 for swiglu]",
    )
    vocab_size: OptionalCount = Field(
        None, description="Rows of the embedding; 256 for byte-level tokens."
    )
    max_positions: OptionalCount = Field(
        None, description="Longest sequence, in tokens. [data.sequence_length]"
    )
    attention: Annotated[Literal["softmax", "linear"], Plain] = Field(
        "softmax",
        description="softmax over all earlier tokens; or linear: a decaying state a head, whose "
        "work and memory grow with the sequence and not with its square.",
    )
    position: Annotated[Literal["learned", "rotary", "none"], Plain] = Field(
        "learned", description="How positions enter: a learned table, rotary embedding, or not."
    )
    norm: Annotated[Literal["layernorm", "rmsnorm"], Plain] = Field(
        "layernorm", description="Normalisation before attention and feed-forward."
    )
    activation: Annotated[Literal["gelu", "swiglu"], Plain] = Field(
        "gelu", description="Feed-forward network: GELU, or gated SiLU with three matrices."
    )
    tied_embeddings: Boolean = Field(
        True, description="The output layer shares the embedding's weight."
    )
    bias: Boolean = Field(True, description="Biases in linears and norms.")
    dropout: Fraction = Field(
        0.0,
        description="Dropout probability on embeddings and on the outputs of attention and "
        "feed-forward.",
    )
    norm_eps: Positive = Field(1e-5, description="Epsilon of the norms.")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary frequencies.")
    init_std: Positive = Field(
        0.02,
        description="Standard deviation of the weights' initialisation; output projections of "
        "each block get init_std / sqrt(2·layers).",
    )
    moe: MoeSpec = Field(
        default_factory=lambda: MoeSpec(),
        description="Experts in place of the feed-forward network.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSpec:
        if self.module is not None:
            given = [key for key in ("preset", *_DIMENSIONS) if getattr(self, key) is not None]
            given += ["moe"] if self.moe.experts else []
            if given:
                raise ValueError(f"module excludes {', '.join(given)}: your function gives these")
            return self
        missing = [
            key for key in ("layers", "hidden", "heads", "vocab_size") if not getattr(self, key)
        ]
        if missing:
            raise ValueError(
                f"missing {', '.join(missing)}; give a preset, all dimensions, or module"
            )
        assert self.hidden and self.heads
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads")
        if self.position == "rotary" and (self.hidden // self.heads) % 2:
            raise ValueError(
                f"rotary positions need an even head size; {self.hidden} / {self.heads} = "
                f"{self.hidden // self.heads}"
            )
        if self.position == "rotary" and self.attention == "linear":
            raise ValueError(
                "attention: linear takes position: learned or none; its features are positive, "
                "which rotation would undo"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into {self.kv_heads} kv_heads")
        if self.moe.experts and self.moe.dense_layers >= (self.layers or 0):
            raise ValueError(
                f"moe.dense_layers {self.moe.dense_layers} leaves none of {self.layers} layers "
                "to experts"
            )
        return self

    def transformer(self) -> TransformerDims:
        """Dimensions with every default filled in.

        Raises:
            ValueError: the model is the user's own.
        """
        if self.module is not None:
            raise ValueError(f"model {self.module} is the user's own: its dimensions are unknown")
        assert self.layers and self.hidden and self.heads and self.vocab_size
        assert self.max_positions, "resolve() fills max_positions"
        return TransformerDims(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            ffn_hidden=self.ffn_hidden or default_ffn_hidden(self.hidden, self.activation),
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            attention=self.attention,
            position=self.position,
            norm=self.norm,
            activation=self.activation,
            tied_embeddings=self.tied_embeddings,
            bias=self.bias,
            dropout=self.dropout,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            init_std=self.init_std,
            moe=self.moe.dims(self.ffn_hidden or default_ffn_hidden(self.hidden, self.activation)),
        )


_DIMENSIONS = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab_size", "max_positions",
)  # fmt: skip


def default_ffn_hidden(hidden: int, activation: str) -> int:
    """4·hidden for two matrices; 8/3·hidden, a multiple of 64, where the gate is a third."""
    return 4 * hidden if activation == "gelu" else -(-8 * hidden // (3 * 64)) * 64
