"""Run as a program: decodes files and prints, for each, the most memory that it took, and what stayed."""

import json
import sys
from pathlib import Path

from PIL import Image

from qwen_serve.server.chat.pictures import GivenPicture

MOST = 4096 * 32 * 32
"""Pixels that the tower takes by default."""


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    Image.init()
    for name in sys.argv[1:]:
        data = Path(name).read_bytes()
        picture = GivenPicture("data:image/any;base64,", "it", data=data)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        before = status("VmRSS")
        try:
            pixels = picture.pixels(32, most=MOST)
            shape: object = pixels.shape
            del pixels
        except Exception as error:
            shape = str(error)
        peak, left = status("VmHWM") - before, status("VmRSS") - before
        print(json.dumps({"peak": peak, "left": left, "result": shape}), flush=True)


if __name__ == "__main__":
    main()
