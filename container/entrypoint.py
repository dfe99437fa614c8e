"""Starts the command line in a container. With STREAMSPEC_PUBLISH=1 other containers and the operator's published port
reach its server, too.

The server binds loopback addresses only, in a container as anywhere. A relay listens on the container's own address, at
the same port, and passes connections on; it starts only with a token that the operator gave. The server checks token,
Host and Origin as always: Host has to be a loopback name and the port, so a port published on the host's loopback under
the same number is reached, and other machines are not unless the operator's own proxy says so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

COMMAND = [sys.executable, "-m", "streamspec"]
PUBLISH, TOKEN = "STREAMSPEC_PUBLISH", "STREAMSPEC_TOKEN"
MOST_CONNECTIONS = 128  # as many as the server takes
AT_ONCE = 1 << 16
LINGER = 10.0  # seconds for a client to read what is left once the server has closed


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        refuse(message)


def served_port(arguments: Sequence[str]) -> int:
    """The port of `serve` in the command line. Ends the program where publishing it was not asked for as it has to be:
    with a token of the operator's, on IPv4, and at a port that is known.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--token")
    parser.add_argument("--token-file")
    given, _ = parser.parse_known_args(arguments[1:])
    if not (given.token or given.token_file or os.environ.get(TOKEN)):
        refuse(f"{PUBLISH} without a token; expected {TOKEN} or --token-file; give one, and keep it")
    if given.port == 0 or given.host == "::1":
        refuse(f"{PUBLISH} with --port 0 or --host ::1; expected a port of its own; leave them out")
    if not 0 < given.port < 1 << 16:
        refuse(f"--port {given.port}; expected 1..65535; change it")
    return int(given.port)


def refuse(message: str) -> NoReturn:
    """Prints one line on stderr and ends the program as the command line does."""
    print(f"streamspec: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def own_addresses() -> list[str]:
    """The container's own addresses on its networks. Ends the program where it has none but loopback."""
    found = set[str]()
    with suppress(OSError):  # as its name is known there, also on a network without a way out
        found.update(socket.gethostbyname_ex(socket.gethostname())[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks which address would
        found.add(str(probe.getsockname()[0]))
    addresses = sorted(address for address in found if not address.startswith("127."))
    return addresses or refuse(f"{PUBLISH} without a network; expected one; leave {PUBLISH} out")


async def relayed(listen: Sequence[str], port: int, command: Sequence[str]) -> int:
    """Runs `command` and passes connections to `port` at the addresses `listen` on to 127.0.0.1:`port`. SIGTERM and
    SIGINT go to the command. Returns its exit code, 0 where it ended by one of them.
    """
    slots = asyncio.Semaphore(MOST_CONNECTIONS)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if slots.locked():
            writer.close()
            return
        async with slots:
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:  # the server is still loading
                writer.close()
                return
            await asyncio.gather(passed(reader, inner_writer), passed(inner_reader, writer))

    try:
        relay = await asyncio.start_server(accept, listen, port)
    except OSError as error:
        refuse(f"port {port} at {', '.join(listen)}: {error.strerror or error}; expected a free one; change --port")
    child = await asyncio.create_subprocess_exec(*command)
    sent: set[int] = set()

    def stop(number: int) -> None:
        sent.add(number)
        with suppress(ProcessLookupError):
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    code = await child.wait()
    relay.close()
    return 0 if -code in sent else 128 - code if code < 0 else code


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on until either side closes; then the other end is closed as well, soon without what is unread."""
    try:
        while data := await reader.read(AT_ONCE):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
        asyncio.get_running_loop().call_later(LINGER, writer.transport.abort)


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["serve"] and os.environ.get(PUBLISH) == "1":
        port = served_port(arguments)
        sys.exit(asyncio.run(relayed(own_addresses(), port, [*COMMAND, *arguments])))
    os.execv(sys.executable, [*COMMAND, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
