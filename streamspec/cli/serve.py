"""`streamspec serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamspec.cli.option_flags import GivenFlags, with_flags
from streamspec.cli.shared_options import RECOMMENDED, Bundle, Precision, folders_of, load_flags
from streamspec.runtime.options import MOST_BATCH, LoadOptions
from streamspec.runtime.sampling.sampling_params import Sampling

if TYPE_CHECKING:
    from streamspec.serve import Server

TOKEN = "STREAMSPEC_TOKEN"


@with_flags
def command(
    *,
    bundle: Bundle,
    precision: Precision = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="127.0.0.1, localhost or ::1: nothing else.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(help=f"Token that clients must send; default: the variable {TOKEN}, else a new one, printed."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File that keeps the token, readable by you alone; made with a new one where there is none."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may ask, with the token, such as https://app.example; repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model id of the bundle; default: its folder's name.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]BUNDLE",
            help="Further bundle, or base, to serve under this name; default: its folder's; repeatable.",
        ),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help=("Adapter of a swappable bundle to offer, by name or folder; repeatable. Default: all in the bundle.")
        ),
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=1, max=64, help="Concurrent generations, each with its own KV cache.")
    ] = 4,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_BATCH,
            help="Most answers that may share a model call, where that pays; 1: none. Default: all sessions.",
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 32,
    timeout: Annotated[float, typer.Option(min=1, help="Maximum seconds per request.")] = 300,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens that a request may ask for.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the line of the address as one JSON object.")] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the web page.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Print one line per request on stderr.")] = False,
    loading: Annotated[LoadOptions, load_flags("tree", "adapter")],
    sampling: Annotated[dict[str, Any], GivenFlags(of=Sampling, without=("seed",), absent=RECOMMENDED)],
) -> None:
    """Serve a bundle to programs on this machine through an OpenAI-compatible API."""
    from streamspec.serve import Limits, serve

    if log:
        logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
        logging.getLogger("streamspec.serve").setLevel(logging.INFO)
    client_token = token or (None if token_file else os.environ.get(TOKEN))
    if batch is None:
        batch = min(sessions + bool(also), MOST_BATCH)  # of several bundles one more is open
    limits = Limits(sessions=sessions, queue=queue, timeout=timeout, max_tokens=max_tokens)

    def ready(server: Server) -> None:
        known = client_token is not None or token_file is not None  # to whoever gave it
        if as_json:
            print(json.dumps({"url": f"{server.url}/v1", "token": None if known else server.token}), flush=True)
            return
        shown = f"; token in {token_file}" if token_file else "" if client_token else f"; token: {server.token}"
        page = "" if no_page else f"; page: {server.url}/" + ("" if known else f"#token={server.token}")
        print(f"{server.url}/v1{shown}{page}", flush=True)

    named = [named_bundle(one) for one in also or ()]
    served, *others = folders_of([bundle, *(further for _, further in named)], precision)
    serve(
        served,
        replace(loading, batch=batch),
        port=port,
        token=client_token,
        token_file=token_file,
        allow_origins=allow_origin or (),
        name=name,
        adapters=list(use) if use else None,
        also=[(label, folder) if label else folder for (label, _), folder in zip(named, others, strict=True)],
        limits=limits,
        page=not no_page,
        host=host,
        sampling=sampling,
        ready=ready,
    )


def named_bundle(given: str) -> tuple[str, str]:
    """Reads `--also`: name and bundle of `NAME=BUNDLE`, '' and the bundle where it has no name."""
    name, equals, bundle = given.partition("=")
    return (name, bundle) if equals and not Path(given).exists() else ("", given)
