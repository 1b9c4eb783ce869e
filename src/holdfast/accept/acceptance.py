"""Runs the acceptance checks of a target, keeps each result as soon as it is there, and resumes from those kept."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.accept.agreement import EXIT_CODES, Agreement, CheckName
from holdfast.accept.check_report import CheckReport, Verdict
from holdfast.accept.fabric_check import check_fabric
from holdfast.accept.first_run_check import check_first_run
from holdfast.accept.gang_check import check_gang
from holdfast.accept.restart_check import check_restart
from holdfast.accept.scaling_check import check_scaling
from holdfast.accept.site import Site
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.fabric.catalog import NAMES
from holdfast.host.files import atomic_write
from holdfast.job.loader import validate_data
from holdfast.job.targets import find_target
from holdfast.launch.target import TARGET_KINDS

FOLDER = Path(".holdfast", "acceptance")
RECORD = "acceptance.json"


class Acceptance(Struct, frozen=True, kw_only=True):
    """The results of a target's checks so far."""

    name: str
    target: str
    kind: str
    agreement: str
    """As JSON, with its defaults: what was measured."""
    began_at: float
    """Unix seconds."""
    wanted: tuple[CheckName, ...]
    reports: tuple[CheckReport, ...] = ()

    @property
    def left(self) -> tuple[CheckName, ...]:
        """Checks without a result."""
        done = {report.check for report in self.reports}
        return tuple(check for check in self.wanted if check not in done)

    @property
    def exit_code(self) -> ExitCode:
        """That of the first check that failed."""
        failed = (EXIT_CODES[report.check] for report in self.reports if report.verdict is Verdict.FAILED)
        return next(failed, ExitCode.OK)

    def report(self, check: CheckName) -> CheckReport | None:
        """The result of a check; None if it has none."""
        return next((report for report in self.reports if report.check is check), None)


def begin(target: str, agreement: Agreement, checks: Sequence[CheckName], *, base: Path) -> tuple[Acceptance, Path]:
    """A new acceptance and its folder; raises HoldfastError if there is no such target."""
    spec = find_target(target, start=base, environ=os.environ, fabrics=NAMES, kinds=TARGET_KINDS)
    validate_data({"command": ["true"], **agreement.job}, (), NAMES).loaded_or_raise()
    began_at = time.time()
    stamp = f"{target}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(began_at))}"
    taken = {path.name for path in (base / FOLDER).glob(f"{stamp}*")}
    names = itertools.chain((stamp,), (f"{stamp}-{number}" for number in itertools.count(2)))
    name = next(each for each in names if each not in taken)
    begun = Acceptance(
        name=name,
        target=target,
        kind=spec.kind,
        agreement=agreement.model_dump_json(),
        began_at=began_at,
        wanted=tuple(check for check in CheckName if check in checks or not checks),
    )
    folder = base / FOLDER / name
    folder.mkdir(parents=True, mode=0o700)
    _keep(begun, folder)
    return begun, folder


def load(name: str, *, base: Path) -> tuple[Acceptance, Path]:
    """An acceptance that was interrupted; raises HoldfastError if there is none of this name."""
    folder = base / FOLDER / name
    known = sorted(path.parent.name for path in (base / FOLDER).glob(f"*/{RECORD}"))
    if name not in known:
        raise failure(
            "acceptance-not-found",
            f"there is no acceptance {name!r} to resume",
            exit_code=ExitCode.NOT_FOUND,
            where=str(base / FOLDER),
            evidence=tuple(known[-10:]),
            remedy="Leave `--resume` out to begin a new one.",
        )
    try:
        found = msgspec.json.decode((folder / RECORD).read_bytes(), type=Acceptance)
        Agreement.model_validate_json(found.agreement)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise failure(
            "acceptance-unreadable",
            f"the record of acceptance {name!r} cannot be read: {error}",
            exit_code=ExitCode.NOT_FOUND,
            where=str(folder / RECORD),
            remedy="Begin a new one without `--resume`.",
        ) from None
    return found, folder


def carry_out(
    acceptance: Acceptance,
    folder: Path,
    *,
    base: Path,
    log: Callable[[str], object],
    show: Callable[[CheckReport], object],
) -> Acceptance:
    """Run the checks that have no result yet; each is kept before the next begins."""
    site = Site(
        target=acceptance.target,
        spec=find_target(acceptance.target, start=base, environ=os.environ, fabrics=NAMES, kinds=TARGET_KINDS),
        base=base,
        folder=folder,
        agreement=Agreement.model_validate_json(acceptance.agreement),
        log=log,
    )
    for check in acceptance.left:
        report = _run(check, site, acceptance)
        acceptance = replace(acceptance, reports=(*acceptance.reports, report))
        _keep(acceptance, folder)
        show(report)
    return acceptance


def _run(check: CheckName, site: Site, acceptance: Acceptance) -> CheckReport:
    """The result of one check; one that the target refuses has failed, with the reason."""
    fabric = acceptance.report(CheckName.FABRIC)
    checks: Mapping[CheckName, Callable[[], CheckReport]] = {
        CheckName.FABRIC: lambda: check_fabric(site),
        CheckName.SCALING: lambda: check_scaling(site, fabric.bus_bytes_s if fabric else None),
        CheckName.GANG: lambda: check_gang(site),
        CheckName.FIRST_RUN: lambda: check_first_run(site),
        CheckName.RESTART: lambda: check_restart(site),
    }
    began_at, began = time.time(), time.monotonic()
    try:
        report = checks[check]()
    except HoldfastError as error:
        report = CheckReport(check=check, verdict=Verdict.FAILED, finding=error.findings[0])
    return replace(report, began_at=began_at, took_s=time.monotonic() - began)


def _keep(acceptance: Acceptance, folder: Path) -> None:
    atomic_write(folder / RECORD, msgspec.json.format(msgspec.json.encode(acceptance)))
