"""holdfast: launches multi-node PyTorch training and recovers it from failures."""

__version__ = "0.1.0"
