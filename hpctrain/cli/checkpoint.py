"""``hpctrain checkpoint``: look at checkpoints, check, compare, remove and convert them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from hpctrain.cli import output
from hpctrain.cli.checkpoint_convert import export, import_, reshard, tune
from hpctrain.cli.checkpoint_place import checkpoint_argument, find_store, newest_step, opened
from hpctrain.cli.options import json_option, runs_option
from hpctrain.errors import CheckpointError


@click.group(short_help="Look at checkpoints, check, compare and convert them.")
def command() -> None:
    """Look at checkpoints, check, compare and convert them.

    Where a CHECKPOINT is asked for, give its directory (…/step00000100), a directory of
    checkpoints, a run directory or a run's id; of several the newest is meant, or --step.
    """


@command.command("ls")
@click.argument("place", metavar="CHECKPOINTS")
@runs_option
@json_option
def list_(place: str, runs: Path, as_json: bool) -> None:
    """List the checkpoints of a run or a directory, newest commit first."""
    from hpctrain.io import directory
    from hpctrain.io.manifest import read_manifest
    from hpctrain.units import format_bytes, format_count, format_duration

    store, _ = find_store(place, runs)
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
@checkpoint_argument
@click.option("--tensors", metavar="PATTERN", help="Also list tensors: '*', 'model/*.weight' …")
@json_option
def inspect(place: str, step: int | None, runs: Path, tensors: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds: layout, scalars, sizes; its tensors on demand."""
    import fnmatch

    from hpctrain.units import format_bytes, format_count

    with opened(place, runs, step) as reader:
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
@checkpoint_argument
@click.option("--deep", is_flag=True, help="Read every byte; without, manifest, sizes, headers.")
@click.option("--all", "every", is_flag=True, help="All checkpoints of the directory.")
@json_option
def verify(
    place: str, step: int | None, runs: Path, deep: bool, every: bool, as_json: bool
) -> None:
    """Check checkpoints against their checksums; exit code 5 where one is damaged."""
    store, named = find_store(place, runs)
    steps = store.steps() if every else [step or named or newest_step(store)]
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

    with opened(one, runs, step_a) as a, opened(other, runs, step_b) as b:
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

    store, _ = find_store(place, runs)
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


for subcommand in (export, import_, reshard, tune):
    command.add_command(subcommand)


def _product(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)
