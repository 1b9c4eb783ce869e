"""holdfast: multi-node training that runs correctly on its first launch and holds fast when things break."""

__version__ = "0.1.0"
