"""``hpctrain schema``: the job file for editors (JSON Schema) or for people (Markdown)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output

if TYPE_CHECKING:
    from hpctrain.spec.fields import Section

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@click.command(short_help="Print the JSON Schema of the job file.")
@click.option("--markdown", is_flag=True, help="A page of all keys for people instead.")
def command(markdown: bool) -> None:
    """Print the JSON Schema of the job file on stdout.

    Editors complete and check job files by it: write the schema to a file, and name that
    file in the first line of a job file:

    \b
      # yaml-language-server: $schema=job.schema.json
    """
    if markdown:
        from hpctrain.cli.reference import markdown as page

        output.line(page().rstrip("\n"))
        return
    import json

    from hpctrain.spec import JobSpec
    from hpctrain.spec.fields import Section

    kinds = {kind.__name__: kind for kind in Section.__subclasses__()}
    # The document is a JSON Schema as it stands; a schema_version key would not be part of one.
    schema = {"$schema": _DIALECT} | JobSpec.model_json_schema() | {"title": "hpctrain job file"}
    for name, section in schema["$defs"].items():
        schema["$defs"][name] = _with_shorthand(section, kinds[name])
    output.line(json.dumps(schema, indent=2, ensure_ascii=False))


def _with_shorthand(section: dict[str, Any], model: type[Section]) -> dict[str, Any]:
    """A section also takes nothing, and where it has a shorthand a bare value."""
    kinds: list[dict[str, Any]] = [section, {"type": "null"}]
    if model.scalar_key is not None:
        kinds.append(section["properties"][model.scalar_key] | {"title": model.scalar_key})
    return {"anyOf": kinds, "description": section.get("description", "")}
