"""TorchFT's Lighthouse protocol: decides which replicas commit the next step together."""
