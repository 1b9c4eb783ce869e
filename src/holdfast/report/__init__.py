"""Run status, summary and goodput as pure folds over the event log, and a reader of the ranks' output."""
