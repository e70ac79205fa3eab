"""``hpctrain explain``: one key of the job file, and where its value in force came from."""

from __future__ import annotations

import re
from typing import Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import job_argument, json_option, set_option


def _complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from hpctrain.cli.reference import all_keys

    return [key.key for key in all_keys() if key.key.startswith(incomplete)]


@click.command(short_help="Explain a key of the job file.")
@click.argument("key", metavar="KEY", shell_complete=_complete_key)
@job_argument(required=False)
@set_option
@json_option
def command(key: str, job: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say what KEY means: what may stand there, its unit and its default.

    KEY may also be an option or a variable of the job's batch script, for example --gpu-bind or
    NCCL_NET, or `script` for all of them: why it is rendered, and from which source.

    With a job file, also the value in force and where it came from: the file with line and
    column, --set, a preset, the default, or worked out from other keys.
    """
    from hpctrain.cli import reference

    if job is not None and _explain_script(key, job, overrides, as_json):
        return
    found = reference.find_key(key)
    inside = [one for one in reference.all_keys() if one.key.startswith(f"{key}.")]
    value = _value(key, job, overrides) if job is not None else None
    if as_json:
        answer: dict[str, Any] = {"key": key, **found.to_dict()}
        if found.section:
            answer["keys"] = [one.key for one in inside]
        output.emit_json(answer | (value or {}))
        return
    output.line(key)
    output.line(f"  {found.meaning}")
    rows = [("type", found.type)]
    if found.unit and found.unit not in found.type:
        rows.append(("unit", found.unit))
    if found.required:
        rows.append(("default", "none: a job must give it"))
    elif not found.section:
        rows.append(("default", f"worked out: {found.default}" if found.derived else found.default))
    if found.shorthand:
        rows.append(("shorthand", f"a bare value means {found.shorthand}"))
    if value is not None:
        if not found.section:
            shown = reference.show(value["value"], found.type)
            rows.append(("value", shown))
        rows.append(("from", f"{value['source']}: {value['where']}"))
    if found.section:
        rows.append(("keys", "\n".join(one.key for one in inside)))
    output.pairs(rows, indent="  ")


def _explain_script(key: str, path: str, overrides: tuple[str, ...], as_json: bool) -> bool:
    """Explain lines of the batch script; False where ``key`` is none of it."""
    from hpctrain.cli import reference

    if any(one.key == key for one in reference.all_keys()):
        return False
    from hpctrain.cli.launch import script_lines_of
    from hpctrain.cli.prepare import load

    lines = script_lines_of(load(path, overrides))
    name = key.lstrip("-")
    if key != "script":
        word = re.compile(rf"(^|\s|--?){re.escape(name)}(=|\s|$)")
        lines = [one for one in lines if word.search(one.text)]
    if not lines:
        return False
    if as_json:
        names = ("part", "text", "why", "source")
        output.emit_json({"lines": [{n: getattr(one, n) for n in names} for one in lines]})
        return True
    for one in lines:
        output.line(one.text if one.part != "module" else f"module load {one.text}")
        output.line(f"  {one.why}")
        output.line(f"  from {one.source}")
    return True


def _value(key: str, path: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The value in force and its origin; of an impossible job, the value before resolving."""
    from hpctrain.cli.prepare import load
    from hpctrain.errors import ImpossibleError

    try:
        job = load(path, overrides).job
    except ImpossibleError as error:
        from hpctrain.spec import read_job

        output.warn(f"the job is impossible as it stands: {error.message}")
        job = read_job(path, overrides)
    value: Any = job.spec
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    source = job.source(key)
    return {"value": value, "source": source.kind, "where": source.where}
