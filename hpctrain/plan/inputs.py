"""What is planned: a model, how it is cut and run, and on what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hpctrain.layout import DEFAULT_ORDER, ParallelLayout
from hpctrain.plan.optimizers import MatrixOptimizer
from hpctrain.plan.platform import Platform
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import Calibration, Stack

_ADAMW = MatrixOptimizer()


class Placement(StrEnum):
    """Where one kind of training state lives over the ranks that share it."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Each rank holds its part, and works on that part only."""
    GATHERED = "sharded-with-gather"
    """Each rank holds its part; a unit at a time is gathered where it is used, then dropped."""
    MATERIALISED = "materialised"
    """Each rank holds its part; it is gathered once a micro-batch and kept until used again."""
    OFFLOADED = "offloaded"
    """As sharded, in host memory."""


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Placement of the states of training over the data-parallel ranks.

    Activations belong to each rank's own samples: replicated means kept whole on the device,
    sharded split over the tensor-parallel group (sequence parallelism), offloaded in host memory.
    """

    parameters: Placement = Placement.REPLICATED
    gradients: Placement = Placement.REPLICATED
    optimizer: Placement = Placement.REPLICATED

    @classmethod
    def zero(cls, stage: int) -> StatePlacement:
        """ZeRO stages 0 to 3 (Rajbhandari et al. 2020)."""
        return cls(
            parameters=Placement.GATHERED if stage >= 3 else Placement.REPLICATED,
            gradients=Placement.SHARDED if stage >= 2 else Placement.REPLICATED,
            optimizer=Placement.SHARDED if stage >= 1 else Placement.REPLICATED,
        )

    @property
    def fully_sharded(self) -> bool:
        return self.parameters in (Placement.GATHERED, Placement.MATERIALISED)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How tokens get to experts on other ranks.

    Attributes:
        kind: ``flat``, ``hierarchical`` or ``slice``; see hpctrain.plan.experts.
        parts: of a micro-batch's tokens, one under way while experts work on another.
        copies: experts of others that a rank takes copies of, at most.
    """

    kind: str = "flat"
    parts: int = 1
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a step is cut.

    Attributes:
        layout: degrees of every kind of parallelism.
        micro_batch: samples of one forward pass on one data-parallel rank.
        virtual: model chunks a pipeline rank holds.
        schedule: name of the pipeline schedule.
        states: placement of parameters, gradients and optimizer states.
        recompute: ``none``, ``selective`` (the attention core), ``full`` (every block from its
            input) or ``stage`` (all blocks of a stage from the stage's input).
        sequence_parallel: norms and residuals are split over the tensor-parallel group.
        order: dense axes, outermost first, as ranks are numbered.
        exchange: of the context-parallel ranks, neighbours that exchange heads; the ring is
            between them.
        stream: tokens of a rank's part of each sequence whose logits and channels exist at once;
            all where None.
    """

    layout: ParallelLayout
    micro_batch: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    states: StatePlacement = StatePlacement()
    recompute: str = "none"
    sequence_parallel: bool = False
    order: tuple[str, ...] = DEFAULT_ORDER
    exchange: int = 1
    stream: int | None = None

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that share optimizer states, where those are sharded.

        The shard group; all data-parallel ranks where there is none (ZeRO-1 beside DDP).
        """
        layout = self.layout
        wide = layout.dp_shard if layout.dp_shard > 1 else layout.dp
        return wide * layout.cp

    def expert_nodes(self, devices: int) -> int:
        """Nodes of ``devices`` that a group of expert ranks spans, if it spans them evenly."""
        reach = self.layout.ep * self.layout.etp
        return reach // devices if devices > 1 and reach > devices else 1

    def strides(self) -> dict[str, int]:
        """Ranks between neighbours along each dense axis."""
        found, step, layout = {}, 1, self.layout
        for axis in reversed(self.order):
            found[axis] = step
            step *= getattr(layout, axis)
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """What does not change while layouts are compared.

    Attributes:
        model: the transformer.
        sequence: tokens a sample.
        global_batch: samples a step.
        dtype: type of matrix products: ``bf16``, ``fp16``, ``fp8`` or ``fp32``.
        platform: accelerator and links.
        stack: software.
        values: calibration of the two.
        attention: kernel of the attention core; the stack's own where None.
        fused_norms: as in Stack; the stack's own where None.
        reduce_bytes: bytes of a gradient element in reductions; the stack's own where None.
        kept_gradient_bytes: bytes of a gradient element in memory; as in reductions where None.
        logit_bytes, parallel_loss: as in Stack; the stack's own where None.
        stages: layers of each pipeline stage; dealt by the stack's rule where None.
        dispatch: how tokens get to experts.
        matrix_optimizer: what updates the matrices of blocks.
    """

    model: ModelShape
    sequence: int
    global_batch: int
    dtype: str
    platform: Platform
    stack: Stack
    values: Calibration
    attention: str | None = None
    fused_norms: bool | None = None
    reduce_bytes: int | None = None
    kept_gradient_bytes: int | None = None
    logit_bytes: float | None = None
    parallel_loss: bool | None = None
    stages: tuple[int, ...] | None = None
    dispatch: Dispatch = Dispatch()
    matrix_optimizer: MatrixOptimizer = _ADAMW

    @property
    def kernel(self) -> str:
        return self.attention or self.stack.attention

    @property
    def norms_fused(self) -> bool:
        return self.stack.fused_norms if self.fused_norms is None else self.fused_norms

    @property
    def gradient_bytes(self) -> int:
        return self.reduce_bytes or self.stack.gradient_bytes(self.dtype)

    @property
    def state_gradient_bytes(self) -> float:
        """Bytes of a gradient element in memory."""
        if self.dtype == "fp32":
            return 4.0
        kept = self.kept_gradient_bytes
        if kept is None and self.dtype != "fp16":
            kept = self.stack.kept_gradient_bytes
        return kept or self.gradient_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter that matrix products read."""
        return 4.0 if self.dtype == "fp32" else self.stack.weight_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes a parameter of master copy and two moments (AdamW); in fp32 no copy is kept."""
        return 8.0 if self.dtype == "fp32" else self.stack.optimizer_bytes

    @property
    def loss_is_parallel(self) -> bool:
        return self.stack.parallel_loss if self.parallel_loss is None else self.parallel_loss

    @property
    def kept_logit_bytes(self) -> float:
        stated = self.stack.logit_bytes_fp32 if self.dtype == "fp32" else self.stack.logit_bytes
        return self.logit_bytes or stated

    @property
    def on_host(self) -> bool:
        """Ranks compute on processors, by kernels that are not fused."""
        return self.platform.family == "CPU"

    @property
    def context_bytes(self) -> float:
        """Bytes of driver, communicators and workspaces, or of a process without a device."""
        return 0.3 * 2**30 if self.on_host else self.stack.context_bytes

    def dp_overlap(self, stages: int) -> float:
        """Share of a micro-batch behind which a pipeline of so many stages reduces gradients."""
        late = self.stack.sums_after_pipeline and stages > 1
        return 0.0 if late else self.values.dp_overlap

    def micro_batches(self, plan: Strategy) -> int:
        """Forward passes of a pipeline in a step."""
        return max(1, self.global_batch // (plan.layout.dp * plan.micro_batch))

    def calibrated(self, values: Calibration) -> Workload:
        """The same under other numbers."""
        return replace(self, values=values)
