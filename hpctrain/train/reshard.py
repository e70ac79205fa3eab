"""What each rank of a job would read of a checkpoint: boxes, bytes, files; nothing is started.

The boxes come from the code that cuts the model in training, run on the meta device for one
rank after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpctrain.errors import UsageError
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.shards import Box
from hpctrain.layout import ParallelLayout, RankGrid
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.expert import Place, cut_experts
from hpctrain.parallel.pipeline_stages import transformer_stages
from hpctrain.parallel.regions import TensorGroup
from hpctrain.parallel.tensor import cut_transformer
from hpctrain.schedule.job import plan_pipeline
from hpctrain.spec.resolve import layout_of

if TYPE_CHECKING:
    from hpctrain.io.restore import CheckpointReader
    from hpctrain.layout import ParallelLayout
    from hpctrain.parallel.model import Cut
    from hpctrain.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank reads.

    Attributes:
        rank: whose.
        coordinates: its place on each axis.
        tensors: boxes that are not empty.
        bytes: of them.
        extents: pieces of the checkpoint that they touch, ``files`` of how many files.
    """

    rank: int
    coordinates: dict[str, int]
    tensors: int
    bytes: int
    extents: int
    files: int


def shares(reader: CheckpointReader, spec: JobSpec) -> Iterator[Share]:
    """The share of every rank of a job.

    Args:
        reader: of the checkpoint.
        spec: resolved job.

    Raises:
        CheckpointError: the checkpoint does not fit the job's model.
        UsageError: the model is the user's own, whose boxes are not known without its code.
    """
    if spec.model.module is not None:
        raise UsageError("model.module: what ranks read of a model of one's own is not known here")
    layout = layout_of(spec)
    grid = RankGrid(layout)
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    kinds = sorted({n.split("/")[1] for n in reader.tensors() if n.startswith("optimizer/")})
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        tensors = size = extents = 0
        files = set()
        for name, whole, box in _boxes(spec, at, layout):
            wanted = [f"model/{name}", *(f"optimizer/{kind}/{name}" for kind in kinds)]
            for entry in wanted:
                found = reader.manifest.tensors.get(entry)
                if found is not None and not found.shape and whole:
                    tensors, size = tensors + 1, size + raw_dtype(found.torch_dtype).itemsize
                    continue
                dtype = found.torch_dtype if found else "float32"
                seen.setdefault(entry, (whole, dtype))
                if found is None or found.shape != whole or not box.elements:
                    continue
                tensors += 1
                size += box.elements * raw_dtype(dtype).itemsize
                for extent in found.extents:
                    if extent.box.overlap(box) is not None:
                        extents += 1
                        files.add(extent.file)
        yield Share(rank, at, tensors, size, extents, len(files))
    reader.check(seen)


def _boxes(
    spec: JobSpec, at: dict[str, int], layout: ParallelLayout
) -> Iterator[tuple[str, tuple[int, ...], Box]]:
    """Name, global shape and box of every parameter of a rank."""
    shard, place = 1, 0
    if spec.parallel.fsdp:
        shard, place = layout.dp_shard * layout.cp, at["dp_shard"] * layout.cp + at["cp"]
    schedule = plan_pipeline(spec)
    modules: list[torch.nn.Module] = [Transformer(spec.model.transformer(), device="meta")]
    copies: set[str] = set()
    if schedule is not None:
        stages = transformer_stages(spec, schedule, at["pp"])
        modules, copies = list(stages.modules), stages.copies
    for module in modules:
        assert isinstance(module, Transformer)
        cuts: dict[str, Cut] = {}
        if layout.tp > 1:
            group = TensorGroup(None, at["tp"], layout.tp, False)
            cuts = cut_transformer(module, group)
        if layout.tp * layout.cp * layout.ep * layout.etp > 1:
            among = Place(at["ep"], layout.ep, at["etp"], layout.etp)
            cuts |= cut_experts(module, among, reduced=True)
        logical = module.logical_names
        for name, parameter in module.named_parameters():
            name = logical.get(name, name)
            if name in copies:
                continue
            shape = tuple(parameter.shape)
            cut = cuts.get(name)
            offsets = cut.offsets if cut else (0,) * len(shape)
            whole = cut.global_shape if cut else shape
            box = Box(offsets, shape)
            if cut is not None and cut.expert:
                ranks = layout.edp if spec.parallel.fsdp else 1
                yield name, whole, _expert_part(box, at["edp"], ranks)
            else:
                yield name, whole, _rows(box, place, shard)


def _expert_part(box: Box, rank: int, ranks: int) -> Box:
    """FSDP2's share of experts on a mesh of their own: whole experts, or rows of each."""
    experts, rows = box.shape[:2]
    if experts < ranks and rows % ranks == 0:
        count = rows // ranks
        first, *rest = box.offsets
        offsets = (first, rest[0] + rank * count, *rest[1:])
        return Box(offsets, (experts, count, *box.shape[2:]))
    return _rows(box, rank, ranks)


def _rows(box: Box, rank: int, ranks: int) -> Box:
    """FSDP2's share of a box: rows in chunks of equal size, the last ones smaller or empty."""
    if not box.shape:
        return box
    chunk = math.ceil(box.shape[0] / ranks)
    first = min(rank * chunk, box.shape[0])
    count = min(chunk, box.shape[0] - first)
    return Box((box.offsets[0] + first, *box.offsets[1:]), (count, *box.shape[1:]))
