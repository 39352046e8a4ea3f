"""Answers messages and obeys commands, whatever they are typed into.

Answers go to the output stream and everything else to the status function, so that a pipe gets answers alone. An answer
stopped by Ctrl-C stays in the history as far as it came; one that failed, or was stopped before its first character, is
forgotten together with its question, because templates expect questions and answers to alternate.
"""

import dataclasses
import enum
import itertools
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TextIO

from jetserve.config import SamplingDefaults
from jetserve.engine.engine import Engine
from jetserve.interactive.conversation import Conversation, Turn
from jetserve.types import FinishReason, Request, RequestOutput, SamplingParams, Usage

logger = logging.getLogger(__name__)

COMMANDS = "/help /reset /system [text] /stats /quit"
HELP = """\
/help           this text
/reset          forget the conversation, but not the system message
/system [text]  set the system message; without a text, remove it
/stats          tokens of the conversation, pages, prefix hits, speed
/quit, /exit    leave (Ctrl-D does too, and Ctrl-C twice)
//text          send "/text" as it is
A line that ends with a backslash goes on in the next one. Ctrl-C stops an answer; what came of it stays in the
conversation. When a conversation outgrows the cache, its oldest turns are forgotten."""

ANSWER_RESERVE = 256
"""Tokens kept free for an answer where no max_tokens says how many; a quarter of the limit where that is less."""

# Escape sequences in an answer could do anything to a terminal. Tabs and line feeds are fine.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Outcome(enum.Enum):
    """What became of one line of input."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    QUIT = "quit"


class Interrupts:
    """Turns Ctrl-C into `requested`, looked at between steps, while in a `with`.

    An exception in the middle of a step would lose the KV cache that the step was given to update in place.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "Interrupts":
        previous = signal.getsignal(signal.SIGINT)
        # Only the main thread may set handlers, and one that somebody set to ignore stays so.
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


@dataclasses.dataclass
class Answer:
    """One answer as it grows; times are seconds of `time.monotonic`."""

    started: float
    text: str = ""
    first: float | None = None
    ended: float = 0.0
    usage: Usage | None = None
    reason: FinishReason | None = None
    error: str | None = None

    def take(self, output: RequestOutput) -> None:
        self.ended = time.monotonic()
        if self.first is None and output.token_ids:
            self.first = self.ended
        self.text += output.text
        self.usage, self.reason, self.error = output.usage, output.finish_reason, output.error

    @property
    def decode(self) -> tuple[int, float]:
        """Tokens after the first, and the seconds they took."""
        if self.usage is None or self.first is None:
            return 0, 0.0
        return self.usage.output_tokens - 1, self.ended - self.first


class Chat:
    """Answers messages and obeys commands."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingDefaults,
        *,
        system: str | None = None,
        output: TextIO,
        status: Callable[[str], None],
    ) -> None:
        """`output` takes answers, and `status` lines about them.

        Raises:
          ValueError: if the model takes no system message, or `sampling` holds a setting that is out of range.
        """
        self.engine = engine
        self.status = status
        self._output = output
        self._for_terminal = output.isatty()
        self._sampling = sampling
        limit = engine.max_length
        reserve = min(ANSWER_RESERVE if sampling.max_tokens is None else sampling.max_tokens, limit // 4)
        self.conversation = Conversation(engine.tokenizer, limit=limit, reserve=reserve, system=system)
        self._params(max_tokens=1)
        self._ids = itertools.count()
        self._decoded, self._decode_seconds = 0, 0.0
        if not engine.tokenizer.has_chat_template:
            status("This model has no chat template: every message is continued as plain text, without a history.")

    def _params(self, max_tokens: int) -> SamplingParams:
        s = self._sampling
        return SamplingParams(
            max_tokens=max_tokens if s.max_tokens is None else s.max_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            seed=s.seed,
        )

    def warm_up(self) -> None:
        """Compiles what short messages need, by answering one twice where nobody sees it.

        The first time takes the whole of the template, the second only what the prefix cache lacks of it. Steps of
        other sizes are compiled when they are first needed.
        """
        params = dataclasses.replace(self._params(2), max_tokens=2)
        tokens, _ = self.conversation.prompt("Hi")
        for number in range(2):
            request = Request(request_id=f"warm-up-{number}", prompt_token_ids=tuple(tokens), sampling=params)
            for _ in self.engine.run([request]):
                pass

    def handle(self, line: str) -> Outcome:
        """Answers a message, or obeys a command."""
        if line.startswith("/") and not line.startswith("//"):
            return self._command(*line[1:].split(maxsplit=1))
        return self.ask(line[1:] if line.startswith("//") else line)

    def _command(self, name: str = "", argument: str = "") -> Outcome:
        match name:
            case "help":
                self.status(HELP)
            case "reset":
                self.conversation.turns.clear()
                self.status("The conversation is forgotten.")
            case "system":
                return self._set_system(argument.strip() or None)
            case "stats":
                self.status(self.describe())
            case "quit" | "exit":
                return Outcome.QUIT
            case _:
                self.status(f'There is no command /{name}. Commands: {COMMANDS}. To send it as it is: "//{name}"')
                return Outcome.FAILED
        return Outcome.DONE

    def _set_system(self, text: str | None) -> Outcome:
        try:
            self.conversation.set_system(text)
        except ValueError as error:
            self.status(f"Error: {error}. The system message stays as it was.")
            return Outcome.FAILED
        self.status("The system message is removed." if text is None else "The system message is set.")
        return Outcome.DONE

    def ask(self, text: str) -> Outcome:
        """Streams the answer to a message. A failure is reported, and the conversation is what it was before."""
        conversation, answer = self.conversation, Answer(started=time.monotonic())
        try:
            tokens, dropped = conversation.prompt(text)
            if dropped:
                turns = "turn is" if dropped == 1 else f"{dropped} turns are"
                self.status(f"The conversation no longer fits in {conversation.limit} tokens: the oldest {turns} gone.")
            params = self._params(max_tokens=conversation.limit - len(tokens))
            request = Request(request_id=f"chat-{next(self._ids)}", prompt_token_ids=tuple(tokens), sampling=params)
            self.engine.submit(request)
        except ValueError as error:
            self.status(f"Error: {error}. The message is left out; the conversation goes on.")
            return Outcome.FAILED
        stopped = self._stream(request.request_id, answer)
        if answer.reason is FinishReason.ERROR:
            self.status(f"Error: {answer.error}. The message is left out; the conversation goes on.")
            return Outcome.FAILED
        if answer.text or not stopped:
            conversation.add(Turn(user=text, assistant=answer.text))
        decoded, seconds = answer.decode
        self._decoded += decoded
        self._decode_seconds += seconds
        self.status(self._summary(answer))
        return Outcome.STOPPED if stopped else Outcome.DONE

    def _stream(self, request_id: str, answer: Answer) -> bool:
        """Writes an answer as it comes, until it ends or Ctrl-C comes; returns whether that came.

        The request is over then in any case, and its pages are free.
        """
        interrupts = Interrupts()
        try:
            with interrupts:
                for outputs in self._steps():
                    for output in outputs:
                        answer.take(output)
                        self._write(output.text)
                    if interrupts.requested:
                        break
        except KeyboardInterrupt:  # came before the handler did, or after
            interrupts.requested = True
        finally:
            for output in self.engine.cancel(request_id):
                answer.take(dataclasses.replace(output, text=""))  # at most half a character
        self._write("\n")
        return interrupts.requested

    def _steps(self) -> Iterator[list[RequestOutput]]:
        """Outputs of each step; none while a long prompt is still being read."""
        while self.engine.has_work:
            try:
                outputs = self.engine.step()
            except Exception as error:
                logger.debug("a step failed", exc_info=True)
                outputs = self.engine.fail(f"{type(error).__name__}: {error}")
            yield outputs

    def _write(self, text: str) -> None:
        self._output.write(_CONTROL_CHARACTERS.sub("\ufffd", text) if self._for_terminal else text)
        self._output.flush()

    def _summary(self, answer: Answer) -> str:
        usage = answer.usage
        if usage is None or answer.first is None:
            return "[stopped before the first token; the message is left out]"
        parts = [f"{usage.output_tokens} tokens"]
        decoded, seconds = answer.decode
        if decoded and seconds:
            parts.append(f"{decoded / seconds:.1f} tokens/s")
        parts.append(f"first after {1000 * (answer.first - answer.started):.0f} ms")
        parts.append(f"prompt {usage.prompt_tokens}, {usage.cached_tokens} of them cached")
        if answer.reason is FinishReason.CANCELLED:
            parts.append("stopped" if answer.text else "stopped before any text; the message is left out")
        elif answer.reason is FinishReason.LENGTH:
            is_own_limit = usage.output_tokens == self._sampling.max_tokens
            parts.append(f"cut off at {'max_tokens' if is_own_limit else 'the limit of the conversation'}")
        return f"[{' · '.join(parts)}]"

    def describe(self) -> str:
        """The text of /stats."""
        conversation, stats = self.conversation, self.engine.stats()
        speed = f"{self._decoded / self._decode_seconds:.1f} tokens/s" if self._decode_seconds else "no speed yet"
        finished = ", ".join(f"{count} {reason.value}" for reason, count in stats.finished.items()) or "none"
        return "\n".join(
            (
                f"conversation: {len(conversation.turns)} turns, {conversation.num_tokens} of {conversation.limit}"
                " tokens",
                f"system message: {conversation.system or 'none of your own'}",
                f"answers: {speed}",
                f"engine, warm-up included: {stats.prompt_tokens} prompt tokens, {stats.prefix_cache_hit_tokens} of"
                f" them from the prefix cache; {stats.output_tokens} output tokens in {stats.steps} steps",
                f"pages: {stats.pages_used} of {stats.pages_total} in use; requests ended: {finished}",
            )
        )
