"""Clipping by the global norm of gradients that may be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

Axes = tuple[str, ...]
Sharding = Callable[[Tensor], Axes]
"""Gradient -> the axes over which ranks hold different parts of it."""
Reduce = Callable[[Tensor, Axes], Tensor]
"""Sum of a scalar over the ranks of these axes."""


def placement_axes(gradient: Tensor) -> Axes:
    """Mesh dimensions that shard a DTensor; none for a plain tensor, which is whole."""
    placements = getattr(gradient, "placements", ())
    if not placements:
        return ()
    names = gradient.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
    if names is None:
        raise ValueError("the DeviceMesh of a sharded gradient needs names for its dimensions")
    return tuple(
        name
        for name, placement in zip(names, placements, strict=True)
        if not placement.is_replicate()
    )


@torch.no_grad()
def global_norm(
    parameters: Iterable[Tensor],
    *,
    reduce: Reduce | None = None,
    sharding: Sharding = placement_axes,
    groups: Iterable[Axes] = (),
) -> Tensor:
    """L2 norm of all gradients, each part counted once.

    Norms are taken in float32 at least. Gradients are grouped by the axes that shard them;
    each group's sum of squares is one scalar that ``reduce`` sums over those axes.

    Args:
        parameters: those without a gradient are passed over.
        reduce: called once a group, in the order of sorted axes, on every rank.
        sharding: axes of a gradient.
        groups: sets of axes to reduce also where this rank holds no such gradient: what other
            pipeline stages hold.

    Returns:
        A scalar; 0 where there is no gradient.

    Raises:
        ValueError: a sharded gradient and no ``reduce``.
    """
    held: dict[Axes, list[Tensor]] = {axes: [] for axes in groups}
    for parameter in parameters:
        if parameter.grad is not None:
            axes = sharding(parameter.grad)
            held.setdefault(axes, []).append(_local(parameter.grad))
    device = next((gradients[0].device for gradients in held.values() if gradients), None)
    total = torch.zeros((), device=device)
    for axes, gradients in sorted(held.items(), key=lambda item: item[0]):
        squares = torch.zeros((), device=device)
        if gradients:
            dtype = torch.promote_types(gradients[0].dtype, torch.float32)
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            squares = torch.stack(norms).square().sum()
        if axes:
            if reduce is None:
                raise ValueError(f"gradients are sharded over {', '.join(axes)}: give reduce")
            squares = reduce(squares, axes)
        total = squares + total.to(squares)
    return total.sqrt()


@torch.no_grad()
def clip_by_global_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    reduce: Reduce | None = None,
    sharding: Sharding = placement_axes,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    The factor is min(1, max_norm / (norm + 1e-6)), that of torch.nn.utils.clip_grad_norm_. A
    norm that is not finite makes every gradient NaN: look at the result.

    Args:
        parameters, reduce, sharding: see :func:`global_norm`.
        max_norm: above 0.

    Returns:
        The norm before clipping, a scalar.
    """
    held = list(parameters)
    norm = global_norm(held, reduce=reduce, sharding=sharding)
    scale_gradients(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a scalar, in place."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _local(gradient: Tensor) -> Tensor:
    """The part of a gradient that lies on this rank: the tensor itself, or a DTensor's own."""
    to_local = getattr(gradient, "to_local", None)
    return gradient if to_local is None else cast(Tensor, to_local())
