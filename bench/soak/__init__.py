"""Soaks: one real run under random faults, checked at its end."""
