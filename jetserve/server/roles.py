"""Who may speak in a chat, the same for every protocol."""

import typing
from typing import Literal

from jetserve.types import FieldError

Role = Literal["system", "developer", "user", "assistant", "tool"]


def for_template(role: str, field: str) -> str:
    """The role as chat templates know it.

    Raises:
      FieldError: if it is none; `field` is where it was found.
    """
    known = typing.get_args(Role)
    if role not in known:
        raise FieldError(field, role, f"one of {', '.join(known)}")
    return "system" if role == "developer" else role
