"""`qwen-serve`: the server and its terminal client under one name."""

from __future__ import annotations

import sys

from server.about import own_version

USAGE = """\
usage: qwen-serve serve --model PATH [--SETTING VALUE ...]   serve one GGUF (python -m server)
       qwen-serve chat [QUESTION]X server (python -m server.client)
       qwen-serve --version

`qwen-serve serve --help` and `qwen-serve chat --help` list every setting."""


def main() -> int:
    """Hands the rest of the command line on; 2 for a command that is none."""
    command, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    match command:
        case "chat":
            from server import client

            return client.main(arguments, prog="qwen-serve chat")
        case "serve":
            from server.__main__ import main as serve

            serve(arguments)
        case "--version":
            print(f"qwen-serve {own_version()}")
        case "--help" | "-h":
            print(USAGE)
        case _:
            print(f"{command}: not a command\n{USAGE}" if command else USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
