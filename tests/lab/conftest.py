"""Shared fixtures for tests of the lab's pods."""

from __future__ import annotations

import pytest
from tests.lab.lab_namespace import LabNamespace
from tests.waiting import until

from lab import Lab


@pytest.fixture
def space(lab: Lab, namespace: str) -> LabNamespace:
    until(lambda: "default" in lab.kubectl("-n", namespace, "get", "serviceaccounts", "-o", "name"), "an account")
    return LabNamespace(lab, namespace)
