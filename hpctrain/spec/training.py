"""Keys of a job file's data and training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from hpctrain.spec.fields import (
    Arguments,
    AutoCount,
    Boolean,
    Count,
    CountOrZero,
    EntryPoint,
    Fraction,
    Line,
    NotNegative,
    OptionalCount,
    OptionalNumber,
    OptionalText,
    Plain,
    Positive,
    Section,
)


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
