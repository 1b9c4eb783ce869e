"""Generates the reference pages from the code: job, Python API, commands, exit codes, events, findings, phase table.

The text comes from docstrings, help texts and tables in src/holdfast, so that it cannot go stale.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import python_api
import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pygments.lexers.special import TextLexer

import holdfast
from holdfast import errors, events, findings
from holdfast.accept.agreement import Agreement
from holdfast.control import machine, policy
from holdfast.control.context import FollowUp
from holdfast.control.state import NodePhase, ReplicaPhase, Timer
from holdfast.diagnose.device_fault_lines import FAULT_OF_RULE
from holdfast.diagnose.knowledge import cuda, nccl, xid
from holdfast.diagnose.knowledge.index import GROUPS, find
from holdfast.job import fault_catalog, spec
from holdfast.job.field_descriptions import describe_fields
from holdfast.launch.kubernetes.manifests.quantities import format_quantity
from holdfast.launch.kubernetes.storage_catalog import CATALOG as STORAGE
from holdfast.launch.kubernetes.storage_catalog import StorageDriver
from holdfast.launch.target_features import CONDITIONS, REASONS, TARGETS, Feature, reason_against
from holdfast.metrics import devices, flops, metric_catalog
from holdfast.observe.alert_catalog import ALERTS
from holdfast.observe.exported_metrics import EXPORTED, PREFIX, Kind
from holdfast.preflight.run_checks import GPU_CHECKS, GPU_RDMA_CHECKS, HOST_CHECKS, RDMA_CHECKS, name_of
from holdfast.security.api_limits import LIMITS, ApiLimits

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SOURCE = Path(holdfast.__file__).parent
LONGEST_DEFAULT = 60
"""Longest default that a table shows in full, in characters."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Write every page before Sphinx collects the sources; diagrams stay text, which GitHub draws."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "reference" / "generated"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(folder: Path) -> None:
    """Write each changed page, so that Sphinx does not rebuild unchanged ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path = folder / f"{name}.md"
        text = page()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# -- the job ------------------------------------------------------------------------------------------------------


def job_page() -> str:
    """Every field of a job file, by model, in definition order."""
    parts = [
        "# Job file",
        "One YAML file describes a job. Unknown keys are refused. `--set` overrides any field by its dotted name, such "
        "as `--set recovery.max_restarts=3`. `holdfast schema` prints this page as JSON Schema; the same models are "
        "the Python API.",
    ]
    return _page((*parts, *_model_tables(spec.Job)))


def acceptance_page() -> str:
    """Every field of an agreement."""
    parts = ("# Agreement of an acceptance", "The YAML file that `holdfast accept --agreement FILE` reads.")
    return _page((*parts, *_model_tables(Agreement)))


def _model_tables(model: type[BaseModel]) -> Iterator[str]:
    """The fields of a model and of those inside it."""
    describe_fields()
    for prefix, inner in _models(model):
        yield f"## {f'`{prefix}`' if prefix else 'Top level'}"
        yield _doc(inner)
        yield _table(
            ("field", "type", "default", "meaning"),
            ((f"`{name}`", _type(field), _default(field), field.description or "") for name, field in _own(inner)),
        )


def _own(model: type[BaseModel]) -> Iterable[tuple[str, FieldInfo]]:
    return ((field.alias or name, field) for name, field in model.model_fields.items())


def _models(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in _own(model):
        for inner in _classes(field.annotation):
            if issubclass(inner, BaseModel):
                many = ".NAME" if typing.get_origin(field.annotation) is dict else ""
                yield from _models(inner, f"{prefix}.{name}{many}".lstrip("."))


def _classes(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _classes(inner)


def _type(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(one, name)}" for one in field.metadata for name, sign in signs.items() if hasattr(one, name)
    ]
    return ", ".join([_name(field.annotation), *limits])


_PLAIN = {str: "text", int: "number", float: "number", bool: "true or false"}


def _name(annotation: object) -> str:
    """A readable name for a type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _name(inner[0])
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_name(one) for one in inner if one is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(one)}`" for one in inner)
    if origin is dict:
        return f"map to {_name(inner[1])}"
    if origin in {list, tuple, set, frozenset}:
        return f"list of {_name(inner[0])}"
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return " or ".join(f"`{member.value}`" for member in annotation)
        if issubclass(annotation, BaseModel):
            return "object"
        return _PLAIN.get(annotation, annotation.__name__)
    return "anything"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        return "none"
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json", exclude_defaults=True)
    elif isinstance(default, tuple | set | frozenset):
        default = list(default)
    if default in ({}, []):
        return "empty"
    text = json.dumps(default, default=str)
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see below"


# -- the commands -------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its help, arguments and options, read from the CLI application."""
    from holdfast.cli.app import app

    parts = ["# Commands", "Every command takes `--help`. A [separate page](exit-codes.md) lists the exit codes."]
    for name, command in _commands("holdfast", typer.main.get_command(app)):
        if name != "holdfast":
            parts.append(f"## `{name}`")
        parts += [*_command(name, command)]
    return _page(parts)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if command.hidden:
        return
    yield name, command
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {verb}", inner)


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    if command.help:
        yield inspect.cleandoc(command.help).replace("\f", "").replace("\b", "")
    records = [
        record
        for parameter in command.get_params(context)
        if "--help" not in parameter.opts and (record := parameter.get_help_record(context))
    ]
    if records:
        yield _table(("argument or option", "meaning"), ((f"`{usage}`", meaning) for usage, meaning in records))


# -- exit codes, findings and events ------------------------------------------------------------------------------


def exit_codes_page() -> str:
    """The exit codes of errors.py."""
    rows = ((str(int(code)), code.name, meaning) for code, meaning in errors.EXIT_CODE_MEANINGS.items())
    return _page(
        [
            "# Exit codes",
            _doc(errors.ExitCode),
            _table(("code", "name", "meaning"), rows),
        ]
    )


def findings_page() -> str:
    """The fields of a finding, the findings of a failed attempt, and every code in the source."""
    return _page(
        [
            "# Findings",
            "Validation, preflight checks, supervision and diagnosis all report findings. "
            + _doc(findings.Finding)
            + " A code never changes its meaning.",
            _struct_table(findings.Finding),
            "## Failed attempts",
            "The finding of a run's first failure, for a rank that has committed steps:",
            _table(("code", "example", "decision", "who can fix it"), _failures()),
            "## Other codes",
            "`…` marks values that the message fills in.",
            _table(("code", "message", "reported by"), _codes()),
        ]
    )


def _failures() -> Iterator[tuple[str, ...]]:
    for kind in policy.FailureKind:
        rank = None if kind is policy.FailureKind.NODE_LOST else 3
        code = signal.SIGKILL if kind in {policy.FailureKind.KILLED, policy.FailureKind.OUT_OF_MEMORY} else 1
        failure = policy.Failure(kind=kind, at=0, node=1, rank=rank, code=code, attempt=0, step=7)
        verdict = policy.decide(failure, (), spec.Recovery())
        yield f"`{kind}`", verdict.finding.what, verdict.action, verdict.finding.owner


def _codes() -> list[tuple[str, str, str]]:
    """One row per code, in alphabetical order, with all of its messages and source files."""
    said: dict[str, list[str]] = {}
    places: dict[str, list[str]] = {}
    for code, what, place in _written_codes():
        said.setdefault(code, []).append(what)
        places.setdefault(code, []).append(f"`{place}`")
    return [(f"`{code}`", _listed(said[code], "; "), _listed(places[code], ", ")) for code in sorted(said)]


def _listed(texts: list[str], separator: str) -> str:
    return separator.join(dict.fromkeys(texts))


def _written_codes() -> Iterator[tuple[str, str, Path]]:
    """Every call with a literal `code`, by keyword or position: `failure("a-code", ...)`, `Finding(code=...)`."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = ast.parse(path.read_text())
        nodes = list(ast.walk(module))
        places = {"failure": ["code", "what"], "cluster_finding": ["code", "where", "what"]}
        places |= {
            node.name: [one.arg for one in node.args.args] for node in nodes if isinstance(node, ast.FunctionDef)
        }
        words = [(node.lineno, node) for node in nodes if isinstance(node, ast.Assign)]
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            match call.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    names = [one for one in places.get(name, []) if one != "self"]
                case _:
                    names = []
            given = dict(zip(names, call.args, strict=False)) | {one.arg or "": one.value for one in call.keywords}
            match given.get("code"):
                case ast.Constant(value=str(text)):
                    said = _assigned(given.get("what"), [node for line, node in words if line < call.lineno])
                    yield text, _template(said), path.relative_to(SOURCE)
                case _:
                    pass


def _assigned(what: ast.expr | None, before: list[ast.Assign]) -> ast.expr | None:
    """The last value assigned to a name before its use; any other expression unchanged."""
    match what:
        case ast.Name(id=name):
            values = [
                (node.lineno, node.value)
                for node in before
                if any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            ]
            return max(values, key=lambda value: value[0])[1] if values else None
        case _:
            return what


def _template(what: ast.expr | None) -> str:
    match what:
        case ast.Constant(value=str(text)):
            return re.sub(r"\{[^{}]*\}", "…", text)
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return _template(left) + _template(right)
        case _:
            return "…"


def explain_page() -> str:
    """The output of `holdfast explain`, as a page."""
    parts = ["# Explanations", "The output of `holdfast explain CODE` for the codes that appear in logs and diagnoses."]
    for heading, rows in GROUPS.items():
        told = ((f"`{row.code}` {row.title}", row.cause, row.confirm, row.remedy) for row in rows)
        parts += [f"## {heading}", _table(("code", "cause", "how to confirm it", "what to do"), told)]
        parts.append(f"Sources: {_listed([row.source for row in rows], '; ')}.")
    return _page(parts)


def drills_table() -> str:
    """The faults of job/fault_catalog.py; docs/drills.md includes the table."""
    rows = (
        (
            f"`{action} {target}{':N' if target.is_numbered else ''}`",
            drill.description,
            "yes" if drill.reversible else "permanent",
            f"`{drill.precondition.field}`" if drill.precondition else "",
        )
        for (action, target), drill in fault_catalog.FAULTS.items()
    )
    return _page([_table(("fault", "what happens", "`--for`", "requires"), rows)])


def node_checks_table() -> str:
    """The checks of a node before a start; docs/preflight.md includes the table."""
    groups = {"every node": HOST_CHECKS, "GPUs": GPU_CHECKS, "RDMA": RDMA_CHECKS, "GPUs and RDMA": GPU_RDMA_CHECKS}
    rows = (
        (f"`{name_of(check)}`", need, _first_paragraph(check)) for need, checks in groups.items() for check in checks
    )
    return _page([_table(("check", "for", "what it looks at"), rows)])


def _first_paragraph(check: Callable[..., object]) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(check) or "").partition("\n\n")[0].split())


def device_faults_table() -> str:
    """What shows each fault of a device, and what follows it; docs/device-faults.md includes the table."""
    follows = {
        policy.NodeBlame.CERTAIN: ("replaces the node", "replaces the node"),
        policy.NodeBlame.SUSPECTED: ("restarts the ranks in place", "replaces the node"),
        policy.NodeBlame.NONE: ("restarts the ranks in place", "restarts the ranks in place"),
    }
    rows = (
        (f"`{fault}`", find(fault.value)[0].cause, _shown_by(fault), *follows[policy.node_blame(fault)])
        for fault in events.DeviceFault
    )
    return _page([_table(("code", "what happened", "shown by", "the first time", "the second time on a node"), rows)])


def _shown_by(fault: events.DeviceFault) -> str:
    """The numbers, names and rules of the lines that show a fault."""
    numbers = [f"Xid {row.number}" for row in xid.XIDS if row.fault is fault]
    named = [f"`cudaError{row.runtime}`" for row in cuda.ERRORS if row.fault is fault]
    named += [f"`{row.name}`" for row in nccl.RESULTS if row.fault is fault]
    rules = [f"lines of `{code}`" for code, shown in FAULT_OF_RULE.items() if shown is fault]
    return ", ".join([*numbers, *named, *rules])


def events_page() -> str:
    """Every event, by producer."""
    parts = [
        "# Events",
        "The log of a run is one append-only file, `events.jsonl`: one JSON object per line, with its type in `type`. "
        "A reader skips unknown types and fields.",
        "Fields of every event:",
        _struct_table(events.Event),
    ]
    producers = {
        "Controller events": events.RunEvent,
        "Agent events": events.AgentEvent,
        "Batched events: the controller merges many agent events into one": events.BatchedEvent,
        "User requests": events.RequestEvent,
    }
    common = {field.name for field in msgspec.structs.fields(events.Event)}
    for heading, union in producers.items():
        parts.append(f"## {heading}")
        for event in sorted(typing.get_args(union), key=_tag):
            parts += [f"### `{_tag(event)}`", _doc(event)]
            parts.append(_struct_table(event, without=common))
    parts.append("## Nested structs")
    for part in sorted(set(_parts(events.AnyEvent)), key=lambda part: part.__name__):
        parts += [f"### {part.__name__}", _doc(part), _struct_table(part)]
    return _page(parts)


def _parts(union: object) -> Iterator[type[msgspec.Struct]]:
    """The structs in fields of these events; findings have a separate page."""
    for event in typing.get_args(union):
        for field in msgspec.structs.fields(event):
            for inner in _classes(field.type):
                if issubclass(inner, msgspec.Struct) and inner is not findings.Finding:
                    yield inner


def _tag(event: type[msgspec.Struct]) -> str:
    return str(event.__struct_config__.tag)


def _struct_table(struct: type[msgspec.Struct], without: Iterable[str] = ()) -> str:
    meanings = _attribute_docstrings(struct)
    rows = [
        (f"`{field.name}`", _struct_type(field.type), meanings.get(field.name, ""))
        for field in msgspec.structs.fields(struct)
        if field.name not in without
    ]
    return _table(("field", "type", "meaning"), rows) if rows else ""


def _struct_type(annotation: object) -> str:
    if findings.Finding in _classes(annotation):
        return "[Finding](findings.md)"
    return _name(annotation)


def _attribute_docstrings(struct: type) -> dict[str, str]:
    """The docstring under each field, which Python does not keep at run time."""
    (body,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
            case _:
                pass
    return found


# -- the state machine --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One row of the machine's table."""

    event: str
    phases: tuple[str, ...]
    """Phases of the replica; empty if they make no difference."""
    handler: str
    summary: str
    leads_to: tuple[str, ...]
    """Phases that it sets, and follow-ups that it raises."""


def phase_rows(table: str) -> Iterator[PhaseRow]:
    """Each row of a table of control/machine.py: `RUN_HANDLERS`, `NODE_HANDLERS` or `REPLICA_HANDLERS`."""
    for trigger, handlers in getattr(machine, table).items():
        by_phase = {(): handlers} if table == "RUN_HANDLERS" else handlers
        for phases, handler in by_phase.items():
            names = tuple(phase.value if phase else "standby" for phase in phases)
            yield PhaseRow(
                event=_trigger(trigger),
                phases=() if set(ReplicaPhase) <= set(phases) else names,
                handler=f"{handler.__module__.rpartition('.')[2]}.{handler.__name__}",
                summary=inspect.cleandoc(handler.__doc__ or "").partition("\n\n")[0],
                leads_to=tuple(dict.fromkeys(_consequences(handler, set()))),
            )


def _trigger(trigger: Any) -> str:
    match trigger:
        case Timer():
            return f"timer `{trigger}`"
        case FollowUp():
            return f"*{trigger.value}*"
        case _:
            return f"`{_tag(trigger)}`"


def _consequences(function: Any, seen: set[Any]) -> Iterator[str]:
    """The phases that a function and those it calls in `control` set, and the follow-ups that they raise."""
    seen.add(function)
    for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not isinstance(call, ast.Call):
            continue
        for argument in (*call.args, *(given.value for given in call.keywords if given.arg == "phase")):
            match argument:
                case ast.Attribute(value=ast.Name(id="ReplicaPhase"), attr=name):
                    yield ReplicaPhase[name].value
                case ast.Attribute(value=ast.Name(id="FollowUp"), attr=name):
                    yield f"*{FollowUp[name].value}*"
                case _:
                    pass
        match call.func:
            case ast.Name(id=name):
                called = function.__globals__.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                called = getattr(function.__globals__.get(module), name, None)
            case _:
                called = None
        if inspect.isfunction(called) and called not in seen and called.__module__.startswith("holdfast.control"):
            yield from _consequences(called, seen)


def phases_page() -> str:
    """The table of the state machine: each event, the phases in which it matters, and what follows."""
    parts = [
        "# Phase table",
        "The controller decides with one function from a state and an event to the next state and commands "
        "(`control/machine.py`). It finds the handler of an event by the event's type and the phase of the replica. A "
        "handler may raise follow-ups (*in italics*), which find their handlers in the same way before the next event.",
        "## Phases of a replica",
        _table(("phase", "meaning"), _members(ReplicaPhase)),
        "## Phases of a node",
        _table(("phase", "meaning"), _members(NodePhase)),
        "## Follow-ups",
        _table(("follow-up", "raised when"), _members(FollowUp)),
        "## Timers",
        _table(("timer", "meaning"), _members(Timer)),
    ]
    tables = {
        "RUN_HANDLERS": "Events of the run",
        "NODE_HANDLERS": "Events of one node",
        "REPLICA_HANDLERS": "Events of one replica",
    }
    for table, heading in tables.items():
        parts.append(f"## {heading}")
        rows = (
            (row.event, ", ".join(row.phases) or "any", f"`{row.handler}`", row.summary, ", ".join(row.leads_to))
            for row in phase_rows(table)
        )
        parts.append(_table(("event", "phase", "handler", "what it does", "leads to"), rows))
    return _page(parts)


def _members(kind: type[enum.Enum]) -> Iterator[tuple[str, str]]:
    meanings = _attribute_docstrings(kind)
    return ((f"`{member.value}`", meanings.get(member.name, "")) for member in kind)


def limits_page() -> str:
    """The limits of security/api_limits.py."""
    meanings = _attribute_docstrings(ApiLimits)
    rows = [
        (f"`{field.name}`", _amount(field.name, getattr(LIMITS, field.name)), meanings[field.name])
        for field in msgspec.structs.fields(ApiLimits)
    ]
    words = sys.modules[ApiLimits.__module__].__doc__ or ""
    return _page(
        ["# Limits of the controller's port", words.partition("\n\n")[2], _table(("limit", "value", "meaning"), rows)]
    )


def metrics_table() -> str:
    """The metric catalog; docs/metrics.md includes it."""
    rows = ((f"`{row.name}`", row.unit, row.reduction, row.help) for row in metric_catalog.CATALOG)
    return _page([_table(("metric", "unit", "over ranks", "meaning"), rows)])


def exported_metrics_table() -> str:
    """What Prometheus reads of a run; docs/monitoring.md includes it."""
    rows = (
        (
            f"`{PREFIX}{row.name}{_SUFFIXES.get(row.kind, '')}`",
            row.kind.value,
            ", ".join(f"`{label}`" for label in row.labels),
            row.help,
        )
        for row in EXPORTED
    )
    return _page([_table(("metric", "type", "labels", "meaning"), rows)])


_SUFFIXES = {Kind.COUNTER: "_total", Kind.INFO: "_info"}


def alerts_table() -> str:
    """The alerts; docs/monitoring.md includes them."""
    template = re.compile(r"\{\{ (?:\$labels\.)?\$?(\w+)[^}]*\}\}")
    rows = (
        (
            f"`{row.name}`",
            row.severity.value,
            template.sub(lambda found: found[1].upper(), row.summary),
            f"`{template.sub(lambda found: found[1].upper(), row.explain)}`",
        )
        for row in ALERTS
    )
    return _page([_table(("alert", "severity", "meaning", "then"), rows)])


def models_list() -> str:
    """The model types with known FLOPs; docs/metrics.md includes the list."""
    return _page([", ".join(f"`{kind}`" for kind in sorted(("gpt2", *flops.GATED, *flops.PLAIN, *flops.MIXTURES)))])


def devices_table() -> str:
    """The peak throughput of each device; docs/metrics.md includes it."""

    def cell(peak: float | None) -> str:
        return "" if peak is None else f"{peak:,g}"

    rows = (
        (
            f"[{row.name}]({row.source})" if row.source.startswith("https:") else row.name,
            *(cell(peak) for peak in (row.bf16, row.fp16 or row.bf16, row.tf32, row.fp8)),
            row.stated if row.source.startswith("https:") else f"{row.stated}: {row.source}",
        )
        for row in devices.DEVICES
    )
    return _page([_table(("device", "bf16", "fp16", "tf32", "fp8", "vendor's figure, bf16"), rows)])


def storage_table() -> str:
    """What a claim of each storage driver is good for; docs/storage.md includes it."""

    def row(driver: StorageDriver) -> tuple[str, ...]:
        sizes: dict[int, list[str]] = {}
        for value, size in driver.smallest.items():
            sizes.setdefault(size, []).append(value or "default")
        least = "; ".join(f"{format_quantity(size)}{_of_values(driver, values)}" for size, values in sizes.items())
        options = ", ".join(f"`{option}`" for option in driver.mount_options)
        has = ", ".join(("one zone",) * driver.zonal + ("snapshots",) * driver.snapshots)
        name = f"[{driver.name}]({driver.source.split(';')[0]})"
        return (name, f"`{driver.provisioner}`", driver.kind, least, driver.throughput, has, options, driver.advice)

    head = ("driver", "provisioner", "volumes", "smallest", "published rate", "has", "mount options", "for checkpoints")
    return _page([_table(head, map(row, STORAGE.values()))])


def _of_values(driver: StorageDriver, values: list[str]) -> str:
    return f" ({driver.size_parameter} {', '.join(values)})" if driver.size_parameter else ""


_UNITS = {"_bytes": "B", "_bytes_per_s": "B/s", "_s": "s"}


def _amount(name: str, value: float) -> str:
    """A number with the unit from the suffix of its name."""
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    for factor, prefix in ((2**20, "Mi"), (2**10, "Ki")):
        if unit.startswith("B") and value >= factor:
            return f"{value / factor:g} {prefix}{unit}"
    return f"{value:g} {unit}".strip()


# -- page layout -------------------------------------------------------------------------------------------------


def _doc(thing: type) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


# -- targets ------------------------------------------------------------------------------------------------------


def targets_page() -> str:
    """What a run survives on each target, with the reason where it does not."""
    notes = list(dict.fromkeys((*REASONS.values(), *CONDITIONS.values())))

    def cell(feature: Feature, target: str) -> str:
        if reason := reason_against(feature, target):
            return f"no ({notes.index(reason) + 1})"
        if condition := CONDITIONS.get((feature, target)):
            return f"yes ({notes.index(condition) + 1})"
        return "yes"

    rows = ((feature.value, *(cell(feature, target) for target in TARGETS)) for feature in Feature)
    return _page(
        (
            "# What a run survives on which target",
            "The same tests run on each target (`tests/runs/test_targets.py`), with the programs of the place itself: "
            "sshd, slurmctld and slurmd, or a Kubernetes control plane, all on one machine. On Slurm they run with "
            "22.05, and `tests/runs/test_slurm_runs.py` with 24.11 and 26.05 too. On Kubernetes some do, and other "
            "tests show the same (`tests/launch/kubernetes/test_cluster_runs.py`). This page is generated from "
            "`launch/target_features.py`, and each *yes* has a test.",
            _table(("what happens", *TARGETS.values()), rows),
            "\n".join(f"{number}. {note[:1].upper()}{note[1:]}." for number, note in enumerate(notes, 1)),
            "How each target is set up: [hosts](hosts.md), [Slurm](slurm.md), [Monarch](monarch.md), "
            "[Kubernetes](kubernetes.md).",
        )
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + " --- |" * len(head), *(line(row) for row in rows)])


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "job": job_page,
    "acceptance": acceptance_page,
    "commands": cli_page,
    "exit-codes": exit_codes_page,
    "findings": findings_page,
    "explain": explain_page,
    "events": events_page,
    "python": python_api.python_api_page,
    "phases": phases_page,
    "limits": limits_page,
    "drills": drills_table,
    "device-faults": device_faults_table,
    "node-checks": node_checks_table,
    "metrics": metrics_table,
    "exported-metrics": exported_metrics_table,
    "alerts": alerts_table,
    "devices": devices_table,
    "storage": storage_table,
    "models": models_list,
}
