"""One layer of experts on the ranks at hand against the same layer whole, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

JOB = """\
model:
  layers: 1
  hidden: 8
  heads: 2
  vocab_size: 8
  bias: false
  activation: swiglu
  init_std: 0.4
  moe: {experts: 6, top_k: 2, hidden: 6, balance: 0}
data: {path: none, sequence_length: 5}
train: {steps: 1, global_batch: 4}
"""


def compare(cases: list[dict[str, Any]], per_node: int) -> list[dict[str, Any]]:
    """For each case the largest differences, and what this rank worked on and sent."""
    from hpctrain.layout import RankGrid
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing import parity

    comm = start_mpi()
    specs = [parity._spec(JOB, comm.size, case.get("set", "").split()) for case in cases]
    context = bootstrap(comm, RankGrid(layout_of(specs[0])), RankEnvironment.read(), device="cpu")
    found = []
    for case, spec in zip(cases, specs, strict=True):
        here = parity._with_grid(context, RankGrid(layout_of(spec)), per_node)
        found.append(_one(here, spec, case))
    shut_down(context)
    return found


def _one(context: Any, spec: Any, case: dict[str, Any]) -> dict[str, Any]:
    from hpctrain.model.init import init_parameters
    from hpctrain.model.transformer import Transformer
    from hpctrain.parallel.expert import Place, cut_experts, expert_group, spread_experts

    dims = spec.model.transformer()
    whole, mine = Transformer(dims), Transformer(dims)
    for model in (whole, mine):
        init_parameters(model, 3)
        model.double()
        weight = model.layers["0"].ffn.router.weight.data
        if case.get("router") == "ties":
            weight.zero_()  # of equal experts the first are chosen
        elif case.get("router") == "last":
            weight.zero_()
            weight[-1, 0], weight[-2, 0] = 3, 2  # x[..., 0] is 1
    place = Place(
        context.coordinate("ep"), context.size("ep"), context.coordinate("etp"), context.size("etp")
    )
    cuts = cut_experts(mine, place, reduced=False)
    spread_experts(mine, expert_group(spec, context, None))
    generator = torch.Generator().manual_seed(5)
    counts = case.get("sequences", [1] * context.world_size)
    x = torch.randn(sum(counts), 5, 8, generator=generator, dtype=torch.float64)
    x[..., 0] = 1
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    first = sum(counts[: context.rank])
    own = slice(first, first + counts[context.rank])
    x_whole, x_mine = x.clone().requires_grad_(), x[own].clone().requires_grad_()
    y_whole = whole.layers["0"].ffn(x_whole)
    y_whole.backward(grad)
    layer, rows = mine.layers["0"].ffn, []
    layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    counter = context.communicators.counter
    counter.take()
    y_mine = layer(x_mine)
    y_mine.backward(grad[own])
    sent = {axis: row["volume"] for axis, row in counter.take().items()}
    worst = {"output": _gap(y_mine, y_whole[own]), "input": _gap(x_mine.grad, x_whole.grad[own])}
    reference = dict(whole.layers["0"].ffn.named_parameters())
    for name, parameter in layer.named_parameters():
        total = parameter.grad.clone()
        expected = reference[name].grad
        cut = cuts.get(f"layers.0.ffn.{name}")
        if cut is None:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total, group=context.communicators.along("edp").group)
            box = [slice(a, a + n) for a, n in zip(cut.offsets, total.shape, strict=True)]
            expected = expected[tuple(box)]
        worst[name] = _gap(total, expected)
    values = [float(value) for value in worst.values()]
    return {
        "worst": math.nan if any(map(math.isnan, values)) else max(values),
        "where": max(worst, key=lambda name: worst[name]),
        "rows": sum(rows),
        "sent": sent,
        "parameters": sum(p.numel() for p in layer.experts.parameters()),
    }


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) if found.numel() else 0.0
