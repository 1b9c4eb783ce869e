"""Predictions for a training job before it runs: memory, step time, cost, and the best parallel layout."""
