"""Bytes that optimizers keep, where they are not AdamW's two moments.

For the matrices of a block, two-dimensional weights of attention, network, router and shared
experts; AdamW keeps the rest: embeddings, output layer, norms, biases and routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.plan.shapes import ModelShape

_MOMENTS = 8.0
"""AdamW's bytes a parameter, which the general count already holds."""


@dataclass(frozen=True, slots=True)
class MatrixOptimizer:
    """An optimizer of matrices.

    Attributes:
        kind: ``adamw``, ``adamw8bit``, ``muon`` or ``shampoo``.
        block: elements of a scale (adamw8bit), longest side of a block (shampoo).
    """

    kind: str = "adamw"
    block: int = 1024

    def beyond_adamw(self, model: ModelShape) -> float:
        """Bytes of one block's states less those that AdamW would keep; negative where fewer."""
        found = 0.0
        for rows, columns in matrices(model):
            found += self.states(rows, columns) - _MOMENTS * rows * columns
        return found

    def states(self, rows: int, columns: int) -> float:
        """Bytes of one matrix's states, step counters (4 bytes a tensor) left out.

        Two codes of a byte with an fp32 scale a block (Dettmers et al. 2022); one momentum (Jordan
        et al. 2024); two moments, and of each block two factors and their roots (Shi et al. 2023).
        """
        size = rows * columns
        if self.kind == "adamw8bit":
            return 2.0 * size + 2 * 4.0 * -(-size // self.block)
        if self.kind == "muon":
            return 4.0 * size
        if self.kind == "shampoo":
            sides = (
                (min(self.block, rows - r), min(self.block, columns - c))
                for r in range(0, rows, self.block)
                for c in range(0, columns, self.block)
            )
            return _MOMENTS * size + sum(2 * 4.0 * (r * r + c * c) for r, c in sides)
        return _MOMENTS * size


def matrices(model: ModelShape) -> Iterator[tuple[int, int]]:
    """(rows, columns) of the matrices of one block, routed experts left out."""
    width, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from ((width, model.hidden), (narrow, model.hidden), (narrow, model.hidden))
    yield (model.hidden, width)
    inner = model.shared_ffn if model.experts else model.ffn_hidden
    if model.experts:
        yield (model.experts, model.hidden)
    if inner:
        for _ in range(model.ffn_matrices - 1):
            yield (inner, model.hidden)
        yield (model.hidden, inner)
