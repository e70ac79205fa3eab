"""What MPI ranks do in the tests of near levels; each function is called by run_ranks.

Two nodes are played by one machine: each has folders of its own, and the ranks are told which
node they are on.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_rank_programs import _comm, fsdp_range, numbers, part, whole

from hpctrain.io.buffers import SaveOptions
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.flush import WriteOptions
from hpctrain.io.parity import ParityTier
from hpctrain.io.partner import PartnerTier
from hpctrain.io.recover import Level, Recovery
from hpctrain.io.restore import Request
from hpctrain.io.saver import Saver
from hpctrain.io.sources import HostSources
from hpctrain.io.tiers import MEMORY, NODE, PARITY, PARTNER, MemoryTier, NodeTier

ROWS, COLUMNS = (40, 30), (8, 12)


def node_of(rank: int, size: int) -> int:
    return rank * 2 // size


def levels_of(root: Path, node: int) -> list[Level]:
    place = root / f"node{node}"
    return [Level(name, place / name / "here") for name in (MEMORY, NODE, PARTNER, PARITY)]


def make_saver(root: Path, comm: Any, files: str = "rank") -> Saver:
    rank, size = comm.rank, comm.size
    node = node_of(rank, size)
    leads = rank == 0 or node_of(rank - 1, size) != node
    memory, local, partner, _ = (level.root for level in levels_of(root, node))
    options = WriteOptions()
    return Saver(
        root / "store",
        comm,
        options=SaveOptions(files=files, write=options),
        node=node,
        tiers=[
            MemoryTier(memory, rank, leads=leads),
            NodeTier(local, rank, leads=leads, keep=1, options=options),
            PartnerTier(partner, comm.Dup(), node, keep=1),
        ],
    )


def save_in_sets(root: str, size: int, steps: list[int], files: str) -> list[Any]:
    """A node a rank; parity over sets of ``size`` of them. Leaves as a killed process would."""
    comm = _comm()
    levels = {level.name: level.root for level in levels_of(Path(root), comm.rank)}
    options = WriteOptions()
    parity = ParityTier(
        levels[PARITY], comm.Dup(), comm.rank, size=size, leads=True, keep=1, options=options
    )
    saver = Saver(
        Path(root) / "store", comm, options=SaveOptions(files), node=comm.rank, tiers=[parity]
    )
    told = []
    for step in steps:
        saver.save(
            step,
            state(comm.rank, comm.size, step),
            scalars={"tokens": step * 100},
            per_rank=functools.partial(dict, generator=np.full(3, 10 * step + comm.rank)),
            tiers=[PARITY],
        )
        told += [[o.step, list(o.tiers), list(o.warnings), str(o.error)] for o in saver.drain()]
    saver.close(forget=False)
    return told


def lose_nodes(root: str, size: int, files: str, losses: list[list[int]]) -> dict[str, Any]:
    """Save in sets; for each loss restore without those nodes; at last with a bad parity."""
    comm = _comm()
    place = Path(root)
    told = save_in_sets(root, size, [1, 2], files)
    found = []

    def move(nodes: list[int], source: str, target: str) -> None:
        comm.Barrier()
        if comm.rank == 0:
            for node in nodes:
                shutil.rmtree(place / f"{target}{node}", ignore_errors=True)
                (place / f"{source}{node}").rename(place / f"{target}{node}")
            # What was worked out would be found the next time.
            for rebuilt in place.glob("node*/parity/here/rebuilt-*"):
                shutil.rmtree(rebuilt)
        comm.Barrier()

    for lost in losses:
        move(lost, "node", "away")
        found.append(restore_levels(root, own_nodes=True))
        move(lost, "away", "node")
    if comm.rank == 0:
        (parity,) = place.glob("node3/parity/here/*/parity-*")
        data = bytearray(parity.read_bytes())
        data[100] ^= 1
        parity.write_bytes(data)
    move([4], "node", "away")
    damaged = restore_levels(root, own_nodes=True)
    return {"told": told, "found": found, "damaged": damaged}


def state(rank: int, size: int, step: int) -> HostSources:
    shards = [
        part("model/rows", numbers(list(ROWS), step), 0, *fsdp_range(ROWS[0], rank, size)),
        part("model/columns", numbers(list(COLUMNS), -step), 1, *fsdp_range(12, rank, size)),
    ]
    if rank == size - 1:
        shards.append(whole("optimizer/step/rows", np.array(float(step), np.float32)))
    return HostSources(shards)


def save_levels(root: str, saves: list[list[Any]], files: str = "rank") -> list[Any]:
    """Save as told, [step, levels]; then leave as a killed process would."""
    comm = _comm()
    saver = make_saver(Path(root), comm, files)
    told = []
    for step, tiers in saves:
        generator = np.full(3, 10 * step + comm.rank)
        saver.save(
            step,
            state(comm.rank, comm.size, step),
            scalars={"tokens": step * 100},
            per_rank=functools.partial(dict, generator=generator),
            tiers=tiers,
        )
        told += [
            [o.step, sorted(o.tiers), str(o.error or ""), list(o.warnings)] for o in saver.drain()
        ]
    saver.close(forget=False)
    return told


def restore_levels(root: str, wanted: int = -1, own_nodes: bool = False) -> dict[str, Any]:
    """Find the best one, read this rank's columns of everything, and say whether it is right."""
    comm = _comm()
    node = comm.rank if own_nodes else node_of(comm.rank, comm.size)
    store = CheckpointStore(Path(root) / "store", comm)
    recovery = Recovery(store, levels_of(Path(root), node), node)
    choice = recovery.find(wanted)
    if choice is None:
        return {"step": None, "skipped": recovery.skipped}
    step = choice.step
    start, stop = fsdp_range(30, comm.rank, comm.size)
    rows = Request("model/rows", (0, start), np.empty((40, stop - start), np.float32))
    start, stop = fsdp_range(8, comm.rank, comm.size)
    columns = Request("model/columns", (start, 0), np.empty((stop - start, 12), np.float32))
    count = Request("optimizer/step/rows", (), np.empty((), np.float32))
    with recovery.open(choice) as reader:
        same_world = reader.world_size == comm.size
        generators = reader.rank_requests(comm.rank) if same_world else []
        requests = [rows, columns, count, *generators]
        reader.require(requests)
        reader.read_all(requests)
        comm.Barrier()
        scalars = dict(reader.scalars)
    start, stop = fsdp_range(30, comm.rank, comm.size)
    right = np.array_equal(rows.out, numbers(list(ROWS), step)[:, start:stop])
    start, stop = fsdp_range(8, comm.rank, comm.size)
    right &= np.array_equal(columns.out, numbers(list(COLUMNS), -step)[start:stop])
    right &= float(count.out) == step and scalars == {"tokens": step * 100, "step": step}
    right &= all(np.all(r.out == 10 * step + comm.rank) for r in generators)
    return {
        "step": step,
        "source": choice.source,
        "right": bool(right),
        "skipped": recovery.skipped,
    }


def lose(root: Path, *names: str) -> None:
    """Remove levels of nodes: ``node1/memory``, or all of ``node1``."""
    for name in names:
        shutil.rmtree(root / name)


def killed_in_the_middle(root: str, tier: str) -> None:
    """Whole at step 1; at step 2 every rank ends before its share is done at ``tier``."""
    import os

    comm = _comm()
    saver = make_saver(Path(root), comm)
    sources = state(comm.rank, comm.size, 1)
    saver.save(1, sources, scalars={"tokens": 100}, per_rank=dict, tiers=[MEMORY, NODE, PARTNER])
    saver.drain()
    sources = state(comm.rank, comm.size, 2)
    if comm.rank % 2:
        sources.check = lambda: os._exit(0)  # type: ignore[method-assign]
    saver.save(2, sources, scalars={"tokens": 200}, per_rank=dict, tiers=[tier])
    comm.Barrier()
    os._exit(0)
