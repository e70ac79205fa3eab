"""What the software between model and accelerator can do, and how well it was measured to do it.

A ``Stack`` states facts about a generation of training software (which attention kernel, what is
overlapped). A ``Calibration`` holds the few numbers that were fitted to published measurements,
or measured on a node, for one accelerator under one stack. docs/planner.md says on which rows and
with which error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

import yaml

from hpctrain.errors import ImpossibleError


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fractions of peaks and fixed costs of one (accelerator, stack).

    Attributes:
        gemm: share of peak FLOP/s that a large half-precision matrix product reaches.
        gemm_fp8: the same in fp8, of the fp8 peak.
        gemm_traffic: how much of a product's memory traffic adds to its time (0: all hidden).
        wave: how much of an unfilled last wave of tiles is lost (0: nothing, 1: all).
        flash1, flash2, cudnn: share of peak FLOP/s in the attention core, by kernel, for heads
            of 128; causal products counted at half.
        head_exponent: smaller heads are slower by (head_dim / 128) to this power.
        softmax: memory passes of an unfused attention core over the planner's count.
        misaligned: slowdown of unfused attention products when head_dim is no multiple of 8.
        memory: share of memory bandwidth that element-wise work reaches.
        unfused_norm: memory passes of norms that are not fused, over the planner's count.
        layer_seconds: time a layer loses a micro-batch to launches and gaps.
        link: share of the fast links' bandwidth in collectives.
        network: share of the network cards' bandwidth in collectives and sends.
        hop_seconds: time of one step of a collective that moves nothing.
        tp_overlap, tp_backward_overlap: share of tensor-parallel communication that is hidden,
            in all passes and in the backward pass.
        dp_overlap: share of a micro-batch behind which gradient reduction can hide.
        pp_overlap: share of sends between stages that is hidden.
        fsdp_overlap: share of gather and scatter of sharded parameters that can hide.
        expert_overlap: share of expert dispatch and combine that is hidden.
        step_seconds: time of a step that belongs to no layer.
        spread: standard deviation of log(measured / predicted) on rows that were not fitted.
    """

    gemm: float = 0.80
    gemm_fp8: float = 0.62
    gemm_traffic: float = 1.0
    wave: float = 0.5
    flash1: float = 0.30
    flash2: float = 0.50
    cudnn: float = 0.50
    head_exponent: float = 0.3
    softmax: float = 0.8
    misaligned: float = 14.0
    memory: float = 0.78
    unfused_norm: float = 1.5
    layer_seconds: float = 1.0e-3
    link: float = 0.75
    network: float = 0.65
    hop_seconds: float = 7.0e-6
    tp_overlap: float = 0.0
    tp_backward_overlap: float = 0.0
    dp_overlap: float = 0.0
    pp_overlap: float = 0.0
    fsdp_overlap: float = 0.7
    expert_overlap: float = 0.0
    step_seconds: float = 0.02
    spread: float = 0.15


@dataclass(frozen=True, slots=True)
class Stack:
    """One generation of training software.

    Attributes:
        name: what it is asked for by.
        title: for people.
        attention: kernel it uses unless a job says otherwise: ``torch`` (a kernel an operation),
            ``fused`` (fused softmax), ``flash1``, ``flash2``, ``cudnn``.
        fused_norms: norms are one kernel.
        split_sends: activations between stages are split over the tensor-parallel group and
            gathered on arrival.
        balanced_stages: layers are dealt to stages by cost; else evenly.
        even_stages: where layers do not divide, the first stages take one more; else embedding
            and output layer take a layer's place where that divides.
        sequence_parallel: on wherever there is tensor parallelism, unless a job says otherwise.
        scattered_gradients: sharded optimizers reduce-scatter gradients; else all-reduce them.
        sums_after_pipeline: in a pipeline gradients are summed after its last pass, beside nothing.
        serial_ends: once the gradients of all replicas are summed come, beside nothing, the sums of
            experts that lie in a layout of their own and the handing out of updated parameters.
        accumulates_whole: with sharded gradients and several micro-batches, gradients are kept
            whole and scattered in the last micro-batch; else they are scattered in each.
        fp16_gradient_bytes, bf16_gradient_bytes: bytes a gradient element has in the reduction.
        like: stack whose calibration serves where this one has none of its own.
        weight_bytes: bytes a parameter of what half-precision products read, where it is kept.
        sharded_master: where parameters are sharded, the shards are the fp32 master copy (FSDP);
            else a half-precision shard stands beside it (ZeRO-3).
        casts: half-precision copies of fp32 weights live until the backward pass is done.
        fp32_stream: under mixed precision without sharding the residual stream stays in fp32.
        optimizer_bytes: bytes a parameter of master weights and moments.
        gated_tensors: tensors of the inner width that a gated network keeps (4 where the
            activation's own output is kept beside the product).
        keeps_gathered: sequence-parallel regions keep their gathered inputs.
        norm_kept: bytes a token and unit of width that norms keep beside inputs and outputs.
        logit_bytes, logit_bytes_fp32: bytes a logit on the last stage at its fullest moment, in
            half precision and in fp32.
        parallel_loss: the loss works on logits split over the tensor-parallel group.
        kept_gradient_bytes: bytes of a gradient element in memory under bf16, where it differs.
        reserved: memory a monitor shows against what is allocated.
        context_bytes: driver context, communicators' buffers and workspaces.
        selective_share: share of a block's forward pass that selective recomputation repeats
            where the attention kernel keeps no scores.
        overlap: names of the overlaps of Calibration that it is capable of.
        expert_launches: launches of a local expert's products over those of a block; 0 where one
            grouped product computes all of them.
        dropout: jobs of that time used dropout.
    """

    name: str
    title: str
    attention: str
    fused_norms: bool = True
    split_sends: bool = True
    balanced_stages: bool = False
    even_stages: bool = False
    sequence_parallel: bool = False
    scattered_gradients: bool = True
    sums_after_pipeline: bool = False
    serial_ends: bool = False
    accumulates_whole: bool = False
    fp16_gradient_bytes: int = 2
    bf16_gradient_bytes: int = 4
    like: str = ""
    selective_share: float = 0.0
    weight_bytes: float = 2.0
    sharded_master: bool = False
    casts: bool = False
    fp32_stream: bool = False
    optimizer_bytes: float = 12.0
    gated_tensors: int = 4
    keeps_gathered: bool = False
    norm_kept: float = 1.0
    logit_bytes: float = 10.0
    logit_bytes_fp32: float = 12.0
    parallel_loss: bool = True
    kept_gradient_bytes: int | None = None
    reserved: float = 1.10
    context_bytes: float = 1.5 * 2**30
    overlap: tuple[str, ...] = ()
    expert_launches: float = 0.25  # two linears, three products each, of about 24 kernels
    dropout: bool = False

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes of a gradient element when it is reduced."""
        return self.fp16_gradient_bytes if dtype == "fp16" else self.bf16_gradient_bytes


STACKS: Mapping[str, Stack] = MappingProxyType(
    {
        s.name: s
        for s in (
            Stack(
                "megatron-2020",
                "Megatron-LM and its ports of 2020 and early 2021",
                "fused",
                split_sends=False,
                dropout=True,
            ),
            Stack(
                "oneflow-2021",
                "OneFlow of 2021: gradient reduction beside the backward pass",
                "fused",
                overlap=("dp_overlap",),
                dropout=True,
            ),
            Stack(
                "megatron-2021",
                "Megatron-LM of 2021 and 2022: interleaving, fused softmax, sequence parallelism",
                "fused",
                overlap=("tp_backward_overlap",),
                dropout=True,
            ),
            Stack(
                "megatron-deepspeed-2021",
                "Megatron-DeepSpeed of 2021: DeepSpeed's pipeline engine and ZeRO-1",
                "fused",
                split_sends=False,
                scattered_gradients=False,
                kept_gradient_bytes=6,  # half-precision gradients beside an fp32 accumulator
                reserved=1.20,
                context_bytes=4.0 * 2**30,
                overlap=("pp_overlap",),
                dropout=True,
            ),
            Stack(
                "pytorch-2023",
                "PyTorch 2.0 with flash attention, FSDP or ZeRO-1 without overlap",
                "flash1",
                split_sends=False,
                sharded_master=True,
                balanced_stages=True,
                scattered_gradients=False,
                keeps_gathered=True,
                overlap=("fsdp_overlap", "pp_overlap"),
            ),
            Stack(
                "pytorch-2024",
                "PyTorch 2.2 and later: flash attention 2, FSDP2, compiled kernels",
                "flash2",
                sharded_master=True,
                balanced_stages=True,
                sequence_parallel=True,
                keeps_gathered=True,
                selective_share=0.5,  # every other product, or every other block
                overlap=("fsdp_overlap", "dp_overlap"),
            ),
            Stack(
                "megatron-core-2024",
                "Megatron-Core and Transformer Engine: fused kernels, everything overlapped",
                "cudnn",
                sequence_parallel=True,
                gated_tensors=3,
                logit_bytes=6.0,
                overlap=(
                    "tp_overlap",
                    "dp_overlap",
                    "pp_overlap",
                    "fsdp_overlap",
                    "expert_overlap",
                ),
            ),
            Stack(
                "hpctrain",
                "this project's own runtime on PyTorch",
                "flash2",
                like="pytorch-2024",
                even_stages=True,
                sequence_parallel=True,
                # fp32 parameters are the master copy; products read bf16 copies of them
                weight_bytes=4.0,
                casts=True,
                fp32_stream=True,
                scattered_gradients=False,
                sums_after_pipeline=True,
                serial_ends=True,
                accumulates_whole=True,
                optimizer_bytes=8.0,
                norm_kept=0.0,
                logit_bytes=10.0,
                logit_bytes_fp32=8.0,
                expert_launches=0.0,
                overlap=("tp_backward_overlap", "fsdp_overlap", "dp_overlap"),
            ),
        )
    }
)

DEFAULT_STACK = "hpctrain"
"""What a job is planned for unless another stack is asked about."""


def stack(name: str) -> Stack:
    """The stack of that name.

    Raises:
        ImpossibleError: no such stack; the known ones are listed.
    """
    try:
        return STACKS[name]
    except KeyError:
        raise ImpossibleError(
            f"no software stack {name!r}", hint=f"known: {', '.join(STACKS)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration with where it comes from.

    Attributes:
        values: the numbers.
        source: ``measured`` on the machine, ``published`` (fitted to published measurements of
            this accelerator under this stack) or ``assumed`` (nearest relative).
        rows: measurements it was fitted to.
    """

    values: Calibration
    source: str
    rows: int = 0


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Mapping[str, float]]:
    text = files("hpctrain.plan").joinpath("calibration.yaml").read_text("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded = yaml.load(text, Loader=loader)  # noqa: S506 (a safe loader)
    return MappingProxyType(loaded)


def apply(base: Calibration, numbers: Mapping[str, float]) -> Calibration:
    """``base`` with the given numbers; names that are no field are left out."""
    known = {f.name for f in fields(Calibration)}
    return replace(base, **{k: float(v) for k, v in numbers.items() if k in known})


def restrict(values: Calibration, software: Stack) -> Calibration:
    """``values`` with every overlap that the stack is not capable of set to 0."""
    names = [f.name for f in fields(Calibration) if f.name.endswith("overlap")]
    return replace(values, **{n: 0.0 for n in names if n not in software.overlap})


def _fitted(family: str, table: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether anything was fitted to measurements of that family."""
    return any(name.startswith(f"{family}/") for name in table)


def calibration(
    family: str, stack_name: str, table: Mapping[str, Mapping[str, float]] | None = None
) -> Fitted:
    """Numbers of an accelerator family under a stack, from the nearest that was fitted.

    Exactly that pair where there is one; else the software's numbers as other accelerators show
    them, with this accelerator's own rates where those are known. The spread widens with every
    step away.

    Args:
        family: as in Platform.
        stack_name: key of STACKS.
        table: fitted numbers by ``family/stack``, ``stack`` and ``family``; the shipped ones
            where None.
    """
    table = _table() if table is None else table
    software = stack(stack_name)
    exact = table.get(f"{family}/{stack_name}")
    near = table.get(f"{family}/{software.like}") if exact is None and software.like else None
    values = apply(Calibration(), table.get(software.like or stack_name, {}))
    values = apply(values, table.get(family, {}))
    if exact is not None:
        values = apply(values, exact)
        return Fitted(restrict(values, software), "published", int(exact.get("rows", 0)))
    # Spread of rows whose source was left out of the fit: about 0.1 where the accelerator is known
    # from other software, and more where it is not.
    if near is not None:
        values = apply(values, near)
    spread = 0.10 if near is not None else 0.12 if _fitted(family, table) else 0.25
    wider = replace(values, spread=max(values.spread if near else 0.0, spread))
    rows = int(near.get("rows", 0)) if near is not None else 0
    return Fitted(restrict(wider, software), "assumed", rows)
