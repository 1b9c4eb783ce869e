"""The parts of the Kubernetes backend that run in the controller's pod."""
