"""Checkpoint formats: one file each."""
