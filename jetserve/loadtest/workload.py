"""What is asked, and when: prompts from a file or of random tokens, and the times of a Poisson process.

The same seed gives the same work. Knows nothing of servers or clocks.
"""

import dataclasses
import enum
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from jetserve import batch_files
from jetserve.types import SamplingParams

RANDOM_TOKEN_IDS = range(16, 256)
"""What random prompts are made of: ids that every model has, above those that are usually special."""


class Distribution(enum.Enum):
    """How lengths vary; the values are the names on the command line."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


_PARAMETERS = {Distribution.FIXED: 1, Distribution.UNIFORM: 2, Distribution.LOGNORMAL: 3}
_FORMS = "a number such as 128, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA,HIGHEST"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of lengths in tokens.

    FIXED takes (length), UNIFORM (lowest, highest), both included, LOGNORMAL (median, sigma of the natural logarithm,
    highest): a length above the highest becomes the highest, one below 1 becomes 1.
    """

    distribution: Distribution
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = self.parameters
        if self.distribution is Distribution.LOGNORMAL:
            if not 0 < sizes[1] < math.inf:
                raise ValueError(f"sigma is {sizes[1]:g}; expected a finite number above 0")
            sizes = (sizes[0], sizes[2])
        if not all(1 <= size < math.inf and size == int(size) for size in sizes):
            raise ValueError(f"found {', '.join(f'{size:g}' for size in sizes)}; expected whole numbers of 1 or more")
        if list(sizes) != sorted(sizes):
            raise ValueError(f"{sizes[0]:g} is more than {sizes[1]:g}; expected the higher one last")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the command line's form.

        Raises:
          ValueError: if it is not one of the forms, or its numbers cannot be.
        """
        name, _, rest = text.partition(":") if ":" in text else (Distribution.FIXED.value, "", text)
        try:
            distribution = Distribution(name)
            parameters = tuple(float(number) for number in rest.split(","))
            if len(parameters) != _PARAMETERS[distribution]:
                raise ValueError(f"found {len(parameters)} numbers")
            return cls(distribution=distribution, parameters=parameters)
        except ValueError as error:
            raise ValueError(f"{text!r} is no length ({error}); expected {_FORMS}") from error

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.distribution is Distribution.FIXED:
            return int(self.parameters[0])
        if self.distribution is Distribution.UNIFORM:
            lowest, highest = self.parameters
            return rng.randint(int(lowest), int(highest))
        median, sigma, highest = self.parameters
        return int(min(max(1, round(rng.lognormvariate(math.log(median), sigma))), highest))


DEFAULT_LENGTHS = Lengths(distribution=Distribution.FIXED, parameters=(128,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: a text, token ids, or the messages of a chat, and how to sample the answer."""

    prompt: str | tuple[int, ...] | list[dict[str, Any]]
    sampling: SamplingParams
    priority: int = 0


def random_asks(
    sampling: SamplingParams, rng: random.Random, input_tokens: Lengths, output_tokens: Lengths
) -> Iterator[Ask]:
    """Prompts of random tokens without end, none like another, answered with exactly as many tokens as are drawn."""
    while True:
        prompt = tuple(rng.choices(RANDOM_TOKEN_IDS, k=input_tokens.draw(rng)))
        yield Ask(prompt=prompt, sampling=_exactly(sampling, output_tokens.draw(rng)))


def _exactly(sampling: SamplingParams, tokens: int) -> SamplingParams:
    return dataclasses.replace(sampling, max_tokens=tokens, ignore_eos=True)


def file_asks(
    path: Path, sampling: SamplingParams, rng: random.Random, output_tokens: Lengths | None
) -> tuple[int, Iterator[Ask]]:
    """The prompts of a file, in order and from the first again, and how many there are.

    Args:
      path: a JSON object a line, see `batch_files`.
      sampling: where a line does not say otherwise.
      rng: for `output_tokens`.
      output_tokens: the length of every answer, None for what a line says.

    Raises:
      ValueError: for a line that is no prompt, naming it, or if there is none.
      OSError: if the file cannot be read.
    """
    asks = []
    for line in batch_files.read_lines(path):
        found = batch_files.parse(line, sampling)
        prompt = found.messages if found.prompt is None else found.prompt
        assert prompt is not None
        asks.append(Ask(prompt=prompt, sampling=found.sampling, priority=found.priority))
    if not asks:
        raise ValueError(f'{path} has no prompts; expected a JSON object a line, {{"prompt": …}}')

    def all_of() -> Iterator[Ask]:
        for ask in itertools.cycle(asks):
            if output_tokens is None:
                yield ask
            else:
                yield dataclasses.replace(ask, sampling=_exactly(ask.sampling, output_tokens.draw(rng)))

    return len(asks), all_of()


def poisson_arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the start at which requests arrive, `rate` a second on average, without end. The first is at 0."""
    time = 0.0
    while True:
        yield time
        time += rng.expovariate(rate)
