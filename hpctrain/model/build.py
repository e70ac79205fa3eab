"""From the ``model`` section of a job to a torch module: ours, or a user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer
from hpctrain.spec.job import JobSpec


def build_model(spec: JobSpec, device: torch.device | str = "cpu") -> nn.Module:
    """The model of a job, float32, initialised; the same on every rank.

    A preset or explicit dimensions give a :class:`Transformer` initialised by
    (seed, name). ``model.module`` gives what that function returns, called with torch's
    generator seeded with ``train.seed`` (and put back afterwards).

    Raises:
        UsageError: the user's function is not there, raised, or returned no module.
    """
    seed = spec.train.seed
    if spec.model.module is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            user_function(spec.model.module, "model.module")
            torch.manual_seed(seed)  # whatever the import drew, once a process
            model = call_user(spec.model.module, spec.model.args, "model.module")
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model.module: {spec.model.module} returned {type(model).__name__}; "
                "a torch.nn.Module belongs here"
            )
        return model.to(device)
    dims = spec.model.transformer()
    transformer = Transformer(dims, device="meta").to_empty(device=device)
    init_parameters(transformer, seed)
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == dims.parameters, (count, dims.parameters)
    return transformer


def user_function(entry: str, key: str) -> Callable[..., Any]:
    """Import ``package.module:function``.

    Args:
        entry: as in the job file.
        key: of the job file that named it, for the message.

    Raises:
        UsageError: no such module or function, or the import raised.
    """
    module_name, _, name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise UsageError(f"{key}: importing {module_name} failed: {error}") from error
        raise UsageError(
            f"{key}: no module named {missing!r} (of {entry})",
            hint="install it, put it beside the job file, or its directory on PYTHONPATH (env: in "
            "the job file reaches every rank)",
        ) from None
    except Exception as error:
        raise UsageError(f"{key}: importing {module_name} failed: {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "has nothing" if function is None else f"has a {type(function).__name__}"
        raise UsageError(f"{key}: {module_name} {found} named {name!r}; a function belongs there")
    return function  # type: ignore[no-any-return]


def call_user(entry: str, args: Mapping[str, Any], key: str) -> Any:
    """Import a user's function and call it with keyword arguments.

    Raises:
        UsageError: as :func:`user_function`, or the call raised; the error is its cause.
    """
    function = user_function(entry, key)
    try:
        return function(**args)
    except UsageError:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in args.items())
        raise UsageError(f"{key}: {entry}({given}) raised {_told(error)}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
