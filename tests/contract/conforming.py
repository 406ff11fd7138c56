"""The checks of `rollfleet conformance`, carried to an engine of this suite the same way as to one in a cluster."""

import asyncio
import gc
import secrets
from decimal import Decimal

import httpx

from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS
from rollfleet_cli.conformance.checks.check import Check, Subject
from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port
from rollfleet_cli.conformance.forging import forged
from rollfleet_cli.conformance.running import Verdict, look, run_check
from rollfleet_cli.conformance.transport import Address, Transport
from tests.contract.client import PROBE_TOKENS, Operator
from tests.contract.process import POD_UID, EngineProcess, Site

BY_ID = {check.id: check for check in ENGINE_CHECKS}
ALLOWED = Decimal("0.0001")
OTHER_SUBJECT = "system:serviceaccount:default:default"


def exchange_of(answer: httpx.Response) -> Exchange:
    """What a client of this suite got, for the judgements of conformance."""
    asked = answer.request
    port = Port.SERVING if asked.url.scheme == "http" else Port.CONTROL
    call = Call(port, asked.method, asked.url.raw_path.decode())
    return Exchange(call, answer.status_code, tuple(answer.headers.multi_items()), answer.content)


def run(engine: EngineProcess, site: Site, operator: Operator, check: Check) -> Verdict:
    """The check, of this engine as it is."""
    verdict = asyncio.run(_run(engine, site, operator, check))
    gc.collect()  # a connection that was left open is told here, and not beside another test
    return verdict


async def _run(engine: EngineProcess, site: Site, operator: Operator, check: Check) -> Verdict:
    config = engine.config
    address = Address("127.0.0.1", config.serving_port, config.control_port, config.fleet.control_server_name)
    transport = Transport(address, site.authority.pem.decode(), bearers(operator))
    try:
        subject = Subject(
            pod="engine",
            pod_uid=POD_UID,
            config=config,
            state=await look(transport),
            probe_tokens=PROBE_TOKENS,
            allowed=ALLOWED,
            salt=secrets.token_hex(8),
        )
        return await run_check(check, transport, subject)
    finally:
        await transport.close()


def bearers(operator: Operator) -> dict[Identity, str]:
    """Of every kind."""
    token = operator.make_token()
    return {
        Identity.OPERATOR: token,
        Identity.WRONG_AUDIENCE: operator.make_token(audience="rollfleet.io/rl/qwen/other-uid"),
        Identity.OTHER_ACCOUNT: operator.make_token(subject=OTHER_SUBJECT),
        **forged(token),
    }
