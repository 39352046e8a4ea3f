"""Whether a model fits on chips, and how fast it can be there, by the real TPU compiler and without a TPU.

The process's own platform stays what it is (CPU): libtpu compiles ahead of time for chips that are not there.
"""
