"""The JobSpec tree: every key of a job file, its meaning, unit and default.

The descriptions below are what ``hpctrain explain``, the JSON Schema and docs/job-file.md
print; they are written once, here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from hpctrain.spec.fields import (
    Arguments,
    AutoCount,
    Boolean,
    Count,
    CountOrZero,
    Line,
    Number,
    OptionalAutoCount,
    OptionalCount,
    OptionalLine,
    OptionalNumber,
    OptionalSize,
    OptionalText,
    OptionalWalltime,
    Plain,
    Seconds,
    Section,
    Text,
    Walltime,
    as_line,
    as_text,
    show,
)
from hpctrain.spec.life import (
    ContainerSpec,
    HealthSpec,
    NodeRange,
    PythonEnvSpec,
    Switch,
    node_range,
)
from hpctrain.spec.moe import DispatchSpec, MoeSpec
from hpctrain.spec.sequence import SequenceSplit
from hpctrain.spec.transformer import TransformerDims
from hpctrain.spec.yaml_tree import plain

_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _entry_point(value: str | None) -> str | None:
    if value is not None and not _ENTRY.fullmatch(value):
        raise ValueError(f"found {value!r}; write package.module:function")
    return value


EntryPoint = Annotated[OptionalText, AfterValidator(_entry_point)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]


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


class DataSpec(Section):
    """What the model is trained on."""

    scalar_key: ClassVar[str | None] = "path"

    path: OptionalText = Field(
        None,
        description="HDF5 token file written by `hpctrain data tokenize`; relative to the "
        "directory you submit from.",
    )
    sequence_length: OptionalCount = Field(None, description="Tokens a sample.")
    documents: Annotated[Literal["joined", "separate", "each"], Plain] = Field(
        "joined",
        description="joined, separate: samples are cut from the row of all documents, and a token "
        "attends to all before it in its sample, or to those of its own document, whose learned "
        "positions count from its start. each: a document is a sample (several, where it is longer "
        "than sequence_length), and gets context-parallel ranks by its length.",
    )
    shuffle_block: Count = Field(
        64,
        description="Samples read as one contiguous block; the order of blocks and the order "
        "inside each are shuffled anew each epoch.",
    )
    module: EntryPoint = Field(
        None,
        description="Your own data set, as package.module:function; called with `args`, returns "
        "an object with __len__ and __getitem__(index) -> tensor or tuple of tensors.",
    )
    args: Arguments = Field(
        default_factory=dict, description="Keyword arguments of the function named by `module`."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> DataSpec:
        if (self.path is None) == (self.module is None):
            raise ValueError("give either path (a token file) or module (your own data set)")
        if self.path is not None and self.sequence_length is None:
            raise ValueError("sequence_length is missing: tokens a sample, for example 1024")
        if self.path is None and self.documents != "joined":
            raise ValueError(
                f"documents: {self.documents} needs a token file, which says where they begin"
            )
        return self


class ScheduleSpec(Section):
    """The learning rate over the steps."""

    scalar_key: ClassVar[str | None] = "kind"

    kind: Annotated[Literal["constant", "cosine", "linear", "wsd"], Plain] = Field(
        "cosine",
        description="After the warm-up: constant, half a cosine or a line down to min_lr at the "
        "last step, or stable and then a line down (wsd, warm-up-stable-decay).",
    )
    warmup_steps: CountOrZero = Field(0, description="Steps of linear warm-up from 0 to lr.")
    decay_steps: OptionalCount = Field(
        None, description="wsd only: steps of the final decay. [a tenth of train.steps]"
    )


class LossSpec(Section):
    """A loss of your own; token models use cross entropy without it."""

    scalar_key: ClassVar[str | None] = "module"

    module: EntryPoint = Field(
        None,
        description="package.module:function; called as function(model, batch, **args), returns "
        "the mean loss over the micro-batch as a scalar tensor. One that takes `keys` is given "
        "the dropout keys of the samples, which our transformer wants with dropout.",
    )
    args: Arguments = Field(default_factory=dict, description="Keyword arguments of the loss.")


class OptimizerSpec(Section):
    """What turns gradients into updates; lr, betas, eps and weight_decay stand in `train`."""

    scalar_key: ClassVar[str | None] = "kind"

    kind: Annotated[Literal["adamw", "adamw8bit", "muon", "shampoo"], Plain] = Field(
        "adamw",
        description="adamw; or for the matrices of the layers adamw8bit (AdamW with states of 8 "
        "bits, quantised in blocks), muon or shampoo, with adamw for embeddings, output layer, "
        "norms and biases.",
    )
    adamw: tuple[Line, ...] = Field(
        (),
        description="adamw8bit, muon, shampoo: patterns of the names of further parameters that "
        "AdamW takes, such as head.* of your own model.",
    )
    momentum: Fraction = Field(0.95, description="muon: momentum.")
    nesterov: Boolean = Field(True, description="muon: look ahead.")
    iterations: Count = Field(5, description="muon: Newton-Schulz steps.")
    scale: Annotated[Literal["match-rms", "spectral"], Plain] = Field(
        "match-rms",
        description="muon: factor of an m x n matrix's update: 0.2·√max(m, n), which takes "
        "AdamW's learning rates, or √max(1, m/n), which wants about 0.02.",
    )
    block: Count = Field(
        1024,
        description="shampoo: longest side of the blocks that matrices are cut into; "
        "adamw8bit: elements that share a scale.",
    )
    interval: Count = Field(
        10, description="shampoo: steps between computations of the preconditioners' roots."
    )
    damping: Positive = Field(
        1e-6, description="shampoo: ridge, as a fraction of the largest eigenvalue."
    )


class TrainSpec(Section):
    """The optimisation."""

    steps: Count = Field(..., description="Optimizer steps of the whole run.")
    global_batch: Count = Field(..., description="Samples (sequences) a step, over all ranks.")
    micro_batch: AutoCount = Field(
        "auto",
        description="Samples a rank takes in one forward pass; the rest of its share is "
        "accumulated. auto: all of its share.",
    )
    optimizer: OptimizerSpec = Field(
        default_factory=lambda: OptimizerSpec(), description="What makes updates of gradients."
    )
    lr: Positive = Field(3e-4, description="Peak learning rate.")
    min_lr: NotNegative = Field(0.0, description="Learning rate at the end of the decay.")
    schedule: ScheduleSpec = Field(
        default_factory=lambda: ScheduleSpec(), description="Shape of the learning rate."
    )
    weight_decay: NotNegative = Field(
        0.1, description="Decoupled weight decay (AdamW) of matrices; norms and biases have none."
    )
    betas: Annotated[tuple[Fraction, Fraction], Plain] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the two moments."
    )
    eps: Positive = Field(1e-8, description="AdamW's epsilon.")
    clip: OptionalNumber = Field(
        1.0, description="Largest global L2 norm of the gradients; null leaves them alone."
    )
    precision: Annotated[Literal["fp32", "bf16"], Plain] = Field(
        "fp32", description="fp32, or bf16 for compute with fp32 master weights and reductions."
    )
    loss: LossSpec = Field(default_factory=lambda: LossSpec(), description="A loss of your own.")
    seed: CountOrZero = Field(
        0,
        description="Seed of everything: weights by (seed, name), order of samples by (seed, "
        "epoch), dropout by (seed, step, sample), your own code's generators by (seed, "
        "data-parallel rank).",
    )
    log_every: Count = Field(1, description="Steps between metric lines.")
    tensorboard: Boolean = Field(
        False, description="Also write TensorBoard event files (needs hpctrain[tensorboard])."
    )

    @field_validator("clip")
    @classmethod
    def _clip(cls, value: float | None) -> float | None:
        if value is not None and value <= 0:
            raise ValueError(f"found {value}; a positive norm or null belongs here")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TrainSpec:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is more than all "
                f"{self.steps} steps"
            )
        if self.schedule.kind == "wsd":
            decay = self.schedule.decay_steps or 1
            if self.schedule.warmup_steps + decay > self.steps:
                raise ValueError(
                    f"schedule: {self.schedule.warmup_steps} warmup_steps and {decay} decay_steps "
                    f"are more than all {self.steps} steps"
                )
        return self


def _absolute(value: str | None) -> str | None:
    if value is not None and not value.startswith("/"):
        raise ValueError(f"found {value!r}; an absolute path belongs here, the same on every node")
    return value


AbsolutePath = Annotated[OptionalText, AfterValidator(_absolute)]


class MemoryLevelSpec(Section):
    """Checkpoints in the node's memory: survive a crash of the ranks, not of the node."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    path: Text = Field("/dev/shm", description="A tmpfs of the node.")  # noqa: S108


class NodeLevelSpec(Section):
    """Checkpoints on the node's own storage: survive a crash of the node's processes."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    path: AbsolutePath = Field(
        None,
        description="A directory that each node has for itself, for example on NVMe; absolute.",
    )

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.every is not None and self.path is None:
            raise ValueError("every is given and path is not: where do the nodes keep them?")
        return self


class PartnerLevelSpec(Section):
    """A copy on another node: survives the loss of a node."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    path: AbsolutePath = Field(
        None,
        description="Directory of the receiving node where copies are kept. [checkpoint.node.path, "
        "else checkpoint.memory.path]",
    )


class ParityLevelSpec(Section):
    """Parity over sets of nodes: survives the loss of a node of each set, in less room."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    nodes: Annotated[Count, Field(ge=2)] = Field(
        8,
        description="Nodes of a set. Beside its own share a node keeps a share's size divided by "
        "one less than that.",
    )
    path: AbsolutePath = Field(
        None,
        description="A directory that each node has for itself. [checkpoint.node.path, else "
        "checkpoint.memory.path]",
    )


class CheckpointSpec(Section):
    """When and where training state is saved."""

    every: OptionalAutoCount = Field(
        None,
        description="Steps between checkpoints; auto works it out from their measured cost and "
        "`mtbf` (Young, Daly). [a tenth of train.steps]",
    )
    keep: Count = Field(2, description="Newest checkpoints kept; older ones are removed.")
    path: OptionalText = Field(
        None, description="Directory of the checkpoints. [checkpoints/ in the run directory]"
    )
    on_error: Annotated[Literal["continue", "stop"], Plain] = Field(
        "continue",
        description="When a checkpoint cannot be written (no space, quota, I/O error): train on "
        "with the previous one, or stop.",
    )
    mtbf: Walltime = Field(
        86400, description="Mean time between failures of the whole job, for `every: auto`."
    )
    background: Boolean = Field(
        True, description="Train on while a checkpoint is copied and written."
    )
    buffers: Annotated[Count, Field(le=8)] = Field(
        2,
        description="Checkpoints in flight at most. Each takes as much host memory as the rank's "
        "share of the state.",
    )
    when_busy: Annotated[Literal["wait", "skip"], Plain] = Field(
        "wait", description="Where all buffers are in use: wait for one, or skip the checkpoint."
    )
    files: Annotated[Literal["auto", "one", "node", "rank"], Plain] = Field(
        "auto",
        description="HDF5 files a checkpoint: one, one a node, one a rank; auto chooses by the "
        "file system (hpctrain checkpoint tune measures).",
    )
    direct: Boolean = Field(
        True, description="Write past the page cache (O_DIRECT), where the file system can."
    )
    bandwidth: OptionalSize = Field(
        None, description="Bytes a second that a rank writes in the background at most. [no cap]"
    )
    memory: MemoryLevelSpec = Field(
        default_factory=lambda: MemoryLevelSpec(), description="Level in the node's memory."
    )
    node: NodeLevelSpec = Field(
        default_factory=lambda: NodeLevelSpec(), description="Level on the node's storage."
    )
    partner: PartnerLevelSpec = Field(
        default_factory=lambda: PartnerLevelSpec(), description="Level on a partner node."
    )
    parity: ParityLevelSpec = Field(
        default_factory=lambda: ParityLevelSpec(), description="Level over sets of nodes."
    )


def _token(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.,:+@%=/-]+", value):
        raise ValueError(f"found {value!r}; letters, digits and _.,:+@%=/- belong here")
    return value


SlurmToken = Annotated[
    OptionalLine, AfterValidator(lambda value: value if value is None else _token(value))
]


def _option(value: str) -> str:
    if not re.match(r"--?[A-Za-z][\w-]*(=|\s|$)", value):
        raise ValueError(f"found {value!r}; an option such as --constraint=nvme belongs here")
    return value


class SlurmSpec(Section):
    """What is asked of Slurm; ignored by the local launcher, but for time and margin."""

    account: SlurmToken = Field(None, description="Account (project) to charge.")
    partition: SlurmToken = Field(None, description="Partition. [the machine's, else Slurm's]")
    qos: SlurmToken = Field(None, description="Quality of service.")
    reservation: SlurmToken = Field(None, description="Reservation.")
    constraint: OptionalLine = Field(None, description="Node features, for example gpu&hbm80g.")
    time: OptionalWalltime = Field(
        None,
        description="Walltime: Slurm's six forms, or 1h30m, 2d. The ranks stop, checkpoint and "
        "exit resumable `margin` before it. [the partition's default, without a deadline]",
    )
    margin: Seconds = Field(
        120.0, description="Time kept for the last checkpoint before the walltime ends."
    )
    cpus_per_task: OptionalCount = Field(None, description="Cores a rank. [the machine's]")
    memory: OptionalSize = Field(None, description="Memory a node, in bytes (64GiB).")
    exclusive: Boolean = Field(False, description="Whole nodes only.")
    mpi: SlurmToken = Field(
        None, description="srun --mpi= type. [the machine's; pmi2 where MPI is the mpich wheel]"
    )
    mail_user: SlurmToken = Field(None, description="Address told of begin, end and failure.")
    comment: OptionalLine = Field(None, description="Comment shown by squeue and sacct.")
    requeue: Switch = Field(
        "auto",
        description="How a run goes on by itself after its walltime, a preemption, a lost node or "
        "a failed rank: true requeues the job; false submits a successor that depends on it; auto "
        "requeues, and submits a successor where the site does not let it.",
    )
    max_restarts: CountOrZero = Field(
        20, description="Times that a run goes on by itself; 0 ends it with its first job."
    )
    nodes: NodeRange = Field(
        None,
        description="Fewest and most nodes that the job takes, as 4-8, in place of `nodes`: each "
        "start takes what there is, with the same global batch, learning rate and samples.",
    )
    max_node_hours: OptionalNumber = Field(
        None,
        description="Node-hours of walltime that a submission may ask for without --yes.",
    )
    sbatch_options: tuple[Annotated[Line, AfterValidator(_option)], ...] = Field(
        (), description="Further sbatch options, one a list item, as --name=value."
    )
    srun_options: tuple[Annotated[Line, AfterValidator(_option)], ...] = Field(
        (), description="Further srun options, one a list item, as --name=value."
    )
    modules: tuple[Line, ...] = Field(
        (), description="Environment modules loaded in the batch script, in order."
    )


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_EMULATED = re.compile(r"(emulate|simulate):(?:([\d.e+]+)\*)?(.+)")


def _machine(value: Any) -> Any:
    """A name; ``{emulate: NAME}`` becomes ``emulate:NAME``."""
    if not isinstance(value, dict):
        return value
    how = "simulate" if "simulate" in value else "emulate"
    if how not in value or set(value) - ({"emulate", "slower"} if how == "emulate" else {how}):
        raise ValueError(
            f"found the keys {', '.join(map(str, value)) or 'none'}; a machine's name or "
            "{emulate: NAME, slower: N} or {simulate: NAME} belongs here"
        )
    name = value[how]
    name = name if isinstance(name, str) else getattr(name, "raw", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"found {how}: {show(value[how])}; a machine's name belongs here")
    if "slower" not in value:
        return f"{how}:{name}"
    factor = plain(value["slower"])
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
        raise ValueError(f"found slower: {show(value['slower'])}; a number from 1 on belongs here")
    return f"emulate:{factor:g}*{name}"


def _as_given(value: str) -> Any:
    found = _EMULATED.fullmatch(value)
    if found is None:
        return value
    slower = {} if found[2] is None else {"slower": float(found[2])}
    return {found[1]: found[3]} | slower


MachineName = Annotated[
    str,
    BeforeValidator(lambda value: as_text(_machine(value))),
    AfterValidator(as_line),
    PlainSerializer(_as_given),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {
                        "emulate": {"type": "string"},
                        "slower": {"type": "number", "minimum": 1},
                    },
                    "required": ["emulate"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"simulate": {"type": "string"}},
                    "required": ["simulate"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""A machine's name; of an emulated one ``emulate:NAME`` or ``emulate:SLOWER*NAME``, of a simulated
one ``simulate:NAME``."""


class JobSpec(Section):
    """A job: everything that is asked for, in one document."""

    @property
    def emulated(self) -> bool:
        """Whether the job runs here with the times of another machine."""
        return _EMULATED.fullmatch(self.machine) is not None

    @property
    def simulated(self) -> bool:
        """Whether it has no ranks: its schedule is simulated with that machine's times."""
        return self.machine.startswith("simulate:")

    @property
    def machine_name(self) -> str:
        """Name or path of the machine, of an emulated one too."""
        found = _EMULATED.fullmatch(self.machine)
        return self.machine if found is None else found[3]

    @property
    def slower(self) -> float | None:
        """How many times longer than on the emulated machine everything takes here; None leaves
        it to the number of ranks and cores."""
        found = _EMULATED.fullmatch(self.machine)
        return None if found is None or found[2] is None else float(found[2])

    name: Line = Field("job", description="Name of the run; starts its run directory's name.")
    machine: MachineName = Field(
        "local",
        description="Machine the job runs on: a site name, or the path of a site file; or "
        "{emulate: NAME, slower: N}, which runs the job's ranks on this machine with the times of "
        "that one, N times slower so that few cores can follow [N by ranks and cores]; or "
        "{simulate: NAME}, without ranks.",
    )
    nodes: Count = Field(1, description="Nodes.")
    ranks_per_node: AutoCount = Field(
        "auto",
        description="MPI ranks a node; auto is one a device of the machine, and 1 on local.",
    )
    model: ModelSpec = Field(..., description="The model.")
    parallel: ParallelSpec = Field(
        default_factory=lambda: ParallelSpec(), description="How the ranks share the work."
    )
    data: DataSpec = Field(..., description="Training data.")
    train: TrainSpec = Field(..., description="The optimisation.")
    checkpoint: CheckpointSpec = Field(
        default_factory=lambda: CheckpointSpec(), description="Saving and keeping state."
    )
    slurm: SlurmSpec = Field(default_factory=lambda: SlurmSpec(), description="Slurm's part.")
    health: HealthSpec = Field(
        default_factory=lambda: HealthSpec(), description="What watches over the ranks."
    )
    container: ContainerSpec = Field(
        default_factory=lambda: ContainerSpec(), description="An image that the ranks run in."
    )
    python_env: PythonEnvSpec = Field(
        default_factory=lambda: PythonEnvSpec(),
        description="A packed environment that the ranks run from.",
    )
    env: Annotated[dict[str, Text], BeforeValidator(lambda v: {} if _null(v) else v)] = Field(
        default_factory=dict,
        description="Environment variables of every rank, byte for byte as written.",
    )

    @model_validator(mode="before")
    @classmethod
    def _most_nodes(cls, value: Any) -> Any:
        """Without ``nodes`` a range of nodes starts with its most."""
        if not isinstance(value, dict) or "nodes" in value:
            return value
        slurm = value.get("slurm")
        try:
            wanted = node_range(slurm.get("nodes")) if isinstance(slurm, dict) else None
        except ValueError:
            return value  # said where it stands
        return value if wanted is None else {**value, "nodes": wanted.most}

    @model_validator(mode="after")
    def _nodes_in_range(self) -> Self:
        wanted = self.slurm.nodes
        if wanted is not None and not wanted.fewest <= self.nodes <= wanted.most:
            raise ValueError(
                f"nodes is {self.nodes}, which is not within slurm.nodes {wanted}; leave it out, "
                "or give one of them"
            )
        return self

    def sequence_split(self) -> SequenceSplit:
        """How a sequence of the resolved job lies over its context-parallel ranks."""
        context = self.parallel.context
        if self.model.attention == "linear":
            return SequenceSplit(context.size, zigzag=False)
        inner = {"ring": 1, "ulysses": context.size}.get(context.method, context.inner)
        assert isinstance(inner, int), "resolve() leaves no auto"
        return SequenceSplit(context.size, inner)

    @field_validator("env", mode="before")
    @classmethod
    def _env_mapping(cls, value: Any) -> Any:
        if not isinstance(value, dict) and not _null(value):
            raise ValueError(f"found {show(value)}; a mapping of variables belongs here")
        return value

    @field_validator("env")
    @classmethod
    def _env_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} cannot name an environment variable")
        return value


def _null(value: Any) -> bool:
    return value is None or getattr(value, "raw", "x") in ("", "~", "null")
