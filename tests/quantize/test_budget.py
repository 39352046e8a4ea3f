"""Forms within a budget: against all combinations, never over it, and refused where there is none."""

import itertools

import numpy as np
import pytest

from jetserve.quantize.budget import Form, choose


def make(seed: int, tensors: int = 5) -> dict[str, list[Form]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, tensors) * 100
    return {
        f"t{i}": [
            Form(bits=int(size * bits), loss=float(rng.uniform(0.5, 1.5) * 4.0**-bits)) for bits in (4, 4.25, 4.5, 8)
        ]
        for i, size in enumerate(sizes)
    }


def total(forms: dict[str, list[Form]], chosen: dict[str, int]) -> tuple[int, float]:
    picked = [forms[name][number] for name, number in chosen.items()]
    return sum(form.bits for form in picked), sum(form.loss for form in picked)


@pytest.mark.parametrize("seed", range(8))
def test_no_combination_of_the_same_size_loses_less(seed: int) -> None:
    forms = make(seed)
    weights = sum(found[0].bits for found in forms.values()) / 4
    for target in (4.0, 4.2, 4.6, 6.0, 8.0):
        bits, loss = total(forms, choose(forms, target * weights))
        assert bits <= target * weights
        every = [
            total(forms, dict(zip(forms, numbers, strict=True)))
            for numbers in itertools.product(range(4), repeat=len(forms))
        ]
        within = [found for found in every if found[0] <= target * weights]
        # What is left of the budget may hold one more step, of the largest tensor at most.
        spared = [found for found in every if found[0] <= target * weights - 500 * 4]
        assert loss >= min(found[1] for found in within) - 1e-12
        assert loss <= min((found[1] for found in spared), default=np.inf) + 1e-12


def test_ends_of_the_range() -> None:
    forms = make(0)
    smallest = sum(min(form.bits for form in found) for found in forms.values())
    assert set(choose(forms, smallest).values()) == {0}
    largest = sum(max(form.bits for form in found) for found in forms.values())
    best = {name: min(range(4), key=lambda i, found=found: found[i].loss) for name, found in forms.items()}
    assert choose(forms, largest) == best
    with pytest.raises(ValueError, match=f"the smallest forms take {smallest} bits, more than the {smallest - 1}"):
        choose(forms, smallest - 1)


def test_a_larger_form_that_loses_more_is_never_chosen() -> None:
    forms = {"a": [Form(bits=10, loss=1.0), Form(bits=12, loss=2.0), Form(bits=14, loss=0.5), Form(bits=14, loss=0.4)]}
    assert [choose(forms, budget)["a"] for budget in (10, 13, 14, 99)] == [0, 0, 3, 3]
