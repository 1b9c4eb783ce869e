"""Explains why pods are pending."""
