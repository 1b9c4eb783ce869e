"""Exactly-once data: shuffling, sharding, prefetching and data state in checkpoints."""
