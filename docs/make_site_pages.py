"""Write docs/sites/*.md: a page a machine, from its file and from the scripts rendered for it.

    python docs/make_site_pages.py

Nothing here is written by hand, so that a page cannot say what the machine's file does not.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.launchers import SrunLauncher
from hpctrain.machine import Machine, get_machine, machine_names
from hpctrain.rundir import RunDir
from hpctrain.slurm import Line, script_lines
from hpctrain.spec import JobSpec, resolve
from hpctrain.spec.load import Job, Source
from hpctrain.units import format_walltime

PAGES = Path(__file__).parent / "sites"
COUNTS = (1, 2, 92)
_OWN = "hpctrain"


def lines_of(machine: Machine, nodes: int) -> list[Line]:
    """What the machine brings into the script of a job; what every job has is left out."""
    devices = machine.devices_per_node or 1
    spec = JobSpec.model_validate(
        {
            "machine": machine.name,
            "nodes": nodes,
            "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 256},
            "data": {"path": "/data/tokens.h5", "sequence_length": 16},
            "train": {"steps": 10, "global_batch": nodes * devices},
            "slurm": {"time": "1h"},
        }
    )
    resolved = resolve(Job(spec, {"": Source("default", "")}), machine, Path("/")).spec
    launcher = SrunLauncher(machine, mpich_wheel=False)
    run = RunDir(Path("/runs/example"))
    lines = script_lines(resolved, run, ["hpctrain", "run", str(run.root)], launcher)
    keys = ("name", "nodes", "ranks_per_node", "nodes, ranks_per_node", "slurm.")
    return [one for one in lines if one.source != _OWN and not one.source.startswith(keys)]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def shown(line: Line) -> str:
    before = {"module": "module load ", "node": "mkdir -p on each node: ", "srun": "srun "}
    return f"`{before.get(line.part, '')}{cell(line.text)}`"


def rendered(machine: Machine) -> list[str]:
    by_count = {count: lines_of(machine, count) for count in COUNTS}
    out = ["| rendered | nodes | why | from |", "|---|---|---|---|"]
    seen: set[tuple[str, str]] = set()
    for count in (2, 1, 92):
        for line in by_count[count]:
            key = (line.part, line.text)
            if key in seen:
                continue
            seen.add(key)
            holds = [n for n in COUNTS if any((o.part, o.text) == key for o in by_count[n])]
            nodes = {(1, 2, 92): "any", (1,): "1", (2, 92): "2 and more"}.get(
                tuple(holds), ", ".join(map(str, holds))
            )
            out.append(f"| {shown(line)} | {nodes} | {cell(line.why)} | {cell(line.source)} |")
    return out if len(out) > 2 else ["Nothing beyond what every job has."]


def limits(machine: Machine) -> list[str]:
    scheduling = machine.scheduling
    rows = []
    for kind, table in (("partition", scheduling.partitions), ("qos", scheduling.qos)):
        for name, one in table.items():
            path = f"{'partitions' if kind == 'partition' else 'qos'}.{name}"
            origin = scheduling.provenance(path)
            low, high = one.node_range()
            times = [
                f"{format_walltime(b.max_walltime)} on {b.min_nodes}-{b.max_nodes} nodes"
                for b in one.bins
            ]
            if not times and one.max_walltime is not None:
                times = [format_walltime(one.max_walltime)]
            rows.append(
                f"| {kind} `{name}` | {low}-{'' if high is None else high} | "
                f"{'<br>'.join(times) or 'not stated'} | "
                f"{one.confidence or origin.confidence} | {cell(one.source or origin.source)} |"
            )
    if not rows:
        return [
            "None in the file: the limits of the Slurm that answers are asked before submitting."
        ]
    head = ["| | nodes | longest walltime | confidence | from |", "|---|---|---|---|---|"]
    end = [
        "",
        "A request over one of high or medium confidence is refused with exit code 3 before it is "
        "submitted; one of low confidence warns.",
    ]
    return [*head, *rows, *end]


def page(machine: Machine) -> str:
    node = machine.node
    rows = [
        ("devices a node", str(node.devices)),
        ("device", node.device.name),
        ("cores a node, for jobs", f"{node.cores}, {node.usable_cores}"),
        ("network", machine.network.fabric),
        ("read", ", ".join(sorted({str(block.as_of) for block in blocks(machine)} - {"None"}))),
    ]
    low = machine.low_confidence()
    notes = [note for block in blocks(machine) for note in block.notes]
    parts = [
        f"# {machine.title}",
        "",
        f"`machine: {machine.name}`"
        + (f", also {', '.join(f'`{a}`' for a in machine.aliases)}" if machine.aliases else ""),
        "",
        "From public documentation, not from use of this machine: each value carries its source, "
        f"and `hpctrain site show {machine.name}` has all of them.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {cell(value)} |" for key, value in rows),
        "",
        "## What is rendered, and why",
        "",
        *rendered(machine),
        "",
        "## Limits",
        "",
        *limits(machine),
        "",
        "## Files",
        "",
        *storage(machine),
        "",
        "## Containers",
        "",
        *containers(machine),
        "",
    ]
    if notes or machine.notes:
        parts += ["## Notes", "", *(f"- {cell(n)}" for n in [*machine.notes, *notes]), ""]
    if low:
        parts += [
            "## Not certain",
            "",
            "Values of low confidence. They are not rendered into jobs and refuse nothing; try "
            "them on the machine, and put them into a file of your own (see "
            "[machines](../machines.md)).",
            "",
            "| value | | from |",
            "|---|---|---|",
            *(f"| `{f.path}` | {cell(str(f.value))} | {cell(f.provenance.source)} |" for f in low),
            "",
        ]
    return "\n".join(parts)


def storage(machine: Machine) -> list[str]:
    found = []
    for role, area in machine.storage.areas.items():
        here = " (checkpoints)" if role == machine.storage.checkpoint_area else ""
        extra = "; ".join(t for t in (area.kind, area.quota, area.note) if t)
        purge = f"; files of {area.purge_days} days are removed" if area.purge_days else ""
        found.append(f"- {role}{here}: `{area.path}`, {extra}{purge}")
    advice = (machine.storage.stripe_advice, machine.storage.python_env)
    found += [f"- {text}" for text in advice if text]
    local = machine.storage.node_local
    if local is not None and local.path:
        found.append(f"- node-local: `{local.path}` ({local.kind}); `python_env` unpacks there")
    return found or ["Nothing is stated."]


def containers(machine: Machine) -> list[str]:
    block = machine.containers
    if block is None:
        return ["The file does not say what starts images: set `container.runtime`."]
    known = block.runtime in ("apptainer", "pyxis", "podman-hpc")
    first = f"`{block.runtime}`" + (
        ""
        if known
        else ", which is not rendered: set `container.runtime` where the site has another"
    )
    return [f"{first}. {block.options or ''}".strip()]


def blocks(machine: Machine) -> list:
    found = [machine.node, machine.network, machine.affinity, machine.launch, machine.rendering,
             machine.scheduling, machine.storage, machine.containers]  # fmt: skip
    return [block for block in found if block is not None]


def pages() -> dict[str, str]:
    """Text by file name; ``local`` depends on the host and has none."""
    machines = [get_machine(name) for name in machine_names() if name != "local"]
    found = {f"{machine.name}.md": page(machine) for machine in machines}
    rows = [
        f"| [{m.name}]({m.name}.md) | {m.title} | {len(m.low_confidence())} |" for m in machines
    ]
    found["README.md"] = "\n".join(
        [
            "# Machines that jobs can name",
            "",
            "A page a machine: what is rendered for it and why, its limits, what is not certain.",
            "",
            "| machine | | doubtful values |",
            "|---|---|---|",
            *rows,
            "",
            "A machine that is not here: [adding a site](../machines.md#adding-a-site).",
            "",
        ]
    )
    return found


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for file, text in pages().items():
        (PAGES / file).write_text(text, encoding="utf-8")
