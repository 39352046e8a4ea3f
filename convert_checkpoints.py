"""Quantizes a checkpoint: see docs/flags.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.convert_command()
