"""Continuous batching: scheduler, runner, sampler, engine."""
