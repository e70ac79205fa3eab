"""Tensor and sequence parallelism of the transformer, and of users' own linears.

Each rank of a tensor group holds, of every layer::

    attention   query, key, value   some heads (rows)        output   their columns
    ffn         up, gate            some channels (rows)     down     their columns
                (of experts only the shared ones; see :mod:`hpctrain.parallel.expert`)
    embedding   tokens              some rows                positions, norms, dropout: whole
    head                            some rows (of the same vocabulary)

Heads go to ranks in whole key-value groups where there are enough of them. Where there are
fewer key-value heads than ranks, every rank keeps key and value whole, computes those it needs,
and the gradients are summed (``Cut.partial``). Heads, channels and vocabulary need not divide:
the first ranks take one more.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.model.dropout import Dropout
from hpctrain.model.linear_attention import LinearAttention
from hpctrain.model.moe import MixtureOfExperts
from hpctrain.model.transformer import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Transformer,
    places_in_documents,
    rotate,
)
from hpctrain.parallel.linear import (
    ColumnLinear,
    RowLinear,
    column_linears,
    row_linear,
    row_partial,
)
from hpctrain.parallel.model import Cut
from hpctrain.parallel.regions import Heads, TensorGroup, share
from hpctrain.parallel.vocabulary import parallel_embedding
from hpctrain.spec.transformer import TransformerDims

Range = tuple[int, int]
M = TypeVar("M", bound=nn.Module)


def check_dims(dims: TransformerDims, size: int) -> None:
    """Raises ImpossibleError where a layer cannot be shared by ``size`` ranks."""
    for what, total in (
        ("heads", dims.heads),
        ("ffn_hidden", dims.ffn_hidden),
        ("vocab_size", dims.vocab_size),
    ):
        if total < size:
            raise ImpossibleError(
                f"parallel.tensor: {size} ranks cannot share model.{what} = {total}; at most "
                f"{total} can"
            )


def cut_transformer(model: Transformer, group: TensorGroup) -> dict[str, Cut]:
    """Make a whole model or a stage on the meta device this rank's part of it, in place.

    Returns:
        The cut of every parameter, by its name in the whole model.

    Raises:
        ImpossibleError: more ranks than heads, channels or tokens.
    """
    dims = model.dims
    check_dims(dims, group.size)
    cuts: dict[str, Cut] = {}
    heads = Heads(dims.heads, dims.kv_heads, group.size, group.rank)
    for index, block in model.layers.items():
        assert isinstance(block, Block)
        name = f"layers.{index}"
        _cut_attention(block.attention, f"{name}.attention", heads, group, cuts)
        ffn: nn.Module | None = block.ffn
        path = f"{name}.ffn"
        if isinstance(ffn, MixtureOfExperts):
            ffn, path = ffn.shared, f"{path}.shared"
        if isinstance(ffn, FeedForward):
            _cut_ffn(ffn, path, group, cuts)
        if group.overlap:
            _become(block, OverlappedBlock).group = group
    vocabulary = share(dims.vocab_size, group.size, group.rank)
    if model.embedding is not None:
        embedding = _become(model.embedding, ParallelEmbedding)
        embedding.set_up(group, vocabulary[0])
        _cut_rows(embedding.tokens, "embedding.tokens", vocabulary, cuts)
    if model.head is not None:
        name = "embedding.tokens" if dims.tied_embeddings else "head"
        if not (dims.tied_embeddings and model.embedding is not None):
            _cut_rows(model.head, name, vocabulary, cuts)
        _become(model.head, ColumnLinear).group = group
    if group.sequence:
        model.sequence_shards = group.size
        for module in model.modules():
            if isinstance(module, Dropout):
                _become(module, SliceDropout).group = group
    model._tie()
    logical = model.logical_names
    for name, parameter in model.named_parameters():
        name = logical.get(name, name)
        shape = tuple(parameter.shape)
        partial = ("tp",) if group.sequence else ()
        cuts.setdefault(name, Cut(shape, (0,) * len(shape), partial=partial))
    return cuts


class ParallelAttention(Attention):
    """Attention over some heads."""

    def set_up(self, group: TensorGroup, heads: Heads) -> None:
        self.group = group
        self.heads = heads
        if isinstance(self.core, LinearAttention):
            self.core.select(*heads.query)

    def _layers(self) -> list[tuple[Tensor, Tensor | None]]:
        layers: list[tuple[Tensor, Tensor | None]] = [(self.query.weight, self.query.bias)]
        for linear in (self.key, self.value):
            weight: Tensor = linear.weight
            bias: Tensor | None = linear.bias
            if self.heads.shared:
                rows = slice(*(head * self.head_dim for head in self.heads.kv))
                weight, bias = weight[rows], None if bias is None else bias[rows]
            layers.append((weight, bias))
        return layers

    def forward(self, x_BSH: Tensor, positions: Tensor, starts: Tensor | None = None) -> Tensor:
        y_BSF = self.inner(x_BSH, positions, starts)
        return row_linear(y_BSF, self.output.weight, self.output.bias, self.group)

    def inner(self, x_BSH: Tensor, positions: Tensor, starts: Tensor | None) -> Tensor:
        """What the output projection takes: this rank's heads, (B, S, F)."""
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for y in column_linears(x_BSH, self._layers(), self.group)
        )
        if self.rope_theta is not None:
            q = rotate(q, positions, self.rope_theta)
            k = rotate(k, positions, self.rope_theta)
        if self.heads.uneven is not None:
            k, v = k[:, :, self.heads.uneven], v[:, :, self.heads.uneven]
        y_BNSD = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), starts)
        return y_BNSD.transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


class ParallelFeedForward(FeedForward):
    """A feed-forward network over some channels."""

    group: TensorGroup

    def forward(self, x_BSH: Tensor) -> Tensor:
        return row_linear(self.inner(x_BSH), self.down.weight, self.down.bias, self.group)

    def inner(self, x_BSH: Tensor) -> Tensor:
        """What the down projection takes: this rank's channels, (B, S, F)."""
        linears = [self.up] if self.gate is None else [self.up, self.gate]
        layers: list[tuple[Tensor, Tensor | None]]
        layers = [(linear.weight, linear.bias) for linear in linears]
        y, *gate = column_linears(x_BSH, layers, self.group)
        if gate:
            return nn.functional.silu(gate[0]) * y
        return nn.functional.gelu(y, approximate="tanh")


class OverlappedBlock(Block):
    """A block that hides its sums behind compute (Domino, Wang et al. 2024, row-wise split).

    The samples are cut in two halves. While the output of one is summed over the ranks, the
    other is computed::

        attention 1 │ attention 2 │ ffn 1       │ ffn 2
                    │ sum 1 ····· │ sum 2 ····· │ sum 1 ····· │ sum 2
    """

    group: TensorGroup

    def forward(
        self,
        x_BSH: Tensor,
        positions: Tensor,
        keys: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        if x_BSH.shape[0] < 2:
            return super().forward(x_BSH, positions, keys, starts)
        halves = x_BSH.chunk(2)
        starts_of = (None, None) if starts is None else starts.chunk(2)
        keys_of = (None, None) if keys is None else keys.chunk(2)
        places = positions.chunk(2) if positions.dim() == 2 else (positions, positions)
        attention, ffn, group = self.attention, self.ffn, self.group
        assert isinstance(attention, ParallelAttention)
        assert isinstance(ffn, ParallelFeedForward)
        begun = []
        for x, place, start in zip(halves, places, starts_of, strict=True):
            y = attention.inner(self.attention_norm(x), place, start)
            begun.append(group.start_leave(row_partial(y, attention.output.weight, group)))
        middle, ends = [], []
        for x, key, place, finish in zip(halves, keys_of, places, begun, strict=True):
            y = _biased(finish(), attention.output.bias)
            middle.append(x + self.attention_dropout(y, key, place))
            z = ffn.inner(self.ffn_norm(middle[-1]))
            ends.append(group.start_leave(row_partial(z, ffn.down.weight, group)))
        outputs = []
        for x, key, place, finish in zip(middle, keys_of, places, ends, strict=True):
            z = _biased(finish(), ffn.down.bias)
            outputs.append(x + self.ffn_dropout(z, key, place))
        return torch.cat(outputs)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


class ParallelEmbedding(Embedding):
    """Embedding over some rows of the vocabulary."""

    def set_up(self, group: TensorGroup, first: int) -> None:
        self.group = group
        self.first = first

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        x_BSH = parallel_embedding(tokens_BS, self.tokens.weight, self.first, self.group)
        if self.positions is not None:
            rows = places_in_documents(positions, starts)
            x_BSH = x_BSH + self.positions(slice_of(rows, self.group))
        return self.dropout(x_BSH, keys, positions)  # type: ignore[no-any-return]


class SliceDropout(Dropout):
    """Dropout on this rank's slice of the sequence, with the mask of the whole."""

    group: TensorGroup

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor | None = None) -> Tensor:
        assert positions is not None, "a slice of a sequence needs its positions"
        return super().forward(x, keys, slice_of(positions, self.group))


def slice_of(positions: Tensor, group: TensorGroup) -> Tensor:
    """This rank's part of (S,) or (B, S) positions; all without sequence parallelism."""
    if not group.sequence:
        return positions
    return positions.chunk(group.size, dim=-1)[group.rank]


def _become(module: nn.Module, kind: type[M]) -> M:
    """The same module, with its parameters and names, as a subclass of what it was."""
    assert issubclass(kind, type(module)), f"{kind} is no {type(module)}"
    module.__class__ = kind
    assert isinstance(module, kind)
    return module


def _cut_attention(
    attention: Attention, name: str, heads: Heads, group: TensorGroup, cuts: dict[str, Cut]
) -> None:
    size = attention.head_dim
    query = (heads.query[0] * size, heads.query[1] * size)
    _cut_rows(attention.query, f"{name}.query", query, cuts)
    for kind in ("key", "value"):
        linear, full_name = getattr(attention, kind), f"{name}.{kind}"
        if heads.shared:
            for part, parameter in linear.named_parameters():
                shape = tuple(parameter.shape)
                whole = Cut(shape, (0,) * len(shape), partial=("tp",))
                cuts[f"{full_name}.{part}"] = whole
        else:
            _cut_rows(linear, full_name, (heads.kv[0] * size, heads.kv[1] * size), cuts)
    _cut_columns(attention.output, f"{name}.output", query, group, cuts)
    _become(attention, ParallelAttention).set_up(group, heads)


def _cut_ffn(ffn: FeedForward, name: str, group: TensorGroup, cuts: dict[str, Cut]) -> None:
    channels = share(ffn.up.out_features, group.size, group.rank)
    _cut_rows(ffn.up, f"{name}.up", channels, cuts)
    if ffn.gate is not None:
        _cut_rows(ffn.gate, f"{name}.gate", channels, cuts)
    _cut_columns(ffn.down, f"{name}.down", channels, group, cuts)
    _become(ffn, ParallelFeedForward).group = group


def _cut_rows(module: nn.Module, name: str, rows: Range, cuts: dict[str, Cut]) -> None:
    """Keep some rows of a weight and its bias."""
    for part, parameter in list(module.named_parameters(recurse=False)):
        shape = tuple(parameter.shape)
        offsets = (rows[0], *(0 for _ in shape[1:]))
        cuts[f"{name}.{part}"] = Cut(shape, offsets, axes=("tp",))
        setattr(module, part, nn.Parameter(parameter.detach()[rows[0] : rows[1]].clone()))


def _cut_columns(
    module: nn.Module, name: str, columns: Range, group: TensorGroup, cuts: dict[str, Cut]
) -> None:
    """Keep some columns of a weight; the bias is added after the sum, whole."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    cuts[f"{name}.weight"] = Cut(tuple(weight.shape), (0, columns[0]), axes=("tp",))
    module.weight = nn.Parameter(weight.detach()[:, columns[0] : columns[1]].clone())
    bias = module.bias
    if isinstance(bias, Tensor):
        partial = ("tp",) if group.sequence else ()
        cuts[f"{name}.bias"] = Cut(tuple(bias.shape), (0,), partial=partial)


# ---- users' own models ------------------------------------------------------------------------


def cut_linears(
    model: nn.Module, plan: Mapping[str, Sequence[str]], group: TensorGroup
) -> dict[str, Cut]:
    """Cut the linears of a user's model that a plan names, in place.

    Args:
        model: whole, with its weights.
        plan: ``column`` and ``row``: patterns of module names, as ``blocks.*.fc1``. What a
            column-parallel linear gives is this rank's part of its outputs, and a
            row-parallel one takes such a part.
        group: tensor group, without sequence parallelism.

    Raises:
        UsageError: a pattern names no linear.
        ImpossibleError: a linear is narrower than the group.
    """
    cuts: dict[str, Cut] = {}
    classes: tuple[tuple[str, type[ColumnLinear | RowLinear]], ...]
    classes = (("column", ColumnLinear), ("row", RowLinear))
    for kind, new_class in classes:
        for pattern in plan.get(kind, ()):
            found = list(_linears(model, pattern))
            if not found:
                known = ", ".join(n for n, m in model.named_modules() if isinstance(m, nn.Linear))
                raise UsageError(
                    f"parallel.tensor_plan.{kind}: {pattern!r} names no linear of the model",
                    hint=f"its linears: {known or 'none'}",
                )
            for name, linear in found:
                width = linear.out_features if kind == "column" else linear.in_features
                if width < group.size:
                    raise ImpossibleError(
                        f"parallel.tensor: {group.size} ranks cannot share {name}, {width} wide"
                    )
                part = share(width, group.size, group.rank)
                if kind == "column":
                    _cut_rows(linear, name, part, cuts)
                else:
                    _cut_columns(linear, name, part, group, cuts)
                new = _become(linear, new_class)
                assert isinstance(new, ColumnLinear | RowLinear)
                new.group = group
    return cuts


def _linears(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and fnmatch.fnmatchcase(name, pattern):
            yield name, module
