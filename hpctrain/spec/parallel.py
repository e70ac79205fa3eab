"""Keys of a job file's layout: what every axis of ranks splits, and how."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from hpctrain.spec.fields import (
    Arguments,
    AutoCount,
    Boolean,
    Count,
    CountOrZero,
    Line,
    Number,
    OptionalCount,
    Plain,
    Seconds,
    Section,
    show,
)
from hpctrain.spec.moe import DispatchSpec
from hpctrain.spec.yaml_tree import plain


def _shard_size(value: Any) -> Any:
    found = plain(value)
    if found in ("auto", "node"):
        return found
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"found {show(value)}; auto, node or a number of ranks belongs here")
    return found


class TensorPlanSpec(Section):
    """Which linears of your own model tensor parallelism cuts."""

    column: tuple[Line, ...] = Field(
        (),
        description="Patterns of module names (blocks.*.fc1) whose outputs are spread over the "
        "tensor group.",
    )
    row: tuple[Line, ...] = Field(
        (),
        description="Patterns of module names whose inputs are spread and whose outputs are "
        "summed; they follow column ones.",
    )


class PipelineScheduleSpec(Section):
    """The order in which a pipeline's ranks work."""

    scalar_key: ClassVar[str | None] = "name"

    name: Line = Field(
        "1f1b",
        description="Method, as `hpctrain schedule list` shows them (gpipe, 1f1b, interleaved, "
        "zb-h1, zb-v …), with transforms after a plus: 1f1b+2bp, zb-v+vocab.",
    )
    options: Arguments = Field(
        default_factory=dict,
        description="Options of the method and its transforms, such as {unit: 4} of zeropp.",
    )


class ContextSpec(Section):
    """How ranks share the sequence."""

    scalar_key: ClassVar[str | None] = "size"

    size: Count = Field(1, description="Ranks that share each sequence.")
    method: Annotated[Literal["ring", "ulysses", "two-level"], Plain] = Field(
        "ring",
        description="How attention reaches the tokens of other ranks: keys and values travel "
        "round a ring; ranks exchange sequence for heads (ulysses); or neighbours exchange heads "
        "and the ring is between them.",
    )
    inner: AutoCount = Field(
        "auto",
        description="two-level: ranks that exchange heads with each other; auto: as many as fit "
        "a node and the heads.",
    )
    both_ways: Boolean = Field(
        False,
        description="ring, two-level: blocks come from both neighbours, so that a link carries "
        "half as much in each direction.",
    )


class ParallelSpec(Section):
    """How the ranks share the work; the product of the axes is the number of ranks."""

    scalar_key: ClassVar[str | None] = "layout"

    layout: Annotated[Literal["given", "auto"], Plain] = Field(
        "given",
        description="given: the keys below say it. auto: the planner takes the fastest layout "
        "that fits; keys that you give beside it stay as they are.",
    )
    tensor: Count = Field(
        1, description="Ranks that share each layer (heads, channels, vocabulary)."
    )
    sequence: Boolean = Field(
        True,
        description="With tensor above 1: norms, dropout and residuals are shared along the "
        "sequence too (sequence parallelism); needs data.sequence_length divisible by tensor.",
    )
    overlap: Boolean = Field(
        False,
        description="With tensor above 1: each block works on one half of a micro-batch while "
        "the other half is summed over the ranks (Domino); needs micro-batches of 2 or more.",
    )
    tensor_plan: TensorPlanSpec = Field(
        default_factory=lambda: TensorPlanSpec(),
        description="Which linears of your own model tensor parallelism cuts.",
    )
    context: ContextSpec = Field(
        default_factory=lambda: ContextSpec(),
        description="Ranks that share each sequence; a number is their count.",
    )
    pipeline: Count = Field(
        1, description="Ranks that the layers are laid over, one stage or more on each."
    )
    chunks: OptionalCount = Field(
        None, description="With pipeline above 1: stages on a rank. [the schedule's]"
    )
    schedule: PipelineScheduleSpec = Field(
        default_factory=lambda: PipelineScheduleSpec(),
        description="With pipeline above 1: who works on which micro-batch when.",
    )
    stage_layers: tuple[Count, ...] = Field(
        (),
        description="With pipeline above 1: layers of each stage, in the order of the model, "
        "[4, 6, 6, 4]. [as even as possible]",
    )
    recompute: Annotated[Literal["none", "block", "full"], Plain] = Field(
        "none",
        description="What backward computes anew instead of keeping it: nothing; each block "
        "from its input; or everything a stage does from the stage's input.",
    )
    stream: OptionalCount = Field(
        None,
        description="Tokens of a rank's part of each sequence on which the output layer with "
        "its loss, and each feed-forward network, work at once; so many logits exist at most, "
        "and backward computes the networks again piece by piece (StreamBP). [all of them]",
    )
    offload: Annotated[Number, Field(ge=0, le=1)] = Field(
        0.0,
        description="With pipeline above 1: share of the activations that wait for backward in "
        "host memory.",
    )
    emulate: Seconds = Field(
        0.0,
        description="Time that each layer sleeps in its forward, in its input gradient and in "
        "its weight gradient: shows the shape of a schedule on any machine.",
    )
    data: AutoCount = Field(
        "auto", description="Data-parallel ranks; auto takes all that the other axes leave."
    )
    expert: Count = Field(
        1,
        description="Ranks of a stage that hold different routed experts. Experts lie on the same "
        "ranks as everything else in a way of their own: expert · expert_tensor divides tensor · "
        "context · data, and what is left are copies.",
    )
    expert_tensor: Count = Field(
        1, description="Ranks that share the channels of each routed expert."
    )
    dispatch: DispatchSpec = Field(
        default_factory=lambda: DispatchSpec(),
        description="With expert above 1: how tokens get to their experts and back.",
    )
    sharding: Annotated[Literal["none", "zero1", "zero2", "zero3"], Plain] = Field(
        "none",
        description="What data-parallel ranks shard: none (DDP: every rank holds everything), "
        "zero1 (optimizer states, in whole blocks), zero2 (FSDP2: gradients and optimizer "
        "states; parameters stay gathered between forward and backward), zero3 (FSDP2: "
        "parameters too).",
    )
    shard: Annotated[int | Literal["auto", "node"], BeforeValidator(_shard_size)] = Field(
        "auto",
        description="Data-parallel ranks that share one copy of what is sharded: auto is all of "
        "them; node as many as fit a node, with copies between nodes (hybrid sharding, MiCS); "
        "or a number. With zero2 and zero3; zero1 takes all of them.",
    )
    prefetch: CountOrZero = Field(
        0,
        description="zero2, zero3 without a pipeline: blocks gathered ahead of the one that "
        "computes; each takes the memory of a gathered block. 0: FSDP2's own choice, about one.",
    )

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 shards gradients and parameters."""
        return self.sharding in ("zero2", "zero3")
