"""The few collectives that checkpoints need, and how ranks agree that one of them failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hpctrain.errors import CheckpointError, HpctrainError

T = TypeVar("T")


class Communicator(Protocol):
    """The part of an mpi4py communicator that is used here (lower-case, any Python object)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allgather(self, sendobj: Any) -> list[Any]: ...
    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None: ...
    def bcast(self, obj: Any, root: int = 0) -> Any: ...
    def barrier(self) -> None: ...


class SoloCommunicator:
    """A world of one."""

    rank = 0
    size = 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return [sendobj]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return obj

    def barrier(self) -> None:
        return None


def on_root(comm: Communicator, work: Callable[[], T]) -> T:
    """Rank 0's ``work()``, given to every rank; where it raises, every rank raises.

    Raises:
        CheckpointError: on every rank; a programming error keeps its own type on rank 0.
    """
    result: Any = None
    error: Exception | None = None
    if comm.rank == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    failed, result = comm.bcast((describe(error), result))
    if failed is not None:
        _raise(failed, error)
    return result  # type: ignore[no-any-return]


def on_all(comm: Communicator, work: Callable[[], T]) -> list[T]:
    """Each rank's ``work()``, given to every rank; where one raises, every rank raises.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed; a programming error
            keeps its own type on the rank that made it.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    answers = comm.allgather((describe(error), result))
    failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text is not None]
    if failed:
        rank, text = failed[0]
        where = f"rank {rank}: " if comm.size > 1 else ""
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        _raise(f"{where}{text}{more}", error)
    return [result for _, result in answers]


def describe(error: Exception | None) -> str | None:
    """One line about an error; None for none."""
    if error is None:
        return None
    if isinstance(error, HpctrainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}"
    return f"{type(error).__name__}: {error}"


def _raise(text: str, error: Exception | None) -> None:
    if error is not None and not isinstance(error, HpctrainError | OSError):
        raise error
    raise CheckpointError(text) from error
