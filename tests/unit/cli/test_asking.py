"""What is said of an engine that was asked through a tunnel."""

from rollfleet_cli.asking import by_tunnel
from rollfleet_operator.clients.errors import Unreachable


def test_an_engine_is_named_by_its_own_address() -> None:
    told = by_tunnel(Unreachable("guard of qwen-0 (127.0.0.1:42581): no answer"), 42581, "198.18.0.7")
    assert str(told) == "guard of qwen-0 (198.18.0.7:8001 by port-forward): no answer"
