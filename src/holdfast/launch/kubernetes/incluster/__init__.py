"""What runs in the pods of a run."""
