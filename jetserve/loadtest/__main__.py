"""`python -m jetserve.loadtest`: see docs/flags.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.loadtest_command()
