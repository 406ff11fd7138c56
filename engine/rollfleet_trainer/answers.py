"""Bodies of answers, as much of them as there may be."""

from __future__ import annotations

import httpx

from rollfleet_trainer.rollout_errors import BadAnswerError

# Routing of 128 layers with 16 experts of 4 bytes each, in base64, is 11 KB for a token.
BYTES_PER_TOKEN, BYTES_BESIDE, LARGEST_ANSWER = 16 << 10, 1 << 20, 1 << 30


def largest_answer(tokens: int) -> int:
    """Bytes of an answer to so many tokens, of prompt and output, at the most."""
    return min(LARGEST_ANSWER, BYTES_BESIDE + BYTES_PER_TOKEN * tokens)


async def read_body(answer: httpx.Response, most: int) -> bytes:
    """All of it. BadAnswerError where it has more bytes, or is packed: a few of those can be any number."""
    packed = answer.headers.get("Content-Encoding", "identity")
    if packed != "identity":
        raise BadAnswerError(f"{answer.url}: the answer is packed ({packed[:40]!r}), which was not asked for")
    found = bytearray()
    async for piece in answer.aiter_bytes():
        found += piece
        if len(found) > most:
            raise BadAnswerError(f"{answer.url}: HTTP {answer.status_code}: the answer has more than {most} bytes")
    return bytes(found)
