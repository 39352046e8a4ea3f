"""Which of several forms each tensor gets, so that the sum of losses is small and the sum of sizes within a budget.

Owns the choice. Plain Python: knows nothing of what forms are, nor how losses are measured.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What one tensor would take in one form, in bits, and lose in it."""

    bits: int
    loss: float


def choose(forms: Mapping[str, Sequence[Form]], budget: float) -> dict[str, int]:
    """The form of every tensor, by its number.

    Starts with the smallest of each, and takes the step that saves most loss a bit as long as one fits. That is the
    best choice for the size that it ends with, but for what is left of the budget.

    Args:
      forms: of every tensor, one or more.
      budget: of all tensors together, bits.

    Raises:
      ValueError: if the smallest forms are larger than that.
    """
    steps = {name: _steps(found) for name, found in forms.items()}
    chosen = {name: found[0] for name, found in steps.items()}
    left = budget - sum(forms[name][number].bits for name, number in chosen.items())
    if left < 0:
        raise ValueError(f"the smallest forms take {budget - left:.0f} bits, more than the {budget:.0f} that are there")
    queue = [(*_slope(forms[name], found, 0), name, 0) for name, found in steps.items() if len(found) > 1]
    heapq.heapify(queue)
    while queue:
        _, bits, name, at = heapq.heappop(queue)
        if bits > left:
            continue
        left -= bits
        chosen[name] = steps[name][at + 1]
        if at + 2 < len(steps[name]):
            heapq.heappush(queue, (*_slope(forms[name], steps[name], at + 1), name, at + 1))
    return chosen


def _steps(forms: Sequence[Form]) -> list[int]:
    """Those that some budget is best spent with, by rising size: each step saves less a bit than the one before it."""
    order = sorted(range(len(forms)), key=lambda i: (forms[i].bits, forms[i].loss))
    kept: list[int] = []
    for number in order:
        if kept and forms[number].loss >= forms[kept[-1]].loss:
            continue
        while len(kept) > 1 and _slope(forms, [*kept[-1:], number], 0)[0] <= _slope(forms, kept[-2:], 0)[0]:
            kept.pop()
        kept.append(number)
    return kept


def _slope(forms: Sequence[Form], steps: Sequence[int], at: int) -> tuple[float, int]:
    """Of a step: the loss that it adds for each bit, below 0, and its bits."""
    before, after = forms[steps[at]], forms[steps[at + 1]]
    bits = after.bits - before.bits
    return (after.loss - before.loss) / bits, bits
