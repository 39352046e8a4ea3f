"""Layers that the models are built from."""
