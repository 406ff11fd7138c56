"""The four native routes of one engine's guard, and the one that breaks off.

They serve our own senders, and vLLM's through its protocol VLLMWeightSyncClient.

vLLM's own HTTP client shows no token, trusts no CA of ours and, on an error, keeps what the engine said to itself.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollfleet_protocol.ipc import plain_handles
from rollfleet_protocol.pushes import HOLDER_HEADER
from rollfleet_protocol.refusals import Refusal
from rollfleet_protocol.words import visible
from rollfleet_trainer.errors import RefusedError, TransferError

LONGEST_WORDS = 1000


class GuardClient:
    """Keeps vLLM's VLLMWeightSyncClient protocol (distributed/weight_transfer/base.py) towards one guard.

    `token` is asked for each call: tokens live 15 minutes. `holder` is the sender's Lease's holderIdentity, where
    there is one. `timeout_s` bounds each call. Every method raises TransferError with the engine's own words.
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
        context = ssl.create_default_context(cadata=ca)
        self._http = httpx.Client(base_url=url, verify=context, timeout=timeout_s, trust_env=False)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1: the engine's workers join the trainer's group. Blocks until all have."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Phase 2."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3: the workers receive what is sent meanwhile. Blocks until they have.

        Handles as vLLM-Ascend's own trainer engine has them (ipc_handles, tuples) go as JSON: nothing is pickled.
        """
        self._post("update_weights", {"update_info": _plain(update_info)})

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        """Phase 4: counted, compared with `digest` (of what was sent, where that is known), applied."""
        body = {"weight_version": weight_version, "digest": digest}
        self._post("finish_weight_update", {name: value for name, value in body.items() if value is not None})

    def abort_weight_update(self, reason: str) -> None:
        """In place of the fourth, at any time: the push comes to nothing, and the engine's operator is told why."""
        self._post("abort_weight_update", {"reason": reason})

    def _post(self, route: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self._token()}", "Host": self._server_name}
        if self._holder:
            headers[HOLDER_HEADER] = self._holder
        try:
            answer = self._http.post(
                f"/{route}", json=body, headers=headers, extensions={"sni_hostname": self._server_name}
            )
        except httpx.HTTPError as error:
            raise TransferError(f"{self.name}: {route}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise _refused(f"{self.name}: {route}", answer)

    def close(self) -> None:
        """Let go of connections."""
        self._http.close()


def _plain(update_info: dict[str, Any]) -> dict[str, Any]:
    """As JSON takes it, without what vLLM's classes leave empty."""
    found = {name: value for name, value in update_info.items() if value is not None}
    return found | {"ipc_handles": plain_handles(found["ipc_handles"])} if "ipc_handles" in found else found


def _refused(what: str, answer: httpx.Response) -> TransferError:
    """With what the engine said, fit to be shown."""
    try:
        error = Refusal.model_validate_json(answer.content).error
    except ValueError:
        return TransferError(f"{what}: HTTP {answer.status_code}: {visible(answer.text[:LONGEST_WORDS])}")
    return RefusedError(f"{what}: {error.message}", error.reason)
