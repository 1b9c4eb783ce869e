"""What monitoring systems read of runs: metrics for Prometheus, from the event log."""
