"""What the ranks of the tests in this folder do; each function runs on every rank."""

from __future__ import annotations

import os
import time
from typing import Any


def start(**grid: Any) -> Any:
    """A bootstrapped rank context; sizes of axes, ``order`` and ``permutation`` as in RankGrid."""
    import torch
    from mpi4py import MPI

    from hpctrain.runtime.bootstrap import bootstrap
    from hpctrain.runtime.environment import RankEnvironment

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    return bootstrap(comm, grid_of(comm.size, **grid), RankEnvironment.read(), device="cpu")


def grid_of(world: int, **grid: Any) -> Any:
    from hpctrain.layout import DEFAULT_ORDER, RankGrid

    order, permutation = grid.pop("order", DEFAULT_ORDER), grid.pop("permutation", None)
    return RankGrid.from_sizes(grid or {"dp_shard": world}, order, permutation)


def pretend(context: Any, nodes: list[int], **grid: Any) -> Any:
    """Communicators as if the ranks were on the given nodes.

    On one machine all ranks share memory and hence a node. Which groups are made is decided by
    node numbers alone, so pretended nodes run the same code as real ones.
    """
    from hpctrain.runtime.communicators import Communicators

    counter = context.communicators.counter
    ranks = grid_of(context.world_size, **grid)
    return Communicators(context.comm, ranks, nodes, context.device, counter)


def stop(context: Any) -> None:
    from hpctrain.runtime.bootstrap import shut_down

    shut_down(context)


def exact_values(length: int, dtype: Any, rank: int) -> Any:
    """Small whole numbers whose sums over a few ranks are exact in every dtype."""
    import torch

    values = (torch.arange(length) * 7 + rank * 3) % 5 - 2
    return values.to(dtype)


def compare_shapes(context: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case every hierarchical collective against closed forms and the flat one.

    A case has ``nodes`` (of each rank), ``axis`` and the sizes of axes. Its result holds what is
    wrong (nothing should be) and how many comparisons there were.
    """
    results = []
    for case in cases:
        grid = {key: value for key, value in case.items() if key not in ("nodes", "axis")}
        communicators = pretend(context, case["nodes"], **grid)
        group = communicators.prepare(case.get("axis", "dp"))
        results.append(_compare(group))
        communicators.close_threads()
    return results


def _compare(group: Any) -> dict[str, Any]:
    import torch

    from hpctrain.runtime import collectives as c

    n, place = group.size, group.place
    wrong: list[str] = []
    done = 0

    def check(what: str, found: Any, right: Any) -> None:
        nonlocal done
        done += 1
        if not torch.equal(found, right):
            wrong.append(f"{what}: {found.tolist()[:8]} is not {right.tolist()[:8]}")

    def of(rank: int, length: int, dtype: Any) -> Any:
        return exact_values(length, dtype, rank)

    if group.levels is None:
        refused = _refusal(lambda: c.all_reduce(group, torch.ones(3), algorithm="hierarchical"))
        return {"levels": False, "refused": refused, "wrong": wrong, "done": done}
    even = group.levels.even
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    for dtype in types:
        for length in (0, 1, 5, 24, 1003):
            parts = [of(rank, length, dtype) for rank in group.ranks]
            stack = torch.stack(parts)
            for op, right in (
                ("sum", stack.sum(0, dtype=dtype)),
                ("max", stack.amax(0)),
                ("min", stack.amin(0)),
            ):
                tensor = parts[place].clone()
                c.all_reduce(group, tensor, op, algorithm="hierarchical")
                check(f"all_reduce {op} {dtype} {length}", tensor, right)
            for root in (0, n - 1, n // 2):
                tensor = parts[place].clone()
                c.broadcast(group, tensor, root, algorithm="hierarchical")
                check(f"broadcast {root} {dtype} {length}", tensor, parts[root])
                tensor = parts[place].clone()
                c.reduce(group, tensor, root, algorithm="hierarchical")
                right = stack.sum(0, dtype=dtype) if place == root else parts[place]
                check(f"reduce {root} {dtype} {length}", tensor, right)
            if not even:
                continue
            whole = [of(rank, n * length, dtype) for rank in group.ranks]
            output = torch.empty(length, dtype=dtype)
            c.reduce_scatter(group, output, whole[place], algorithm="hierarchical")
            right = torch.stack(whole).sum(0, dtype=dtype).view(n, length)[place]
            check(f"reduce_scatter {dtype} {length}", output, right)
            output = torch.empty(n * length, dtype=dtype)
            c.all_gather(group, output, parts[place], algorithm="hierarchical")
            check(f"all_gather {dtype} {length}", output, torch.cat(parts))
            output = torch.empty(n * length, dtype=dtype)
            c.all_to_all(group, output, whole[place], algorithm="hierarchical")
            right = torch.cat([one.view(n, length)[place] for one in whole])
            check(f"all_to_all {dtype} {length}", output, right)
    _compare_with_flat(group, check, even)
    _compare_packed(group, check, even)
    refused = (
        ""
        if even
        else _refusal(
            lambda: c.all_gather(group, torch.empty(n), torch.empty(1), algorithm="hierarchical")
        )
    )
    return {
        "levels": True,
        "counts": list(group.levels.counts),
        "wrong": wrong,
        "done": done,
        "refused": refused,
        "ranks": list(group.ranks),
    }


def _refusal(call: Any) -> str:
    from hpctrain.errors import ImpossibleError

    try:
        call()
    except ImpossibleError as error:
        return error.message
    return ""


def _compare_packed(group: Any, check: Any, even: bool) -> None:
    """Packed messages: the bits of hierarchical sums over two nodes, near them over more."""
    import torch

    from hpctrain.runtime import collectives as c
    from hpctrain.runtime.packing import DTYPES

    if not even:
        refused = _refusal(lambda: c.all_reduce(group, torch.ones(9), algorithm="packed"))
        check("uneven", torch.tensor("on every node" in refused), torch.tensor(True))
        return
    refused = _refusal(lambda: c.all_reduce(group, torch.ones(9).long(), algorithm="packed"))
    check("integers", torch.tensor("takes floats" in refused), torch.tensor(True))
    generator = torch.Generator().manual_seed(group.ranks[group.place])
    table = [c.Crossover("all_reduce", "gloo", packed=True)]
    for dtype in DTYPES:
        # From noise of no pattern at all, which does not shrink, to gradients and to one number.
        noise = torch.randint(0, 256, (4 * 40_003,), dtype=torch.uint8, generator=generator)
        for mine in (
            torch.randn(700_001, generator=generator).to(dtype),
            noise.view(dtype).nan_to_num(1.0, 2.0, 3.0).clamp(-1e4, 1e4),
            torch.full((1003,), 0.0).to(dtype),
            torch.ones(1, dtype=dtype),
        ):
            levelled, packed = mine.clone(), mine.clone()
            c.all_reduce(group, levelled, algorithm="hierarchical")
            c.all_reduce(group, packed, algorithm="packed")
            if group.levels.nodes == 2:
                check(f"packed {dtype} {len(mine)}", packed, levelled)
            else:
                # Other orders of rounding, relative to what was added up and may cancel.
                slack = torch.finfo(dtype).eps * 3 * max(1.0, float(mine.abs().max()))
                close = (packed.float() - levelled.float()).abs() <= slack * group.size
                check(f"packed {dtype} {len(mine)}", close, close | True)
            by_table = mine.clone()
            c.all_reduce_async(group, by_table, table=table).wait()
            check(f"packed by table {dtype} {len(mine)}", by_table, packed)


def _compare_with_flat(group: Any, check: Any, even: bool) -> None:
    """Random numbers: the same on all ranks to the bit, near the flat result, several pieces."""
    import torch
    import torch.distributed as dist

    from hpctrain.runtime import collectives as c
    from hpctrain.runtime import hierarchical

    generator = torch.Generator().manual_seed(group.ranks[group.place])
    length = 2 * 2**20 // 8 + 3  # two pieces and an odd end
    mine = torch.randn(length, dtype=torch.float64, generator=generator)
    levelled, flat = mine.clone(), mine.clone()
    c.all_reduce(group, levelled, algorithm="hierarchical")
    c.all_reduce(group, flat, algorithm="flat")
    check("all_reduce near flat", (levelled - flat).abs() < 1e-14 * group.size, flat == flat)
    everyone = [torch.empty_like(levelled) for _ in range(group.size)]
    dist.all_gather(everyone, levelled, group=group.group)
    for other in everyone:
        check("all ranks alike", other, levelled)
    levelled = mine.clone()
    future = c.all_reduce_async(group, levelled, "avg", algorithm="hierarchical")
    second = torch.ones(7)
    c.all_reduce(group, second, algorithm="hierarchical")  # after the one under way
    future.wait()
    check("async avg", (levelled * group.size - flat).abs() < 1e-13 * group.size, flat == flat)
    check("in turn", second, torch.full((7,), float(group.size)))
    future = c.all_reduce_async(group, mine.clone(), algorithm="flat")
    check("async flat", future.wait(), flat)
    if group.levels.counts == (3, 3):
        # In bf16 256 + 1 + 1 is 256; in fp32, rounded once, it is 258.
        tensor = torch.tensor([1.0 if group.levels.local else 256.0], dtype=torch.bfloat16)
        c.all_reduce(group, tensor, algorithm="hierarchical")
        check("rounded once a node", tensor, torch.tensor([516.0], dtype=torch.bfloat16))
    # Not in order in memory: the transpose of a matrix.
    matrix = torch.arange(12.0).view(3, 4).t()
    c.all_reduce(group, matrix, algorithm="hierarchical")
    check("transposed", matrix, torch.arange(12.0).view(3, 4).t() * group.size)
    if even:
        whole = torch.randn(group.size * 70_001, dtype=torch.float64, generator=generator)
        output = torch.empty(70_001, dtype=torch.float64)
        reference = output.clone()
        hierarchical.reduce_scatter(group.levels, output, whole, "sum", 5)
        c.reduce_scatter(group, reference, whole, algorithm="flat")
        near = (output - reference).abs() < 1e-14 * group.size
        check("reduce_scatter in pieces", near, reference == reference)
        gathered, right = torch.empty_like(whole), torch.empty_like(whole)
        hierarchical.all_gather(group.levels, gathered, output, 5)
        c.all_gather(group, right, output, algorithm="flat")
        check("all_gather in pieces", gathered, right)
        hierarchical.all_to_all(group.levels, gathered, whole, 5)
        c.all_to_all(group, right, whole, algorithm="flat")
        check("all_to_all in pieces", gathered, right)


# ---- groups, counting, gradients ----


def on_eight_ranks(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """All that the tests ask of eight ranks, in one start of them."""
    context = start()
    found = {"groups": describe_groups(context), "shapes": compare_shapes(context, cases)}
    stop(context)
    return found


def on_six_ranks(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The shapes of groups that six ranks can have."""
    context = start()
    found = compare_shapes(context, cases)
    stop(context)
    return found


def on_four_ranks() -> dict[str, Any]:
    """All that the tests ask of four ranks."""
    context = start()
    found = {
        "moved": moved_ranks(context),
        "experts": expert_groups(context),
        "gradients": gradients_in_levels(context),
        "threads": threads_of_grids(context),
    }
    stop(context)
    return found


def describe_groups(context: Any) -> dict[str, Any]:
    """Groups of a job of eight ranks on two pretended nodes, as torch and MPI have them."""
    import torch.distributed as dist

    made = pretend(context, [0, 0, 0, 0, 1, 1, 1, 1], pp=2, dp_replicate=2, tp=2)
    found: dict[str, Any] = {"rank": context.rank}
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        one = made.along(axis)
        ours = list(one.ranks)
        found[axis] = {
            "ranks": ours,
            "torch": dist.get_process_group_ranks(one.group),
            "place": dist.get_rank(one.group),
            "mesh": made.mesh[axis].mesh.tolist(),
            "mpi": one.mpi.allgather(context.rank),
            "mpi_place": one.mpi.rank,
        }
    found["made"] = [cost.name for cost in made.costs if not cost.name.startswith("mpi:")]
    joint = made.along("dp", "tp")
    found["dp_tp"] = {"name": joint.name, "ranks": list(joint.ranks)}
    found["dp is dp_replicate"] = made.along("dp") is made.along("dp_replicate")
    found["node"] = list(made.node.ranks)
    found["rail"] = list(made.rail.ranks)
    found["leaders"] = None if made.leaders is None else list(made.leaders.ranks)
    found["world"] = list(made.world.ranks)
    summary = made.summary()
    found["cost"] = {key: summary[key] for key in ("groups", "seconds", "rss_bytes")}
    found["each"] = len(summary["each"])
    return found


def moved_ranks(context: Any) -> dict[str, Any]:
    """A tensor sharded over ranks that a placement turned around, and put together again."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    order = [3, 0, 2, 1]
    made = pretend(context, [0] * 4, permutation=order)
    place = made.grid.coordinates(context.rank)["dp_shard"]
    mine = torch.full((2,), float(place))
    ours = DTensor.from_local(mine, made.mesh["dp_shard"], [Shard(0)]).full_tensor()
    plain = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("dp_shard",))
    theirs = DTensor.from_local(mine, plain, [Shard(0)]).full_tensor()
    return {"place": place, "ours": ours.tolist(), "theirs": theirs.tolist()}


def expert_groups(context: Any) -> dict[str, Any]:
    made = pretend(context, [0] * 4, dp_shard=4, ep=2)
    mesh = made.expert_mesh
    dense, ep, edp = made.along("dp_shard"), made.along("ep"), made.along("edp")
    return {
        "names": list(mesh.mesh_dim_names),
        "ep": mesh["ep"].mesh.tolist(),
        "edp": mesh["edp"].mesh.tolist(),
        "ranks": [list(ep.ranks), list(edp.ranks)],
        "own": len({g.group.group_name for g in (dense, ep, edp)}) == 3,
    }


def threads_of_grids(context: Any) -> list[int]:
    """Threads of this process after each of four grids that were laid and given back."""
    import gc

    import torch

    found = []
    for _ in range(4):
        made = pretend(context, [0, 0, 1, 1], dp_shard=2, tp=2, ep=2)
        for axes in (("tp",), ("ep",), ("dp_shard",), ("dp_shard", "tp")):
            torch.distributed.all_reduce(torch.ones(2), group=made.along(*axes).group)
        assert made.along("tp").mpi.allreduce(1) == 2
        made.free()
        del made
        gc.collect()
        found.append(len(os.listdir("/proc/self/task")))
    return found


def count_operations() -> dict[str, Any]:
    """Two ranks; what each way of communicating adds to the counters."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.nn.parallel import DistributedDataParallel

    context = start(dp_shard=2)
    counter, mesh = context.communicators.counter, context.mesh["dp_shard"]
    group, rank = mesh.get_group(), context.rank
    found: dict[str, Any] = {}
    counter.take()

    def note(what: str) -> None:
        time.sleep(0.1)  # gloo's thread notes the end of an operation after the waiter is awake
        operations = counter.operations()
        found[what] = {
            f"{axis}.{name}": [tally.calls, tally.bytes, tally.volume]
            for axis, row in operations.items()
            for name, tally in row.items()
        }
        found[f"{what} seconds"] = {axis: row["seconds"] for axis, row in counter.take().items()}

    ten = torch.ones(10)
    dist.all_reduce(ten, group=group)
    note("all_reduce")
    functional.wait_tensor(functional.all_reduce(ten, "sum", group))
    note("functional")
    with torch.inference_mode():
        dist.broadcast(torch.ones(10), 0, group=group)
    note("inference")
    DTensor.from_local(ten, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    DTensor.from_local(ten, mesh, [Shard(0)]).full_tensor()
    note("dtensor")
    dist.all_to_all_single(
        torch.empty(4 if rank else 8), torch.ones(6), [2, 2] if rank else [4, 4],
        [4, 2], group=group,
    )  # fmt: skip
    note("uneven all_to_all")
    if rank == 0:
        dist.send(ten, 1, group=group)
    else:
        dist.recv(ten, 0, group=group)
    note("message")
    linear = torch.nn.Linear(30, 20)
    model = DistributedDataParallel(linear, process_group=group)
    counter.take()  # DDP compares and broadcasts parameters when it is made
    with model.no_sync():
        model(torch.ones(2, 30)).sum().backward()
    note("no_sync")
    model(torch.ones(2, 30)).sum().backward()
    note("ddp")
    units = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(units, mesh=mesh)
    counter.take()
    units(torch.ones(2, 30)).sum().backward()
    note("fsdp")
    context.comm.Barrier()
    context.comm.bcast("words" if rank == 0 else None)
    import numpy as np

    context.comm.Allreduce(np.zeros(5), np.zeros(5))
    context.comm.Dup().Bcast(np.zeros(3))
    note("mpi")
    began = time.perf_counter()
    works = [dist.all_reduce(torch.ones(2**18), group=group, async_op=True) for _ in range(8)]
    for work in works:
        work.wait()
    elapsed = time.perf_counter() - began
    note("at once")
    found["at once elapsed"] = elapsed
    one = torch.ones(1)
    for _ in range(9):
        works = [dist.all_reduce(one, group=group, async_op=True) for _ in range(1000)]
        works[-1].wait()
    for work in works:
        work.wait()
    found["many notes"] = len(counter._notes)
    note("many")
    own = dist.new_group([0, 1])
    dist.all_reduce(ten, group=own)
    note("group of a user")
    context.communicators.counter.close()
    dist.all_reduce(ten, group=group)
    note("closed")
    stop(context)
    return found


def gradients_in_levels(context: Any) -> dict[str, Any]:
    """DDP and FSDP2 over two pretended nodes of two ranks, flat and in two levels."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hpctrain.runtime.collectives import Crossover
    from hpctrain.runtime.gradients import replicate_in_levels, shard_in_levels

    found: dict[str, Any] = {}

    def model() -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64, dtype=torch.float64) for _ in range(4)]
        return torch.nn.Sequential(*layers)

    def backward(net: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(context.rank)
        data = torch.randn(8, 64, dtype=torch.float64, generator=generator)
        net(data).square().mean().backward()
        return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
                for p in net.parameters()]  # fmt: skip

    def worst(a: list[Any], b: list[Any]) -> float:
        return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))

    made = pretend(context, [0, 0, 1, 1], dp_replicate=4)
    group, mesh = made.prepare("dp"), made.mesh["dp_replicate"]
    plain = DistributedDataParallel(model(), process_group=group.group)
    reference = backward(plain)
    levelled = DistributedDataParallel(model(), process_group=group.group)
    found["ddp changed"] = replicate_in_levels(levelled, group, algorithm="hierarchical")
    made.counter.take()
    for _ in range(3):  # DDP rebuilds its buckets after the first backward
        levelled.zero_grad()
        gradients = backward(levelled)
    found["ddp"] = worst(gradients, reference)
    found["size"] = max(float(one.abs().max()) for one in reference)
    found["ddp counted"] = {
        f"{axis}.{name}": [tally.calls, tally.bytes]
        for axis, row in made.counter.operations().items()
        for name, tally in row.items()
    }
    small = DistributedDataParallel(model(), process_group=group.group)
    table = [Crossover("all_reduce", "gloo", at_least=2**30)]
    found["ddp small changed"] = replicate_in_levels(small, group, table=table)
    made.counter.take()
    found["ddp small"] = worst(backward(small), reference)
    found["ddp small counted"] = sorted(made.counter.take())
    found["ddp flat changed"] = replicate_in_levels(small, group, algorithm="flat")
    made.close_threads()

    made = pretend(context, [0, 0, 1, 1], dp_shard=4)
    group, mesh = made.prepare("dp"), made.mesh["dp_shard"]
    net = model()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    found["fsdp changed"] = shard_in_levels(net, group, algorithm="hierarchical")
    made.counter.take()
    found["fsdp"] = worst(backward(net), reference)
    found["fsdp counted"] = sorted(made.counter.take())
    made.close_threads()
    return found


def measure_two_hosts() -> dict[str, Any]:
    """Links between real hosts, and collectives over them, flat and in two levels."""
    import statistics

    import torch

    from hpctrain.runtime import bootstrap as module
    from hpctrain.runtime import collectives, measure

    found: dict[str, Any] = {"wrong": [], "seconds": {}}
    context = start()
    group = context.communicators.prepare("dp")
    assert group.levels is not None, "the ranks are on two hosts"
    size = 2**20
    whole, part = torch.ones(size), torch.ones(size // 4)
    right = {"all_reduce": whole * 4, "reduce_scatter": part * 4}
    for name in right:
        times: dict[str, list[float]] = {"flat": [], "hierarchical": []}
        for _ in range(4):
            for algorithm, seconds in times.items():
                source, output = whole.clone(), torch.zeros_like(part)
                arguments = (source,) if name == "all_reduce" else (output, source)
                context.comm.Barrier()
                began = time.perf_counter()
                getattr(collectives, name)(group, *arguments, algorithm=algorithm)
                seconds.append(time.perf_counter() - began)
                if not torch.equal(arguments[0], right[name]):
                    found["wrong"].append(f"{name} {algorithm}")
        found["seconds"][name] = {
            algorithm: statistics.median(seconds[1:]) for algorithm, seconds in times.items()
        }
    # The program of `topo --measure`, but for starting and ending the ranks once more.
    keep = (module.start_mpi, module.bootstrap, module.shut_down)
    module.start_mpi = lambda: context.comm
    module.bootstrap = lambda *_: context
    module.shut_down = lambda _: None
    request = {"machine": "local", "sizes": {"dp_shard": 4}, "order": context.grid.order,
               "permutation": None, "ranks_per_node": 2}  # fmt: skip
    found["answer"] = measure.run(request)
    module.start_mpi, module.bootstrap, module.shut_down = keep
    stop(context)
    return found
