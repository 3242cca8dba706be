"""`prefix_file`: the cache's states survive a restart and change no answer."""

import asyncio
import io
import json
import logging
import os
import random
import resource
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.llamacpp import HAS_STATE_F16
from qwen_serve.server.engine import Engine, GenerateRequest, SamplingParams, restore_prefixes, save_prefixes
from qwen_serve.server.engine.prefix_cache import PrefixFile, PrefixFileError
from qwen_serve.server.engine.prefix_cache.file import Entry
from tests.marks import slow_but
from tests.server.engine.helpers import (
    EXACT,
    Question,
    answers_alone,
    ask,
    ask_all,
    random_prompt,
    running,
    settings,
)
from tests.server.engine.test_deterministic import requests

N = 24


@pytest.mark.parametrize("speculation", slow_but(["both"], ["off", "both"]))
async def test_a_restart_finds_what_the_engine_before_had(
    speculation: str, nano_f32: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (200, 300, 400)]
    alone = answers_alone(nano_f32, prompts, N)
    file = tmp_path / "prefixes"
    options: dict[str, Any] = {**EXACT, "speculation": speculation, "ctx_size": 4096, "prefix_file": file}
    with running(nano_f32, **options) as engine:
        for prompt in prompts:
            await ask(engine, Question(prompt, N))
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["prefixes"]
    with running(nano_f32, **options) as engine:
        for prompt, answer in zip(prompts, alone, strict=True):
            assert (await ask(engine, Question(prompt, N))).tokens == answer
        stats = engine.stats()
        assert stats.prompt_tokens == len(prompts)
        assert stats.prefix.hits == len(prompts)


async def test_salts_are_kept_apart_across_a_restart(nano_f32: Path, tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(2), 200)
    options: dict[str, Any] = {**EXACT, "prefix_file": tmp_path / "prefixes"}

    async def cached(engine: Any, salt: str) -> int:
        params = SamplingParams(ignore_eos=True)
        generation = engine.submit(GenerateRequest(engine.prompt(prompt), params, 4, salt=salt))
        assert [token async for tokens in generation for token in tokens]
        return int(generation.request.cached_tokens)

    with running(nano_f32, **options) as engine:
        assert await cached(engine, "one") == 0
    with running(nano_f32, **options) as engine:
        assert [await cached(engine, salt) for salt in ("", "another", "one")] == [0, 0, 199]


async def test_to_the_host_tier_what_the_device_has_no_id_for(nano_f32: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, 200) for _ in range(4)]
    options: dict[str, Any] = {**EXACT, "prefix_checkpoints": 2, "prefix_host_mib": 64}
    for restarted in (False, True):
        with running(nano_f32, **options, prefix_file=tmp_path / "prefixes") as engine:
            if restarted:
                stats = engine.stats().prefix
                assert (stats.resident, stats.host_checkpoints) == (2, stats.host_checkpoints)
                assert stats.host_checkpoints >= 2
            for prompt in prompts:
                before = engine.stats().prompt_tokens
                await ask(engine, Question(prompt, 4))
                assert engine.stats().prompt_tokens - before == (1 if restarted else 200)
            kept = engine.between_steps(lambda: [*engine.components.cache.entries()]).result()
            assert len({one.tokens.tobytes() for one in kept}) == len(kept), "none twice, as it is in both"


@pytest.mark.slow
async def test_states_are_saved_and_restored_while_others_are_taken_and_evicted(
    nano_f32: Path, tmp_path: Path
) -> None:
    """Steps run between the copies, and saved states are intact."""
    rng = random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(140, 400)) for _ in range(24)]
    alone = answers_alone(nano_f32, prompts, 8)
    options: dict[str, Any] = {"prefix_checkpoints": 5, "prefix_host_mib": 4, "ctx_size": 4096}
    file = tmp_path / "states"

    async def asked(engine: Engine, some: list[int]) -> None:
        answers = await ask_all(engine, [Question(prompts[index], 8) for index in some])
        assert [answer.tokens for answer in answers] == [alone[index] for index in some]

    with running(nano_f32, **options, **EXACT) as engine:
        for start in range(0, 24, 4):
            some = [rng.randrange(start + 4) for _ in range(4)] + [*range(start, start + 4)]
            work = restore_prefixes if start % 8 else save_prefixes
            await asyncio.gather(asyncio.to_thread(work, engine, file, ""), asked(engine, some))
        assert save_prefixes(engine, file, "").entries > 0
        assert engine.between_steps(partial(engine.components.cache.erase, "")).result() > 0
        assert restore_prefixes(engine, file, "").entries > 0
        await asked(engine, [*range(24)])
        assert engine.stats().prefix.hits > 0


@pytest.mark.slow
async def test_answers_stay_deterministic(nano_q4_k_m: Path, tmp_path: Path) -> None:
    asked = requests(random.Random(4))
    options: dict[str, Any] = {"deterministic": True, "ctx_size": 4 * 1024}
    with running(nano_q4_k_m, **options, prefix_cache=False) as engine:
        alone = [await ask(engine, request) for request in asked]
    for restarted in (False, True):
        with running(nano_q4_k_m, **options, prefix_file=tmp_path / "prefixes") as engine:
            before = engine.stats().prefix
            assert (before.resident > 0) == restarted
            assert [await ask(engine, request) for request in asked] == alone


async def test_it_is_bounded_the_most_recently_used_first(nano_f32: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    prompts = [random_prompt(rng, 500) for _ in range(4)]
    file = tmp_path / "prefixes"
    options: dict[str, Any] = {**EXACT, "ctx_size": 8192, "prefix_file": file, "prefix_file_mib": 2}
    with running(nano_f32, **options) as engine:
        for prompt in prompts:
            await ask(engine, Question(prompt, 4))
    assert 2**20 < file.stat().st_size < 2 * 2**20 + 4096
    with running(nano_f32, **options) as engine:
        await ask(engine, Question(prompts[-1], 4))
        assert engine.stats().prompt_tokens == 1
        await ask(engine, Question(prompts[0], 4))
        assert engine.stats().prompt_tokens == 501


def forged(content: bytes, change: dict[str, bytes]) -> bytes:
    """The same zip with other members, whose checksums are right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, change.get(name, old.read(name)))
    return made.getvalue()


def header(text: str) -> bytes:
    """An array's header alone."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.encode().ljust(117) + b"\n"


HUGE = header("{'descr': '|u1', 'fortran_order': False, 'shape': (900000000000,), }")
NOT_ABOUT = [b"[" * 100_000, b"[]", b"5", b"\xff", b'{"format": 1}', b" " * 2**25]


@pytest.mark.parametrize(
    "change",
    [{"about.json": about} for about in NOT_ABOUT]
    + [
        {"0/state.npy": HUGE},
        {"0/tokens.npy": HUGE.replace(b"|u1", b"<i4")},
        {"0/tokens.npy": header("{'descr': '<i4', 'fortran_order': False, 'shape': (0,), }")},
        {"0/state.npy": header("(" * 99)},
        {"0/state.npy": b""},
    ],
)
def test_no_file_makes_the_reader_fail_or_allocate(change: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    entry = Entry("", np.arange(9, dtype=np.int32), np.zeros(99, np.uint8))
    PrefixFile(path, {}).write([entry], 2**20)
    path.write_bytes(forged(path.read_bytes(), change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PrefixFileError):
        list(PrefixFile(path, {}).read())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


async def test_what_is_before_the_damage_is_used(
    nano_f32: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and when the file is restored, which says how much it was."""
    file, rng = tmp_path / "prefixes", random.Random(8)
    options: dict[str, Any] = {**EXACT, "prefix_file": file}
    with running(nano_f32, **options) as engine:
        for length in (200, 300):
            await ask(engine, Question(random_prompt(rng, length), 4))
    with zipfile.ZipFile(file) as archive:
        last = archive.namelist()[-2]
        longest = max(len(entry.tokens) for entry in PrefixFile(file, made_by(archive)).read())
    file.write_bytes(forged(file.read_bytes(), {last: HUGE}))
    with caplog.at_level(logging.WARNING), running(nano_f32, **options) as engine:
        assert engine.stats().prefix.resident > 0
        found = await asyncio.to_thread(restore_prefixes, engine, file, "")
    assert any(f"the rest of {file} is not used" in line for line in caplog.messages)
    assert found.entries > 0
    assert found.longest <= longest
    assert "damaged" in found.damage


def made_by(archive: zipfile.ZipFile) -> Any:
    return json.loads(archive.read("about.json"))["made_by"]


@pytest.mark.parametrize("what", ["settings", "state type", "model", "damaged", "cut", "no zip"])
async def test_one_that_does_not_fit_is_said_and_not_used(
    what: str, nano_f32: Path, nano_q4_k_m: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "state type" and not HAS_STATE_F16:
        pytest.skip("llama.cpp has no patch state-f16")
    file = tmp_path / "prefixes"
    prompt = random_prompt(random.Random(6), 300)
    options: dict[str, Any] = {**EXACT, "prefix_file": file}
    with running(nano_f32, **options) as engine:
        await ask(engine, Question(prompt, 4))
    model, said = nano_f32, "damaged"
    content = bytearray(file.read_bytes())
    if what == "settings":
        options, said = {"prefix_file": file}, "cache_type_k, cache_type_v, flash_attn"
    elif what == "state type":
        options["state_type"], said = "f16", "another state_type"
    elif what == "model":
        model, said = nano_q4_k_m, "another model"
    elif what == "damaged":
        with zipfile.ZipFile(file) as archive:
            state = archive.getinfo("0/state.npy")
        content[state.header_offset + state.file_size // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2] if what == "cut" else b"states")
    with caplog.at_level(logging.WARNING), running(model, **options) as engine:
        await ask(engine, Question(prompt, 4))
        assert engine.stats().prompt_tokens == 300
    assert any("is not used" in line and said in line for line in caplog.messages)


async def test_a_disk_that_refuses_costs_the_file_alone(
    nano_f32: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prefixes"
    file.write_bytes(b"what was there")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.file._put", full)
    with running(nano_f32, **EXACT, prefix_file=file) as engine:
        await ask(engine, Question(random_prompt(random.Random(7), 300), 4))
    assert any("No space left" in line for line in caplog.messages)
    assert file.read_bytes() == b"what was there"
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(nano_f32: Path, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="a regular file"):
        settings(nano_f32, prefix_file=path)
    file = PrefixFile(path, {})  # that it became later
    with pytest.raises(PrefixFileError, match="no regular file"):
        next(file.read())
    with pytest.raises(OSError, match="no regular file"):
        file.write([], 1)
    assert path.is_fifo()


def test_no_planted_link_is_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "prefixes"
    victim.write_text("precious")
    for name in ("prefixes", "prefixes.part"):
        (tmp_path / name).symlink_to(victim)
    PrefixFile(path, {}).write([], 1)
    assert victim.read_text() == "precious"
    assert [*PrefixFile(path, {}).read()] == []
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"prefix_cache": False}, "needs the prefix cache"),
        ({"prefix_file": "/nowhere/at/all"}, "a folder that"),
        ({"prefix_file": "/dev/null"}, "a regular file"),
    ],
)
def test_what_can_not_be_is_refused(
    changes: dict[str, Any], wrong: str, nano_f32: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=wrong):
        settings(nano_f32, **{"prefix_file": tmp_path / "prefixes", **changes})
