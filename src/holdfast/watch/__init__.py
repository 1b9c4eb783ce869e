"""Watching ranks and nodes that still run: monitors read sources, detectors judge streams. Pure but for the reading."""
