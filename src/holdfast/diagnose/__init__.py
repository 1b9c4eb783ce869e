"""What happened, read from logs: which rank failed first, what is only a consequence, and what to do."""
