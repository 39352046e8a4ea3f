"""Chats with a model in the terminal: see docs/flags.md, or --help."""

from jetserve import commands

if __name__ == "__main__":
    commands.chat_command()
