"""Runs replicas of the server behind an existing router, with one command.

    python -m qwen_serve.server.cluster --replicas 2 --gpus 0,1 --model models/Qwen3.5-4B-Q4_K_M.gguf

Each replica is one process on a GPU of its own, behind vllm-router. The router sends requests with a common
prefix to the same replica as long as the load allows, and retries a request on another replica if it failed
before streaming. A replica that ends is restarted. On SIGTERM and Ctrl-C the router accepts no more requests
and waits for running ones; then the replicas end. SIGHUP replaces the replicas one by one. If a replica does
not come back, the launcher stops there, and the others continue. If the launcher gets SIGKILL, the router and
all replicas get SIGTERM (on Linux). Other flags are passed to `python -m qwen_serve.server`.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import requests

from qwen_serve.common.children import sigterm_with_parent

HEALTH_CHECK_S = 2
ROUTER_FLAGS = {
    "policy": "cache_aware",
    # a prefix moves if its replica has over 2 requests more than another, and over 3 times as many
    "balance-abs-threshold": 2,
    "balance-rel-threshold": 3.0,
    "health-check-interval-secs": HEALTH_CHECK_S,
    "health-check-timeout-secs": 2,
    "health-failure-threshold": 1,
    "health-success-threshold": 1,
    # the second try of a request to a dead replica goes elsewhere, even before the next health check
    "cb-failure-threshold": 1,
    "cb-success-threshold": 1,
    "cb-timeout-duration-secs": 2,
    "retry-max-retries": 10,
    "retry-max-backoff-ms": 1000,
    "worker-startup-check-interval": 1,
}
"""Options of vllm-router, besides addresses; `vllm-router --help` explains them."""

RESTART_PAUSE_S = 1.0
POLL_S = 0.1
NO_PROXY = {"http": "", "https": ""}


@dataclass
class Child:
    """A child process, its address, and its log file."""

    name: str
    command: list[str]
    port: int
    log: Path
    card: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the child in a session of its own, so that Ctrl-C reaches only the launcher, which ends its
        children in order. The child also ends if the launcher dies."""
        # the router forwards client-supplied headers, so no proxy is trusted
        environment = {"FORWARDED_ALLOW_IPS": "", **os.environ}
        if self.card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.card
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=sigterm_with_parent(),
            )

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answers(self) -> bool:
        """Whether its /health answers 200."""
        try:
            return requests.get(f"{self.url}/health", timeout=2, proxies=NO_PROXY).status_code == 200
        except requests.RequestException:
            return False

    def end(self) -> None:
        """Sends SIGTERM and waits until the child has finished its requests and ended."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])


class ClusterError(Exception):
    """A child did not start; the message names it and has its log's last lines."""


class Cluster:
    """The replicas and their router, from start to the drained end."""

    def __init__(self, replicas: Sequence[Child], router: Child) -> None:
        self._replicas, self._router = replicas, router
        self._ending, self._reload = threading.Event(), threading.Event()

    def run(self) -> None:
        """Runs until a signal ends it. Raises ClusterError."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGHUP, lambda *_: self._reload.set())
        try:
            for replica in self._replicas:
                replica.start()
            for replica in self._replicas:
                self._wait(replica)
            self._router.start()
            self._wait(self._router)
            self._print()
            while not self._ending.wait(POLL_S):
                self._supervise()
        finally:
            print("draining: the router first, then replicas", flush=True)
            self._router.end()
            enders = [threading.Thread(target=replica.end) for replica in self._replicas]
            for ender in enders:
                ender.start()
            for ender in enders:
                ender.join()

    def _end(self, sig: int, frame: FrameType | None) -> None:
        self._ending.set()

    def _wait(self, child: Child) -> None:
        """Waits until `child` answers or the cluster is to end."""
        while not child.answers():
            if not child.runs:
                raise ClusterError(f"{child.name} ended before it answered:\n{child.last_words()}")
            if self._ending.wait(POLL_S):
                return

    def _supervise(self) -> None:
        if not self._router.runs:
            raise ClusterError(f"the router ended:\n{self._router.last_words()}")
        for replica in self._replicas:
            if not replica.runs:
                assert replica.process is not None
                print(f"{replica.name} ended with status {replica.process.returncode}: again", flush=True)
                if not self._ending.wait(RESTART_PAUSE_S):
                    replica.start()
        if self._reload.is_set():
            self._reload.clear()
            self._replace()
            self._print()

    def _replace(self) -> None:
        """Replaces the replicas one by one. Stops if one does not come back; the remaining ones stay."""
        for number, replica in enumerate(self._replicas):
            print(f"replacing {replica.name}", flush=True)
            replica.end()
            replica.start()
            try:
                self._wait(replica)
            except ClusterError as error:
                kept = ", ".join(other.name for other in self._replicas[number + 1 :]) or "none"
                print(f"{error}\nreplacing stops here; not replaced: {kept}", file=sys.stderr, flush=True)
                return
            # wait for the router's health check to take the replica back before the next is replaced
            if self._ending.wait(2 * HEALTH_CHECK_S):
                return

    def _print(self) -> None:
        print(f"\n  {'':<10}  {'card':<6}  {'port':<6}  {'process':<8}  {'state':<8}  log")
        for child in (self._router, *self._replicas):
            pid = child.process.pid if child.process else ""
            state = "ready" if child.answers() else "waits"
            what = f"{child.name:<10}  {child.card or '-':<6}  {child.port:<6}"
            print(f"  {what}  {pid:<8}  {state:<8}  {child.log}")
        print(f"\nserving on {self._router.url}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once drained, 1 if something did not start."""
    options, server_flags = _parser().parse_known_args(arguments)
    cards = options.gpus.split(",") if options.gpus else [None] * options.replicas
    if len(cards) != options.replicas:
        print(f"--gpus {options.gpus}: {len(cards)} cards for {options.replicas} replicas", file=sys.stderr)
        return 2
    if find_spec("vllm_router") is None:
        print("the router is not installed: pip install 'qwen-serve[cluster]'", file=sys.stderr)
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    first = options.worker_port or options.port + 1
    replicas = [
        Child(
            name=f"worker-{i}",
            command=[
                *(sys.executable, "-m", "qwen_serve.server", "--host", "127.0.0.1", "--port", str(first + i)),
                *server_flags,
            ],
            port=first + i,
            log=options.logs / f"worker-{i}.log",
            card=card,
        )
        for i, card in enumerate(cards)
    ]
    flags = [text for name, value in ROUTER_FLAGS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", options.host, "--port"]
    command += [str(options.port), "--prometheus-port", str(first + options.replicas), *flags]
    command += ["--worker-urls", *(replica.url for replica in replicas)]
    router = Child("router", command, options.port, options.logs / "router.log")
    for child in (*replicas, router):
        child.log.write_bytes(b"")
    try:
        Cluster(replicas, router).run()
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qwen_serve.server.cluster",
        description="Replicas of the server behind vllm-router. Other flags are the server's own.",
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", type=int, default=2, help="how many (%(default)s)")
    parser.add_argument("--gpus", metavar="A,B", help="one card for each (whatever each finds)")
    parser.add_argument("--host", default="127.0.0.1", help="the router's address (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="the router's port (%(default)s)")
    parser.add_argument(
        "--worker-port",
        type=int,
        help="the first replica's port; the router's metrics are behind the last one's (--port and 1)",
    )
    parser.add_argument("--logs", type=Path, default=Path(".work/cluster"), help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
