"""One token per character: the vocabulary of the tiny test model, so that both engines take the same requests."""

from collections.abc import Iterable

# Line feed and printable ASCII, numbered from 0, as rollfleet_engine.tools.tiny_qwen3 makes its tokenizer.
ALPHABET = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
VOCABULARY = len(ALPHABET) + 2  # and end-of-text and padding, which are never generated
UNKNOWN = ALPHABET.index("?")
_NUMBERS = {character: number for number, character in enumerate(ALPHABET)}


def encode(text: str) -> tuple[int, ...]:
    """Tokens of a text; what is not in the alphabet reads as a question mark."""
    return tuple(_NUMBERS.get(character, UNKNOWN) for character in text)


def decode(tokens: Iterable[int]) -> str:
    """Text of tokens; the special ones have none."""
    return "".join(ALPHABET[token] for token in tokens if 0 <= token < len(ALPHABET))
