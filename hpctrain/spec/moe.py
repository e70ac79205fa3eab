"""The ``model.moe`` and ``parallel.dispatch`` sections: networks made of experts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hpctrain.spec.fields import (
    Boolean,
    Count,
    CountOrZero,
    Number,
    OptionalCount,
    OptionalNumber,
    Plain,
    Section,
)
from hpctrain.spec.transformer import MoeDims

Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]


class MoeSpec(Section):
    """Experts in place of the feed-forward network."""

    scalar_key: ClassVar[str | None] = "experts"

    experts: CountOrZero = Field(
        0, description="Routed experts of a block; 0 is a dense model. Experts have no biases."
    )
    top_k: Count = Field(2, description="Experts that each token visits.")
    hidden: OptionalCount = Field(None, description="Inner width of an expert. [model.ffn_hidden]")
    shared: CountOrZero = Field(
        0, description="Experts that every token visits: one network of shared · hidden channels."
    )
    dense_layers: CountOrZero = Field(
        0, description="Blocks at the start that keep a dense network of model.ffn_hidden channels."
    )
    router: Annotated[Literal["softmax", "sigmoid"], Plain] = Field(
        "softmax",
        description="Scores of the experts: softmax over all of them, or a sigmoid of each.",
    )
    normalize: Boolean = Field(
        True, description="The weights of the experts that a token visits sum to 1."
    )
    scale: Positive = Field(1.0, description="Factor of the routed experts' output.")
    groups: Count = Field(
        1,
        description="Equal groups of experts, of which a token first chooses top_groups (bi-level "
        "routing): it then visits experts of these only.",
    )
    top_groups: Count = Field(1, description="With groups above 1: groups that a token chooses.")
    capacity: OptionalNumber = Field(
        None,
        description="Capacity factor: of each sequence an expert takes at most "
        "capacity · tokens · top_k / experts, rounded up, and the others pass it by; first "
        "choices come before second ones, earlier tokens before later ones. [dropless]",
    )
    balance: NotNegative = Field(
        0.01, description="Weight of the load-balance loss, taken over each sequence."
    )
    z_loss: NotNegative = Field(0.0, description="Weight of the router's z-loss.")
    bias_rate: NotNegative = Field(
        0.0,
        description="Balancing by a bias instead of a loss: how much an expert's bias, which "
        "counts for the choice only, moves after each step towards an even load.",
    )

    @field_validator("capacity")
    @classmethod
    def _capacity(cls, value: float | None) -> float | None:
        if value is not None and value <= 0:
            raise ValueError(f"found {value}; a factor above 0, or null for dropless")
        return value

    @model_validator(mode="after")
    def _fits(self) -> MoeSpec:
        if not self.experts:
            return self
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than all {self.experts} experts")
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups {self.top_groups} is more than all {self.groups} groups")
        if self.groups > 1 and self.top_groups * (self.experts // self.groups) < self.top_k:
            raise ValueError(
                f"top_k {self.top_k} experts are more than {self.top_groups} groups of "
                f"{self.experts // self.groups} hold"
            )
        return self

    def dims(self, ffn_hidden: int) -> MoeDims | None:
        """What the model code takes; None for a dense model."""
        if not self.experts:
            return None
        return MoeDims(
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden or ffn_hidden,
            shared=self.shared,
            dense_layers=self.dense_layers,
            router=self.router,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
            top_groups=self.top_groups if self.groups > 1 else 1,
            capacity=self.capacity,
            balance=self.balance,
            z_loss=self.z_loss,
            bias_rate=self.bias_rate,
        )


class DispatchSpec(Section):
    """How tokens get to experts on other ranks."""

    scalar_key: ClassVar[str | None] = "kind"

    kind: Annotated[Literal["flat", "hierarchical", "slice"], Plain] = Field(
        "flat",
        description="flat: straight to the rank of each expert. hierarchical: once to each node "
        "that has experts of a token, along the rail, and from there inside the node. slice: "
        "every rank of a tensor group picks the tokens of its experts, and the outputs are summed; "
        "needs expert = tensor.",
    )
    chunks: Count = Field(
        1,
        description="Parts of a micro-batch's tokens: one is under way while experts work on "
        "another.",
    )
    copies: CountOrZero = Field(
        0,
        description="Experts of other ranks that a rank takes copies of for one forward and "
        "backward, where it has more rows for them than they weigh (sparse materialisation).",
    )
