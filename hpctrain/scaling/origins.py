"""Provenance of a report: job, code, environment, nodes, script and inputs of every run.

Secrets are masked before anything is shown: values of the job's own variables, and of every
variable or option whose name speaks of a key, token or password.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.scaling.analysis import Report
from hpctrain.scaling.collect import Measured

MASK = "***"
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|API|KEY|JWT", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"((?:^|[\s;&?,'\"-])[\w.-]*(?:token|secret|passw|cred|auth|cookie|api[_-]?key|[_-]key|jwt)[\w.-]*"
    r"\s*[=:]\s*)(?!\s)([^\s'\"]+|'[^']*'|\"[^\"]*\")",
    re.IGNORECASE,
)
_URL = re.compile(r"(\w+://[^/\s:@]+:)[^@\s/]+@")
_LARGEST_HASHED = 64 * 2**20
"""Bytes of an input that are hashed whole; of larger ones the first and last such part are."""
_NODES = re.compile(r"^hpctrain: job \S+ on (\S+),", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one run comes from.

    Attributes:
        run: its id.
        path: its directory.
        job: ``job.yaml`` as resolved, masked.
        script: batch script, masked; empty without one.
        code: version of hpctrain and commit.
        host: where it was submitted.
        command: command line, masked.
        modules: loaded when it was submitted, colon-separated as LOADEDMODULES has them.
        nodes: node list of the job.
        topology: ranks and nodes, as the run's first event says.
        environment: variables that matter, masked.
        inputs: path, size and SHA-256 of each input.
    """

    run: str
    path: str
    job: str
    script: str
    code: str
    host: str
    command: str
    modules: str
    nodes: str
    topology: str
    environment: Mapping[str, str]
    inputs: tuple[Mapping[str, Any], ...]

    def line(self) -> str:
        """One line for a list of runs."""
        where = f" on {self.nodes}" if self.nodes else ""
        files = "".join(f", {one['path']} sha256 {str(one['sha256'])[:12]}" for one in self.inputs)
        return f"{self.run}: {self.code}, {self.topology or 'not started'}{where}{files}"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "environment": dict(self.environment),
            "inputs": [dict(one) for one in self.inputs],
        }


def origins(report: Report) -> list[Origin]:
    """Of every run of a report, in its order; each input is hashed once."""
    hashed: dict[str, Mapping[str, Any]] = {}
    return [_origin(run, hashed) for row in report.rows for run in row.point.runs]


def mask(text: str) -> str:
    """Text without the values of what is named like a secret, and without passwords in URLs."""
    return _URL.sub(rf"\1{MASK}@", _ASSIGNED.sub(rf"\1{MASK}", text))


def masked_job(text: str) -> str:
    """A job file without the values of its variables, which may be secrets."""
    lines, inside = [], False
    for line in text.splitlines():
        if inside and line.startswith((" ", "\t")):
            name, colon, _ = line.partition(":")
            lines.append(f"{name}{colon} {MASK}" if colon else MASK)
            continue
        inside = line.startswith("env:")
        if inside and line.strip() not in ("env:", "env: {}"):
            line = f"env: {MASK}"
        lines.append(line)
    return mask("\n".join(lines))


def _masked_script(text: str, names: Mapping[str, str]) -> str:
    """A batch script without the values that the job itself exports."""
    for name in names:
        text = re.sub(
            rf"(export {re.escape(name)}=).*?(?=\n\s*(?:export \w|exec |\)|\Z))",
            rf"\1{MASK}", text, flags=re.DOTALL,
        )  # fmt: skip
    return mask(text)


def _origin(run: Measured, hashed: dict[str, Mapping[str, Any]]) -> Origin:
    caller = run.provenance.get("caller") or {}
    git = caller.get("git") or {}
    version = caller.get("hpctrain", "unknown version")
    commit = f", commit {git['commit'][:12]}" if git.get("commit") else ""
    variables = {
        name: MASK if _SECRET.search(name) else mask(str(value))
        for name, value in (caller.get("environment") or {}).items()
        if value is not None
    }
    started = [event for event in run.run.read_events() if event.kind == "started"]
    return Origin(
        run=run.run.id,
        path=str(run.run.root),
        job=masked_job(_text(run.run.job)),
        script=_masked_script(_text(run.run.script), run.spec.env),
        code=f"hpctrain {version}{commit}",
        host=str(caller.get("host", "")),
        command=mask(" ".join(caller.get("argv") or [])),
        modules=variables.get("LOADEDMODULES", ""),
        nodes=_node_list(run),
        topology=started[-1].message.split(";")[0] if started else "",
        environment=variables,
        inputs=tuple(_inputs(run, hashed)),
    )


def _node_list(run: Measured) -> str:
    """Nodes that the batch script wrote into its log; the host of a local run."""
    found = _NODES.findall(_text(run.run.job_log))
    if found:
        return str(found[-1])
    launches = run.run.read_launches()
    return launches[-1].host if launches and launches[-1].launcher == "local" else ""


def _inputs(run: Measured, hashed: dict[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    path = run.spec.data.path
    if path is None or not Path(path).is_file() or run.hardware.get("emulated"):
        return []
    if path not in hashed:
        hashed[path] = {"path": path, **_digest(Path(path))}
    return [hashed[path]]


def _digest(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    found = hashlib.sha256()
    with path.open("rb") as stream:
        if size <= 2 * _LARGEST_HASHED:
            while part := stream.read(2**20):
                found.update(part)
            return {"bytes": size, "sha256": found.hexdigest(), "of": "all of it"}
        found.update(stream.read(_LARGEST_HASHED))
        stream.seek(-_LARGEST_HASHED, 2)
        found.update(stream.read())
    return {"bytes": size, "sha256": found.hexdigest(), "of": "its first and last 64 MiB"}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
