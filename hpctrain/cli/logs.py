"""``hpctrain logs``: what the launcher and the ranks wrote."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, json_option, run_argument
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDir

_FOLLOW_SECONDS = 0.3
_ASK_SECONDS = 3.0


@click.command(short_help="Print what the ranks of a run wrote.")
@run_argument()
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank's log.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), metavar="K", help="Only the last K lines of each."
)
@json_option
def command(
    name: str | None, runs: Path, rank: int | None, follow: bool, lines: int | None, as_json: bool
) -> None:
    """Print the log of the launcher or batch script and that of rank 0.

    After a failure also that of the rank that failed first. With --rank only that rank's.
    """
    if follow and as_json:
        raise UsageError("--follow and --json exclude each other", hint="follow the files it names")
    run = find_run(name, runs)
    paths = [_rank_log(run, rank)] if rank is not None else _usual(run)
    if as_json:
        files = [{"path": str(path), "rank": _rank(path), "text": _text(path, lines)}
                 for path in paths]  # fmt: skip
        output.emit_json({"run": run.id, "files": files})
        return
    _Printer(several=rank is None).run(run, paths, lines, follow)


class _Printer:
    """Prints parts of files, each change of file announced as ``tail`` does, on stderr."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self.current: Path | None = None

    def run(self, run: RunDir, paths: list[Path], lines: int | None, follow: bool) -> None:
        from hpctrain.cli.view import look

        ends = {}
        for path in paths:
            text, ends[path] = _read(path, lines)
            self.show(path, text)
        if not follow:
            if not any(ends.values()):
                output.note(f"nothing has been written yet; run {run.id} is {look(run).status}")
            return
        over, asked = look(run).is_final, time.monotonic()
        while True:
            for path in paths if not self.several else _usual(run):
                start = ends.get(path, 0)
                text = _from(path, start)
                ends[path] = start + len(text)
                self.show(path, text)
            if over:  # what was read above is all there will be
                return
            time.sleep(_FOLLOW_SECONDS)
            if time.monotonic() - asked > _ASK_SECONDS:
                over, asked = look(run).is_final, time.monotonic()

    def show(self, path: Path, text: bytes) -> None:
        if not text:
            return
        if self.several and path != self.current:
            click.echo(f"==> {path.parent.name}/{path.name} <==", err=True)
        self.current = path
        click.echo(text, nl=False)  # bytes, as they are: half a character is completed later


def _usual(run: RunDir) -> list[Path]:
    found = [run.job_log, run.rank_log(0)]
    launches = run.read_launches()
    failures = run.read_failures(len(launches) - 1) if launches else []
    if failures and failures[0].rank != 0:
        found.append(run.rank_log(failures[0].rank))
    return found


def _rank_log(run: RunDir, rank: int) -> Path:
    path = run.rank_log(rank)
    if not path.exists():
        ranks = [_rank(log) for log in sorted(run.logs.glob("rank*.log"))]
        there = f"ranks {ranks[0]} to {ranks[-1]} have one" if ranks else "no rank has one yet"
        raise UsageError(f"run {run.id} has no log of rank {rank}; {there}")
    return path


def _rank(path: Path) -> int | None:
    match = re.fullmatch(r"rank(\d+)", path.stem)
    return int(match[1]) if match else None


def _text(path: Path, lines: int | None) -> str:
    return _read(path, lines)[0].decode(errors="replace")


def _read(path: Path, lines: int | None) -> tuple[bytes, int]:
    """What the file holds, or its last lines, and where it ended."""
    data = _from(path, 0)
    if lines is None:
        return data, len(data)
    return b"".join(data.splitlines(keepends=True)[-lines:] if lines else []), len(data)


def _from(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            return stream.read()
    except FileNotFoundError:
        return b""
