"""Reading the API server with the administrator's certificate; all that `up` and `status` need."""

import http.client
import json
import ssl
import urllib.request
from typing import Any

from devcluster.network import AddressPlan
from devcluster.paths import Paths

REQUEST_TIMEOUT_S = 5.0


def get(plan: AddressPlan, paths: Paths, path: str) -> dict[str, Any] | None:
    """The object at the path; None if there is none or nobody answers."""
    try:
        context = ssl.create_default_context(cafile=str(paths.pki / "ca.crt"))
        context.load_cert_chain(paths.pki / "admin.crt", paths.pki / "admin.key")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"{plan.api_url}{path}", timeout=REQUEST_TIMEOUT_S) as answer:
            body: dict[str, Any] = json.load(answer)
            return body
    except (OSError, http.client.HTTPException):
        return None
