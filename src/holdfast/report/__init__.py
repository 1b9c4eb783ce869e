"""Says what happened in a run: pure folds over its event log, and a reader of its ranks' output."""
