"""Jobs and scripts that several tests of this folder need; run to write the golden scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.launchers import SrunLauncher
from hpctrain.machine import Machine, get_machine, machine_names
from hpctrain.rundir import RunDir
from hpctrain.slurm import render
from hpctrain.spec import Job, JobSpec, resolve
from hpctrain.spec.load import Source

GOLDEN = Path(__file__).parent / "golden"
BASE: dict[str, Any] = {
    "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 256},
    "data": {"path": "/data/tokens.h5", "sequence_length": 16},
    "train": {"steps": 10, "global_batch": 840},
}


def site() -> Machine:
    return get_machine(GOLDEN / "site.yaml")


def spec_of(machine: Machine, **keys: Any) -> JobSpec:
    """A resolved job; what of it does not matter here is filled in."""
    spec = JobSpec.model_validate({**BASE, **keys})
    return resolve(Job(spec, {"": Source("default", "")}), machine, Path("/submit/dir")).spec


def script_of(
    spec: JobSpec,
    machine: Machine,
    run: RunDir | None = None,
    program: Sequence[str] = ("/opt/venv/bin/hpctrain", "run", "/runs/r-1"),
    *,
    mpich_wheel: bool = False,
    hook: Sequence[str] = ("/opt/venv/bin/hpctrain", "batch"),
) -> str:
    launcher = SrunLauncher(machine, mpich_wheel=mpich_wheel)
    return render(spec, run or RunDir(Path("/runs/r-1")), program, launcher, hook)


# The environment values that public reports say get lost on the way to a rank.
HOSTILE_ENV = {
    "NCCL_NET": "AWS Libfabric",
    "NCCL_PROTO": "^LL128",
    "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
    "LINES_OF_TEXT": "first\nsecond\n\n",
    "CRLF": "dos\r\nline\t\x1b[0m\x7f",
    "QUOTES": 'it\'s "quoted" \\\'twice\\"',
    "DOLLAR": "$HOME ${HOME} $(id) `id` $$ \\$",
    "GLOB": "* ? [a] ~ !! # ; & | < > ( ) { }",
    "EQUALS": "a=b,c=d",
    "EMPTY": "",
    "BLANKS": "  both  ends  ",
    "UNICODE": "Grüße, 漢字, \u2028 \u00a0",
    "DASH": "-n",
    "PATH": "/nowhere",
    "IFS": "x",
}


def golden_scripts() -> dict[str, str]:
    machine = site()
    everything = spec_of(
        machine,
        name="big run: 'a' / $b",
        nodes=2,
        train={**BASE["train"], "global_batch": 8},
        slurm={
            "account": "p123", "partition": "batch", "qos": "normal", "reservation": "r1",
            "constraint": "gpu&(a|b)", "time": "1h30m", "margin": "90s", "cpus_per_task": 7,
            "memory": "10.5GiB", "exclusive": True, "mpi": "pmi2", "mail_user": "me@example.org",
            "comment": 'a "b" #c $HOME \\', "sbatch_options": ["--hint=nomultithread", "-x n1,n2"],
            "srun_options": ["--cpu-bind=map_cpu:1,2", "--prolog=/a b/c"],
            "modules": ["cuda/12", "odd'name"],
        },
        env=HOSTILE_ENV,
    )  # fmt: skip
    plain = spec_of(machine, name="plain")
    elastic = {"nodes": "1-2"}
    env = {"archive": "/project/it's/env.tar.gz", "path": "/local/${USER}"}
    packed = spec_of(machine, name="packed", slurm=elastic, nodes=2, python_env=env)
    image = {"image": "/images/a b.sif", "runtime": "apptainer", "binds": ["/scratch", "/a:/b"]}
    odd = RunDir(Path("/runs/100%j $x/it's"))
    return {
        "plain.sbatch": script_of(plain, machine),
        "packed.sbatch": script_of(packed, machine),
        "container.sbatch": script_of(spec_of(machine, name="image", container=image), machine),
        "everything.sbatch": script_of(
            everything, machine, odd, ["/opt/my venv/bin/hpctrain", "run", str(odd.root)]
        ),
    }


SITE_NODES = (1, 2, 92)


def site_scripts() -> dict[str, str]:
    """A script of each machine at node counts that differ: one node has no network to configure,
    two have, and 92 are in another walltime bin of Frontier."""
    found = {}
    for name in machine_names():
        if name == "local":  # depends on the host
            continue
        machine = get_machine(name)
        for nodes in SITE_NODES:
            train = {"steps": 10, "global_batch": nodes * (machine.devices_per_node or 1)}
            slurm = {"account": "project", "time": "1h"}
            spec = spec_of(machine, nodes=nodes, train=train, slurm=slurm)
            found[f"sites/{name}-{nodes}.sbatch"] = script_of(spec, machine)
    return found


if __name__ == "__main__":
    (GOLDEN / "sites").mkdir(exist_ok=True)
    for name, text in {**golden_scripts(), **site_scripts()}.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
