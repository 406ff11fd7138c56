"""Our objects, and the engines' pods, read and written with the credentials that kubectl uses."""

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from rollfleet_cli.errors import ConflictError, ForbiddenError, NotFoundError, RejectedError, UnreachableError
from rollfleet_operator.api.meta import API_VERSION, GROUP, LABEL_COMPONENT, LABEL_FLEET, VERSION, ApiModel
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.ports import PODS, Manifest, Resource

Model = TypeVar("Model", bound=ApiModel)
CONNECT_S, READ_S = 5.0, 15.0
HTTP_BAD_REQUEST, HTTP_FORBIDDEN, HTTP_NOT_FOUND, HTTP_CONFLICT, HTTP_INVALID = 400, 403, 404, 409, 422
JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"
FIELD_MANAGER = "rollfleet-cli"
BUSY, TRIES, LONGEST_RETRY_S = (429, 503), 5, 2.0  # with Retry-After: as while a CRD's storage is made ready
MOST_OBJECTS = 1000  # of one list
MOST_LOG_BYTES = 8 << 20  # limitBytes cuts the newest off, so it must hold all lines that are asked for
CONNECTION = re.compile(r"^HTTPS?Connection(Pool)?\([^)]*\): ")  # what urllib3 begins with: the address, told already
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Reader(Protocol):
    """What the commands need of a cluster."""

    namespace: str

    def fleets(self, namespace: str | None) -> list[RolloutEngine]:
        """All fleets of a namespace, or of the cluster."""
        ...

    def fleet(self, namespace: str, name: str) -> RolloutEngine:
        """One fleet."""
        ...

    def versions(self, namespace: str | None) -> list[WeightVersion]:
        """All WeightVersions of a namespace, or of the cluster."""
        ...

    def pods(self, namespace: str | None, fleet: str | None) -> list[dict[str, Any]] | None:
        """Pods of engines; None where the user may not list pods."""
        ...


class Writer(Reader, Protocol):
    """What the commands need that ask for another version."""

    def create_version(self, namespace: str, manifest: dict[str, Any]) -> WeightVersion:
        """Create a WeightVersion; ConflictError where its name is taken."""
        ...

    def patch_version(self, namespace: str, name: str, patch: dict[str, Any]) -> WeightVersion:
        """JSON merge patch; ConflictError where metadata.resourceVersion in it is not the newest."""
        ...


@dataclass(frozen=True)
class Access:
    """Where the cluster is: as kubectl's own options say."""

    kubeconfig: Path | None = None
    context: str | None = None


class Cluster:
    """Keeps Writer, with the official client. Its import takes a while, so it happens when a cluster is needed."""

    namespace: str

    def __init__(self, access: Access) -> None:
        from kubernetes import config  # noqa: PLC0415 - half a second, not for --help
        from kubernetes.client import ApiClient, Configuration  # noqa: PLC0415
        from kubernetes.config import ConfigException  # noqa: PLC0415
        from urllib3 import disable_warnings  # noqa: PLC0415
        from urllib3.exceptions import InsecureRequestWarning  # noqa: PLC0415
        from yaml import YAMLError  # noqa: PLC0415

        configuration = Configuration()
        configuration.retries = False
        disable_warnings(InsecureRequestWarning)  # the kubeconfig said so; kubectl does not warn of it either
        file = str(access.kubeconfig) if access.kubeconfig else None
        try:
            if is_in_a_pod(access):
                config.load_incluster_config(client_configuration=configuration)
                self.namespace = OWN_NAMESPACE.read_text().strip()
            else:
                _require_a_file(access)
                self.namespace = self._chosen(config, file, access.context).get("namespace") or "default"
                config.load_kube_config(file, context=access.context, client_configuration=configuration)
        except (ConfigException, OSError) as error:
            raise UnreachableError(_no_way(f"{_files_of(access)}: {error}")) from error
        except (YAMLError, TypeError) as error:  # TypeError: YAML that is not a mapping
            raise UnreachableError(_no_way(f"{_files_of(access)} is not a kubeconfig: {error}")) from error
        self._client = ApiClient(configuration)

    @staticmethod
    def _chosen(config: Any, file: str | None, context: str | None) -> dict[str, Any]:
        contexts, active = config.list_kube_config_contexts(file)
        if context is None:
            return dict(active["context"])
        known = {each["name"]: dict(each["context"]) for each in contexts}
        if context not in known:
            raise UnreachableError(f"no context {context!r} in the kubeconfig; there are: {', '.join(sorted(known))}")
        return known[context]

    def fleets(self, namespace: str | None) -> list[RolloutEngine]:
        """All fleets of a namespace, or of the cluster."""
        return [_read(RolloutEngine, item) for item in self._list("rolloutengines", namespace)]

    def fleet(self, namespace: str, name: str) -> RolloutEngine:
        """One fleet."""
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/rolloutengines/{name}"
        return _read(RolloutEngine, self._get(path, f"RolloutEngine {namespace}/{name}"))

    def versions(self, namespace: str | None) -> list[WeightVersion]:
        """All WeightVersions of a namespace, or of the cluster."""
        return [_read(WeightVersion, item) for item in self._list("weightversions", namespace)]

    def pods(self, namespace: str | None, fleet: str | None) -> list[dict[str, Any]] | None:
        """Pods of engines; None where the user may not list pods."""
        selector = f"{LABEL_COMPONENT}=engine,{LABEL_FLEET}" + (f"={fleet}" if fleet else "")
        path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        try:
            return list(self._get(path, "pods", labelSelector=selector)["items"])
        except ForbiddenError:
            return None

    def objects(self, resource: Resource, namespace: str | None, **query: str) -> list[Manifest]:
        """A list of any kind, MOST_OBJECTS of it at most."""
        path, limit = resource.path(namespace), str(MOST_OBJECTS)
        return list(self._get(path, resource.plural, limit=limit, **query)["items"])

    def object(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """One object of any kind."""
        where = f"{resource.kind} {namespace + '/' if namespace else ''}{name}"
        return self._get(resource.path(namespace, name), where)

    def log(self, namespace: str, pod: str, lines: int, within_s: int) -> str:
        """The last lines that a pod wrote lately."""
        path = f"{PODS.path(namespace, pod)}/log"
        query = {"tailLines": str(lines), "sinceSeconds": str(within_s), "limitBytes": str(MOST_LOG_BYTES)}
        status, body = self._send("GET", path, {}, None, query)
        if status >= HTTP_BAD_REQUEST:
            _checked(status, body, f"log of {namespace}/{pod}")
        return body.decode(errors="replace")

    def create_version(self, namespace: str, manifest: dict[str, Any]) -> WeightVersion:
        """Create a WeightVersion."""
        name = manifest["metadata"]["name"]
        body = {"apiVersion": API_VERSION, "kind": "WeightVersion", **manifest}
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/weightversions"
        return _read(WeightVersion, self._write("POST", path, f"WeightVersion {namespace}/{name}", JSON, body))

    def patch_version(self, namespace: str, name: str, patch: dict[str, Any]) -> WeightVersion:
        """JSON merge patch of a WeightVersion."""
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/weightversions/{name}"
        return _read(WeightVersion, self._write("PATCH", path, f"WeightVersion {namespace}/{name}", MERGE_PATCH, patch))

    def _list(self, plural: str, namespace: str | None) -> list[dict[str, Any]]:
        where = f"namespaces/{namespace}/" if namespace else ""
        return list(self._get(f"/apis/{GROUP}/{VERSION}/{where}{plural}", plural)["items"])

    def _get(self, path: str, what: str, **query: str) -> dict[str, Any]:
        return self._call("GET", path, what, {}, None, query)

    def _write(self, method: str, path: str, what: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._call(method, path, what, {"Content-Type": kind}, body, query)

    def _call(
        self, method: str, path: str, what: str, headers: dict[str, str], body: Any, query: dict[str, str]
    ) -> dict[str, Any]:
        return _checked(*self._send(method, path, headers, body, query), what)

    def _send(
        self, method: str, path: str, headers: dict[str, str], body: Any, query: dict[str, str]
    ) -> tuple[int, bytes]:
        """Status and body. An API server that asks to wait has done nothing, and is asked again a few times."""
        from kubernetes.client import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        host = self._client.configuration.host
        request = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        for attempt in range(1, TRIES + 1):
            try:
                answer = self._client.call_api(*request, _request_timeout=(CONNECT_S, READ_S))
                content = answer.read()
            except (HTTPError, ApiException, OSError) as error:
                words = CONNECTION.sub("", str(error))
                raise UnreachableError(f"no answer from the API server at {host}: {words}") from error
            asked = answer.headers.get("Retry-After", "")
            if answer.status not in BUSY or not asked.isdecimal() or attempt == TRIES:
                break
            time.sleep(min(float(asked), LONGEST_RETRY_S))
        return answer.status, content


def is_in_a_pod(access: Access) -> bool:
    """Whether the pod's own account is meant, as with kubectl: no kubeconfig is named or there."""
    named = access.kubeconfig or access.context or os.environ.get("KUBECONFIG")
    return not named and "KUBERNETES_SERVICE_HOST" in os.environ and not Path("~/.kube/config").expanduser().exists()


def _files_of(access: Access) -> str:
    """The kubeconfig that is meant, as it was named."""
    return str(access.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")


def _require_a_file(access: Access) -> None:
    """The client speaks of a missing file without its name."""
    if not any(Path(each).expanduser().exists() for each in _files_of(access).split(os.pathsep)):
        raise UnreachableError(_no_way(f"{_files_of(access)}: no such file"))


def _no_way(why: str) -> str:
    return f"no way to a cluster: {why.rstrip('.')}. Set KUBECONFIG, or give --kubeconfig."


def _checked(status: int, body: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = {}
    if status < 300 and isinstance(parsed, dict):
        return parsed
    words = parsed.get("message") or body.decode(errors="replace")
    if status == HTTP_NOT_FOUND and parsed.get("kind") != "Status":  # no such route, rather than no such object
        raise UnreachableError(f"the cluster does not know {what} of {GROUP}/{VERSION}: install the chart rollfleet")
    if status == HTTP_NOT_FOUND:
        raise NotFoundError(f"{what}: {words}")
    if status == HTTP_FORBIDDEN:
        raise ForbiddenError(f"{what}: {words}")
    if status == HTTP_CONFLICT:
        raise ConflictError(f"{what}: {words}")
    if status in (HTTP_BAD_REQUEST, HTTP_INVALID):
        raise RejectedError(f"{what}: {words}")
    raise UnreachableError(f"{what}: HTTP {status}: {words}")


def _read(model: type[Model], item: dict[str, Any]) -> Model:
    try:
        return model.model_validate(item)
    except ValidationError as error:
        name = (item.get("metadata") or {}).get("name")
        raise UnreachableError(f"{model.__name__} {name} is not of the API that this program knows: {error}") from error
