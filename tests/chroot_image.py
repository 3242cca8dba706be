"""Builds a Dockerfile's image without a container engine, and starts it. Each stage is a folder.

    sudo python -m tests.chroot_image Dockerfile.cpu /var/tmp/image

RUN is a chroot in a mount namespace. Base images are made by mmdebstrap from Debian's packages, so this is
for Dockerfiles that start `FROM debian:`. It supports the instructions of the repository's Dockerfiles and
refuses others. RUN gets the host's resolver, pip configuration, certificates and their variables, as a build
behind a proxy would. The result is started with the image's own environment, user and command, on a root that
is mounted read-only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
HOST_VARIABLES = re.compile(
    r"(?i)PIP_(CERT|INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT)|SSL_CERT_FILE|\w+_proxy"
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """A FROM instruction, and the settings after it."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def expand(self, text: str) -> str:
        """Replace `$NAME` and `${NAME}` by values of ENV and ARG."""
        values = {**self.arguments, **self.env}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), text)

    def copied(self, root: Path) -> Stage:
        """A new stage that begins with this one's files."""
        subprocess.run(["cp", "-a", self.root, root], check=True)
        return replace(self, root=root, env=dict(self.env), arguments=dict(self.arguments))

    def read(self, name: str, rest: str) -> None:
        """Apply an instruction that changes no files. Raises SystemExit for an unknown one."""
        match name:
            case "ARG":
                self.arguments |= dict([rest.split("=", 1)])
            case "ENV":
                pairs = (word.partition("=") for word in shlex.split(rest))
                self.env |= {key: self.expand(value) for key, _, value in pairs}
            case "USER":
                self.user = rest
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)
            case "HEALTHCHECK" | "EXPOSE" | "RUN" | "COPY":
                pass
            case _:
                raise SystemExit(f"{name}: not known here")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command as root in the chroot, with /proc and /dev."""
        script = (
            'mount --bind "$0" "$0" && cd "$0" && mount -t proc proc proc && mount --rbind /dev dev && '
            'exec chroot . /bin/sh -c \'cd "$0" && exec "$@"\' "$@"'
        )
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, str(self.root), self.workdir, *command],
            env={**self.arguments, **self.env, **variables},
            check=False,
        )


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, rest) of each instruction, without comments, lines joined."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*#", line)]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name.upper(), rest.strip()) for name, rest in pairs]


def build(dockerfile: Path, context: Path, folder: Path) -> Stage:
    """Build the last stage of `dockerfile`. Raises SystemExit for a failed or unknown instruction."""
    stages: list[Stage] = []
    names: dict[str, Stage] = {}
    given: dict[str, str] = {}
    for name, rest in instructions(dockerfile.read_text(encoding="utf-8")):
        print(f"{name} {rest}", flush=True)
        if name == "FROM":
            image, _, alias = rest.partition(" AS ")
            outer = Stage(folder, arguments=given)
            stages.append(Stage(folder / str(len(stages))))
            if image in names:
                stages[-1] = names[image].copied(stages[-1].root)
            else:
                debian(outer.expand(image), stages[-1].root)
            names[alias] = stages[-1]
            continue
        if not stages:
            if name != "ARG":
                raise SystemExit(f"{name} before FROM")
            given |= dict([rest.split("=", 1)])
            continue
        stage = stages[-1]
        if name == "WORKDIR":
            stage.workdir = rest
            inside(stage, rest).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            copy(stage, context, names, rest)
        elif name == "RUN":
            network(stage)
            passed = {key: value for key, value in os.environ.items() if HOST_VARIABLES.fullmatch(key)}
            done = stage.run("/bin/sh", "-ec", rest, **passed)
            if done.returncode != 0:
                raise SystemExit(f"RUN {rest}\nended with status {done.returncode}")
        else:
            stage.read(name, rest)
    return stages[-1]


def debian(image: str, root: Path) -> None:
    """debian:RELEASE-slim, as mmdebstrap makes it: essential packages and apt."""
    release = re.fullmatch(r"debian:(\w+)-slim", image)
    if release is None:
        raise SystemExit(f"FROM {image}: only debian:RELEASE-slim can be made here")
    root.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mmdebstrap", "--variant=apt", "--quiet", release[1], str(root)], check=True)


def inside(stage: Stage, path: str) -> Path:
    """The path on this machine of a path in the image."""
    return stage.root / str(Path(stage.workdir) / path).lstrip("/")


def copy(stage: Stage, context: Path, names: dict[str, Stage], rest: str) -> None:
    """COPY: copies a folder's contents, or files into a folder."""
    *sources, target = stage.expand(rest).split()
    found = [context / source for source in sources]
    if sources[0].startswith("--from="):
        other = names[sources.pop(0).removeprefix("--from=")]
        found = [inside(other, source) for source in sources]
    place = inside(stage, target)
    for path in found:
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "train", "heldout")
            shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place / path.name)


def network(stage: Stage) -> None:
    """The host's files and variables that RUN needs to download anything."""
    for name in HOST_FILES:
        host, there = Path(name), stage.root / name.lstrip("/")
        if host.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(host, there)


def start(
    image: Stage, *arguments: str, model: Path | None = None, **variables: str
) -> subprocess.Popen[bytes]:
    """Start the image as `docker run --read-only [-v MODEL:/opt/ml/model:ro] image ARGUMENTS` would."""
    mounted = f"mount --bind {shlex.quote(str(model))} opt/ml/model && " if model else ""
    script = (
        'mount --bind "$0" "$0" && cd "$0" && mount -t proc proc proc && mount --rbind /dev dev && '
        f'{mounted}mount -o remount,bind,ro "$0" && exec chroot --userspec="$1:$1" . '
        '/bin/sh -c \'cd "$0" && exec "$@"\' "$2" "${@:3}"'
    )
    command = [*image.entrypoint, *(arguments or image.command)]
    return subprocess.Popen(
        ["unshare", "-m", "bash", "-c", script, str(image.root), image.user, image.workdir, *command],
        env={"HOME": "/", **image.env, **variables},
    )


if __name__ == "__main__":
    made = build(Path(sys.argv[1]), Path.cwd(), Path(sys.argv[2]))
    print(f"built {made.root}")
    sys.exit(start(made, *sys.argv[3:]).wait())
