"""Answers, commands, Ctrl-C, and the loop that reads messages."""

import dataclasses
import json
import re
import signal
from pathlib import Path

import pytest
from chat_parts import CONFIG, LIMIT, Screen, cache_dir, make_chat, make_endless, reader

from jetserve.config import ModelSource
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.interactive.chat import HELP, Chat, Outcome
from jetserve.interactive.conversation import Turn
from jetserve.interactive.terminal import EXIT_FAILED, EXIT_INTERRUPTED, read_message, talk
from jetserve.tokenizer import Tokenizer
from jetserve.types import RequestOutput


class TestAnswers:
    def test_an_answer_is_streamed_and_remembered(self, chat: Chat, screen: Screen) -> None:
        assert chat.handle("Hello") is Outcome.DONE
        (turn,) = chat.conversation.turns
        assert turn == Turn(user="Hello", assistant=screen.getvalue()[:-1])
        assert turn.assistant
        assert re.fullmatch(
            r"\[8 tokens · [\d.]+ tokens/s · first after \d+ ms · prompt \d+, \d+ of them cached"
            r" · cut off at max_tokens\]",
            screen.notes[-1],
        )

    def test_a_turn_computes_only_what_is_new(self, chat: Chat, screen: Screen) -> None:
        chat.handle("Prefix caching makes each turn compute only its own tokens, or so they say.")
        first, _ = usage_of(screen)
        chat.handle("Is that so?")
        second, cached = usage_of(screen)
        assert second > first
        assert cached >= first // 16 * 16  # whole pages

    def test_without_max_tokens_the_limit_ends_the_answer(self, engine: Engine, screen: Screen) -> None:
        chat = make_chat(engine, screen, max_tokens=None)
        assert chat.handle("Hello") is Outcome.DONE
        prompt, _ = usage_of(screen)
        assert f"[{LIMIT - prompt} tokens" in screen.notes[-1]
        assert "cut off at the limit of the conversation" in screen.notes[-1]

    def test_warming_up_leaves_no_trace_in_the_conversation(self, chat: Chat, screen: Screen) -> None:
        chat.warm_up()
        assert chat.conversation.turns == []
        assert (screen.getvalue(), screen.notes) == ("", [])

    def test_forgetting_is_said(self, engine: Engine, screen: Screen) -> None:
        chat = make_chat(engine, screen, max_tokens=40)
        while not any("no longer fits" in note for note in screen.notes):
            assert len(chat.conversation.turns) < 10
            assert chat.handle("What is the capital of France?") is Outcome.DONE
        assert any("the oldest turn is gone" in note for note in screen.notes)

    def test_two_slashes_send_one(self, chat: Chat) -> None:
        chat.handle("//help me")
        assert chat.conversation.turns[0].user == "/help me"

    def test_text_that_is_no_unicode_is_refused(self, chat: Chat, screen: Screen) -> None:
        assert chat.handle("caf\udce9") is Outcome.FAILED
        assert "surrogate" in screen.notes[-1]
        assert chat.conversation.turns == []

    def test_escape_sequences_do_not_reach_a_terminal(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        step = engine.step

        def hostile_step() -> list[RequestOutput]:
            return [dataclasses.replace(output, text="\x1b[2J\ta\r\n") for output in step()]

        monkeypatch.setattr(engine, "step", hostile_step)
        shown = {}
        for is_terminal in (True, False):
            screen = Screen(is_terminal=is_terminal)
            make_chat(engine, screen, max_tokens=1).handle("Hello")
            shown[is_terminal] = screen.getvalue()
        assert shown == {True: "\ufffd[2J\ta\ufffd\n\n", False: "\x1b[2J\ta\r\n\n"}

    def test_a_failed_step_is_shown_and_the_conversation_goes_on(
        self, chat: Chat, screen: Screen, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chat.handle("One")
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", lambda plan, rows: 1 / 0)
            assert chat.handle("Two") is Outcome.FAILED
        assert "ZeroDivisionError: division by zero" in screen.notes[-1]
        assert chat.handle("Three") is Outcome.DONE
        assert [turn.user for turn in chat.conversation.turns] == ["One", "Three"]

    def test_without_a_template_text_is_continued(self, tmp_path: Path) -> None:
        plain = make_endless(tmp_path / "plain")
        config = json.loads((plain / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (plain / "tokenizer_config.json").write_text(json.dumps(config))
        source = ModelSource(checkpoint_path=str(plain), cache_dir=cache_dir())
        plain_engine = build_engine(source, CONFIG, max_length=LIMIT)
        screen = Screen()
        chat = make_chat(plain_engine, screen)
        assert "no chat template" in screen.notes[0]
        for _ in range(2):
            assert chat.handle("The quick brown") is Outcome.DONE
            assert usage_of(screen)[0] == len(plain_engine.tokenizer.encode("The quick brown", add_special_tokens=True))
        assert chat.handle("/system Be brief.") is Outcome.FAILED
        with pytest.raises(ValueError, match="no chat template"):
            make_chat(plain_engine, screen, system="Be brief.")


def usage_of(screen: Screen) -> tuple[int, int]:
    """Tokens of the last prompt, and how many of them were cached."""
    match = re.search(r"prompt (\d+), (\d+) of them cached", screen.notes[-1])
    assert match is not None, screen.notes[-1]
    return int(match[1]), int(match[2])


class TestCommands:
    def test_help(self, chat: Chat, screen: Screen) -> None:
        assert chat.handle("/help") is Outcome.DONE
        assert screen.notes == [HELP]
        assert screen.getvalue() == ""

    def test_reset(self, chat: Chat) -> None:
        chat.handle("/system Be brief.")
        chat.handle("Hello")
        assert chat.handle("/reset") is Outcome.DONE
        assert chat.conversation.turns == []
        assert chat.conversation.system == "Be brief."

    def test_system(self, chat: Chat, tokenizer: Tokenizer) -> None:
        assert chat.handle("/system  Be brief.\nBe kind. ") is Outcome.DONE
        tokens, _ = chat.conversation.prompt("Hello")
        assert "system\nBe brief.\nBe kind." in tokenizer.decode(tokens)
        assert chat.handle("/system") is Outcome.DONE
        assert chat.conversation.system is None

    def test_a_system_message_that_leaves_no_room_is_refused(self, chat: Chat, screen: Screen) -> None:
        chat.handle("/system Be brief.")
        assert chat.handle("/system " + "word " * LIMIT) is Outcome.FAILED
        assert f"at most {LIMIT - 1} fit" in screen.notes[-1]
        assert chat.conversation.system == "Be brief."

    def test_stats(self, chat: Chat, screen: Screen, engine: Engine) -> None:
        chat.handle("/stats")
        assert f"conversation: 0 turns, 0 of {LIMIT} tokens" in screen.notes[-1]
        chat.handle("Hello")
        chat.handle("/stats")
        assert f"conversation: 1 turns, {chat.conversation.num_tokens} of {LIMIT} tokens" in screen.notes[-1]
        assert re.search(r"answers: [\d.]+ tokens/s", screen.notes[-1])
        assert f"pages: 0 of {engine.allocator.total} in use" in screen.notes[-1]

    @pytest.mark.parametrize("name", ["quit", "exit"])
    def test_quit(self, chat: Chat, name: str) -> None:
        assert talk(chat, reader(f"/{name}", "Hello"), is_terminal=True) == 0
        assert chat.conversation.turns == []

    @pytest.mark.parametrize("line", ["/nonsense", "/", "/Help"])
    def test_unknown(self, chat: Chat, screen: Screen, line: str) -> None:
        assert chat.handle(line) is Outcome.FAILED
        assert "/help /reset /system [text] /stats /quit" in screen.notes[-1]


class TestInterrupts:
    def test_ctrl_c_keeps_what_came_of_the_answer(self, engine: Engine) -> None:
        screen = Screen(interrupt_at=4)
        chat = make_chat(engine, screen, max_tokens=100)
        assert chat.handle("Hello") is Outcome.STOPPED
        assert not engine.has_work
        assert engine.stats().pages_used == 0
        assert "[4 tokens" in screen.notes[-1]
        assert screen.notes[-1].endswith("· stopped]")
        (turn,) = chat.conversation.turns
        assert turn.assistant.startswith(screen.getvalue().removesuffix("\n"))
        assert chat.handle("Go on") is Outcome.DONE
        assert len(chat.conversation.turns) == 2

    def test_ctrl_c_in_a_step_waits_for_its_end(
        self, engine: Engine, screen: Screen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, done = engine.runner.run, []

        def interrupted_run(*args):
            signal.raise_signal(signal.SIGINT)
            tokens = run(*args)
            done.append(tokens)
            return tokens

        chat = make_chat(engine, screen)
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", interrupted_run)
            # More than one step of prompt: nothing has been answered when the first one ends.
            assert chat.handle("x9 " * 60) is Outcome.STOPPED
        assert done == [[None]]
        assert screen.notes == ["[stopped before the first token; the message is left out]"]
        assert chat.conversation.turns == []
        assert engine.stats().pages_used == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert chat.handle("Hello") is Outcome.DONE

    def test_ctrl_c_at_the_prompt_hints_and_twice_quits(self, chat: Chat, screen: Screen) -> None:
        read_line = reader(KeyboardInterrupt, "Hello", KeyboardInterrupt, KeyboardInterrupt, "not read")
        assert talk(chat, read_line, is_terminal=True) == 0
        assert [note for note in screen.notes if "/quit" in note] == [
            "\nType /quit, or press Ctrl-C again, to leave."
        ] * 2
        assert [turn.user for turn in chat.conversation.turns] == ["Hello"]
        assert read_line("") == "not read"

    def test_ctrl_c_ends_a_pipe(self, engine: Engine, screen: Screen) -> None:
        assert talk(make_chat(engine, screen), reader(KeyboardInterrupt), is_terminal=False) == EXIT_INTERRUPTED
        chat = make_chat(engine, Screen(interrupt_at=1))
        assert talk(chat, reader("One", "Two"), is_terminal=False) == EXIT_INTERRUPTED
        assert [turn.user for turn in chat.conversation.turns] == ["One"]


class TestInput:
    def test_lines_are_turns_and_blank_ones_nothing(self, chat: Chat) -> None:
        assert talk(chat, reader("One", "", "  ", "Two"), is_terminal=False) == 0
        assert [turn.user for turn in chat.conversation.turns] == ["One", "Two"]

    @pytest.mark.parametrize(
        ("typed", "message"),
        [
            (["a\\", "b\\", " c", "d"], "a\nb\n c"),
            (["a\\"], "a"),  # the end of input comes in the middle
            (["\\", ""], ""),
        ],
    )
    def test_a_backslash_continues(self, typed: list[str], message: str) -> None:
        assert read_message(reader(*typed)) == message

    def test_a_message_without_an_answer_fails_a_pipe_but_not_a_terminal(self, chat: Chat, screen: Screen) -> None:
        typed = ("One", "word " * LIMIT, "Two")
        assert talk(chat, reader(*typed), is_terminal=False) == EXIT_FAILED
        assert any("Shorten it, or raise --max_cache_length" in note for note in screen.notes)
        assert [turn.user for turn in chat.conversation.turns] == ["One", "Two"]
        assert talk(chat, reader(*typed), is_terminal=True) == 0
