"""Servers over the engine."""
