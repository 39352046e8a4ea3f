"""Reads a compiled program's text: its collectives, and the cycles that the compiler expects its parts to take.

The text is XLA's, and its form is not promised to stay.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_WHILE = re.compile(r" while\(.*?body=%?(?P<body>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_READ = re.compile(r'"hbm_bytes":"(\d+)"')
_SENT: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
"""Of a result's bytes, those that each of n devices sends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One operation between devices, and the bytes of its result on each."""

    kind: str
    result_bytes: float

    def bytes_sent(self, devices: int) -> float:
        """By each of so many devices that take part."""
        return self.result_bytes * _SENT[self.kind](devices)


def collectives(text: str) -> list[Collective]:
    """Of a program, one that stands in a loop once."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        sizes = [_BYTES[dtype] * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in _arrays(match)]
        # A start's result repeats the operand beside the result, which is the larger where they differ.
        found.append(Collective(kind=match["kind"], result_bytes=max(sizes) if "-start(" in line else sum(sizes)))
    return found


def _arrays(match: re.Match[str]) -> list[tuple[str, str]]:
    return _ARRAY.findall(match["result"])


def kernel_bytes(text: str) -> int:
    """Read by kernels whose cycles nobody knows, by what they say in their metadata."""
    return sum(int(found) for found in _READ.findall(text))


def cycles(text: str, unknown_trips: int) -> int:
    """That the compiler expects of all parts, one after the other, and kernels that say so of themselves.

    Args:
      text: of the program.
      unknown_trips: of loops whose length the program does not say.
    """
    own: dict[str, int] = {}
    loops: dict[str, list[tuple[str, int]]] = {}
    entry = current = ""
    for line in text.splitlines():
        if computation := _COMPUTATION.match(line):
            current = computation["name"]
            entry = current if computation["entry"] else entry
        elif loop := _WHILE.search(line):
            trips = _TRIPS.search(line)
            loops.setdefault(current, []).append((loop["body"], int(trips[1]) if trips else unknown_trips))
        elif estimate := _CYCLES.search(line):
            own[current] = own.get(current, 0) + int(estimate[1])

    def total(name: str) -> int:
        return own.get(name, 0) + sum(trips * total(body) for body, trips in loops.get(name, []))

    return total(entry)
