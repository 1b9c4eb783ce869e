"""What a platform team installs on a cluster for holdfast."""
