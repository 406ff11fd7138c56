"""What a client is told of an answer, compared with what really made each of its tokens."""

from rollfleet_engine.guard.turnstile import Passage
from tests.model.books import Book, BrokenPromise, Ledger
from tests.model.requests import Piece, Request
from tests.support.simulated_engine import MODEL_DIGEST


def judge_answer(request: Request, book: Book, ledger: Ledger) -> int:
    """An answer went out; the version of its last token."""
    passage = request.passage
    versions = {piece.held.version for piece in request.pieces}
    for piece in request.pieces:
        _judge_piece(request, piece, book)
        told = _told_at(passage, request.told or 0, piece.first)
        if told != piece.held.version:
            text = f"token {piece.first} of {request.name} is of version {piece.held.version}, told is {told}"
            raise BrokenPromise("told", f"{text}: {passage.spans}")
    if request.pinned and len(versions) > 1:
        raise BrokenPromise("told", f"{request.name} demanded one version and was answered by {sorted(versions)}")
    if len(versions) > 1 and not request.was_kept:
        raise BrokenPromise("atomic", f"{request.name} was not kept and was answered by {sorted(versions)}")
    if request.was_kept:
        ledger.seen["answer: kept"] += 1
    if len(versions) > 1:
        ledger.seen["answer: spans versions"] += 1
    return request.pieces[-1].held.version if request.pieces else request.told or 0


def _judge_piece(request: Request, piece: Piece, book: Book) -> None:
    held = piece.held
    if held.version not in book.versions:
        raise BrokenPromise("never stale", f"{request.name} was answered at {held.version}, which was never committed")
    if held.resident.rstrip("!") != (held.digest or MODEL_DIGEST):
        raise BrokenPromise("never stale", f"{request.name} was answered by {held.resident}, not {held.digest}")
    if not piece.fresh:
        raise BrokenPromise("never stale", f"{request.name} was answered on caches of other weights than {held}")


def _told_at(passage: Passage, head: int, token: int) -> int:
    told = head
    for span in passage.spans:
        first = span.from_token[0]
        if first is not None and first <= token:
            told = span.version
    return told
