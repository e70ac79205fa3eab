"""``hpctrain init``: a job file to start from, its comments taken from the keys' descriptions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output

if TYPE_CHECKING:
    from hpctrain.machine import Machine

_HOUR = 3600


def _complete_machine(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from hpctrain.machine import machine_names

    return [name for name in machine_names() if name.startswith(incomplete)]


@click.command(short_help="Write a commented job file that works as it stands.")
@click.argument("path", metavar="[PATH]", default="job.yaml", type=click.Path(path_type=Path))
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Machine the job is for: a site's name or the path of a site file.",
    shell_complete=_complete_machine,
)
def command(path: Path, machine_name: str) -> None:
    """Write a commented job file, job.yaml unless PATH says otherwise.

    It trains a small GPT on bytes of text. A file that exists is never overwritten.
    """
    from hpctrain.errors import UsageError
    from hpctrain.machine import get_machine

    machine = get_machine(machine_name)
    text = template(machine, machine_name)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise UsageError(
            f"{path} exists and is left as it is", hint="give another name: hpctrain init PATH"
        ) from None
    except FileNotFoundError:
        raise UsageError(f"{path}: no directory {path.parent}") from None
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    output.line(f"wrote {path}")
    output.line("next:")
    output.line("  hpctrain data tokenize TEXT... -o tokens.h5   # the file that data.path names")
    if machine.scheduling.account_required:
        output.line(f"  edit {path}: slurm.account is your project's")
    output.line(f"  hpctrain submit {path} --dry-run")
    output.line(f"  hpctrain submit {path}")


def template(machine: Machine, machine_name: str) -> str:
    """The text of a job file for one node of a machine."""
    local = machine.kind == "local"
    devices = machine.devices_per_node
    ranks = min(2, devices) if local else devices
    time = min(machine.scheduling.longest_walltime(1) or _HOUR, _HOUR)
    from hpctrain.cli.reference import all_keys
    from hpctrain.units import format_walltime

    meaning = {key.key: key.meaning for key in all_keys()}

    def entry(key: str, value: str, extra: str = "") -> str:
        indent = "  " * key.count(".")
        text = " ".join(part for part in (meaning[key], extra) if part)
        return f"{_comment(text, indent)}{indent}{key.rpartition('.')[2]}: {value}\n"

    lines = [
        "# A job for hpctrain: a small GPT, trained on bytes of text.\n"
        "#   hpctrain explain KEY job.yaml   what a key means, and all that is not shown here\n"
        "#   hpctrain submit job.yaml        start it; --set train.steps=1000 replaces a key\n\n",
        entry("name", "tiny-gpt"),
        entry("machine", _quoted(machine_name)),
        entry("nodes", "1"),
        entry("ranks_per_node", str(ranks) if local else "auto"),
        "\nmodel:\n",
        entry("model.layers", "4"),
        entry("model.hidden", "192"),
        entry("model.heads", "6"),
        entry("model.vocab_size", "256"),
        entry("model.dropout", "0.0"),
        "\ndata:\n",
        entry("data.path", "tokens.h5"),
        entry("data.sequence_length", "128"),
        "\nparallel:\n",
        entry("parallel.data", "auto"),
        entry("parallel.sharding", "none"),
        "\ntrain:\n",
        entry("train.steps", "200"),
        entry("train.global_batch", str(8 * ranks)),
        entry("train.micro_batch", "auto"),
        entry("train.lr", "1e-3"),
        entry("train.min_lr", "1e-4"),
        "  schedule:\n",
        entry("train.schedule.kind", "cosine"),
        entry("train.schedule.warmup_steps", "20"),
        entry("train.precision", "fp32"),
        entry("train.seed", "0"),
        "\ncheckpoint:\n",
        entry("checkpoint.every", "50"),
        entry("checkpoint.keep", "2"),
        "\nslurm:\n",
    ]
    if machine.scheduling.account_required:
        lines.append(entry("slurm.account", "CHANGE-ME", "This machine wants one."))
    lines.append(entry("slurm.time", format_walltime(time)))
    lines.append(f"\n{_comment(meaning['env'], '')}env: {{}}\n")
    return "".join(lines)


def _comment(text: str, indent: str) -> str:
    import textwrap

    prefix = f"{indent}# "
    wrapped = textwrap.fill(
        text, 88, initial_indent=prefix, subsequent_indent=prefix, break_long_words=False
    )
    return f"{wrapped}\n"


def _quoted(text: str) -> str:
    """As a YAML value: plain where every reader takes that for text."""
    import json
    import re

    from hpctrain.spec.yaml_tree import resolve

    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*", text) and resolve(text) == text:
        return text
    return json.dumps(text, ensure_ascii=False)
