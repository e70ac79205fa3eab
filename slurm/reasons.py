"""Slurm's reasons and states in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.slurm.client import JobInfo


def why_pending(reason: str) -> str:
    """Why a job waits, from squeue's reason; the reason itself where it is not known."""
    raise NotImplementedError


def why_failed(info: JobInfo) -> str:
    """Why a job ended as it did; empty for one that completed or is not over."""
    raise NotImplementedError
