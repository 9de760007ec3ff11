"""Text, on the event loop's side: tokenizer, incremental detokenizer, stop strings. The engine's thread has no text."""

from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer"]
