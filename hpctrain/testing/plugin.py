"""Fixtures and reporting for pytest, registered by installing the package.

- ``slurm_cluster``: a running :class:`~hpctrain.testing.slurm.SlurmCluster` of 4 nodes with 8
  cores, one for the whole session. Tests share it: leave its nodes up and your jobs cancelled.
- ``slurm_cluster_factory``: starts clusters of any shape for one test, which may break them.

A test that asks for one of them carries the marker ``slurm`` by itself. Where Slurm is missing
such tests are skipped, and the session ends with a line that nobody overlooks.
``--hpctrain-require=slurm,mpi`` makes a session fail in which tests with these markers were
skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hpctrain.testing.slurm import SlurmCluster

# What a test can need that a machine may lack; name of the marker and what it says.
_NEEDS = {
    "slurm": "needs a real Slurm cluster (started by the fixture)",
    "mpi": "starts real MPI ranks",
    "network": "needs network namespaces (root or user namespaces)",
}
# One test's environment; many ranks on few cores are slow with a thread pool each.
_CLUSTER_ENV = {"OMP_NUM_THREADS": "1"}
_skips_key = pytest.StashKey[Counter[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hpctrain-require",
        metavar="MARKERS",
        default="",
        help="comma separated, of slurm, mpi, network: fail when such tests were skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, text in _NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.stash[_skips_key] = Counter()
    unknown = _required(config) - set(_NEEDS)
    if unknown:
        known = ", ".join(_NEEDS)
        raise pytest.UsageError(f"--hpctrain-require: {sorted(unknown)} is none of {known}")


def _required(config: pytest.Config) -> set[str]:
    option: str = config.getoption("--hpctrain-require")
    return {name.strip() for name in option.split(",") if name.strip()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"slurm_cluster", "slurm_cluster_factory"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slurm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Markers and not report.keywords, which also holds the names of directories.
    needs = [name for name in _NEEDS if item.get_closest_marker(name)]
    if report.skipped and needs and not hasattr(report, "wasxfail"):
        report.user_properties.append(("hpctrain_needs", ",".join(needs)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skips = _skipped(terminalreporter)
    for (need, reason), count in sorted(skips.items()):
        terminalreporter.write_line(
            f"SKIPPED {need.upper()} TESTS: {reason} ({count} {'test' if count == 1 else 'tests'})",
            yellow=True,
            bold=True,
        )


def _skipped(terminalreporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """Need and reason of each skipped test that needs something special."""
    skips: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        needs = dict(getattr(report, "user_properties", ())).get("hpctrain_needs", "")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        for need in filter(None, str(needs).split(",")):
            skips[need, str(reason).removeprefix("Skipped: ")] += 1
    return skips


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return
    if _required(session.config) & {need for need, _ in _skipped(reporter)}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _or_skip() -> None:
    from hpctrain.testing.slurm import available

    reason = available()
    if reason is not None:
        pytest.skip(f"no Slurm cluster here: {reason}")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A running cluster of 4 nodes with 8 cores, shared by all tests of the session."""
    from hpctrain.testing.slurm import SlurmCluster

    _or_skip()
    with SlurmCluster(env=_CLUSTER_ENV) as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster_factory() -> Iterator[Callable[..., SlurmCluster]]:
    """Start clusters for this test alone: called like ``SlurmCluster``, returns it running."""
    from hpctrain.testing.slurm import SlurmCluster

    _or_skip()
    with ExitStack() as stack:

        def start(*args: object, **kwargs: object) -> SlurmCluster:
            kwargs.setdefault("env", _CLUSTER_ENV)
            return stack.enter_context(SlurmCluster(*args, **kwargs))  # type: ignore[arg-type]

        yield start
