"""Exit codes and the errors that carry them.

Every error a user can cause or meet is one of these classes. The command line prints
``message`` and ``hint`` and leaves with ``exit_code``; no traceback is shown. Invariants of
our own are ``assert``; values a caller of the library got wrong are ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every hpctrain command."""

    OK = 0
    USAGE = 2
    IMPOSSIBLE = 3
    SCHEDULER = 4
    CHECKPOINT = 5
    RANK_FAILED = 6
    STOPPED = 75
    """Stopped early and resumable (EX_TEMPFAIL of sysexits.h)."""


class HpctrainError(Exception):
    """Base of all errors shown to a user.

    Args:
        message: what is wrong, with the file, key or path it is about.
        hint: what to do about it.
    """

    exit_code: Exit = Exit.USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UsageError(HpctrainError):
    """A command or a library call was given something it cannot take."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a job file.

    Attributes:
        key: dotted key, for example ``train.lr``; empty for the document itself.
        message: what was found and what would be right.
        file: path as the user gave it, or ``--set`` for an override.
        line: 1-based line, 0 where there is none.
        column: 1-based column, 0 where there is none.
    """

    key: str
    message: str
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        where = self.file
        if self.line:
            where += f":{self.line}:{self.column}"
        parts = [part for part in (where, self.key) if part]
        return ": ".join([*parts, self.message])


class SpecError(UsageError):
    """A job file is not valid; carries every fault that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a SpecError needs at least one problem"
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = tuple(problems)


class ImpossibleError(HpctrainError):
    """A valid request that this machine, layout or memory cannot satisfy."""

    exit_code = Exit.IMPOSSIBLE


class SchedulerError(HpctrainError):
    """A Slurm command failed or answered something unexpected."""

    exit_code = Exit.SCHEDULER


class CheckpointError(HpctrainError):
    """A checkpoint is missing, incomplete, damaged or does not fit the model."""

    exit_code = Exit.CHECKPOINT


class RankFailedError(HpctrainError):
    """A rank ended with an error; the others were stopped."""

    exit_code = Exit.RANK_FAILED


class StoppedEarly(HpctrainError):
    """The run stopped at a step boundary, checkpointed, and can be resumed."""

    exit_code = Exit.STOPPED
