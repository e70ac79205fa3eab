"""``hpctrain plan``: does a job fit, how fast is it, what would be better, what does it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import job_argument, json_option, set_option
from hpctrain.errors import Exit

if TYPE_CHECKING:
    from hpctrain.cli.prepare import Prepared
    from hpctrain.plan.plan import Plan

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Say whether a job fits, how fast it is, and what would be better.")
@job_argument()
@set_option
@json_option
@click.option("--explain", "explained", is_flag=True, help="Each number's formula and source.")
@click.option("--html", "page", metavar="FILE", type=_FILE, help="Write a page with charts.")
@click.option("--compare", metavar="JOB", type=click.Path(), help="Show another job beside it.")
@click.option("--stack", metavar="NAME", help="Software to plan for. [this project's own runtime]")
@click.option(
    "--with",
    "others",
    metavar="MACHINE=NODES",
    multiple=True,
    help="Nodes of another machine in the same job: uneven shares of the work.",
)
@click.option("--no-search", is_flag=True, help="Do not look for better layouts.")
def command(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    explained: bool,
    page: Path | None,
    compare: str | None,
    stack: str | None,
    others: tuple[str, ...],
    no_search: bool,
) -> int:
    """Plan JOB: memory, step time, cost of the run, better layouts, warnings.

    Nothing is started, no device is touched. Leaves with 3 where the job does not fit.

    \b
      hpctrain plan job.yaml
      hpctrain plan job.yaml --set parallel.tensor=4 --explain
      hpctrain plan job.yaml --compare other.yaml
    """
    from hpctrain.plan import explain, text
    from hpctrain.plan.page import render as render_page

    if others:
        return _mixed(job, overrides, stack, others, as_json)
    found = _plan(job, overrides, stack, no_search)
    other = None if compare is None else _plan(compare, (), stack, no_search)
    if page is not None:
        page.write_text(render_page(found), encoding="utf-8")
        output.note(f"wrote the page: {page}")
    if as_json:
        data = to_dict(found)
        if explained:
            data["explained"] = [
                {
                    "name": one.name,
                    "value": one.value,
                    "formula": one.formula,
                    "inputs": [{"name": n, "value": v, "source": s} for n, v, s in one.inputs],
                }
                for one in explain.explain(found)
            ]
        if other is not None:
            data["compared"] = to_dict(other)
        output.emit_json(data)
    elif other is not None:
        assert compare is not None
        output.line(text.compare(found, other, (Path(job).name, Path(compare).name)))
    elif explained:
        output.line(explain.render(explain.explain(found)))
    else:
        output.line(text.render(found))
    return Exit.OK if found.fits else Exit.IMPOSSIBLE


def _load(job: str, overrides: tuple[str, ...]) -> Prepared:
    """The job; an unknown machine is impossible to plan for, as an unknown stack is."""
    from hpctrain.cli.prepare import load
    from hpctrain.errors import ImpossibleError
    from hpctrain.machine.catalogue import UnknownMachineError

    try:
        return load(job, overrides)
    except UnknownMachineError as error:
        raise ImpossibleError(error.message, hint=error.hint) from None


def _plan(job: str, overrides: tuple[str, ...], stack: str | None, no_search: bool) -> Plan:
    from hpctrain.plan.plan import make_plan
    from hpctrain.plan.software import DEFAULT_STACK

    prepared = _load(job, overrides)
    return make_plan(
        prepared.job.spec,
        prepared.machine,
        stack=stack or DEFAULT_STACK,
        alternatives=0 if no_search else 3,
    )


def _mixed(
    job: str,
    overrides: tuple[str, ...],
    stack: str | None,
    others: tuple[str, ...],
    as_json: bool,
) -> int:
    """A job over nodes of several machines."""
    from hpctrain.errors import UsageError
    from hpctrain.machine import get_machine
    from hpctrain.plan import text
    from hpctrain.plan.job import workload_of
    from hpctrain.plan.software import DEFAULT_STACK
    from hpctrain.plan.unequal import Part, plan_mixed

    prepared = _load(job, overrides)
    spec, name = prepared.job.spec, stack or DEFAULT_STACK
    machines = [(prepared.machine, spec.nodes)]
    for other in others:
        wanted, equals, count = other.partition("=")
        if not (equals and count.isdigit() and int(count)):
            raise UsageError(f"--with {other!r}: should be MACHINE=NODES, for example dgx-h100=2")
        machines.append((get_machine(wanted), int(count)))
    parts = []
    for machine, nodes in machines:
        here = spec.model_copy(update={"ranks_per_node": machine.devices_per_node})
        work, _ = workload_of(here, machine, name)
        parts.append(Part(machine.name, work, nodes * machine.devices_per_node))
    found = plan_mixed(parts)
    if as_json:
        output.emit_json(
            {
                "way": found.way,
                "seconds": found.seconds,
                "even_seconds": found.even,
                "micro_batch": found.micro_batch,
                "tensor": found.tensor,
                "shares": [
                    {
                        "machine": share.part.name,
                        "devices": share.part.devices,
                        "micro_batches": share.micro_batches,
                        "state_share": share.state,
                        "stages": share.stages,
                        "layers": list(share.layers),
                        "busy_seconds": share.seconds,
                        "memory": share.memory,
                    }
                    for share in found.shares
                ],
            }
        )
    else:
        output.line(text.render_mixed(found))
    return Exit.OK


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as JSON data; sizes in bytes, times in seconds, rates in FLOP/s and bytes/s."""
    from dataclasses import asdict

    low, high = plan.interval
    run = plan.run
    return {
        "fits": plan.fits,
        "memory": {
            "used": plan.used,
            "limit": plan.limit,
            "stages": [stage.parts() for stage in plan.memory],
        },
        "step": {
            "seconds": plan.step.seconds,
            "low": low,
            "high": high,
            "micro_batches": plan.step.micro_batches,
            "split": plan.step.split,
            "stages": list(plan.step.stages),
        },
        "tokens_per_second": plan.tokens_per_second,
        "model_flops": plan.model_flops,
        "hardware_flops": plan.hardware_flops,
        "mfu": plan.utilisation,
        "run": asdict(run),
        "layout": asdict(plan.strategy.layout),
        "axes": [
            {
                "axis": link.axis,
                "ranks": link.size,
                "groups": link.groups,
                "link": link.kind.value,
                "bandwidth": link.bandwidth,
                "nodes": link.nodes,
                "exposed": plan.exposed.get(link.axis),
            }
            for link in plan.links
        ],
        "alternatives": [
            {
                "seconds": other.candidate.seconds,
                "memory": other.candidate.memory,
                "gain": other.gain,
                "why": other.why,
                "settings": other.settings,
            }
            for other in plan.alternatives
        ],
        "layouts_scored": plan.found.scored if plan.found else 0,
        "warnings": [{"text": w.text, "remedy": w.remedy} for w in plan.warnings],
        "numbers": {
            "source": plan.fitted.source,
            "rows": plan.fitted.rows,
            "spread": plan.work.values.spread,
            "stack": plan.work.stack.name,
        },
    }
