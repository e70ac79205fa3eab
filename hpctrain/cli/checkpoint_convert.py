"""``hpctrain checkpoint export, import, reshard, tune``: other programs, layouts and storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.cli import output
from hpctrain.cli.checkpoint_place import checkpoint_argument, opened
from hpctrain.cli.options import json_option, set_option
from hpctrain.errors import UsageError

_PATH = click.Path(path_type=Path)


@click.command()
@checkpoint_argument
@click.argument("target", metavar="TARGET", type=_PATH)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "dcp", "hdf5"]),
    required=True,
    help="safetensors under our names; hf: Hugging Face's GPT-2 or Llama with config.json; dcp: "
    "torch.distributed.checkpoint; hdf5: a checkpoint of one file without virtual data sets.",
)
@click.option("--weights-only", is_flag=True, help="Leave optimizer states out.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the weights, for hf.",
)
def export(
    place: str,
    step: int | None,
    runs: Path,
    target: Path,
    kind: str,
    weights_only: bool,
    dtype: str,
) -> None:
    """Convert a checkpoint for other programs.

    \b
      hpctrain checkpoint export my-run weights/ --format hf --dtype bfloat16
      hpctrain checkpoint export my-run --step 500 all/ --format safetensors
    """
    from hpctrain.io import exchange

    with opened(place, runs, step) as reader:
        if kind == "hf":
            exchange.export_huggingface(reader, target, torch_dtype=dtype)
        elif kind == "safetensors":
            exchange.export_safetensors(reader, target, optimizer=not weights_only)
        elif kind == "hdf5":
            exchange.export_hdf5(reader, target, optimizer=not weights_only)
        else:
            from hpctrain.train.dcp import export_dcp

            export_dcp(reader, target, optimizer=not weights_only)
        output.note(f"step {reader.step} is in {target}")


@click.command("import")
@click.argument("source", metavar="SOURCE", type=_PATH)
@click.argument("root", metavar="DIRECTORY", type=_PATH)
@click.option("--step", type=int, help="Number to give it. [its own, or 0]")
def import_(source: Path, root: Path, step: int | None) -> None:
    """Make a checkpoint of what another program wrote, in a directory of checkpoints.

    SOURCE is a safetensors file or directory (ours, or Hugging Face's with its config.json), or
    a torch.distributed.checkpoint directory. A job starts from it with checkpoint.path.
    """
    if not source.exists():
        raise UsageError(f"{source}: is not there")
    left_out: list[str] = []
    if source.is_dir() and (source / ".metadata").exists():
        from hpctrain.train.dcp import import_dcp

        report, left_out = import_dcp(source, root, step=step)
    else:
        from hpctrain.io.exchange import import_safetensors

        report = import_safetensors(source, root, step=step)
    if left_out:
        output.warn(f"left out, for they are no tensors: {', '.join(left_out[:10])}")
    output.note(f"{source} is in {report.path}")
    model = _model_section(report.path)
    if model:
        from hpctrain.spec.yaml_tree import dump

        output.line(dump({"model": model}).rstrip())


def _model_section(path: Path) -> dict[str, Any]:
    """The section of a job file that describes a checkpoint's model, without what is not set."""

    def given(section: dict[str, Any]) -> dict[str, Any]:
        inner = {k: given(v) if isinstance(v, dict) else v for k, v in section.items()}
        return {key: value for key, value in inner.items() if value is not None and value != {}}

    with opened(str(path), path, None) as reader:
        model = given(reader.scalars.get("model") or {})
    if not model.get("moe", {}).get("experts"):
        model.pop("moe", None)
    return model


@click.command()
@checkpoint_argument
@click.option("--job", metavar="JOB", type=click.Path(), required=True, help="Job file.")
@set_option
@click.option("--dry-run", is_flag=True, help="The only way: see above.")
@json_option
def reshard(
    place: str,
    step: int | None,
    runs: Path,
    job: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Show what each rank of a job would read of a checkpoint, and whether it fits.

    There is no resharding to be done: a checkpoint holds whole tensors, and a job of any layout
    reads its parts of them when it starts.
    """
    from hpctrain.cli.prepare import prepare
    from hpctrain.spec import parse_job
    from hpctrain.train.reshard import shares
    from hpctrain.units import format_bytes

    if not dry_run:
        output.note("nothing to do: a job of any layout reads a checkpoint as it is")
    path = Path(job)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    spec = prepare(parse_job(text, str(path), overrides), path.absolute().parent).job.spec
    with opened(place, runs, step) as reader:
        found = list(shares(reader, spec))
        total = reader.manifest.total_bytes
    if as_json:
        rows = [
            {
                "rank": s.rank,
                "coordinates": s.coordinates,
                "tensors": s.tensors,
                "bytes": s.bytes,
                "extents": s.extents,
                "files": s.files,
            }
            for s in found
        ]
        output.emit_json({"checkpoint_bytes": total, "ranks": rows})
        return
    axes = [axis for axis in found[0].coordinates if any(s.coordinates[axis] for s in found)]
    output.table(
        ("rank", *axes, "tensors", "reads", "extents", "files"),
        [
            (
                str(s.rank),
                *(str(s.coordinates[axis]) for axis in axes),
                str(s.tensors),
                format_bytes(s.bytes),
                str(s.extents),
                str(s.files),
            )
            for s in found
        ],
        right=tuple(range(5 + len(axes))),
    )
    read = sum(s.bytes for s in found)
    output.line(f"all ranks read {format_bytes(read)} of a checkpoint of {format_bytes(total)}")


@click.command()
@click.argument("path", metavar="PATH", type=_PATH)
@click.option("--writers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--size", default="256MiB", show_default=True, help="Bytes of a measurement.")
@click.option("--repeat", type=click.IntRange(1, 20), default=3, show_default=True)
@json_option
def tune(path: Path, writers: int, size: str, repeat: int, as_json: bool) -> None:
    """Measure a directory's storage and say how checkpoints should be written there."""
    from hpctrain.io.tune import Measurement
    from hpctrain.io.tune import tune as measure
    from hpctrain.units import format_bytes, parse_bytes

    try:
        total = parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None

    def show(m: Measurement) -> None:
        output.note(_words(m) + f": {format_bytes(m.bytes_per_second)}/s")

    advice = measure(path, writers=writers, total=total, repeat=repeat, tell=show)
    if as_json:
        output.emit_json(
            {
                "path": str(path),
                "file_system": advice.kind,
                "writers": writers,
                "measurements": [
                    {
                        "files": m.files,
                        "direct": m.direct,
                        "stripes": m.stripes,
                        "bytes_per_second": m.bytes_per_second,
                    }
                    for m in advice.measurements
                ],
                "files": advice.files,
                "direct": advice.direct,
                "stripes": advice.stripes,
            }
        )
        return
    output.line(f"# {path}: {advice.kind or 'unknown file system'}, {writers} writers")
    output.line("checkpoint:")
    output.line(f"  files: {advice.files}")
    output.line(f"  direct: {'true' if advice.direct else 'false'}")
    if advice.stripes is not None:
        output.line(f"# before the first checkpoint: lfs setstripe -c {advice.stripes} {path}")


def _words(m: Any) -> str:
    files = "one file" if m.files == "one" else "a file a writer"
    how = "past the page cache" if m.direct else "through the page cache"
    return f"{files}, {how}" + ("" if m.stripes is None else f", {m.stripes} stripes")
