"""Quoting for the two readers of a batch script: bash, and sbatch for its ``#SBATCH`` lines."""

from __future__ import annotations

import re
import shlex

from hpctrain.errors import UsageError

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


def bash_quote(text: str) -> str:
    """One bash word that is exactly ``text``, on one line.

    Line breaks and other control characters go into ``$'…'``, since sbatch refuses a script
    with a carriage return in it, in a quoted string as well.
    """
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match[0]):03o}", escaped) + "'"


def bash_expanding(text: str) -> str:
    """One bash word in which only ``${NAME}`` is expanded.

    Raises:
        ValueError: control characters, which double quotes cannot hold.
    """
    if _CONTROL.search(text):
        raise ValueError(f"{text!r} holds control characters")
    parts = []
    last = 0
    for match in _REFERENCE.finditer(text):
        parts += [re.sub(r'([$`"\\])', r"\\\1", text[last : match.start()]), match[0]]
        last = match.end()
    parts.append(re.sub(r'([$`"\\])', r"\\\1", text[last:]))
    return '"' + "".join(parts) + '"'


def sbatch_quote(text: str, what: str) -> str:
    """One token of an ``#SBATCH`` line that sbatch reads as exactly ``text``.

    sbatch has a parser of its own (tried on 22.05): single and double quotes group, a backslash
    takes the next character literally inside quotes, but outside of them a blank ends the
    token all the same, and ``#`` begins a comment. So: double quotes, with backslashes before
    backslash and double quote.

    Args:
        text: the token, for example ``--comment=my job``.
        what: key of the job file it comes from, for the error.

    Raises:
        UsageError: a line break or NUL, which no quoting carries.
    """
    if re.search(r"[\n\r\x00]", text):
        raise UsageError(f"{what}: a line break cannot be part of a line for sbatch: {text!r}")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*", name):
        name, equals, value = "", "", text
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def log_pattern(path: str) -> str:
    """A file name for ``--output`` that Slurm takes as it is.

    ``%`` begins a replacement and is doubled; a name with a backslash gets no replacements,
    and its backslashes are doubled instead (tried on 22.05).
    """
    if "\\" in path:
        return path.replace("\\", "\\\\")
    return path.replace("%", "%%")
