"""The CA and what it signs."""

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.clients.certificates import (
    CA_SECRET,
    FLEET_LIFE,
    MOST_BEFORE,
    ROTATE,
    Certificates,
    issue,
    make_authority,
    renewal_time,
    why_renew,
)
from rollfleet_operator.clients.errors import Conflict, InvalidSpec, Unreachable
from tests.support.cluster import MemoryCluster

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
NAME = "qwen.rl.engine.rollfleet.io"
UNKNOWN_CURVE = b"MC4CAQEEIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBoAcGBSuBBABj"  # of a key, DER: 1.3.132.0.99


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def make_fleet(uid: str = "f-1") -> RolloutEngine:
    spec = {
        "image": "i",
        "model": {"path": "m", "servedName": "policy"},
        "volumes": {"model": {"hostPath": {"path": "/m"}}},
    }
    return RolloutEngine.model_validate({"metadata": {"name": "qwen", "namespace": "rl", "uid": uid}, "spec": spec})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def certificates(cluster: MemoryCluster, clock: Clock) -> Certificates:
    return Certificates(cluster, "rollfleet", clock)


def secret(cluster: MemoryCluster) -> dict[str, Any]:
    return cluster.objects["secrets", "rl", "qwen-engine-tls"]


def certificate(of: dict[str, Any]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(of["data"]["tls.crt"]))


def test_lives_and_keys() -> None:
    authority = make_authority(NOW)
    assert authority.certificate.not_valid_after_utc - NOW == timedelta(days=3650)
    served = x509.load_pem_x509_certificate(issue(authority, NAME, NOW).certificate)
    assert served.not_valid_after_utc - NOW == timedelta(days=90)
    key = served.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert abs(renewal_time(served) - (NOW + timedelta(days=60))) < timedelta(minutes=5)


def test_keys_do_not_show_in_a_repr() -> None:
    authority = make_authority(NOW)
    assert "PRIVATE" not in repr(issue(authority, NAME, NOW))
    assert "key" not in repr(authority)


async def test_two_operators_agree_on_one_ca(cluster: MemoryCluster, clock: Clock) -> None:
    both = [Certificates(cluster, "rollfleet", clock) for _ in range(2)]
    one, other = await asyncio.gather(*(certificates.authority() for certificates in both))
    assert one.pem == other.pem
    assert ("secrets", "rollfleet", CA_SECRET) in cluster.objects


async def test_the_loser_of_the_race_takes_the_winners_ca(cluster: MemoryCluster, clock: Clock) -> None:
    winner = await Certificates(cluster, "rollfleet", clock).authority()
    loser = Certificates(cluster, "rollfleet", clock)
    created = await loser._create_authority()
    assert base64.b64decode(created["data"]["ca.crt"]).decode() == winner.pem


async def test_a_fleets_secret_is_written_once(
    certificates: Certificates, cluster: MemoryCluster, clock: Clock
) -> None:
    bundle = await certificates.ensure(make_fleet())
    assert base64.b64decode(bundle).decode().startswith("-----BEGIN CERTIFICATE-----")
    names = certificate(secret(cluster)).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NAME]
    assert secret(cluster)["metadata"]["ownerReferences"][0]["uid"] == "f-1"
    for _ in range(3):
        clock.now += timedelta(days=15)
        certificates.recheck({"f-1"})
        await certificates.ensure(make_fleet())
    assert cluster.writes.count(("apply", "secrets", "qwen-engine-tls")) == 1


async def test_it_is_renewed_at_two_thirds_of_its_life(
    certificates: Certificates, cluster: MemoryCluster, clock: Clock
) -> None:
    await certificates.ensure(make_fleet())
    first = certificate(secret(cluster))
    clock.now += timedelta(days=59)
    await certificates.ensure(make_fleet())
    assert certificate(secret(cluster)) == first
    clock.now += timedelta(days=1)
    await certificates.ensure(make_fleet())
    assert certificate(secret(cluster)) != first


async def test_a_restarted_operator_keeps_what_holds(
    certificates: Certificates, cluster: MemoryCluster, clock: Clock
) -> None:
    await certificates.ensure(make_fleet())
    first = secret(cluster)
    await Certificates(cluster, "rollfleet", clock).ensure(make_fleet())
    assert secret(cluster) == first


async def test_a_damaged_or_deleted_secret_is_made_anew(certificates: Certificates, cluster: MemoryCluster) -> None:
    await certificates.ensure(make_fleet())
    del cluster.objects["secrets", "rl", "qwen-engine-tls"]
    certificates.recheck({"f-1"})
    await certificates.ensure(make_fleet())
    secret(cluster)["data"]["tls.crt"] = base64.b64encode(b"nonsense").decode()
    certificates.recheck({"f-1"})
    await certificates.ensure(make_fleet())
    assert certificate(secret(cluster)).issuer == (await certificates.authority()).certificate.subject


async def test_somebody_elses_secret_is_not_overwritten(certificates: Certificates, cluster: MemoryCluster) -> None:
    foreign = {"metadata": {"name": "qwen-engine-tls", "namespace": "rl"}, "data": {"tls.crt": "x"}}
    cluster.objects["secrets", "rl", "qwen-engine-tls"] = foreign
    with pytest.raises(InvalidSpec, match="is not the operator's"):
        await certificates.ensure(make_fleet())
    assert secret(cluster) == foreign


async def test_the_secret_of_a_deleted_fleet_of_that_name_is_waited_for(
    certificates: Certificates, cluster: MemoryCluster
) -> None:
    await certificates.ensure(make_fleet("f-1"))
    with pytest.raises(Unreachable, match="not collected yet"):
        await certificates.ensure(make_fleet("f-2"))


async def test_a_broken_ca_is_named_with_its_cure(certificates: Certificates, cluster: MemoryCluster) -> None:
    cluster.objects["secrets", "rollfleet", CA_SECRET] = {"data": {"tls.crt": "eA==", "tls.key": "eA=="}}
    with pytest.raises(InvalidSpec, match=r"rollfleet/rollfleet-ca holds no CA .* delete it"):
        await certificates.authority()


async def test_every_reason_to_renew_is_seen(certificates: Certificates, cluster: MemoryCluster) -> None:
    await certificates.ensure(make_fleet())
    authority, good = await certificates.authority(), secret(cluster)
    other = make_authority(NOW)

    def changed(**data: str) -> dict[str, Any]:
        return {"data": good["data"] | data}

    def b64(content: bytes) -> str:
        return base64.b64encode(content).decode()

    assert why_renew(authority, good, NAME, NOW) is None
    assert why_renew(authority, changed(**{"tls.key": ""}), NAME, NOW) == "a part of it is missing"
    assert "does not hold" in (why_renew(authority, changed(**{"tls.crt": b64(b"x")}), NAME, NOW) or "")
    foreign = issue(other, NAME, NOW)
    by_other = changed(**{"tls.crt": b64(foreign.certificate), "tls.key": b64(foreign.key)})
    assert "does not hold" in (why_renew(authority, by_other, NAME, NOW) or "")
    key = issue(authority, NAME, NOW).key
    assert why_renew(authority, changed(**{"tls.key": b64(key)}), NAME, NOW) == "its key is another certificate's"
    assert (
        why_renew(authority, changed(**{"ca.crt": b64(other.pem.encode())}), NAME, NOW) == "its ca.crt is another CA's"
    )
    assert why_renew(authority, changed(**{"ca.crt": b64(b"\xff")}), NAME, NOW) == "its ca.crt is another CA's"
    strange = b64(b"-----BEGIN EC PRIVATE KEY-----\n" + UNKNOWN_CURVE + b"\n-----END EC PRIVATE KEY-----\n")
    assert "does not hold" in (why_renew(authority, changed(**{"tls.key": strange}), NAME, NOW) or "")
    assert why_renew(authority, good, "other.rl.engine.rollfleet.io", NOW) == "it names another server"
    assert "two thirds" in (why_renew(authority, good, NAME, NOW + timedelta(days=61)) or "")


def ca_secret(cluster: MemoryCluster) -> dict[str, Any]:
    return cluster.objects["secrets", "rollfleet", CA_SECRET]


def bundled(bundle: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(base64.b64decode(bundle))


class Trust:
    """What the operator was told to trust, and whether it was told before engines had the certificate."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.told: list[tuple[str, int]] = []

    def __call__(self, pem: str) -> None:
        self.told.append((pem, self.cluster.writes.count(("apply", "secrets", "qwen-engine-tls"))))


@pytest.mark.parametrize("reason", ["annotation", "age"])
async def test_a_new_ca_is_trusted_beside_the_one_before_until_no_engine_can_show_that(
    cluster: MemoryCluster, clock: Clock, reason: str
) -> None:
    trust = Trust(cluster)
    certificates = Certificates(cluster, "rollfleet", clock, trust)
    (first,) = bundled(await certificates.ensure(make_fleet()))
    if reason == "annotation":
        ca_secret(cluster)["metadata"]["annotations"] = {ROTATE: "today", "kept": "x"}
    else:
        clock.now = renewal_time(first)
    certificates.recheck({"f-1"})
    second, before = bundled(await certificates.ensure(make_fleet()))
    assert before == first
    certificate(secret(cluster)).verify_directly_issued_by(second)
    pem, applied = trust.told[-1]
    assert (pem.count("BEGIN CERTIFICATE"), applied) == (2, 1), "trusted before an engine can show it"
    assert ROTATE not in ca_secret(cluster)["metadata"].get("annotations", {})
    restarted = Certificates(cluster, "rollfleet", clock)
    assert bundled((await restarted.authority()).bundle) == [second, first]
    clock.now += FLEET_LIFE - timedelta(minutes=1)
    certificates.recheck({"f-1"})
    assert bundled(await certificates.ensure(make_fleet())) == [second, first]
    clock.now += timedelta(minutes=2)
    certificates.recheck({"f-1"})
    assert bundled(await certificates.ensure(make_fleet())) == [second]
    assert trust.told[-1][0].count("BEGIN CERTIFICATE") == 1
    assert cluster.writes.count(("patch", "secrets", CA_SECRET)) == 1


async def test_each_ca_is_trusted_for_ninety_days_after_its_own_successor(
    certificates: Certificates, cluster: MemoryCluster, clock: Clock
) -> None:
    """Also where CAs are made so often that the newest is always young: a CA may have been withdrawn for its key."""
    made = [bundled(await certificates.ensure(make_fleet()))[0]]
    began = clock.now

    async def on_day(day: float, *, rotate: bool = False) -> list[x509.Certificate]:
        clock.now = began + timedelta(days=day)
        if rotate:
            ca_secret(cluster)["metadata"]["annotations"] = {ROTATE: "again"}
        certificates.recheck({"f-1"})
        return bundled(await certificates.ensure(make_fleet()))

    for day in (0, 80, 160, 240):
        bundle = await on_day(day, rotate=True)
        made.insert(0, bundle[0])
        assert bundle == made[:3]
        assert await on_day(day + 9) == made[:3]
        assert await on_day(day + 11) == made[:2], "the one before the last is gone"
    assert await on_day(240 + 91) == made[:1]


async def test_one_of_two_operators_makes_the_new_ca(cluster: MemoryCluster, clock: Clock) -> None:
    both = [Certificates(cluster, "rollfleet", clock) for _ in range(2)]
    await asyncio.gather(*(each.ensure(make_fleet()) for each in both))
    ca_secret(cluster)["metadata"]["annotations"] = {ROTATE: ""}
    for each in both:
        each.recheck({"f-1"})
    ends = await asyncio.gather(*(each.ensure(make_fleet()) for each in both), return_exceptions=True)
    assert all(isinstance(end, str | Conflict) for end in ends)
    bundles = {await each.ensure(make_fleet()) for each in both}
    assert len(bundles) == 1
    assert len(bundled(bundles.pop())) == 2


async def test_however_often_one_is_asked_for_the_bundle_stays_small(
    certificates: Certificates, cluster: MemoryCluster, clock: Clock
) -> None:
    for _ in range(MOST_BEFORE + 3):
        await certificates.ensure(make_fleet())
        ca_secret(cluster)["metadata"]["annotations"] = {ROTATE: "again"}
        certificates.recheck({"f-1"})
        clock.now += timedelta(hours=1)
    assert len(bundled(await certificates.ensure(make_fleet()))) == 1 + MOST_BEFORE


async def test_a_ca_that_is_damaged_later_is_told_and_the_one_that_was_read_goes_on(
    certificates: Certificates, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = await certificates.ensure(make_fleet())
    ca_secret(cluster)["data"] = {"tls.crt": "eA==", "tls.key": "eA=="}
    certificates.recheck({"f-1"})
    assert await certificates.ensure(make_fleet()) == bundle
    assert "holds no CA" in caplog.text


async def test_a_ca_that_was_deleted_is_made_anew_and_the_one_before_is_trusted_no_more(
    certificates: Certificates, cluster: MemoryCluster
) -> None:
    (first,) = bundled(await certificates.ensure(make_fleet()))
    del cluster.objects["secrets", "rollfleet", CA_SECRET]
    certificates.recheck({"f-1"})
    (second,) = bundled(await certificates.ensure(make_fleet()))
    assert second != first
    certificate(secret(cluster)).verify_directly_issued_by(second)


async def test_what_is_trusted_besides_may_be_unreadable(cluster: MemoryCluster, clock: Clock) -> None:
    authority = await Certificates(cluster, "rollfleet", clock).authority()
    for text in ("", "eA=="):
        ca_secret(cluster)["data"]["ca.crt"] = text
        assert (await Certificates(cluster, "rollfleet", clock).authority()).trusted == authority.pem
