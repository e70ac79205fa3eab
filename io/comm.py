"""The few collectives that checkpoints need, and how ranks agree that one of them failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from hpctrain.errors import CheckpointError, HpctrainError

T = TypeVar("T")

_SPIN_SECONDS = 50e-6
_NAP_SECONDS = 200e-6


class Request(Protocol):
    """An operation under way."""

    def Test(self) -> bool: ...


class Communicator(Protocol):
    """The part of an mpi4py communicator that is used here.

    The lower-case methods move any Python object; ``Iallreduce`` sums arrays and is the only
    one that a save uses once its layout is known.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allgather(self, sendobj: Any) -> list[Any]: ...
    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None: ...
    def bcast(self, obj: Any, root: int = 0) -> Any: ...
    def scatter(self, sendobj: Any, root: int = 0) -> Any: ...
    def Iallreduce(self, sendbuf: Any, recvbuf: Any) -> Request: ...
    def send(self, obj: Any, dest: int) -> None: ...
    def recv(self, *, source: int) -> Any: ...
    def barrier(self) -> None: ...
    def Split(self, color: int, key: int) -> Any: ...


class Done:
    """An operation that is over."""

    def Test(self) -> bool:
        return True


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

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        return sendobj[0]

    def Iallreduce(self, sendbuf: Any, recvbuf: Any) -> Request:
        recvbuf[...] = sendbuf
        return Done()

    def send(self, obj: Any, dest: int) -> None:
        raise ValueError("a world of one has nobody to send to")

    def recv(self, *, source: int) -> Any:
        raise ValueError("a world of one has nobody to receive from")

    def barrier(self) -> None:
        return None

    def Split(self, color: int, key: int) -> SoloCommunicator:
        return self


def summed(comm: Communicator, mine: np.ndarray) -> np.ndarray:
    """Sum over all ranks. Whoever waits long sleeps: its core may be the one that is needed."""
    if comm.size == 1:
        return mine
    total = np.zeros_like(mine)
    request = comm.Iallreduce(mine, total)
    began = time.perf_counter()
    while not request.Test():
        if time.perf_counter() - began > _SPIN_SECONDS:
            time.sleep(_NAP_SECONDS)
    return total


def wait_for_all(comm: Communicator) -> None:
    """A barrier that sleeps, where some ranks have much to do and others nothing."""
    summed(comm, np.zeros(1, np.int64))


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
    wait_for_all(comm)
    failed, result = comm.bcast((_fault(error), result))
    if failed is not None:
        _raise(failed, error)
    return result  # type: ignore[no-any-return]


def on_all(comm: Communicator, work: Callable[[], T]) -> list[T] | None:
    """Each rank's ``work()``, given to rank 0; where one raises, every rank raises.

    Raises:
        CheckpointError: on every rank, naming the first rank that failed; a programming error
            keeps its own type on the rank that made it.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    wait_for_all(comm)
    answers = comm.gather((_fault(error), result))
    failed: _Fault | None = None
    if answers is not None:
        faults = [(rank, fault) for rank, (fault, _) in enumerate(answers) if fault is not None]
        if faults:
            rank, fault = faults[0]
            where = f"rank {rank}: " if comm.size > 1 else ""
            more = f" (and {len(faults) - 1} more ranks)" if len(faults) > 1 else ""
            failed = _Fault(f"{where}{fault.message}{more}", fault.hint)
    failed = comm.bcast(failed)
    if failed is not None:
        _raise(failed, error)
    return None if answers is None else [result for _, result in answers]


@dataclass(frozen=True, slots=True)
class _Fault:
    """An error as it travels between ranks."""

    message: str
    hint: str | None


def _fault(error: Exception | None) -> _Fault | None:
    if error is None:
        return None
    if isinstance(error, HpctrainError):
        return _Fault(error.message, error.hint)
    return _Fault(fault_text(error), None)


def fault_text(error: BaseException) -> str:
    """Path and reason of an operating system's error; kind and text of any other."""
    if isinstance(error, OSError):
        name = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return name + (error.strerror or str(error))
    return f"{type(error).__name__}: {error}"


def _raise(fault: _Fault, error: Exception | None) -> NoReturn:
    if error is not None and not isinstance(error, HpctrainError | OSError):
        raise error
    raise CheckpointError(fault.message, hint=fault.hint) from error
