"""The job file: strict YAML to a validated, resolved JobSpec."""

from __future__ import annotations

from hpctrain.spec.job import JobSpec
from hpctrain.spec.load import Job, Source, dump_job, parse_job, read_job
from hpctrain.spec.resolve import resolve

__all__ = ["Job", "JobSpec", "Source", "dump_job", "parse_job", "read_job", "resolve"]
