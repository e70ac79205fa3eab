"""Checkpoints to and from torch's distributed checkpoints (DCP), as programs outside know them.

Keys there are ``model.<parameter>`` and ``optimizer.state.<parameter>.<state>``; scalars go as
the bytes of their JSON in a tensor, for anything that is not a tensor DCP pickles, and nothing
here reads pickles.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.checkpoint import SaveReport
from hpctrain.io.exchange import save_whole, whole
from hpctrain.io.restore import CheckpointReader
from hpctrain.io.shards import TensorShard
from hpctrain.train.sources import as_numpy, dtype_name, from_numpy

_SCALARS = "hpctrain.scalars"


def export_dcp(reader: CheckpointReader, target: Path, *, optimizer: bool = True) -> None:
    """Write a DCP directory; the whole state passes through memory.

    Args:
        reader: of the checkpoint.
        target: a directory that does not exist yet.
        optimizer: also its states.

    Raises:
        CheckpointError: ``target`` is there already.
    """
    from torch.distributed.checkpoint import state_dict_saver

    if target.exists():
        raise CheckpointError(f"{target}: is there already; name a new directory")
    state: dict[str, torch.Tensor] = {}
    for name, (_, dtype) in reader.tensors().items():
        if optimizer or not name.startswith("optimizer/"):
            state[_outer(name)] = from_numpy(whole(reader, name), getattr(torch, dtype))
    text = np.frombuffer(json.dumps(reader.scalars).encode(), np.uint8).copy()
    state[_SCALARS] = torch.from_numpy(text)
    with _alone():
        state_dict_saver.save(state, checkpoint_id=target, no_dist=True)


def import_dcp(
    source: Path, root: Path, *, step: int | None = None
) -> tuple[SaveReport, list[str]]:
    """A checkpoint from a DCP directory, of ours or of any program.

    Args:
        source: the directory.
        root: directory of checkpoints to add it to.
        step: number to give it; its own, or 0.

    Returns:
        The checkpoint, and the keys that were left out because they are not tensors.

    Raises:
        CheckpointError: it is no such directory, or holds no tensor.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(source).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{source}: is no DCP directory: {error}") from error
    state: dict[str, Any] = {}
    left_out = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            left_out.append(key)
    if not state:
        raise CheckpointError(f"{source}: holds no tensor")
    with _alone():
        state_dict_loader.load(state, checkpoint_id=source, no_dist=True)
    text = state.pop(_SCALARS, None)
    scalars: dict[str, Any] = {"tokens": 0, "samples": 0, "imported_from": source.name}
    if text is not None:
        scalars = json.loads(bytes(text.tolist()))
    shards = [
        TensorShard(
            _inner(key), tuple(t.shape), (0,) * t.dim(), as_numpy(t.contiguous()), dtype_name(t)
        )
        for key, t in state.items()
    ]
    number = int(scalars.get("step", 0)) if step is None else step
    return save_whole(root, number, shards, scalars), sorted(left_out)


def _outer(name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        state, _, parameter = rest.partition("/")
        return f"optimizer.state.{parameter}.{state}"
    return f"model.{rest}"


def _inner(key: str) -> str:
    for prefix in ("optimizer.state.", "optim.state."):
        if key.startswith(prefix):
            parameter, _, state = key.removeprefix(prefix).rpartition(".")
            return f"optimizer/{state}/{parameter}"
    return f"model/{key.removeprefix('model.')}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """DCP warns that it runs in one process, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
