"""The parts of the Kubernetes back end that run in the controller's pod."""
