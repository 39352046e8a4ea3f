"""`python -m jetserve convert|serve|chat|offline|evaluate|loadtest|plan`: the commands of an installed package."""

import sys

from jetserve import __version__, commands

COMMANDS = {
    "convert": commands.convert_command,
    "serve": commands.serve_command,
    "chat": commands.chat_command,
    "offline": commands.offline_command,
    "evaluate": commands.evaluate_command,
    "loadtest": commands.loadtest_command,
    "plan": commands.plan_command,
}


def main() -> None:
    """Runs the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name == "--version":
        print(__version__)
        return
    if name not in COMMANDS:
        listing = "\n".join(f"  {key:10}{command.__doc__}" for key, command in COMMANDS.items())
        print(f"usage: python -m jetserve COMMAND [--help]\n\n{listing}", file=sys.stdout if name else sys.stderr)
        raise SystemExit(0 if name in ("--help", "-h", "help") else 2)
    sys.argv[:2] = [f"jetserve {name}"]
    COMMANDS[name]()


if __name__ == "__main__":
    main()
