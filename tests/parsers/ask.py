"""Runs in the interpreter that has vLLM: its parser reads command lines, one as JSON on each line of the input.

The first line of the output tells what the release knows; then comes a line for each command line.
"""

import json
import sys
from argparse import Namespace
from typing import Any, NoReturn

from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # from 0.30 on
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args


class RefusedError(Exception):
    """The parser's own words."""


class Parser(FlexibleArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def parsed(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """What the release understands, or its words."""
    try:
        found: Namespace = parser.parse_args(arguments)
        validate_parsed_serve_args(found)
    except (RefusedError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return json.loads(json.dumps(vars(found), default=str))


def main() -> None:
    parser = make_arg_parser(Parser())
    known = {
        "options": sorted(parser._option_string_actions),
        "tool_parsers": sorted(ToolParserManager.list_registered()),
        "actions": [list(action.option_strings) for action in parser._actions],
        "switches": sorted(name for action in parser._actions if action.nargs == 0 for name in action.option_strings),
    }
    print("ROLLFLEET", json.dumps(known), flush=True)
    for line in sys.stdin:
        print("ROLLFLEET", json.dumps(parsed(parser, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
