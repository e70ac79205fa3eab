"""``hpctrain checkpoint``: look at checkpoints, check, compare, remove and convert them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option, runs_option, set_option
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.io.checkpoint import CheckpointReader, CheckpointStore

_PATH = click.Path(path_type=Path)


@click.group(short_help="Look at checkpoints, check, compare and convert them.")
def command() -> None:
    """Look at checkpoints, check, compare and convert them.

    Where a CHECKPOINT is asked for, give its directory (…/step00000100), a directory of
    checkpoints, a run directory or a run's id; of several the newest is meant, or --step.
    """


def _place(function: Callable[..., None]) -> Callable[..., None]:
    """A CHECKPOINT argument with --step and --runs."""
    argument = click.argument("place", metavar="CHECKPOINT")
    step = click.option("--step", type=int, help="Step of the checkpoint. [the newest]")
    return argument(step(runs_option(function)))


def _store(text: str, runs: Path) -> tuple[CheckpointStore, int | None]:
    """The directory of checkpoints that a person means, and the step where it is said."""
    from hpctrain.io import directory
    from hpctrain.io.checkpoint import CheckpointStore
    from hpctrain.io.comm import SoloCommunicator

    path = Path(text)
    step = None
    if directory.step_of(path.absolute().name) is not None and path.is_dir():
        step = directory.step_of(path.absolute().name)
        root = path.absolute().parent
    elif path.is_dir() and directory.committed(path):
        root = path
    else:
        root = _root_of_run(text, runs)
    return CheckpointStore(root, SoloCommunicator()), step


def _root_of_run(text: str, runs: Path) -> Path:
    from hpctrain.rundir import RunDir
    from hpctrain.spec import read_job

    try:
        run = RunDir.find(text, runs)
    except UsageError:
        if Path(text).is_dir():
            raise CheckpointError(f"{text}: there is no checkpoint in it") from None
        raise UsageError(
            f"{text!r} is neither a directory of checkpoints nor a run",
            hint="give …/step00000100, the directory it is in, or a run's id",
        ) from None
    settings = read_job(run.job).spec.checkpoint
    return Path(settings.path) if settings.path else run.checkpoints


def _newest(store: CheckpointStore) -> int:
    from hpctrain.io import directory

    steps = directory.by_commit(store.root)
    if not steps:
        raise CheckpointError(f"{store.root}: there is no checkpoint")
    return steps[0]


@contextmanager
def _opened(
    place: str, runs: Path, step: int | None, *, verify: bool = True
) -> Iterator[CheckpointReader]:
    store, named = _store(place, runs)
    if step is None:
        step = named
    with store.open(_newest(store) if step is None else step, verify=verify) as reader:
        yield reader


@command.command("ls")
@click.argument("place", metavar="CHECKPOINTS")
@runs_option
@json_option
def list_(place: str, runs: Path, as_json: bool) -> None:
    """List the checkpoints of a run or a directory, newest commit first."""
    from hpctrain.io import directory
    from hpctrain.io.manifest import read_manifest
    from hpctrain.units import format_bytes, format_count, format_duration

    store, _ = _store(place, runs)
    rows: list[dict[str, Any]] = []
    for step in directory.by_commit(store.root):
        folder = store.root / directory.step_name(step)
        row: dict[str, Any] = {"step": step, "path": str(folder), "state": "ok"}
        problems = store.verify(step, deep=False)
        if problems:
            row |= {"state": "damaged", "problem": problems[0]}
        else:
            manifest = read_manifest(folder)
            row |= {
                "tokens": manifest.tokens,
                "bytes": manifest.total_bytes,
                "files": len(manifest.files),
                "tensors": len(manifest.tensors),
                "world_size": manifest.world_size,
                "created": manifest.created,
                "sequence": manifest.sequence,
            }
        rows.append(row)
    left = directory.leftovers(store.root)
    if as_json:
        output.emit_json({"root": str(store.root), "checkpoints": rows, "leftovers": left})
        return
    if not rows:
        raise CheckpointError(f"{store.root}: there is no checkpoint")
    cells = []
    for row in rows:
        if row["state"] != "ok":
            cells.append((str(row["step"]), "", "", "", "", "", "damaged: " + row["problem"]))
            continue
        cells.append(
            (
                str(row["step"]),
                "" if row["tokens"] is None else format_count(row["tokens"]),
                format_bytes(row["bytes"]),
                str(row["files"]),
                str(row["world_size"]),
                format_duration(max(0.0, time.time() - row["created"])) + " ago",
                "ok",
            )
        )
    headers = ("step", "tokens", "size", "files", "ranks", "committed", "state")
    output.table(headers, cells, right=(0, 1, 2, 3, 4))
    for name in left:
        output.note(f"left by a writer that died or is at work: {store.root / name}")


@command.command()
@_place
@click.option("--tensors", metavar="PATTERN", help="Also list tensors: '*', 'model/*.weight' …")
@json_option
def inspect(place: str, step: int | None, runs: Path, tensors: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds: layout, scalars, sizes; its tensors on demand."""
    import fnmatch

    from hpctrain.units import format_bytes, format_count

    with _opened(place, runs, step) as reader:
        manifest = reader.manifest
        forms = reader.tensors()
        kinds: dict[str, list[int]] = {}
        for name, (shape, _) in forms.items():
            kind = "/".join(name.split("/")[: 2 if name.startswith("optimizer/") else 1])
            entry = kinds.setdefault(kind, [0, 0, 0])
            entry[0] += 1
            entry[1] += _product(shape)
            entry[2] += sum(storage.bytes for storage in manifest.tensors[name].storage)
        listed = [name for name in forms if tensors and fnmatch.fnmatch(name, tensors)]
        if as_json:
            output.emit_json(
                {
                    "path": str(reader.path),
                    "step": manifest.step,
                    "tokens": manifest.tokens,
                    "sequence": manifest.sequence,
                    "world_size": manifest.world_size,
                    "created": manifest.created,
                    "writer": dict(manifest.writer),
                    "files": [{"name": f.name, "bytes": f.bytes} for f in manifest.files],
                    "scalars": reader.scalars,
                    "groups": {
                        kind: dict(zip(("tensors", "elements", "bytes"), row, strict=True))
                        for kind, row in kinds.items()
                    },
                    "tensors": [
                        {
                            "name": name,
                            "shape": forms[name][0],
                            "torch_dtype": forms[name][1],
                            "extents": len(manifest.tensors[name].extents),
                        }
                        for name in listed
                    ],
                }
            )
            return
        written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created))
        by = ", ".join(f"{name} {version}" for name, version in manifest.writer.items())
        rows = [
            ("path", str(reader.path)),
            ("step", str(manifest.step)),
            ("tokens", "" if manifest.tokens is None else format_count(manifest.tokens)),
            ("written", f"{written} by {by}"),
            ("ranks", str(manifest.world_size)),
            ("files", "\n".join(f"{f.name}  {format_bytes(f.bytes)}" for f in manifest.files[:20])),
        ]
        rows += [
            (key, ", ".join(f"{k} {v}" for k, v in value.items()))
            for key, value in reader.scalars.items()
            if isinstance(value, dict) and key in ("layout", "data")
        ]
        output.pairs(rows)
        output.line()
        output.table(
            ("group", "tensors", "elements", "size"),
            [(k, str(n), format_count(e), format_bytes(b)) for k, (n, e, b) in kinds.items()],
            right=(1, 2, 3),
        )
        if listed:
            output.line()
            output.table(
                ("tensor", "dtype", "shape", "extents"),
                [
                    (
                        name,
                        forms[name][1],
                        " x ".join(map(str, forms[name][0])) or "scalar",
                        str(len(manifest.tensors[name].extents)),
                    )
                    for name in listed
                ],
                right=(3,),
            )


@command.command()
@_place
@click.option("--deep", is_flag=True, help="Read every byte; without, manifest, sizes, headers.")
@click.option("--all", "every", is_flag=True, help="All checkpoints of the directory.")
@json_option
def verify(
    place: str, step: int | None, runs: Path, deep: bool, every: bool, as_json: bool
) -> None:
    """Check checkpoints against their checksums; exit code 5 where one is damaged."""
    store, named = _store(place, runs)
    steps = store.steps() if every else [step or named or _newest(store)]
    found = {number: store.verify(number, deep=deep) for number in steps}
    bad = {number: faults for number, faults in found.items() if faults}
    if as_json:
        results = [{"step": n, "ok": not f, "problems": f} for n, f in found.items()]
        output.emit_json({"root": str(store.root), "deep": deep, "checkpoints": results})
    else:
        for number, faults in found.items():
            word = "every byte" if deep else "manifest, sizes and HDF5 structure"
            output.line(f"step {number}: {'damaged' if faults else f'whole ({word})'}")
            for fault in faults[:20]:
                output.line(f"  {fault}")
    if bad:
        raise CheckpointError(
            f"{store.root}: {len(bad)} of {len(found)} checkpoints damaged: step "
            + ", ".join(map(str, bad))
        )


@command.command()
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@runs_option
@click.option("--step-a", type=int, help="Step of A. [the newest]")
@click.option("--step-b", type=int, help="Step of B. [the newest]")
@json_option
def diff(
    one: str, other: str, runs: Path, step_a: int | None, step_b: int | None, as_json: bool
) -> None:
    """Compare two checkpoints, bit for bit; exit code 5 where tensors differ.

    Layout and number of ranks do not matter: what is compared are the whole tensors.
    """
    from hpctrain.io.compare import differences

    with _opened(one, runs, step_a) as a, _opened(other, runs, step_b) as b:
        found = list(differences(a, b))
        scalars = [d for d in found if d.name.startswith("scalar ")]
        tensors = [d for d in found if not d.name.startswith("scalar ")]
        if as_json:
            output.emit_json(
                {
                    "a": str(a.path),
                    "b": str(b.path),
                    "equal": not tensors,
                    "tensors": [
                        {
                            "name": d.name,
                            "what": d.what,
                            "elements": d.elements,
                            "largest": d.largest,
                        }
                        for d in tensors
                    ],
                    "scalars": [{"name": d.name[7:], "what": d.what} for d in scalars],
                }
            )
        else:
            for d in tensors:
                gap = "" if d.largest is None else f", by {d.largest:.6g} at most"
                output.line(f"{d.name}: {d.what}{gap}")
            for d in scalars:
                output.line(f"{d.name}: {d.what}")
            if not tensors:
                output.line(f"all {len(a.tensors())} tensors are equal")
    if tensors:
        raise CheckpointError(f"{len(tensors)} tensors differ")


@command.command()
@click.argument("place", metavar="CHECKPOINTS")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Newest ones to keep.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@runs_option
def prune(place: str, keep: int, dry_run: bool, runs: Path) -> None:
    """Remove all but the newest good checkpoints, and what dead writers left.

    Damaged ones do not count as kept: they go, as long as a good one is left.
    """
    from hpctrain.io import directory

    store, _ = _store(place, runs)
    kept: list[int] = []
    going: list[tuple[int, str]] = []
    for step in directory.by_commit(store.root):
        problems = store.verify(step, deep=False)
        if problems:
            going.append((step, f"damaged: {problems[0]}"))
        elif len(kept) < keep:
            kept.append(step)
        else:
            going.append((step, "older"))
    if not kept:
        raise CheckpointError(f"{store.root}: no good checkpoint is left; nothing is removed")
    for step, reason in going:
        if not dry_run:
            directory.remove(store.root, step)
        output.line(f"{'would remove' if dry_run else 'removed'} step {step} ({reason})")
    if not dry_run:
        for text in store.clean():
            output.line(text)
    output.line(f"kept step {', '.join(map(str, kept))}")


@command.command()
@_place
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

    with _opened(place, runs, step) as reader:
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


@command.command("import")
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
        output.line("model:")
        for key, value in model.items():
            output.line(f"  {key}: {str(value).lower() if isinstance(value, bool) else value}")


def _model_section(path: Path) -> dict[str, Any]:
    with _opened(str(path), path, None) as reader:
        model = reader.scalars.get("model") or {}
        return {key: value for key, value in model.items() if value is not None and value != {}}


@command.command()
@_place
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
    with _opened(place, runs, step) as reader:
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


@command.command()
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


def _product(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)
