"""The server's addresses, and who can reach them."""

import errno
import socket
import stat
from pathlib import Path

from qwen_serve.server.api.origin import is_local
from qwen_serve.server.settings import Settings, Sources

BACKLOG = 2048
UDS_MODE = 0o666


class ListenError(Exception):
    """The address cannot be used; the message names it and says why."""


def listen(settings: Settings) -> list[socket.socket]:
    """Sockets listening on `host` and `port`, or on `uds`. Raises ListenError.

    Opened before the model is loaded, which may take minutes.
    """
    if settings.uds is not None:
        return [_listen_on_path(settings.uds)]
    host, port, found = settings.host, settings.port, []
    why: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, (address, _, *scope) in addresses:  # a name may have several, such as localhost
            try:
                found.append(socket.create_server((address, port, *scope), family=family, backlog=BACKLOG))
                port = found[0].getsockname()[1]  # all addresses share the port chosen for 0
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a machine without IPv6
                    raise
                why = error
    except OSError as error:
        why = error
        for one in found:
            one.close()
        found = []
    if not found:
        assert why is not None
        raise ListenError(f"--host {host} --port {settings.port}: {why.strerror}") from why
    return found


def _listen_on_path(path: Path) -> socket.socket:
    mode = UDS_MODE
    server = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as client:
                if client.connect_ex(str(path)) == 0:
                    raise ListenError(f"--uds {path}: another process listens there")
            mode = stat.S_IMODE(path.stat().st_mode)
            path.unlink()  # left behind by a killed server
        server.bind(str(path))
        path.chmod(mode)
        server.listen(BACKLOG)
    except ListenError:
        server.close()
        raise
    except OSError as error:
        server.close()
        raise ListenError(f"--uds {path}: {error.strerror or error}") from error
    return server


def exposures(settings: Settings, sources: Sources) -> list[str]:
    """Warnings at start about access that is probably not intended."""
    said = []
    if settings.uds is None and not settings.api_keys() and not is_local(settings.host):
        said.append(
            f"no API key is set, and {settings.host} is not loopback: anybody who reaches port "
            f"{settings.port} may use this server (--api-key-file or QWEN_API_KEY sets a key)"
        )
    secrets: dict[str, Path | None] = {
        "--api-key-file": settings.api_key_file,
        "--ssl-keyfile": settings.ssl_keyfile,
        "--config": Path(sources["api_key"])
        if settings.api_key is not None
        else None,  # or the text is not a file's name
    }
    for flag, path in secrets.items():
        if path is not None and path.is_file() and path.stat().st_mode & stat.S_IROTH:
            said.append(f"{flag}: every user of this machine can read {path}; chmod o-r hides it from them")
    return said
