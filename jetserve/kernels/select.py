"""Chooses the implementation of an operation: the best that serves the platform and takes the arguments.

An operation is a folder beside this file; each file in it is an implementation and offers

  PLATFORMS: frozenset of jax platform names it serves, or None for all;
  PRIORITY: of several that serve, the highest is tried first;
  run(*args, **kwargs): the operation, or NotImplementedError for arguments that it does not take;
  prepare(weight, **options): optional; the weight laid out as `run` wants it, once at load, or NotImplementedError.

Knows nothing of what the operations compute.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation that takes some arguments (None if none does), what it returned, and who refused before."""

    name: str | None
    result: Any
    refused: Mapping[str, str]


def call(op: str, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
    """Runs the first candidate that takes the arguments.

    Raises:
      NotImplementedError: if none does, with each one's reason.
    """
    return _first(op, "run", implementation, args, kwargs)


def prepare(op: str, weight: Any, *, implementation: str | None = None, **options: Any) -> Any:
    """The weight as the first candidate that takes it wants it; unchanged if that one has no wish."""
    return _first(op, "prepare", implementation, (weight,), options)


def explain(op: str, *args: Any, **kwargs: Any) -> Choice:
    """Which implementation `call` would run, and why not the ones before it. Runs nothing: arguments may be shapes."""

    def trace(run: Callable[..., Any]) -> Any:
        return jax.eval_shape(functools.partial(run, **kwargs), *args)

    return _choose(op, "run", None, trace)


def explain_prepare(op: str, weight: Any) -> Choice:
    """The same of `prepare`, which runs."""
    return _choose(op, "prepare", None, lambda function: function(weight))


def _first(op: str, function: str, implementation: str | None, args: tuple, kwargs: dict) -> Any:
    choice = _choose(op, function, implementation, lambda run: run(*args, **kwargs))
    if choice.name is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refused.items())
        raise NotImplementedError(f"no implementation of {op} takes these arguments ({reasons or 'none is there'})")
    return choice.result


def _choose(op: str, function: str, implementation: str | None, attempt: Callable[[Callable[..., Any]], Any]) -> Choice:
    refused: dict[str, str] = {}
    for module in candidates(op, implementation):
        name = module.__name__.rsplit(".", 1)[-1]
        try:
            return Choice(name=name, result=attempt(getattr(module, function, _unchanged)), refused=refused)
        except NotImplementedError as error:
            refused[name] = str(error)
    return Choice(name=None, result=None, refused=refused)


def _unchanged(weight: Any, **_: Any) -> Any:
    """What an implementation without `prepare` makes of a weight."""
    return weight
