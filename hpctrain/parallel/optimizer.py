"""The optimizer of a job, and ZeRO-1: ranks own whole blocks, update those, and hand them round.

::

            gradients (DDP, or the pipeline's sums): the same on all ranks
    rank 0  ▓▓▓▓▓▓▓▓▓▓▓▓  owns blocks 0-3   ─┐ each updates          ┌─▶ all parameters
    rank 1  ▓▓▓▓▓▓▓▓▓▓▓▓  owns blocks 4-7   ─┤ its own, with states  ├─▶ all parameters
    rank 2  ▓▓▓▓▓▓▓▓▓▓▓▓  owns blocks 8-11  ─┘ that only it has      └─▶ all parameters
                                               all-gather of bytes

Optimizer states are sharded as in ZeRO's first stage (Rajbhandari et al. 2020, section 5.1), but
by :func:`~hpctrain.parallel.ragged.plan_ragged`: a matrix optimizer finds its matrices, and
Shampoo its blocks, whole on one rank, and computes exactly what one rank alone would.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import build_optimizer
from hpctrain.optim.adamw8 import KEYS, AdamW8bit, block_rows
from hpctrain.optim.muon import Muon
from hpctrain.optim.shampoo import FACTORS, MOMENTS, Shampoo, block_keys
from hpctrain.parallel.data import REPLICA_AXES
from hpctrain.parallel.model import ParallelModel, Part, unwrapped
from hpctrain.parallel.ragged import WHOLE, Piece, RaggedPlan, plan_ragged
from hpctrain.runtime.hierarchical import all_gather_op

if TYPE_CHECKING:
    from hpctrain.spec.job import JobSpec
    from hpctrain.spec.training import TrainSpec

_GRAIN = 1024
"""Elements below which rows of AdamW's parameters stay together: vectors are cut for no gain."""
_WINDOW_BYTES = 16 << 20
"""Bytes of each rank in one all-gather."""


def make_optimizer(model: ParallelModel, spec: JobSpec) -> torch.optim.Optimizer:
    """The optimizer that a job asks for, over what this rank holds of the model.

    Raises:
        ImpossibleError: an optimizer of matrices or blocks where tensor parallelism or FSDP2 cuts
            them.
    """
    kind = spec.train.optimizer.kind
    if kind != "adamw" and (spec.parallel.tensor > 1 or spec.parallel.fsdp):
        raise ImpossibleError(
            f"train.optimizer: {kind} needs whole matrices or blocks, which parallel.tensor above "
            "1 and parallel.sharding zero2 and zero3 cut",
            hint="set parallel.sharding: zero1 or none, and parallel.tensor: 1",
        )
    sharded = spec.parallel.sharding == "zero1"
    if kind == "adamw" and not sharded:
        return build_optimizer(model.parameters(), spec.train)
    return BlockOptimizer(model, spec, sharded=sharded)


class BlockOptimizer(torch.optim.Optimizer):
    """Optimizers over the row blocks that this rank owns.

    Args:
        model: as parallelised; its parameters are whole on every data-parallel rank, and its
            gradients equal on all of them when ``step`` is called.
        spec: resolved job.
        sharded: blocks are spread over the data-parallel ranks; without, each rank owns all.

    Attributes:
        param_groups: one, whose ``lr`` is that of all parts.
        state: of each parameter of which this rank owns something, as the optimizer that
            takes it keeps it; tensors of the parameter's form hold the owned rows.
        plan: who owns what; parameters by their order in the model, without experts that lie on
            a mesh of their own.
    """

    def __init__(self, model: ParallelModel, spec: JobSpec, *, sharded: bool) -> None:
        train = spec.train
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        super().__init__([p for _, p in named], {"lr": train.lr})
        self._model = model
        matrices = _matrices(model, train)
        self._kind: dict[Tensor, str] = {
            p: train.optimizer.kind if n in matrices else "adamw" for n, p in named
        }
        self._block = train.optimizer.block
        self._pieces: dict[Tensor, Piece] = {}
        self._shards: dict[Tensor, Tensor] = {}
        self._spread: dict[Tensor, tuple[str, ...]] = {}
        self._exchanges: list[_Exchange] = []
        # Copies of experts may lie on other ranks than those of everything else.
        experts = [p for n, p in named if model.is_expert(n)]
        self.plan = self._lay_out(
            [p for n, p in named if not model.is_expert(n)], REPLICA_AXES, sharded
        )
        if experts:
            self._lay_out(experts, ("edp",), sharded)
        self._inner = self._build(train)
        for optimizer in self._inner:
            for parameter, shard in self._shards.items():
                if self._takes(optimizer, parameter):
                    self.state[parameter] = optimizer.state[shard]

    def _lay_out(
        self, parameters: Sequence[Tensor], axes: tuple[str, ...], sharded: bool
    ) -> RaggedPlan:
        """Plan who owns what of parameters whose copies lie along axes, and keep our part."""
        copies = self._model.context.communicators.along(*axes) if sharded else None
        ranks, rank = (1, 0) if copies is None else (copies.size, copies.place)
        plan = plan_ragged(
            [p.shape for p in parameters],
            ranks,
            [self._block_rows(p) for p in parameters],
            [p.element_size() for p in parameters],
        )
        for piece in plan.by_rank[rank]:
            parameter = parameters[piece.tensor]
            self._pieces[parameter] = piece
            self._shards[parameter] = _rows(parameter.detach(), piece)
        if copies is not None and ranks > 1:
            self._spread |= dict.fromkeys(parameters, axes)
            self._exchanges.append(_Exchange(plan, parameters, rank, copies.group))
        return plan

    def _block_rows(self, parameter: Tensor) -> int:
        kind = self._kind[parameter]
        if kind == "muon" or parameter.ndim == 0:
            return WHOLE
        if kind == "shampoo":
            return self._block
        if kind == "adamw8bit":
            return block_rows(parameter.shape[1], self._block)
        return max(1, _GRAIN * parameter.shape[0] // max(1, parameter.numel()))

    def _build(self, train: TrainSpec) -> list[torch.optim.Optimizer]:
        options = train.optimizer
        found: list[torch.optim.Optimizer] = []
        by_kind: dict[tuple[str, bool], list[Tensor]] = {}
        for parameter, shard in self._shards.items():
            by_kind.setdefault((self._kind[parameter], parameter.ndim >= 2), []).append(shard)
        for (kind, decays), shards in by_kind.items():
            decay = train.weight_decay if decays else 0.0
            if kind == "muon":
                found.append(
                    Muon(
                        shards,
                        lr=train.lr,
                        weight_decay=decay,
                        momentum=options.momentum,
                        nesterov=options.nesterov,
                        iterations=options.iterations,
                        scale=options.scale,
                        dtype=torch.bfloat16 if train.precision == "bf16" else None,
                    )
                )
            elif kind == "shampoo":
                first = {self._shards[p]: piece.start for p, piece in self._pieces.items()}
                found.append(
                    Shampoo(
                        shards,
                        lr=train.lr,
                        betas=train.betas,
                        eps=train.eps,
                        weight_decay=decay,
                        block=options.block,
                        interval=options.interval,
                        damping=options.damping,
                        first_rows={shard: first[shard] for shard in shards},
                    )
                )
            elif kind == "adamw8bit":
                found.append(
                    AdamW8bit(
                        shards,
                        lr=train.lr,
                        betas=train.betas,
                        eps=train.eps,
                        weight_decay=decay,
                        block=options.block,
                    )
                )
            else:
                found.append(
                    torch.optim.AdamW(
                        shards,
                        lr=train.lr,
                        betas=train.betas,
                        eps=train.eps,
                        weight_decay=decay,
                        fused=True,
                    )
                )
        return found

    def _takes(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
        shard = self._shards[parameter]
        return any(shard is p for group in optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update what this rank owns; then every rank gets what the others own."""
        assert closure is None, "gradients are computed before the step"
        for parameter, shard in self._shards.items():
            if parameter.grad is not None:
                shard.grad = _rows(parameter.grad, self._pieces[parameter])
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            optimizer.step()
        for shard in self._shards.values():
            shard.grad = None
        for exchange in self._exchanges:
            exchange.run()

    # ---- checkpoints ------------------------------------------------------------------------

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates any of it."""
        return parameter in self._pieces

    def state_keys(self, parameter: nn.Parameter) -> list[str]:
        """Names of the states that ranks keep of a parameter, whoever owns it."""
        kind = self._kind[parameter]
        if kind == "muon":
            return ["momentum"]
        if kind == "adamw":
            return list(MOMENTS)
        if kind == "adamw8bit":
            return list(KEYS)
        rows, columns = parameter.shape
        blocks = block_keys(range(rows), columns, self._block)
        return [*MOMENTS, *(f"{f}_{r}_{c}" for (r, c), f in itertools.product(blocks, FACTORS))]

    def empty_state(
        self, parameter: nn.Parameter, key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """A tensor for what this rank keeps of a state; None where it keeps nothing of it.

        Args:
            parameter: of the model.
            key: of the state.
            shape: of the whole state, over all ranks.
            dtype: of its elements.
        """
        piece = self._pieces.get(parameter)
        if piece is None or key not in self.state_keys(parameter):
            return None
        factor = _factor_row(key)
        if factor is not None:
            mine = piece.start <= factor * self._block < piece.stop
            return torch.zeros(*shape, dtype=dtype, device=parameter.device) if mine else None
        if not shape:
            # torch's fused AdamW keeps the count beside the parameter, as Shampoo does.
            return torch.zeros((), dtype=dtype, device=parameter.device)
        if key.endswith("_scale"):
            blocks = -(-self._shards[parameter].numel() // self._block)
            return torch.zeros(blocks, dtype=dtype, device=parameter.device)
        return torch.zeros_like(self._shards[parameter], dtype=dtype)

    def state_part(self, entry: str, name: str, parameter: Tensor, key: str, value: Tensor) -> Part:
        """Where a state of an owned piece stands in the whole one."""
        cut = self._model.cut(name, parameter)
        piece = self._pieces[parameter]
        axes = self._spread.get(parameter, ())
        writes = self._model.writes(name, entry, spread=axes)
        if value.dim() == 0:
            first = piece.start == 0 and not any(cut.offsets)
            return Part(entry, value.detach(), (), (), writes and first)
        if _factor_row(key) is not None:
            shape = tuple(value.shape)
            return Part(entry, value.detach(), shape, (0,) * len(shape), writes)
        if key.endswith("_scale"):
            columns = parameter.shape[1]
            shape = (-(-parameter.numel() // self._block),)
            return Part(
                entry, value.detach(), shape, (piece.start * columns // self._block,), writes
            )
        offsets = (cut.offsets[0] + piece.start, *cut.offsets[1:])
        return Part(entry, value.detach(), cut.global_shape, offsets, writes)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor if tensor.dim() == 0 else tensor[piece.start : piece.stop]


def _factor_row(key: str) -> int | None:
    """Row block of a Kronecker factor's name; None for other states."""
    name, _, place = key.partition("_root_") if "_root_" in key else key.partition("_")
    return int(place.partition("_")[0]) if name in ("left", "right") else None


def _matrices(model: ParallelModel, train: TrainSpec) -> set[str]:
    """Names of the parameters that a matrix optimizer takes: matrices inside of layers.

    Of our transformer all in its blocks; of a user's model all but embeddings and what
    ``train.optimizer.adamw`` names.
    """
    embeddings = set()
    blocks_only = False
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, nn.Embedding):
                embeddings.add(id(module.weight))
        blocks_only |= isinstance(unwrapped(chunk), Transformer)
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
        and id(parameter) not in embeddings
        and (name.startswith("layers.") or not blocks_only)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in train.optimizer.adamw)
    }


class _Exchange:
    """All-gather of ragged shards: bytes, in rounds of equal windows of every rank's own.

    Args:
        plan: who owns what.
        parameters: of the plan, contiguous.
        rank: this one.
        group: of the plan's ranks, in order.
    """

    def __init__(
        self, plan: RaggedPlan, parameters: Sequence[Tensor], rank: int, group: Any
    ) -> None:
        self._rank, self._group = rank, group
        per_rank = [
            list(_windows([_bytes(parameters[p.tensor], p) for p in pieces]))
            for pieces in plan.by_rank
        ]
        self._rounds = list(itertools.zip_longest(*per_rank, fillvalue=()))

    def run(self) -> None:
        """Every rank's pieces to all; collective."""
        for windows in self._rounds:
            sizes = [sum(view.numel() for view in window) for window in windows]
            device = next(view.device for window in windows for view in window)
            size = max(sizes)
            everything = torch.empty(len(windows), size, dtype=torch.uint8, device=device)
            mine = everything[self._rank]
            if sizes[self._rank]:
                torch.cat(list(windows[self._rank]), out=mine[: sizes[self._rank]])
            all_gather_op(everything.view(-1), mine.clone(), group=self._group)
            for owner, window in enumerate(windows):
                if owner != self._rank:
                    pieces = torch.split(
                        everything[owner, : sizes[owner]], [view.numel() for view in window]
                    )
                    for view, piece in zip(window, pieces, strict=True):
                        view.copy_(piece)


def _bytes(parameter: Tensor, piece: Piece) -> Tensor:
    """A piece as bytes; changes with the parameter."""
    found = _rows(parameter.detach(), piece)
    if not found.is_contiguous():
        raise ImpossibleError(
            f"sharding zero1: a parameter of shape {list(parameter.shape)} has strides "
            f"{parameter.stride()}",
            hint="make it contiguous, or set parallel.sharding: none",
        )
    return found.view(-1).view(torch.uint8)


def _windows(views: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The views, cut and grouped into windows of _WINDOW_BYTES; the last may be shorter."""
    window: list[Tensor] = []
    room = _WINDOW_BYTES
    for whole in views:
        rest = whole
        while rest.numel():
            window.append(rest[:room])
            rest = rest[room:]
            room -= window[-1].numel()
            if not room:
                yield tuple(window)
                window, room = [], _WINDOW_BYTES
    if window:
        yield tuple(window)
