"""MPI communicators that count what goes through them, the control plane's traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.runtime.counting import Counter

# Blocking calls on buffers, and what they are counted as.
_BUFFERS = {
    "Allreduce": "all_reduce",
    "Reduce": "reduce",
    "Bcast": "broadcast",
    "Allgather": "all_gather",
    "Allgatherv": "all_gather",
    "Gather": "gather",
    "Gatherv": "gather",
    "Scatter": "scatter",
    "Scatterv": "scatter",
    "Alltoall": "all_to_all",
    "Alltoallv": "all_to_all",
    "Reduce_scatter": "reduce_scatter",
    "Reduce_scatter_block": "reduce_scatter",
    "Send": "send",
    "Ssend": "send",
}
# Blocking calls on Python objects: their bytes are not known, calls and seconds are.
_OBJECTS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "bcast": "broadcast",
    "allgather": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "send": "send",
    "ssend": "send",
    "barrier": "barrier",
    "Barrier": "barrier",
}


def counted_comm(comm: Any, counter: Counter, axis: str) -> Any:
    """``comm`` as a communicator whose blocking collectives and sends count under ``axis``.

    It is the same MPI communicator, with the same context: nothing is created. Duplicates and
    parts of it count under ``axis`` too. What is handed in counts where it is handed in as a
    buffer with a size of its own (an array); objects that mpi4py pickles count no bytes.
    """
    from mpi4py import MPI

    methods: dict[str, Callable[..., Any]] = {}
    for table, with_bytes in ((_BUFFERS, True), (_OBJECTS, False)):
        for method, operation in table.items():
            methods[method] = _counting(
                getattr(MPI.Intracomm, method), counter, axis, operation, with_bytes
            )
    kind = type("CountedComm", (MPI.Intracomm,), methods)
    return kind(comm)


def _counting(
    call: Callable[..., Any], counter: Counter, axis: str, operation: str, with_bytes: bool
) -> Callable[..., Any]:
    from hpctrain.runtime.counting import volume_of

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        members = self.Get_size()
        if members == 1:
            return call(self, *args, **kwargs)
        with counter.during(axis):
            result = call(self, *args, **kwargs)
        size = _handed_in(args) if with_bytes else 0
        counter.add(axis, operation, size, volume_of(operation, size, members))
        return result

    counted.__name__ = call.__name__
    counted.__doc__ = call.__doc__
    return counted


def _handed_in(args: tuple[Any, ...]) -> int:
    """Bytes of the first buffer among the arguments, which is the one handed in.

    Under MPI.IN_PLACE, which is no buffer, that is the second.
    """
    for argument in args[:2]:
        buffer = argument[0] if isinstance(argument, list | tuple) and argument else argument
        size = getattr(buffer, "nbytes", None)
        if isinstance(size, int):
            return size
    return 0
