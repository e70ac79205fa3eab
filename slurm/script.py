"""The batch script: pure text from a job, a run directory and a machine.

Every rendered option and variable is a :class:`Line` that says why it is there and where it
comes from; the script is made of these lines, so that an explanation cannot drift from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.launchers import container
from hpctrain.launchers.environment import check_job_env
from hpctrain.launchers.shape import cores_per_rank, ranks_per_node
from hpctrain.launchers.srun import OURS, SrunLauncher, cores_source, split_option
from hpctrain.rundir import safe_name
from hpctrain.slurm.quoting import bash_expanding, bash_quote, log_pattern, sbatch_quote
from hpctrain.units import format_walltime

if TYPE_CHECKING:
    from hpctrain.rundir import RunDir
    from hpctrain.spec import JobSpec

Part = Literal["sbatch", "module", "site", "node", "unpack", "srun", "program", "job"]
"""Where a line stands: ``#SBATCH`` options, modules, the site's exports, directories made on
every node, the packed environment, options of srun, the program, the job's own exports."""

_LONGEST_SIGNAL = 65535
"""Seconds; sbatch takes no larger time in --signal (sbatch(1))."""
_RESERVE_SECONDS = 30
"""Of the margin, for what the batch script does after its ranks; a fifth of a short one."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the script.

    Attributes:
        part: see Part.
        text: as it stands in the script, quoted.
        why: what it is for.
        source: job-file key, publication or file that it comes from.
    """

    part: Part
    text: str
    why: str
    source: str


# sbatch options that the script renders itself, and the key to write instead.
_OURS = {
    "nodes": "nodes", "N": "nodes",
    "ntasks": "nodes and ranks_per_node", "n": "nodes and ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "slurm.cpus_per_task", "c": "slurm.cpus_per_task",
    "time": "slurm.time", "t": "slurm.time",
    "account": "slurm.account", "A": "slurm.account",
    "partition": "slurm.partition", "p": "slurm.partition",
    "qos": "slurm.qos", "q": "slurm.qos",
    "reservation": "slurm.reservation",
    "constraint": "slurm.constraint", "C": "slurm.constraint",
    "mem": "slurm.memory",
    "exclusive": "slurm.exclusive",
    "comment": "slurm.comment",
    "mail-user": "slurm.mail_user",
    "job-name": "name", "J": "name",
    "signal": "slurm.margin",
    "requeue": "slurm.requeue", "no-requeue": "slurm.requeue",
    "output": "", "o": "", "error": "", "e": "", "open-mode": "",
    "array": "", "a": "", "wrap": "", "parsable": "", "wait": "", "W": "", "test-only": "",
    "chdir": "", "D": "",
}  # fmt: skip


def script_lines(
    spec: JobSpec, run: RunDir, program: Sequence[str], srun: SrunLauncher
) -> list[Line]:
    """All lines that a job's own keys and its machine bring into the script, in order.

    Args:
        spec: a resolved job.
        run: its run directory; need not exist.
        program: what each rank executes; see hpctrain.launchers.rank_program.
        srun: with the machine.

    Raises:
        UsageError: something that no quoting carries, or an sbatch option that the script
            renders itself.
    """
    check_job_env(spec.env)
    return [
        *_sbatch(spec, run, srun),
        *_modules(spec, srun),
        *_site(spec, srun),
        *_node_directories(spec, srun),
        *_unpack(spec, srun),
        *_srun(spec, run, srun),
        _program(spec, run, program, srun),
        *(
            Line("job", f"export {name}={bash_quote(value)}", "set in the job file", f"env.{name}")
            for name, value in spec.env.items()
        ),
    ]


def render(
    spec: JobSpec,
    run: RunDir,
    program: Sequence[str],
    srun: SrunLauncher,
    hook: Sequence[str],
) -> str:
    """The batch script; the same text for the same arguments. See script_lines.

    Args:
        spec, run, program, srun: see script_lines.
        hook: command that accounts for the job, see hpctrain.launchers.batch_hook.
    """
    import jinja2

    lines = script_lines(spec, run, program, srun)
    environment = jinja2.Environment(
        autoescape=False,  # noqa: S701 (bash, not HTML: every value comes quoted)
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    margin = math.ceil(spec.slurm.margin)
    reserve = min(_RESERVE_SECONDS, margin // 5)
    parts = {
        part: [line.text for line in lines if line.part == part]
        for part in ("sbatch", "module", "site", "node", "unpack", "srun", "program", "job")
    }
    template = resources.files("hpctrain.slurm").joinpath("job.sbatch.j2").read_text("utf-8")
    text = environment.from_string(template).render(
        **parts,
        run_id=re.sub(r"[^ -~]", "?", run.id),
        machine=srun.machine.name,
        root=bash_quote(str(run.root)),
        hook=" ".join(bash_quote(token) for token in hook),
        cores=cores_per_rank(spec, srun.machine),
        walltime=spec.slurm.time,
        margin=margin,
        patience=margin - reserve,
        grace=max(1, reserve // 4),
    )
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end]
        raise UsageError(f"the job holds {bad!r}, which has no bytes") from None
    return text


def _sbatch(spec: JobSpec, run: RunDir, srun: SrunLauncher) -> Iterator[Line]:
    machine, slurm = srun.machine, spec.slurm

    def line(token: str, why: str, source: str) -> Line:
        return Line("sbatch", f"#SBATCH {sbatch_quote(token, source)}", why, source)

    given = "given in the job file"
    yield line(f"--job-name={safe_name(spec.name)}", "shown by squeue", "name")
    ranks, cores = ranks_per_node(spec), cores_per_rank(spec, machine)
    if slurm.nodes is None:
        yield line(f"--nodes={spec.nodes}", given, "nodes")
        yield line(f"--ntasks-per-node={ranks}", "one task a rank", "ranks_per_node")
        yield line(f"--cpus-per-task={cores}", "cores of a rank", cores_source(spec, machine))
    else:
        # Tasks would be counted for the fewest nodes, and after a start for those of that start:
        # Slurm then gives no more than these (tried on 22.05).
        yield line(f"--nodes={slurm.nodes}", "as many as there are", "slurm.nodes")
        yield line(
            f"--mincpus={ranks * cores}", "cores of a node's ranks", cores_source(spec, machine)
        )
    if slurm.time is not None:
        yield line(f"--time={format_walltime(slurm.time)}", "walltime", "slurm.time")
    yield from _where(spec, srun)
    if slurm.memory is not None:
        mebibytes = -(-slurm.memory // 2**20)
        yield line(f"--mem={mebibytes}M", "memory a node", "slurm.memory")
    if slurm.exclusive:
        yield line("--exclusive", "whole nodes", "slurm.exclusive")
    if slurm.mail_user is not None:
        yield line(f"--mail-user={slurm.mail_user}", given, "slurm.mail_user")
        yield line("--mail-type=BEGIN,END,FAIL", "what it is told of", "slurm.mail_user")
    if slurm.comment is not None:
        yield line(f"--comment={slurm.comment}", given, "slurm.comment")
    yield line(
        f"--output={log_pattern(str(run.job_log))}",
        "absolute: a missing directory would end the job without a word",
        OURS,
    )
    yield line("--open-mode=append", "a requeue must not truncate the log", OURS)
    if slurm.max_restarts and slurm.requeue != "false":
        yield line("--requeue", "the run goes on from its checkpoint", "slurm.requeue")
    else:
        why = "slurm.max_restarts" if not slurm.max_restarts else "slurm.requeue"
        yield line("--no-requeue", "Slurm does not start it again by itself", why)
    yield line(
        f"--signal=B:USR1@{_signal_seconds(spec)}",
        "Slurm tells the script before the walltime ends, which passes it on to the ranks",
        "slurm.margin",
    )
    yield line("--export=ALL", "PATH and loaded modules of the submitting shell", OURS)
    for option in machine.sbatch_options(spec.nodes):
        given_tokens = option.tokens
        if slurm.nodes is not None:
            given_tokens = tuple(_of_a_node(token, ranks) for token in given_tokens)
        tokens = " ".join(sbatch_quote(token, option.source) for token in given_tokens)
        yield Line("sbatch", f"#SBATCH {tokens}", option.why, option.source)
    for index, text in enumerate(slurm.sbatch_options):
        key = f"slurm.sbatch_options.{index}"
        _refuse_ours(text, key)
        tokens = " ".join(sbatch_quote(token, key) for token in split_option(text))
        yield Line("sbatch", f"#SBATCH {tokens}", given, key)


def _of_a_node(token: str, ranks: int) -> str:
    """An option of a job that has no number of tasks."""
    match = re.fullmatch(r"--gpus-per-task=(\d+)", token)
    return f"--gpus-per-node={int(match[1]) * ranks}" if match else token


def _where(spec: JobSpec, srun: SrunLauncher) -> Iterator[Line]:
    """Account, partition, quality of service, reservation, features."""
    scheduling = srun.machine.scheduling
    for name, value, default in (
        ("account", spec.slurm.account, None),
        ("partition", spec.slurm.partition, scheduling.default_partition),
        ("qos", spec.slurm.qos, scheduling.default_qos),
        ("reservation", spec.slurm.reservation, None),
        ("constraint", spec.slurm.constraint, None),
    ):
        key = f"slurm.{name}"
        if value is not None:
            text, why, source = value, "given in the job file", key
        elif default is not None:
            text, why = default, f"default of machine {srun.machine.name}"
            source = scheduling.provenance(f"default_{name}").source
        else:
            continue
        yield Line("sbatch", f"#SBATCH {sbatch_quote(f'--{name}={text}', key)}", why, source)


def _srun(spec: JobSpec, run: RunDir, srun: SrunLauncher) -> Iterator[Line]:
    options = [*srun.options(spec), *container.srun_options(spec, srun.machine, run)]
    for one in options:
        text = " ".join(bash_quote(token) for token in one.tokens)
        if spec.slurm.nodes is not None and text.startswith(("--nodes=", "--ntasks=")):
            # As many as there are: what `batch begin` has answered.
            per_node = ranks_per_node(spec)
            counts = {"--nodes": '"$nodes"', "--ntasks": f'"$((nodes * {per_node}))"'}
            name = text.partition("=")[0]
            yield Line("srun", f"{name}={counts[name]}", one.why, "slurm.nodes")
            continue
        yield Line("srun", text, one.why, one.source)


def _program(spec: JobSpec, run: RunDir, program: Sequence[str], srun: SrunLauncher) -> Line:
    tokens = container.program(spec, srun.machine, run, list(program))
    if spec.python_env.archive is None:
        text = " ".join(bash_quote(token) for token in tokens)
        return Line("program", text, "each rank", OURS)
    # The environment's own hpctrain, where it was unpacked on each node.
    text = '"$unpacked"/bin/python "$unpacked"/bin/hpctrain ' + " ".join(
        bash_quote(token) for token in program[1:]
    )
    return Line("program", text, "each rank, from the unpacked environment", "python_env.archive")


def _unpack(spec: JobSpec, srun: SrunLauncher) -> Iterator[Line]:
    """Where the packed environment goes on each node."""
    if spec.python_env.archive is None:
        return
    if spec.container.image is not None:
        raise UsageError("python_env and container: ranks run from one of the two")
    path, source = spec.python_env.path, "python_env.path"
    storage = srun.machine.storage
    if path is None and storage.node_local is not None and storage.node_local.path is not None:
        path, source = storage.node_local.path, storage.provenance("node_local").source
        if storage.node_local.constraint is not None:
            tokens = " ".join(
                sbatch_quote(token, source) for token in split_option(storage.node_local.constraint)
            )
            yield Line("sbatch", f"#SBATCH {tokens}", "brings node-local storage", source)
    if path is None:
        raise ImpossibleError(
            f"python_env: machine {srun.machine.name} names no node-local storage",
            hint="set python_env.path to a directory that each node has for itself",
        )
    yield Line("unpack", f"archive={bash_quote(spec.python_env.archive)}", "sent to each node",
               "python_env.archive")  # fmt: skip
    where = bash_expanding(f"{path.rstrip('/')}/hpctrain-env-${{SLURM_JOB_ID}}")
    yield Line("unpack", f"unpacked={where}", "node-local, gone with the job", source)


def _signal_seconds(spec: JobSpec) -> int:
    seconds = math.ceil(spec.slurm.margin)
    if seconds > _LONGEST_SIGNAL:
        raise UsageError(
            f"slurm.margin: {seconds} s; sbatch --signal takes at most {_LONGEST_SIGNAL} s"
        )
    return seconds


def _refuse_ours(text: str, key: str) -> None:
    name = split_option(text)[0].partition("=")[0].lstrip("-")
    if name not in _OURS:
        return
    instead = _OURS[name]
    raise UsageError(
        f"{key}: {text!r}: the batch script sets this option itself",
        hint=f"write it as {instead}" if instead else "it cannot be changed",
    )


def _modules(spec: JobSpec, srun: SrunLauncher) -> Iterator[Line]:
    rendering = srun.machine.rendering
    source = rendering.provenance("modules").source
    for name in rendering.modules:
        yield Line("module", bash_quote(name), f"of machine {srun.machine.name}", source)
    for index, name in enumerate(spec.slurm.modules):
        yield Line("module", bash_quote(name), "given in the job file", f"slurm.modules.{index}")


def _site(spec: JobSpec, srun: SrunLauncher) -> Iterator[Line]:
    for one in srun.machine.environment(spec.nodes):
        value = bash_expanding(one.value) if one.expand else bash_quote(one.value)
        yield Line("site", f"export {one.name}={value}", one.why, one.source)


def _node_directories(spec: JobSpec, srun: SrunLauncher) -> Iterator[Line]:
    rendering = srun.machine.rendering
    source = rendering.provenance("node_directories").source
    for path in rendering.node_directories:
        why = "has to exist on every node before the ranks start"
        yield Line("node", bash_expanding(path), why, source)
