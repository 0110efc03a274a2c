"""Spot and preemption notices of AWS, Google Cloud and Azure."""
