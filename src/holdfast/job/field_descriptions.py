"""Gives the models' fields their docstrings as descriptions, for the JSON Schema and the documentation.

pydantic does the same whenever a class is made (`use_attribute_docstrings`): a tenth of the CPU time that a command
and a controller need to start, and neither shows a description.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise

from pydantic import BaseModel

from holdfast.job.spec import Model


@functools.cache
def describe_fields() -> None:
    """Describe the fields of every model that has been imported before the first call."""
    models = list(_below(Model))
    for model in models:
        for base in reversed(model.__mro__):
            for name, text in _docstrings(base).items():
                if name in model.model_fields:
                    model.model_fields[name].description = text
    for model in models:  # a model comes after those of its fields
        model.model_rebuild(force=True)


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from _below(each)


def _docstrings(cls: type) -> Mapping[str, str]:
    """The text below each annotated name of a class."""
    found = _classes(cls.__module__).get(cls.__name__) if issubclass(cls, Model) else None
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(found.body if found else ())
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


@functools.cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
