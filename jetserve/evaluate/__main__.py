"""`python -m jetserve.evaluate`: see docs/flags.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.evaluate_command()
