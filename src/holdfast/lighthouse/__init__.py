"""Which replicas commit the next step together: TorchFT's Lighthouse protocol, told by the controller who is lost."""
