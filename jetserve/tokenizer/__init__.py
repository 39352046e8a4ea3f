"""Text to tokens and back: tokenizers of every format, chat templates, and text as it streams. No jax."""

from jetserve.tokenizer.detokenizer import IncrementalDetokenizer, StopStrings
from jetserve.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStrings", "Tokenizer"]
