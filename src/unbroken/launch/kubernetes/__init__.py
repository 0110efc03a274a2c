"""Manifests for Kubernetes: from options to the documents that the API server takes, as pure functions."""
