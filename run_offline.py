"""Generates from files, evaluates, benchmarks: see docs/flags.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.offline_command()
