"""The API server, through kubernetes.aio: its configuration and authentication, with plain dicts.

The library is imported with the first connection only: senders alone run without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from rollfleet_protocol.words import fitted
from rollfleet_trainer.errors import (
    ApiServerError,
    ConflictError,
    DeniedError,
    NotFoundError,
    NotPossible,
    UnauthorizedError,
    UnreachableError,
)

DEADLINE_S = 10.0  # of one request
WATCH_S = 240  # after so long the API server ends a watch by itself
LONGEST_TEXT = 1024  # characters kept of the other side's words
LONGEST_EVENT = 8 << 20  # bytes; etcd's objects have 1.5 MB at most
JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"
STRICT = {"fieldValidation": "Strict"}  # else an API server drops a misspelt field, and says nothing
NOT_STRICT = "strict decoding error"  # its words where it does not (k8s.io/apimachinery, runtime.strictDecodingError)
IN_A_POD = "KUBERNETES_SERVICE_HOST"

API = "/apis/rollfleet.io/v1alpha1"
LEASES_API = "/apis/coordination.k8s.io/v1"

Manifest = dict[str, Any]


def path_of(api: str, namespace: str, plural: str, name: str = "", subresource: str = "") -> str:
    """Of a namespaced resource, or of the collection."""
    parts = [api, "namespaces", quote(namespace, safe=""), plural]
    parts += [quote(name, safe="")] if name else []
    parts += [subresource] if subresource else []
    return "/".join(parts)


class ApiServer:
    """One connection pool. Every method raises ApiServerError, named by what a caller can do about it."""

    def __init__(self, client: Any, connector: Any) -> None:
        self._api, self._connector = client, connector

    @classmethod
    async def connect(cls, kubeconfig: str | Path | None) -> ApiServer:
        """By a kubeconfig, else as the pod's ServiceAccount, else by $KUBECONFIG or ~/.kube/config."""
        try:
            from kubernetes.aio import client, config  # noqa: PLC0415 - see the head of this module
        except ImportError as error:
            raise NotPossible(f"{error}: install rollfleet[trainer], which brings the kubernetes client") from error
        configuration = client.Configuration()
        in_a_pod = kubeconfig is None and IN_A_POD in os.environ
        try:
            if in_a_pod:
                config.load_incluster_config(client_configuration=configuration)
            else:
                file = _existing(kubeconfig)
                await config.load_kube_config(config_file=file, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            source = "the pod's ServiceAccount" if in_a_pod else f"kubeconfig {kubeconfig or '(default)'}"
            raise NotPossible(f"no way to the API server by {source}: {error}") from error
        api = client.ApiClient(configuration)
        api.user_agent = "rollfleet-trainer"
        from rollfleet_trainer.session import prepare  # noqa: PLC0415 - needs aiohttp

        return cls(api, prepare(api))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()
        await self._connector.close()

    async def get(self, path: str) -> Manifest:
        """Read an object or a collection from quorum."""
        return await self._call("GET", path)

    async def create(self, path: str, manifest: Manifest) -> Manifest:
        """Create an object, or post to a subresource."""
        return await self._call("POST", path, manifest)

    async def patch(self, path: str, patch: Manifest, deadline_s: float = DEADLINE_S) -> Manifest:
        """JSON merge patch; metadata.uid and metadata.resourceVersion in it are preconditions."""
        return await self._call("PATCH", path, patch, kind=MERGE_PATCH, deadline_s=deadline_s)

    async def watch(self, path: str, name: str, resource_version: str) -> AsyncIterator[Manifest]:
        """One object of a collection, each time it changes. Ends when the API server ends it; then look again.

        Raises NotFoundError where the object was deleted.
        """
        import aiohttp  # noqa: PLC0415 - comes with kubernetes.aio

        query = {"watch": "1", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": str(WATCH_S)}
        query["resourceVersion"] = resource_version
        timeout = aiohttp.ClientTimeout(total=WATCH_S + DEADLINE_S, sock_connect=DEADLINE_S)
        answer = await self._answer("GET", path, None, JSON, timeout, query)
        try:
            async for line in _lines(answer.response.content):
                try:
                    event = json.loads(line)
                    kind, found = event["type"], event["object"]
                except (ValueError, TypeError, KeyError) as error:
                    raise UnreachableError(f"watch of {path}/{name}: what came is no event: {error!r}") from error
                if kind == "ERROR":  # the version is too old, for example: look again
                    return
                if kind == "DELETED":
                    raise NotFoundError(f"{path}/{name} was deleted")
                yield found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"watch of {path}/{name}: {_cause(error)}") from error
        finally:
            answer.response.close()

    async def require_watch(self, path: str, name: str) -> None:
        """DeniedError where `watch` would raise it; of an object that need not be there yet."""
        import aiohttp  # noqa: PLC0415 - comes with kubernetes.aio

        query = {"watch": "1", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": "1"}
        answer = await self._answer("GET", path, None, JSON, aiohttp.ClientTimeout(total=DEADLINE_S), query)
        answer.response.close()

    async def _call(
        self, method: str, path: str, body: Manifest | None = None, *, kind: str = JSON, deadline_s: float = DEADLINE_S
    ) -> Manifest:
        import aiohttp  # noqa: PLC0415 - comes with kubernetes.aio

        query = {} if body is None else STRICT
        answer = await self._answer(method, path, body, kind, aiohttp.ClientTimeout(total=deadline_s), query)
        try:
            parsed: Any = json.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UnreachableError(f"{method} {path}: {_cause(error)}") from error
        if not isinstance(parsed, dict):
            raise ApiServerError(f"{method} {path}: the answer is not an object")
        return parsed

    async def _answer(
        self, method: str, path: str, body: Manifest | None, kind: str, timeout: Any, query: Mapping[str, str]
    ) -> Any:
        """The answer of a request that was taken."""
        import aiohttp  # noqa: PLC0415 - comes with kubernetes.aio
        from kubernetes.aio.config import ConfigException  # noqa: PLC0415

        what, headers = f"{method} {path}", {"Content-Type": kind, "Accept": JSON}
        try:
            _, url, headers, _, _ = await self._api.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            url += f"?{urlencode(query)}" if query else ""
            answer = await self._api.call_api(method, url, headers, body, _request_timeout=timeout)
            if 200 <= answer.status < 300:
                return answer
            content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ConfigException) as error:
            raise UnreachableError(f"{what}: {_cause(error)}") from error
        raise refusal(answer.status, content, what)


def _existing(kubeconfig: str | Path | None) -> str:
    """The file, or files as $KUBECONFIG lists them, to read. NotPossible where there is none."""
    variable = os.environ.get("KUBECONFIG", "")
    named = variable or str(Path("~/.kube/config")) if kubeconfig is None else str(kubeconfig)
    if not any(Path(each).expanduser().exists() for each in named.split(os.pathsep) if each):
        cure = "; this is no pod: give kubeconfig=, or set $KUBECONFIG" if kubeconfig is None else ""
        source = f"$KUBECONFIG, {named}" if kubeconfig is None and variable else named
        raise NotPossible(f"no way to the API server by kubeconfig {source}: there is no such file{cure}")
    return named


async def _lines(content: Any) -> AsyncIterator[bytes]:
    """Lines of any length up to LONGEST_EVENT; a stream reader's own have a much lower bound."""
    held = bytearray()
    async for chunk in content.iter_any():
        held += chunk
        while (end := held.find(b"\n")) >= 0:
            yield bytes(held[:end])
            del held[: end + 1]
        if len(held) > LONGEST_EVENT:
            raise ApiServerError(f"an event of a watch is longer than {LONGEST_EVENT} bytes")


def refusal(status: int, content: bytes, what: str) -> ApiServerError:
    """An answer that is not 2xx; the body is a metav1.Status."""
    try:
        said = json.loads(content).get("message")
    except (ValueError, AttributeError):
        said = None
    words = str(said or content.decode(errors="replace"))
    words = words[max(0, words.find(NOT_STRICT)) :]  # of a patch: before them stands the whole object
    text = f"{what}: {fitted(words, LONGEST_TEXT)} (HTTP {status})"
    if status == 401:
        return UnauthorizedError(
            f"{text}. The API server does not accept this token or certificate: it may be out of date"
        )
    if status == 403:
        return DeniedError(f"{text}. docs/trainer.md lists the rights that a trainer needs")
    if words.startswith(NOT_STRICT):
        return ApiServerError(f"{text}. docs/api.md lists the fields; CRDs that are older than this program lack some")
    if status == 409:
        return ConflictError(text)
    if status == 404:
        return NotFoundError(text)
    return UnreachableError(text) if status == 429 or status >= 500 else ApiServerError(text)


def _cause(error: Exception) -> str:
    return "no answer within the deadline" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
