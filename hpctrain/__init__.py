"""hpctrain: train transformers on Slurm and MPI machines from one YAML file."""

from __future__ import annotations

__version__ = "0.1.0"
