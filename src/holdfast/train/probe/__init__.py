"""Active probes of devices and links: `python -m holdfast.train.probe` on every rank, as torchrun would start it."""
