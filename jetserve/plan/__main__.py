"""`python -m jetserve.plan`: see docs/tpu.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.plan_command()
