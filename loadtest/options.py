"""Command-line options that `python -m loadtest` and `python -m loadtest.compare` share."""

from __future__ import annotations

import argparse
import json
from typing import Any

from loadtest.target import Target
from loadtest.workload import LoadSpec

DEFAULTS = LoadSpec()


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what the requests look like; `load_spec` reads them."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--input-len", type=positive, default=DEFAULTS.input_len, help="mean prompt tokens (%(default)s)"
    )
    group.add_argument("--output-len", type=positive, default=DEFAULTS.output_len, help="mean max_tokens (%(default)s)")
    group.add_argument(
        "--spread", type=share, default=DEFAULTS.spread, help="lengths vary by this share of the mean (%(default)s)"
    )
    group.add_argument(
        "--shared-prefix", type=not_negative, default=0, metavar="N", help="all prompts begin with N equal tokens"
    )
    group.add_argument("--seed", type=int, default=0, help="same seed, same load (%(default)s)")
    group.add_argument("--temperature", type=float, default=DEFAULTS.temperature, help="(%(default)s)")
    group.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    group.add_argument("--text", action="store_true", help="prompts of words, for servers that refuse token ids")
    group.add_argument(
        "--token-ids",
        type=id_range,
        default=DEFAULTS.token_ids,
        metavar="LOW:HIGH",
        help="draw prompts from the ids LOW to HIGH - 1 (1000:32000)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have outputs of full length; not every server knows the field",
    )
    group.add_argument(
        "--usage", action=argparse.BooleanOptionalAction, default=True, help="ask for token counts in the stream"
    )
    group.add_argument("--extra", type=json_object, default={}, metavar="JSON", help="fields to add to each request")


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how servers are reached."""
    group = parser.add_argument_group("connection")
    group.add_argument("--api-key", metavar="KEY", help="sent as a Bearer token")
    group.add_argument(
        "--timeout", type=positive_float, default=600.0, metavar="S", help="for one request (%(default)s)"
    )
    group.add_argument(
        "--allow-remote", action="store_true", help="load a server on another host (which must be yours to load)"
    )


def load_spec(options: argparse.Namespace, *, num_requests: int) -> LoadSpec:
    """The load that the options describe."""
    return LoadSpec(
        num_requests=num_requests,
        input_len=options.input_len,
        output_len=options.output_len,
        spread=options.spread,
        seed=options.seed,
        shared_prefix_len=options.shared_prefix,
        token_ids=options.token_ids,
        text=options.text,
        chat=options.chat,
        ignore_eos=options.ignore_eos,
        ask_usage=options.usage,
        temperature=options.temperature,
        extra=options.extra,
    )


def read_target(parser: argparse.ArgumentParser, options: argparse.Namespace, url: str) -> Target:
    """The server at `url`; ends the program when it is on another host and that was not asked for."""
    try:
        target = Target.parse(url, api_key=options.api_key)
    except ValueError as error:
        parser.error(str(error))
    if not (target.is_loopback or options.allow_remote):
        parser.error(f"{target.host} is not this machine: add --allow-remote if that server is yours to load")
    return target


def positive(text: str) -> int:
    """A whole number from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0 up."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive_float(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def id_range(text: str) -> tuple[int, int]:
    """LOW:HIGH, with 0 <= LOW < HIGH."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
    return int(low), int(high)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
