"""Root-cause analysis of logs: which rank failed first, which failures only follow, and what to do."""
