"""Four processes fetch one file into one cache, are killed at random moments, and find damaged parts."""

import multiprocessing
import os
import random
import signal
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from qwen_serve.server.weights import WeightsError, resolve
from tests.fake_hub import REPO, Hub, in_place_of_the_hub
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N, KILLS = 4, 8
"""Processes at a time, and kills of one file."""
PIECE = 1 << 15
WEIGHTS = random.Random(1).randbytes(200 * PIECE + 7)
DAMAGED = 7
"""Exit status of a process that says that a part was damaged."""

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload([__name__])


def fetch(endpoint: str, template: str, cache: str) -> None:
    """A process of its own. Exit status 0: what it was given are the hub's bytes."""
    constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint, template
    constants.HF_HUB_CACHE, constants.HF_HUB_DISABLE_XET = cache, True
    constants.DOWNLOAD_CHUNK_SIZE = PIECE
    try:
        sys.exit(resolve(f"hf:{REPO}", None, vision=False).read_bytes() != WEIGHTS)
    except WeightsError as error:
        print(error, file=sys.stderr)
        sys.exit(DAMAGED if "it was removed" in str(error) else 2)


class Race:
    """The processes, and what happens to them whenever a piece was sent."""

    def __init__(self, cache: Path, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.kills = self.damages = 0
        self.processes: list[ForkServerProcess] = []

    def begin(self) -> None:
        where = (constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE, str(self.cache))
        process = START.Process(target=fetch, args=where)
        process.start()
        self.processes.append(process)

    def last(self) -> None:
        self.begin()
        self.processes[-1].join(300)

    def alive(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid and process.exitcode is None]

    def sent_a_piece(self) -> None:
        if self.kills == KILLS or self.random.random() > 0.02:
            return
        self.kills += 1
        for pid in self.random.sample(
            alive := self.alive(), min(len(alive), self.random.choice((1, 1, 2, N)))
        ):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.random.random() < 0.4:
            self.damage()

    def damage(self) -> None:
        for part in self.cache.rglob("*.incomplete"):
            with suppress(FileNotFoundError), part.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                match self.random.choice(("flip", "cut", "more")):
                    case "flip" if size:
                        file.seek(at := self.random.randrange(size))
                        byte = file.read(1)
                        file.seek(at)
                        file.write(bytes([byte[0] ^ 1]))
                    case "cut":
                        file.truncate(self.random.randrange(size + 1))
                    case _:
                        file.seek(0, os.SEEK_END)
                        file.write(b"more")
                self.damages += 1


def test_whoever_ends_has_the_hubs_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_place_of_the_hub(monkeypatch, tmp_path, {"Tiny-Q4_K_M.gguf": WEIGHTS}) as hub:
        races = [Race(tmp_path / f"cache-{seed}", seed) for seed in range(6)]
        for race in races:
            run(race, hub, monkeypatch)
        n_resumed = sum(method == "GET" and bool(part) for method, _, part in hub.asked)
    codes = [process.exitcode for race in races for process in race.processes]
    n_damaged = sum(race.damages for race in races)
    print(f"{len(codes)} processes, {codes.count(-signal.SIGKILL)} killed, {n_damaged} parts damaged,")
    print(f"{n_resumed} transfers resumed, {codes.count(DAMAGED)} processes told of damage")
    assert n_resumed
    assert n_damaged
    assert codes.count(-signal.SIGKILL) >= KILLS * len(races) // 2


def run(race: Race, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    """Races until it was killed often enough. Then whoever is left ends, and a last process has the file."""

    def write(self: Any, data: bytes) -> None:
        with suppress(ConnectionError):  # of a killed process
            for at in range(0, len(data), PIECE):
                self.wfile.write(data[at : at + PIECE])
                if len(data) > PIECE:
                    race.sent_a_piece()

    monkeypatch.setattr(hub, "write", write)
    while race.kills < KILLS:
        if whole := [path for path in race.cache.rglob("blobs/*") if path.suffix != ".incomplete"]:
            wait_until(lambda: not race.alive(), 300)
            whole[0].unlink()  # for the next transfer
        while len(race.alive()) < N:
            race.begin()
        wait_until(lambda: len(race.alive()) < N, 300)
    for process in race.processes:
        process.join(300)
    codes = {process.exitcode for process in race.processes}
    assert codes <= {0, DAMAGED, -signal.SIGKILL}
    assert race.damages or DAMAGED not in codes
    race.last()
    if race.processes[-1].exitcode == DAMAGED:  # by what was left: "the same command fetches it again"
        race.last()
    assert race.processes[-1].exitcode == 0
    assert not list(race.cache.rglob("*.incomplete"))
