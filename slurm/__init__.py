"""Slurm: the batch script as pure text, the commands, limits, and words for its reasons."""

from __future__ import annotations

from hpctrain.slurm.answers import JobInfo
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.script import Line, render, script_lines
from hpctrain.slurm.submit import Submission, submit

__all__ = ["JobInfo", "Line", "SlurmClient", "Submission", "render", "script_lines", "submit"]
