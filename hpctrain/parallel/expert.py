"""Expert parallelism, folded over the ranks of a pipeline stage.

The ranks of a stage are counted twice (MoE Parallel Folding, Liu et al. 2025)::

    attention, norms, router, shared experts     dp × cp × tp
    routed experts                               edp × ep × etp

``ep`` ranks hold different experts, ``etp`` ranks different channels of the same ones, ``edp``
ranks copies, whatever the same ranks are to attention. Every rank brings tokens of its own: its
samples and, of these, its slice of the sequence; where a tensor group holds all tokens alike, each
member takes a share of them and the outputs are gathered again.

Gradients: those of an expert are complete once the ``edp`` ranks have added theirs up, for the
tokens of all others came to it by dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError
from hpctrain.model.moe import MixtureOfExperts, Router, Routing, combine, expand, slots_of
from hpctrain.model.moe_experts import Experts
from hpctrain.model.moe_routing import DROPPED, within_capacity
from hpctrain.parallel.expert_dispatch import (
    CopyPlan,
    Crossing,
    Route,
    fetch_copies,
    flat,
    hierarchical,
    run_together,
)
from hpctrain.parallel.expert_exchange import all_rows, own_rows
from hpctrain.parallel.model import Cut
from hpctrain.parallel.regions import TensorGroup, share
from hpctrain.spec.transformer import TransformerDims

if TYPE_CHECKING:
    from hpctrain.model.transformer import Transformer
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec

EXPERT_AXES = ("ep", "etp")


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share the experts."""

    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class ExpertGroup:
    """How the experts of a stage are reached from this rank.

    Attributes:
        route: to all experts.
        crossing: the same from the nodes; where dispatch is hierarchical.
        slices: experts of a tensor group are found by index, without messages.
        chunks: parts of the tokens that are under way at a time.
        tensor: ranks that share attention; None where this rank does alone.
    """

    route: Route
    crossing: Crossing | None = None
    slices: bool = False
    chunks: int = 1
    tensor: TensorGroup | None = None


def folds(context: RankContext) -> bool:
    """Whether experts lie on the ranks of a stage in another way than dense layers do."""
    return any(context.size(axis) > 1 for axis in ("tp", "cp", "ep", "etp"))


def cut_experts(model: Transformer, place: Place, *, reduced: bool) -> dict[str, Cut]:
    """Keep this rank's experts, and of those its channels, in place.

    Args:
        model: whole or a stage, on the meta device.
        place: of this rank.
        reduced: gradients over the ranks with copies are summed by somebody else (FSDP2).

    Returns:
        The cut of every parameter of the routed experts, by its name in the whole model.

    Raises:
        ImpossibleError: fewer experts or channels than ranks.
    """
    cuts: dict[str, Cut] = {}
    for index, block in model.layers.items():
        ffn = block.ffn
        if not isinstance(ffn, MixtureOfExperts):
            continue
        for part, matrix in ffn.experts.named_children():
            weight = matrix.weight
            assert isinstance(weight, Tensor)
            shape = tuple(weight.shape)
            channels = 2 if part == "down" else 1
            check_shares(shape[0], shape[channels], place)
            experts = share(shape[0], place.ep_size, place.ep)
            inner = share(shape[channels], place.etp_size, place.etp)
            window = [slice(*experts), slice(None), slice(None)]
            window[channels] = slice(*inner)
            offsets = [experts[0], 0, 0]
            offsets[channels] = inner[0]
            cuts[f"layers.{index}.ffn.experts.{part}.weight"] = Cut(
                shape,
                tuple(offsets),
                axes=EXPERT_AXES,
                partial=() if reduced else ("edp",),
                expert=True,
            )
            matrix.weight = nn.Parameter(weight.detach()[tuple(window)].clone())
    return cuts


def check_shares(experts: int, channels: int, place: Place) -> None:
    """Raises ImpossibleError where there is less of something than ranks to share it."""
    for key, ranks, what, total in (
        ("expert", place.ep_size, "experts", experts),
        ("expert_tensor", place.etp_size, "channels of an expert", channels),
    ):
        if ranks > total:
            raise ImpossibleError(
                f"parallel.{key}: {ranks} ranks cannot share {total} {what}; at most {total} can"
            )


def spread_experts(model: Transformer, group: ExpertGroup) -> None:
    """Let the experts of a model, cut already, be reached through a group, in place."""
    for block in model.layers.values():
        ffn = block.ffn
        if isinstance(ffn, MixtureOfExperts):
            ffn.__class__ = ParallelExpertLayer
            ffn.router.__class__ = ParallelRouter
            ffn.experts.__class__ = CopyingExperts
            assert isinstance(ffn, ParallelExpertLayer)
            assert isinstance(ffn.router, ParallelRouter)
            ffn.group = group
            ffn.router.tensor = group.tensor


def expert_group(spec: JobSpec, context: RankContext, tensor: TensorGroup | None) -> ExpertGroup:
    """The group of a job; every rank of the job comes here together."""
    moe = spec.model.transformer().moe
    assert moe is not None
    options, communicators = spec.parallel.dispatch, context.communicators
    size, rank = context.size("ep"), context.coordinate("ep")
    bounds = tuple(share(moe.experts, size, member) for member in range(size))
    # The matrices of a copy, there and their gradients back, against rows there and back twice.
    matrices = 3 if spec.model.activation == "swiglu" else 2
    route = Route(
        communicators.along("ep").group,
        rank,
        bounds,
        communicators.along("etp").group,
        options.copies,
        worth=matrices * moe.hidden // 2,
    )
    crossing = None
    if options.kind == "hierarchical":
        crossing = _crossing(context, bounds, route)
    return ExpertGroup(route, crossing, options.kind == "slice", options.chunks, tensor)


def _crossing(context: RankContext, bounds: Sequence[tuple[int, int]], route: Route) -> Crossing:
    communicator = context.communicators.prepare("ep")
    levels = communicator.levels
    if levels is None or not levels.even:
        found = "one level" if levels is None else "nodes with different numbers of members"
        raise ImpossibleError(
            f"parallel.dispatch: hierarchical needs expert groups with as many ranks on each of "
            f"several nodes, and several on a node; those of this job have {found}",
            hint="set parallel.dispatch: flat, or a parallel.expert that spans nodes",
        )
    node_of = [0] * bounds[-1][1]
    inner_of = [0] * bounds[-1][1]
    inside: list[tuple[int, int]] = []
    for node in range(levels.nodes):
        first = 0
        for local in range(levels.per_node):
            low, high = bounds[levels.position_of(node, local)]
            for expert in range(low, high):
                node_of[expert], inner_of[expert] = node, first + expert - low
            if node == levels.node:
                inside.append((first, first + high - low))
            first += high - low
    return Crossing(
        levels.across,
        levels.node,
        torch.tensor(node_of, device=context.device),
        torch.tensor(inner_of, device=context.device),
        Route(levels.inside, levels.local, tuple(inside), route.inner, route.copies, route.worth),
    )


class ParallelRouter(Router):
    """A router of sequences that lie in slices on the ranks of a tensor group."""

    tensor: TensorGroup | None

    def tokens(self, here: int) -> int:
        return here * (self._slices.size if self._slices else 1)

    def whole(self, loads_BE: Tensor) -> Tensor:
        if self._slices is None:
            return loads_BE
        total = loads_BE.clone()
        dist.all_reduce(total, group=self._slices.group)
        return total

    def limit(self, experts_BSk: Tensor) -> Tensor:
        if self._slices is None:
            return within_capacity(experts_BSk, self.moe)
        # Small beside the tokens themselves: k numbers each.
        whole = within_capacity(self._slices.gather(experts_BSk), self.moe)
        return whole.chunk(self._slices.size, dim=1)[self._slices.rank]

    @property
    def _slices(self) -> TensorGroup | None:
        return self.tensor if self.tensor is not None and self.tensor.sequence else None


class CopyingExperts(Experts):
    """Experts that can take copies of others for one forward and backward."""

    def forward(
        self, x_RH: Tensor, counts: Sequence[int], copies: CopyPlan | None = None
    ) -> Tensor:
        if copies is None:
            return super().forward(x_RH, counts)
        own = self.up.weight.shape[0]
        first = sum(counts[:own])
        matrices = [self.up.weight, self.down.weight]
        if self.gate is not None:
            matrices.append(self.gate.weight)
        fetched = fetch_copies(copies, matrices)
        gate = fetched[2] if self.gate is not None else None
        # The gradient of a copy is on its way to the owner when backward ends: never deferred.
        theirs = self.network(x_RH[first:], fetched[0], gate, fetched[1], counts[own:], None)
        return torch.cat([super().forward(x_RH[:first], counts[:own]), theirs])


class ParallelExpertLayer(MixtureOfExperts):
    """A layer of experts whose routed ones lie on other ranks too."""

    group: ExpertGroup

    def routed(self, x_BSH: Tensor) -> Tensor:
        routing = self.router(x_BSH)
        if self.group.slices:
            return self._by_index(x_BSH, routing)
        x_TH, experts, weights = x_BSH.flatten(0, 1), routing.experts, routing.weights
        tensor = self.group.tensor
        if tensor is None or tensor.sequence:
            return self._dispatched(x_TH, experts, weights).view_as(x_BSH)
        # All members of the tensor group hold these tokens; each takes some.
        mine = [own_rows(each, tensor.group) for each in (x_TH, experts, weights)]
        y_TH = self._dispatched(*mine)
        return all_rows(y_TH, x_TH.shape[0], tensor.group).view_as(x_BSH)

    def _dispatched(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        group = self.group
        split = [each.tensor_split(group.chunks) for each in (x_TH, experts_Tk, weights_Tk)]
        parts = zip(*split, strict=True)
        if group.crossing is not None:
            crossing = group.crossing
            ways = [hierarchical(x, e, w, crossing, self.experts) for x, e, w in parts]
        else:
            ways = [flat(x, e, w, group.route, self.experts) for x, e, w in parts]
        found = run_together(ways)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _by_index(self, x_BSH: Tensor, routing: Routing) -> Tensor:
        """Every member of the tensor group has all tokens, picks those of its experts, and the
        outputs are summed as any layer's are (PPMoE, Chen et al. 2023)."""
        tensor, route = self.group.tensor, self.group.route
        assert tensor is not None, "refused without a tensor group"
        first, last = route.bounds[route.rank]
        shape = (*x_BSH.shape[:2], -1)
        experts, weights = routing.experts.view(shape), tensor.enter(routing.weights.view(shape))
        if tensor.sequence:
            experts = tensor.gather(experts)
        whole = tensor.enter(x_BSH)
        local = torch.where((experts >= first) & (experts < last), experts - first, DROPPED)
        local = local.flatten(0, 1)
        slots, counts = slots_of(local, last - first)
        rows = self.experts(expand(whole.flatten(0, 1), slots, local.shape[1]), counts.tolist())
        return tensor.leave(combine(rows, slots, weights.flatten(0, 1)).view_as(whole))


def routers(modules: Sequence[nn.Module]) -> list[tuple[int, Router]]:
    """Routers with the number of their layer."""
    found = []
    for module in modules:
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleDict):
            for index, block in layers.items():
                ffn = getattr(block, "ffn", None)
                if isinstance(ffn, MixtureOfExperts):
                    found.append((int(index), ffn.router))
    return found


@torch.no_grad()
def take_loads(modules: Sequence[nn.Module], dims: TransformerDims) -> Tensor:
    """What the routers on this rank saw since they were asked last.

    Args:
        modules: chunks of the model on this rank.
        dims: of the whole model.

    Returns:
        (layers, experts + 1) int64: how often each expert was chosen, before capacity, and, last,
        how many choices were dropped.
    """
    moe = dims.moe
    assert moe is not None
    seen = torch.zeros(dims.layers, moe.experts + 1, dtype=torch.int64)
    for index, router in routers(modules):
        seen[index] += torch.cat([router.load, router.dropped]).cpu()
        router.load.zero_()
        router.dropped.zero_()
    return seen


@torch.no_grad()
def balance_by_bias(modules: Sequence[nn.Module], loads: Tensor) -> None:
    """Move every router's bias one step towards an even load.

    Wang et al. 2024 (algorithm 1): up for experts with less than the mean, down for those with
    more.

    Args:
        modules: chunks of the model on this rank.
        loads: (layers, experts), of the whole global batch, before capacity.
    """
    for index, router in routers(modules):
        if router.bias is not None:
            load = loads[index].to(router.bias)
            router.bias += router.moe.bias_rate * torch.sign(load.mean() - load)
