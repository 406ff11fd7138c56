"""The four native routes of one engine's guard, and the one that breaks off.

They serve our own senders, and vLLM's through its protocol VLLMWeightSyncClient.

vLLM's own HTTP client shows no token, trusts no CA of ours and, on an error, keeps what the engine said to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollfleet_protocol.pushes import HOLDER_HEADER
from rollfleet_protocol.pushes import LONGEST_WORDS as REASON_WORDS
from rollfleet_protocol.refusals import Refusal
from rollfleet_protocol.words import fitted
from rollfleet_trainer.calls import Sockets, within
from rollfleet_trainer.errors import GuardRefusedError, TransferError
from rollfleet_trainer.said import as_json, said

LONGEST_WORDS = 1000
LARGEST_ANSWER = 64 << 10  # bytes; a refusal has 4096 characters of words at most
CONNECT_S = 30.0
ABORT_S = 10.0  # an abort is taken at once, or by nobody


class GuardClient:
    """Keeps vLLM's VLLMWeightSyncClient protocol (distributed/weight_transfer/base.py) towards one guard.

    `token` is asked for each call: tokens live 15 minutes. `holder` is the sender's Lease's holderIdentity, where
    there is one. `timeout_s` bounds each call, whatever comes of it, and LARGEST_ANSWER what is read of its answer.
    Every method raises TransferError with the engine's own words.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str],
        *,
        ca: str,
        server_name: str,
        timeout_s: float,
        name: str = "",
        holder: str = "",
    ) -> None:
        self._token = token
        self._holder = holder
        self._server_name = server_name
        self.name = name or urlsplit(url).netloc
        self._timeout_s = timeout_s
        self._sockets = Sockets()
        self._http = httpx.Client(
            base_url=url,
            verify=self._sockets.context(ca),
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1: the engine's workers join the trainer's group. Blocks until all have."""
        self._post("init_weight_transfer_engine", as_json({"init_info": init_info}))

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        """Phase 2. tensors: all that will be sent, as update_weights tells them; not `whole`: those that come first.

        What does not fit the model is refused while the engine still holds what it held.
        """
        body = b"{}" if tensors is None else b'{"tensors":%b,"whole":%b}' % (said(tensors).json, as_json(whole))
        self._post("start_weight_update", body)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3: the workers receive what is sent meanwhile. Blocks until they have.

        Handles as vLLM-Ascend's own trainer engine has them (ipc_handles, tuples) go as JSON: nothing is pickled.
        """
        self._post("update_weights", b'{"update_info":%b}' % said(update_info).json)

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        """Phase 4: counted, compared with `digest` (of what was sent, where that is known), applied."""
        body = {"weight_version": weight_version, "digest": digest}
        told = {name: value for name, value in body.items() if value is not None}
        self._post("finish_weight_update", as_json(told))

    def abort_weight_update(self, reason: str) -> None:
        """In place of the fourth, at any time: the push comes to nothing, and the engine's operator is told why."""
        words = fitted(reason, REASON_WORDS) or "no reason was given"
        self._post("abort_weight_update", as_json({"reason": words}), min(ABORT_S, self._timeout_s))

    def _post(self, route: str, body: bytes, timeout_s: float | None = None) -> None:
        headers = {"Authorization": f"Bearer {self._token()}", "Host": self._server_name}
        headers["Content-Type"] = "application/json"
        if self._holder:
            headers[HOLDER_HEADER] = self._holder
        what, seconds = f"{self.name}: {route}", self._timeout_s if timeout_s is None else timeout_s
        options = {"sni_hostname": self._server_name}
        try:
            with (
                within(seconds),
                self._http.stream("POST", f"/{route}", content=body, headers=headers, extensions=options) as answer,
            ):
                content = _content(answer, what)
        except httpx.TimeoutException as error:
            told = f"{what}: {type(error).__name__}: {error}, of the {seconds:g} s that the call may take"
            raise TransferError(told) from error
        except httpx.HTTPError as error:
            raise TransferError(f"{what}: {type(error).__name__}: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise _refused(what, answer.status_code, content)

    def cut(self) -> None:
        """End the calls that run, from any thread; later ones fail too."""
        self._sockets.cut()

    def close(self) -> None:
        """Let go of connections."""
        self._http.close()


def _content(answer: httpx.Response, what: str) -> bytes:
    found = bytearray()
    for piece in answer.iter_raw():
        found += piece
        if len(found) > LARGEST_ANSWER:
            raise TransferError(f"{what}: HTTP {answer.status_code}: the answer has more than {LARGEST_ANSWER} bytes")
    return bytes(found)


def _refused(what: str, status: int, content: bytes) -> TransferError:
    """With what the engine said, fit to be shown."""
    try:
        error = Refusal.model_validate_json(content).error
    except ValueError:
        words = content[: 4 * LONGEST_WORDS].decode(errors="replace")
        return TransferError(f"{what}: HTTP {status}: {fitted(words, LONGEST_WORDS)}")
    return GuardRefusedError(f"{what}: {error.message}", error.reason)
