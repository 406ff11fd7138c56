"""`rollfleet-operator`, also as `python -m rollfleet_operator`."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from rollfleet_operator.clients.errors import RollfleetError
from rollfleet_operator.runtime.app import run
from rollfleet_operator.runtime.logs import set_up
from rollfleet_operator.runtime.options import parse

logger = logging.getLogger("rollfleet_operator")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator; exit code 1 with a line of explanation where it cannot."""
    options = parse(arguments)
    set_up(options.log_level)
    try:
        asyncio.run(run(options))
    except (RollfleetError, OSError) as error:
        logger.error("the operator cannot run: %s", error)  # noqa: TRY400 - the cause is in the message
        sys.exit(1)


if __name__ == "__main__":
    main()
