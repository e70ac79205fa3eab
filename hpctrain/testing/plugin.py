"""Fixtures and reporting for pytest, registered by installing the package.

- ``slurm_cluster``: a running :class:`~hpctrain.testing.slurm.SlurmCluster` of 4 nodes with 8
  cores, one for the whole session. Tests share it: leave its nodes up and your jobs cancelled.
- ``slurm_cluster_factory``: starts clusters of any shape for one test, which may break them.
- ``hosts_factory``: starts :class:`~hpctrain.testing.hosts.Hosts` for one test.
- ``run_ranks``: the function :func:`hpctrain.testing.ranks.run_ranks`.

A test that asks for one of them carries its marker (``slurm``, ``network``, ``mpi``) by itself.
Where the machine lacks what it takes such tests are skipped, and the session ends with a line
that nobody overlooks.
``--hpctrain-require=slurm,mpi`` makes a session fail in which a test with one of these markers
was skipped, or none ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hpctrain.testing.hosts import Hosts
    from hpctrain.testing.slurm import SlurmCluster

# What a test can need that a machine may lack; name of the marker and what it says.
_NEEDS = {
    "slurm": "needs a real Slurm cluster (started by the fixture)",
    "mpi": "starts real MPI ranks",
    "network": "needs network namespaces (root or user namespaces)",
}
_MARKER_OF = {
    "slurm_cluster": "slurm",
    "slurm_cluster_factory": "slurm",
    "hosts_factory": "network",
    "run_ranks": "mpi",
}
# Many ranks on few cores are slow with a thread pool each.
_RANK_ENV = {"OMP_NUM_THREADS": "1"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hpctrain-require",
        metavar="MARKERS",
        default="",
        help="comma separated, of slurm, mpi, network: fail unless such tests ran, all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, text in _NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
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
        fixtures = getattr(item, "fixturenames", ())
        for name in sorted({_MARKER_OF[one] for one in fixtures if one in _MARKER_OF}):
            item.add_marker(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Markers and not report.keywords, which also holds the names of directories.
    needs = [name for name in _NEEDS if item.get_closest_marker(name)]
    if needs and call.when != "teardown" and not hasattr(report, "wasxfail"):
        report.user_properties.append(("hpctrain_needs", ",".join(needs)))
    return report


def _needs(report: pytest.TestReport) -> list[str]:
    names: str = dict(getattr(report, "user_properties", ())).get("hpctrain_needs", "")
    return names.split(",") if names else []


def _skipped(reporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """How many tests were skipped, by what they need and the reason."""
    skips: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        for need in _needs(report):
            skips[need, str(reason).removeprefix("Skipped: ")] += 1
    return skips


def _missing(reporter: pytest.TerminalReporter) -> set[str]:
    """Required needs of which a test was skipped or none passed."""
    required = _required(reporter.config)
    passed = {need for report in reporter.stats.get("passed", []) for need in _needs(report)}
    return required & {need for need, _ in _skipped(reporter)} | required - passed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for (need, reason), count in sorted(_skipped(terminalreporter).items()):
        tests = "test" if count == 1 else "tests"
        line = f"SKIPPED {need.upper()} TESTS: {reason} ({count} {tests})"
        terminalreporter.write_line(line, yellow=True, bold=True)
    for need in sorted(_missing(terminalreporter)):
        line = f"REQUIRED {need.upper()} TESTS did not all run (--hpctrain-require)"
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    fine = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if reporter is not None and fine and _missing(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skip_if(what: str, reason: str | None) -> None:
    if reason is not None:
        pytest.skip(f"no {what} here: {reason}")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A running cluster of 4 nodes with 8 cores, shared by all tests of the session."""
    from hpctrain.testing import slurm

    _skip_if("Slurm cluster", slurm.unavailable())
    with slurm.SlurmCluster(env=_RANK_ENV) as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster_factory() -> Iterator[Callable[..., SlurmCluster]]:
    """Start clusters for this test alone: called like ``SlurmCluster``, returns it running."""
    from hpctrain.testing import hosts, slurm

    _skip_if("Slurm cluster", slurm.unavailable())
    with ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> SlurmCluster:
            if kwargs.get("uts") or kwargs.get("netns"):
                _skip_if("hosts", hosts.unavailable())
            cluster = slurm.SlurmCluster(*args, **{"env": _RANK_ENV, **kwargs})
            return stack.enter_context(cluster)

        yield start


@pytest.fixture
def hosts_factory() -> Iterator[Callable[..., Hosts]]:
    """Start hosts for this test alone: called like ``Hosts``, returns them running."""
    from hpctrain.testing import hosts

    _skip_if("hosts", hosts.unavailable())
    with ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> Hosts:
            return stack.enter_context(hosts.Hosts(*args, **{"env": _RANK_ENV, **kwargs}))

        yield start


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """:func:`hpctrain.testing.ranks.run_ranks`; skips the test where there is no mpiexec."""
    from hpctrain.testing import ranks

    _skip_if("MPI", ranks.unavailable())
    return ranks.run_ranks
