"""Talks to the API server: requests, errors, exec."""
