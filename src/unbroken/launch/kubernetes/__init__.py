"""Manifests for Kubernetes: from what is wanted to the documents a cluster takes, as pure functions."""
