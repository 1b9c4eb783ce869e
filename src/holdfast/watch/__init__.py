"""Watching ranks and nodes that still run: monitors read sources, detectors judge streams. Pure except the reading."""
