"""Checkpoints to and from safetensors, in our names or in Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io import huggingface
from hpctrain.io.checkpoint import CheckpointStore, SaveReport
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.dtypes import narrow, widen
from hpctrain.io.plan import RANK_STATE
from hpctrain.io.restore import CheckpointReader
from hpctrain.io.safefile import Entry, SafeReader, write_safetensors
from hpctrain.io.shards import TensorShard

_SCALARS = "hpctrain_scalars"

LARGEST = 5_000_000_000


def whole(reader: CheckpointReader, name: str) -> np.ndarray:
    """All of a tensor."""
    shape = reader.manifest.tensors[name].shape
    return reader.read(name, (0,) * len(shape), shape)


def export_safetensors(
    reader: CheckpointReader, target: Path, *, optimizer: bool = True, largest: int = LARGEST
) -> list[Path]:
    """Everything under our names; scalars and rank states with it, so that nothing is lost.

    Args:
        reader: of the checkpoint.
        target: directory.
        optimizer: also its states.
        largest: bytes a file at most.
    """
    names = [
        name for name in reader.manifest.tensors if optimizer or not name.startswith("optimizer/")
    ]
    metadata = {
        "format": "pt",
        _SCALARS: json.dumps(reader.scalars),
        "hpctrain_world_size": str(reader.world_size),
    }
    return write_safetensors(
        target, (_entry(reader, name, name) for name in names), metadata, largest
    )


def export_huggingface(
    reader: CheckpointReader, target: Path, *, torch_dtype: str = "float32", largest: int = LARGEST
) -> list[Path]:
    """Weights and ``config.json`` as ``transformers`` loads them.

    Args:
        reader: of the checkpoint of a dense GPT-2 or Llama.
        target: directory.
        torch_dtype: float32, or bfloat16 or float16, to which weights are rounded.
        largest: bytes a file at most.

    Raises:
        CheckpointError: the model has no such layout.
    """
    model = _model_of(reader)
    entries = []
    for rule in huggingface.rules(model):
        shape = _shape_of(reader, rule)
        entries.append(Entry(rule.name, shape, torch_dtype, _loader(reader, rule, torch_dtype)))
    paths = write_safetensors(target, entries, {"format": "pt"}, largest)
    config = huggingface.to_config(model, torch_dtype)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return paths


def export_hdf5(reader: CheckpointReader, target: Path, *, optimizer: bool = True) -> SaveReport:
    """A checkpoint of one file in which every tensor is a plain data set, in a directory of
    checkpoints; the whole state passes through memory."""
    shards = [
        TensorShard(name, shape, (0,) * len(shape), whole(reader, name), dtype)
        for name, (shape, dtype) in reader.tensors().items()
        if optimizer or not name.startswith("optimizer/")
    ]
    per_rank = reader.rank_state(0) if reader.world_size == 1 else None
    return save_whole(target, reader.step, shards, reader.scalars, per_rank)


def _loader(reader: CheckpointReader, rule: huggingface.Rule, torch_dtype: str) -> Any:
    def load(name: str) -> np.ndarray:
        key = f"model/{name}"
        found = reader.manifest.tensors[key].torch_dtype
        array = whole(reader, key)
        return array if found == torch_dtype else narrow(widen(array, found), torch_dtype)

    return lambda: rule.export(load)


def _shape_of(reader: CheckpointReader, rule: huggingface.Rule) -> tuple[int, ...]:
    shapes = []
    for name in rule.ours:
        entry = reader.manifest.tensors.get(f"model/{name}")
        if entry is None:
            raise CheckpointError(f"{reader.path}: there is no tensor model/{name}")
        shapes.append(entry.shape)
    rows = sum(shape[0] for shape in shapes)
    whole_shape = (rows, *shapes[0][1:])
    return tuple(reversed(whole_shape)) if rule.transposed else whole_shape


def _model_of(reader: CheckpointReader) -> Mapping[str, Any]:
    model = reader.scalars.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{reader.path}: does not say what model it is of")
    return model


def _entry(reader: CheckpointReader, name: str, as_name: str) -> Entry:
    found = reader.manifest.tensors[name]
    return Entry(as_name, found.shape, found.torch_dtype, lambda: whole(reader, name))


def import_safetensors(source: Path, root: Path, *, step: int | None = None) -> SaveReport:
    """A checkpoint from safetensors: what :func:`export_safetensors` wrote, or Hugging Face's.

    Hugging Face's have weights alone: training starts from them at step 0 with fresh optimizer
    states. Weights become float32, which holds every bfloat16 and float16 exactly.

    Args:
        source: file or directory.
        root: directory of checkpoints to add it to.
        step: number to give it; its own, or 0.

    Raises:
        CheckpointError: it is neither.
    """
    reader = SafeReader(source)
    if _SCALARS in reader.metadata:
        return _import_own(reader, root, step)
    config = source / "config.json" if source.is_dir() else source.with_name("config.json")
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{config}: cannot be read: {error}",
            hint="Hugging Face's layout needs it beside the weights",
        ) from error
    model = huggingface.from_config(found)
    shards = [
        TensorShard(f"model/{name}", array.shape, (0,) * array.ndim, array, "float32")
        for name, array in _take_all(reader, model)
    ]
    scalars = {"tokens": 0, "samples": 0, "model": model, "imported_from": source.name}
    return save_whole(root, step or 0, shards, scalars)


def _take_all(reader: SafeReader, model: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    known = set(reader.names())
    # The hub's own GPT-2 files leave the module's name out.
    bare = "wte.weight" in known
    used = set()
    for rule in huggingface.rules(model):
        name = rule.name.removeprefix("transformer.") if bare else rule.name
        used.add(name)
        if name not in known:
            raise CheckpointError(f"{reader.path}: there is no tensor {name!r}")
        array = widen(reader.read(name), reader.form(name)[1])
        for ours, part in rule.take(array):
            yield ours, np.ascontiguousarray(part, dtype=np.float32)
    extra = sorted(name for name in known - used if not _derived(name))
    if extra:
        raise CheckpointError(
            f"{reader.path}: holds {', '.join(extra[:3])}, which our transformer has not"
        )


def _derived(name: str) -> bool:
    """Tensors of old files that follow from others: causal masks, frequencies, tied heads."""
    return name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")) or name in {
        "lm_head.weight",
        "transformer.lm_head.weight",
    }


def _import_own(reader: SafeReader, root: Path, step: int | None) -> SaveReport:
    scalars = json.loads(reader.metadata[_SCALARS])
    shards = []
    per_rank: dict[str, np.ndarray] = {}
    for name in reader.names():
        shape, dtype = reader.form(name)
        if name.startswith(f"{RANK_STATE}/"):
            per_rank[name] = reader.read(name)
            continue
        shards.append(TensorShard(name, shape, (0,) * len(shape), reader.read(name), dtype))
    number = scalars["step"] if step is None else step
    world_size = int(reader.metadata["hpctrain_world_size"])
    # Generators belong to ranks; of one rank they can be kept, of several they go with them.
    kept = {
        name.removeprefix(f"{RANK_STATE}/"): array[0]
        for name, array in per_rank.items()
        if world_size == 1
    }
    return save_whole(root, number, shards, scalars, kept)


def save_whole(
    root: Path,
    step: int,
    shards: list[TensorShard],
    scalars: Mapping[str, Any],
    per_rank: Mapping[str, np.ndarray] | None = None,
) -> SaveReport:
    """Add a checkpoint to a directory, keeping all that are there."""
    store = CheckpointStore(root, SoloCommunicator(), keep=1 << 30)
    return store.save(step, shards, scalars=scalars, per_rank=per_rank or {})
