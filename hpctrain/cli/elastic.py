"""A job that takes a range of node counts, made to fit the nodes that it got."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ImpossibleError, SpecError
from hpctrain.records import EventRecord, read_json, write_json
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.cli.prepare import Prepared
    from hpctrain.spec import Job


@dataclass(frozen=True, slots=True)
class Given:
    """What a run was given as: the text of its job, where it stood, every override so far."""

    text: str
    file: str
    directory: Path
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, run: RunDir) -> Given:
        """Raises UsageError where the run does not say."""
        from hpctrain.errors import UsageError

        origin = read_json(run.provenance) or {}
        try:
            more = [o for resume in origin["resumes"] for o in resume["overrides"]]
            return cls(
                origin["job_text"],
                origin["job_file"],
                Path(origin["directory"]),
                (*origin["overrides"], *more),
            )
        except (KeyError, TypeError):
            raise UsageError(f"{run.provenance}: does not say what the job was given as") from None

    def prepare(self, *further: str) -> Prepared:
        """The job made again, so that every ``auto`` follows what is changed."""
        from hpctrain.cli.prepare import prepare

        return prepare(self._parse(*further), self.directory)

    def is_auto(self, section: str, key: str) -> bool:
        """Whether a key is left to be worked out."""
        return bool(getattr(getattr(self._parse().spec, section), key) == "auto")

    def _parse(self, *further: str) -> Job:
        from hpctrain.spec import parse_job

        return parse_job(self.text, self.file, [*self.overrides, *further])


def possible(given: Given, counts: range) -> tuple[dict[int, Prepared], dict[int, str]]:
    """Which node counts a job can run on, and why not on the others.

    A micro-batch that is left to be worked out is that of the most nodes, or the next smaller one
    that divides: on fewer nodes there are more of them, and no rank needs more memory.
    """
    fits: dict[int, Prepared] = {}
    reasons: dict[int, str] = {}
    largest: int | None = None
    automatic = given.is_auto("train", "micro_batch")
    for count in reversed(counts):
        try:
            prepared = given.prepare(f"nodes={count}")
            train, data = prepared.job.spec.train, int(prepared.job.spec.parallel.data)
            share, micro = train.global_batch // data, int(train.micro_batch)
            if automatic and largest is not None and micro > largest:
                micro = max(size for size in range(1, largest + 1) if share % size == 0)
                prepared = given.prepare(f"nodes={count}", f"train.micro_batch={micro}")
        except (ImpossibleError, SpecError) as error:
            reasons[count] = error.message.splitlines()[0]
            continue
        largest = micro if largest is None else largest
        fits[count] = prepared
    return fits, reasons


def fit(run: RunDir, nodes: int) -> int:
    """Make the job of a run fit the nodes that it got; the number that it uses.

    The global batch, the learning rate and the order of samples stay as they are; the number of
    micro-batches follows. Where the job cannot use all nodes it leaves some idle.

    Raises:
        ImpossibleError: it can run on no such number.
    """
    from hpctrain.cli.launch import write_job
    from hpctrain.spec import read_job

    before = read_job(run.job).spec
    wanted = before.slurm.nodes
    assert wanted is not None
    fits, reasons = possible(Given.of(run), wanted.counts)
    count = max((one for one in fits if one <= nodes), default=0)
    if not count:
        words = "; ".join(f"{one}: {why}" for one, why in sorted(reasons.items()))
        raise ImpossibleError(
            f"slurm.nodes {wanted}: the job cannot run on {nodes} nodes ({words})"
        )
    spec = fits[count].job.spec
    if spec != before:
        write_job(run, fits[count])
        share = spec.train.global_batch // int(spec.parallel.data)
        parts = share // int(spec.train.micro_batch)
        idle = f", {nodes - count} idle" if nodes > count else ""
        message = (
            f"{count} node{'s' * (count > 1)} now, {before.nodes} before{idle}: global batch "
            f"{spec.train.global_batch} in {parts} micro-batch{'es' * (parts > 1)} of "
            f"{spec.train.micro_batch} on {spec.parallel.data} data-parallel "
            f"rank{'s' * (int(spec.parallel.data) > 1)}; learning rate "
            "and order of samples as before"
        )
        run.add_event(
            EventRecord(
                "elastic", time.time(), message, data={"nodes": count, "before": before.nodes}
            )
        )
        _note_world(run, count * int(spec.ranks_per_node))
    return count


def _note_world(run: RunDir, ranks: int) -> None:
    state = read_json(run.state)
    if state is not None:
        write_json(run.state, state | {"world_size": ranks})
