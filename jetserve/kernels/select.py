"""Chooses the implementation of an operation: the best that serves the platform and takes the arguments.

An operation is a folder beside this file; each file in it is an implementation and offers

  PLATFORMS: frozenset of jax platform names it serves, or None for all;
  PRIORITY: of several that serve, the highest is tried first;
  run(*args, **kwargs): the operation, or NotImplementedError for arguments that it does not take;
  prepare(weight): optional; the weight laid out as `run` wants it, once at load, or NotImplementedError.

Knows nothing of what the operations compute.
"""

import contextlib
import contextvars
import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_choices: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def platform(name: str) -> Iterator[None]:
    """Traces for another platform than the default backend's (ahead-of-time compilation)."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


@contextlib.contextmanager
def choose(**implementations: str) -> Iterator[None]:
    """Names the implementation of some operations, for all that is traced or prepared within."""
    for op, name in implementations.items():
        _implementation(op, name)
    token = _choices.set({**(_choices.get() or {}), **implementations})
    try:
        yield
    finally:
        _choices.reset(token)


Selection = tuple[str, frozenset[tuple[str, str]]]


def current_platform() -> str:
    """The platform that programs are traced for now."""
    return _platform.get() or jax.default_backend()


def selection() -> Selection:
    """What decides now which implementations run: a key for programs that were traced under it."""
    return current_platform(), frozenset((_choices.get() or {}).items())


@functools.cache
def implementations(op: str) -> Mapping[str, ModuleType]:
    """Every implementation of an operation, by name, the highest priority first."""
    package = importlib.import_module(f"jetserve.kernels.{op}")
    modules = {
        info.name: importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    }
    found = {name: module for name, module in modules.items() if hasattr(module, "PRIORITY")}
    return dict(sorted(found.items(), key=lambda item: -item[1].PRIORITY))


def _implementation(op: str, name: str) -> ModuleType:
    known = implementations(op)
    if name not in known:
        raise ValueError(f"{op} has no implementation {name!r}; expected one of {', '.join(known)}")
    return known[name]


def candidates(op: str, implementation: str | None = None) -> list[ModuleType]:
    """The implementations to try, in order; just the named one where one is named."""
    name = implementation or (_choices.get() or {}).get(op)
    if name is not None:
        return [_implementation(op, name)]
    current = current_platform()
    return [
        module for module in implementations(op).values() if module.PLATFORMS is None or current in module.PLATFORMS
    ]


def call(op: str, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
    """Runs the first candidate that takes the arguments.

    Raises:
      NotImplementedError: if none does, with each one's reason.
    """
    return _first(op, "run", implementation, args, kwargs)


def prepare(op: str, weight: Any, *, implementation: str | None = None) -> Any:
    """The weight as the first candidate that takes it wants it; unchanged if that one has no wish."""
    return _first(op, "prepare", implementation, (weight,), {})


def _first(op: str, function: str, implementation: str | None, args: tuple, kwargs: dict) -> Any:
    reasons = []
    for module in candidates(op, implementation):
        if function == "prepare" and not hasattr(module, "prepare"):
            return args[0]
        try:
            return getattr(module, function)(*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{module.__name__.rsplit('.', 1)[-1]}: {error}")
    raise NotImplementedError(
        f"no implementation of {op} takes these arguments ({'; '.join(reasons) or 'none is there'})"
    )
