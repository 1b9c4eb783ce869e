"""Base class of all events."""

from __future__ import annotations

import re

import msgspec


def _kebab_case(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_kebab_case):
    """A fact that changed a run's state.

    `at` is Unix time in seconds on the controller's clock; agents' times are mapped to it on arrival. `source` names
    the producer's incarnation (`node1.0/4f2c`) and `seq` counts its events from 1, to recognise an event sent twice.
    Both are unset for the controller's events.
    """

    at: float
    source: str = ""
    seq: int = 0
