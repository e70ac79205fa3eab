"""Which checkpoint a person means: its directory, one of several, a run directory or a run's id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import runs_option
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.io.checkpoint import CheckpointReader, CheckpointStore


def checkpoint_argument(function: Callable[..., None]) -> Callable[..., None]:
    """A CHECKPOINT argument with --step and --runs."""
    argument = click.argument("place", metavar="CHECKPOINT")
    step = click.option("--step", type=int, help="Step of the checkpoint. [the newest]")
    return argument(step(runs_option(function)))


def find_store(text: str, runs: Path) -> tuple[CheckpointStore, int | None]:
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


def newest_step(store: CheckpointStore) -> int:
    """Step of the most recently committed checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    from hpctrain.io import directory

    steps = directory.by_commit(store.root)
    if not steps:
        raise CheckpointError(f"{store.root}: there is no checkpoint")
    return steps[0]


@contextmanager
def opened(
    place: str, runs: Path, step: int | None, *, verify: bool = True
) -> Iterator[CheckpointReader]:
    """The checkpoint that a person means, open."""
    store, named = find_store(place, runs)
    if step is None:
        step = named
    with store.open(newest_step(store) if step is None else step, verify=verify) as reader:
        yield reader
