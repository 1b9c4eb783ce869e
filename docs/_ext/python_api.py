"""Generates the reference of the Python API from signatures and docstrings, without importing torch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import holdfast

TRAIN = Path(holdfast.__file__).parent / "train"


class Public(NamedTuple):
    """A public class: its name in a program, and the module of `holdfast.train` that defines it."""

    name: str
    module: str
    import_from: str = "holdfast.train"


PUBLIC = (
    Public("Session", "session/session.py"),
    Public("Data", "data/elastic_data.py"),
    Public("Packed", "data/packed.py"),
    Public("Text", "data/text.py"),
    Public("MicroBatch", "data/sharding.py", ""),
    Public("Batch", "data/sharding.py", ""),
    Public("RankConfig", "session/rank_config.py"),
    Public("HoldfastCallback", "integrations/transformers.py", "holdfast.train.integrations.transformers"),
    Public("HoldfastCallback", "integrations/lightning.py", "holdfast.train.integrations.lightning"),
)


def python_api_page() -> str:
    """Every public class with its constructor, attributes, methods and errors."""
    parts = [
        "# Python API",
        "What a training program imports. Every error is printed as a [finding](findings.md) with its code, the "
        "evidence and what to do, and ends the rank with an [exit code](exit-codes.md). The models of a job are on "
        "[a separate page](job.md).",
    ]
    for public in PUBLIC:
        parts += _class(public)
    return "\n\n".join(part for part in parts if part) + "\n"


def _class(public: Public) -> Iterator[str]:
    module = ast.parse((TRAIN / public.module).read_text())
    tree = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == public.name)
    methods = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    package = public.import_from.removeprefix("holdfast.train").removeprefix(".integrations.")
    yield f"## `{public.name}`" + (f" ({package})" if package else "")
    if public.import_from:
        yield f"```python\nfrom {public.import_from} import {public.name}\n```"
    yield _doc(tree)
    if (made := methods.get("__init__")) is not None:
        yield f"```python\n{_signature(made, public.name)}\n```"
        yield _doc(made)
    fields = [*_documented(tree.body), *(_documented(made.body) if made else ())]
    if fields:
        yield _table(("attribute", "type", "default", "meaning"), fields)
    for name, method in methods.items():
        if not name.startswith("_") and not _is_override(method):
            shown = ast.unparse(method.returns or ast.Constant(None)) if _is_property(method) else ""
            yield f"### `{public.name}.{name}`" + (f" ({package})" if package else "")
            yield f"`{name}: {shown}`" if shown else f"```python\n{_signature(method, name)}\n```"
            yield _doc(method)
    if codes := sorted(set(_codes(tree))):
        yield "Errors: " + ", ".join(f"`{code}`" for code in codes) + "."


def _signature(function: ast.FunctionDef, name: str) -> str:
    """The call, on one line or one parameter per line."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(named) - len(arguments.defaults)), *arguments.defaults]
    words = [_parameter(*each) for each in zip(named, defaults, strict=True)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    words = words[1:]  # without self
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{ast.unparse(arguments.vararg)}" if arguments.vararg else "*")
    words += [_parameter(*each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    words += [f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else []
    returned = f" -> {ast.unparse(function.returns)}" if function.returns and name == function.name else ""
    line = f"{name}({', '.join(words)}){returned}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) + (f" = {ast.unparse(default)}" if default is not None else "")


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, ...]]:
    """Public fields and attributes that have a docstring under them."""
    for field, below in pairwise(body):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        match field:
            case ast.AnnAssign(target=ast.Name(id=name)):
                default = f"`{ast.unparse(field.value)}`" if field.value else "required"
                yield _row(name, ast.unparse(field.annotation), default, below.value)
            case ast.AnnAssign(target=ast.Attribute(attr=name)):
                yield _row(name, ast.unparse(field.annotation), "", below.value)
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Constant(value=value)):
                yield _row(name, type(value).__name__, "", below.value)
            case _:
                pass


def _row(name: str, annotation: str, default: str, text: ast.Constant) -> tuple[str, ...]:
    return f"`{name}`", f"`{annotation}`", default, inspect.cleandoc(str(text.value))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(row for row in rows if not row[0].startswith("`_"))]
    if len(lines) == 2:
        return ""
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "property" for one in function.decorator_list)


def _is_override(function: ast.FunctionDef) -> bool:
    """Whether the library calls it: the hooks of a callback have no docstring, or begin with `on_`."""
    return function.name.startswith("on_") or ast.get_docstring(function) is None


def _codes(tree: ast.ClassDef) -> Iterator[str]:
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Name(id="failure"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case _:
                pass


def _doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The docstring, with its literal blocks as Python."""
    text = ast.get_docstring(node) or ""
    before, marker, after = text.partition("::\n\n")
    if not marker:
        return text
    block = after.splitlines()
    length = next((number for number, line in enumerate(block) if line and not line.startswith(" ")), len(block))
    code, rest = "\n".join(block[:length]), "\n".join(block[length:])
    return "\n\n".join(filter(None, (before.rstrip(), f"```python\n{inspect.cleandoc(code)}\n```", rest)))
