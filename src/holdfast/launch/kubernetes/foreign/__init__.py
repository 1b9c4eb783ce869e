"""Manifests that others wrote: reading, linting and converting them. It needs no cluster and no client."""
