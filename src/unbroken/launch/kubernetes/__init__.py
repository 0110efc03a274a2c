"""Kubernetes manifests: options, documents, text, as pure functions."""
