"""The API server, through kubernetes.aio: its configuration, authentication and connection pool, with plain dicts.

The generated models of that library are not used: they cost a millisecond for each pod and drop fields that they do
not know.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException

from rollfleet_operator.api.meta import FIELD_MANAGER
from rollfleet_operator.clients.errors import InvalidSpec, RollfleetError, Unsupported, from_api_server, from_transport
from rollfleet_operator.ports import Listing, Manifest, Meter, Resource

DEADLINE_S = 10.0  # of one request; the API server's own default for a write is 34 s, far too long for a pass
LIST_DEADLINE_S = 60.0  # of one page
PAGE = 500  # objects
MAX_PAGES = 400
MAX_CONNECTIONS = 128
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML
JSON = "application/json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Where the API server is and who we are: a kubeconfig, else the pod's own ServiceAccount."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = MAX_CONNECTIONS
    try:
        if kubeconfig is not None:
            await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        else:
            load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        source = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount (no --kubeconfig was given)"
        raise InvalidSpec(f"no way to the API server from {source}: {error}") from error
    return configuration


class KubernetesCluster:
    """Keeps ports.Cluster."""

    def __init__(self, configuration: Configuration, meter: Meter) -> None:
        self._api = ApiClient(configuration)
        self._api.user_agent = "rollfleet-operator"
        self._meter = meter

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """Read an object from quorum."""
        return await self._call("get", "GET", resource, namespace, name)

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """Read a collection from quorum, page by page."""
        return await self._list(resource, namespace, label_selector, JSON)

    async def list_metadata(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """The same, of each object only its metadata."""
        return await self._list(resource, namespace, label_selector, METADATA_ONLY)

    async def _list(self, resource: Resource, namespace: str | None, label_selector: str, accept: str) -> Listing:
        items: list[Manifest] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": label_selector} if label_selector else {})
        for _ in range(MAX_PAGES):
            page = await self._call(
                "list", "GET", resource, namespace, query=query, deadline_s=LIST_DEADLINE_S, accept=accept
            )
            items.extend(page.get("items") or ())
            following = page["metadata"].get("continue")
            if not following:
                return Listing(tuple(items), page["metadata"].get("resourceVersion", ""))
            query["continue"] = following
        raise Unsupported(
            f"more than {PAGE * MAX_PAGES} {resource.plural}: narrow the namespaces that the operator serves"
        )

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        """Create an object, or post to (name, subresource)."""
        name, sub = subresource or (None, None)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("create", "POST", resource, namespace, name, sub, query=query, body=manifest)

    async def apply(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        """Server-side apply under our field manager, with force."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        name = manifest["metadata"]["name"]
        return await self._call(
            "patch", "PATCH", resource, namespace, name, query=query, body=manifest, kind=APPLY_PATCH
        )

    async def replace_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Replace the status subresource; the manifest's resourceVersion must still hold."""
        metadata, query = manifest["metadata"], {"fieldManager": FIELD_MANAGER}
        return await self._call(
            "update", "PUT", resource, metadata["namespace"], metadata["name"], "status", query=query, body=manifest
        )

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        """JSON merge patch; metadata.uid and metadata.resourceVersion in the patch are preconditions."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("patch", "PATCH", resource, namespace, name, query=query, body=patch, kind=MERGE_PATCH)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> Manifest:
        """Delete an object, with the uid as precondition where given."""
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self._call("delete", "DELETE", resource, namespace, name, body=options)

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        """Verbs by resource name that the API server serves for a version."""
        listed = await self._request(
            "GET", f"/apis/{api_version}", {}, None, JSON, DEADLINE_S, f"discovery of {api_version}"
        )
        return {entry["name"]: frozenset(entry["verbs"]) for entry in listed.get("resources", ())}

    async def _call(
        self,
        verb: str,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str | None = None,
        subresource: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        kind: str = JSON,
        accept: str = JSON,
        deadline_s: float = DEADLINE_S,
    ) -> Manifest:
        """One counted request."""
        path = resource.path(namespace, name, subresource)
        what = f"{verb} {resource.kind} {namespace or '*'}/{name or '*'}{'/' + subresource if subresource else ''}"
        counted = resource.plural + (f"/{subresource}" if subresource else "")
        started, outcome = time.monotonic(), "ok"
        try:
            return await self._request(method, path, query or {}, body, kind, deadline_s, what, accept)
        except RollfleetError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._meter.kubernetes_call(verb, counted, outcome, time.monotonic() - started)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Manifest | None,
        kind: str,
        deadline_s: float,
        what: str,
        accept: str = JSON,
    ) -> Manifest:
        headers = {"Content-Type": kind, "Accept": accept}
        try:
            _, url, headers, _, _ = await self._api.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            if query:
                url += "?" + urlencode(query)
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            answer = await self._api.call_api(method, url, headers, body, _request_timeout=timeout)
            content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ConfigException) as error:
            raise from_transport(error, what) from error
        if not 200 <= answer.status < 300:
            raise from_api_server(answer.status, content, what, answer.headers.get("Retry-After"))
        parsed: Any = json.loads(content)
        if not isinstance(parsed, dict):
            raise Unsupported(f"{what}: the answer is not an object")
        return parsed
