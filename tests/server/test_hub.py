"""GGUFs on the hub: choice of files, downloads into the hub's cache, `list` and `rm`."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from qwen_serve.convert.split import split
from qwen_serve.convert.stages import Output, StageRecord, locked
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import read_header, read_model
from qwen_serve.server import cli, models
from qwen_serve.server.engine import Engine, EngineSettings
from qwen_serve.server.hub_files import HubError, choose, models_of, tower_of
from qwen_serve.server.settings import find_mmproj, find_model
from qwen_serve.server.weights import WeightsError, resolve
from tests.fake_hub import REPO, Hub, in_place_of_the_hub

PUBLISHED = [
    "README.md",
    "config.json",
    "imatrix_unsloth.gguf_file",
    "Qwen3.5-4B-imatrix.gguf",
    "BF16/Qwen3.5-4B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3.5-4B-BF16-00002-of-00002.gguf",
    "Q8_0/Qwen3.5-4B-Q8_0-00001-of-00003.gguf",
    "Qwen3.5-4B-IQ4_XS.gguf",
    "Qwen3.5-4B-Q4_K_M.gguf",
    "Qwen3.5-4B-UD-Q4_K_XL.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mmproj-F32.gguf",
]
WEIGHTS = bytes(range(256)) * 1200


def test_what_the_files_of_a_repository_are() -> None:
    assert {model.quant for model in models_of(PUBLISHED)} == {"BF16", "IQ4_XS", "Q4_K_M", "UD-Q4_K_XL"}
    assert len(choose("a/b", "bf16", PUBLISHED).files) == 2
    assert choose("a/b", "Q4_K_XL", PUBLISHED).quant == "UD-Q4_K_XL"
    assert choose("a/b", None, PUBLISHED).quant == "Q4_K_M"
    assert choose("a/b", "Qwen3.5-4B-IQ4_XS.gguf", PUBLISHED).quant == "IQ4_XS"
    assert choose("a/b", None, ["tiny.q2_k.gguf", "readme"]).quant == "Q2_K"
    assert tower_of(PUBLISHED) == "mmproj-F16.gguf"
    assert tower_of(["a.gguf"]) is None


@pytest.mark.parametrize(
    ("quant", "names", "said"),
    [
        ("Q2_K", PUBLISHED, "hf:a/b: has no Q2_K; it has BF16, IQ4_XS, Q4_K_M, UD-Q4_K_XL"),
        (None, ["a-Q2_K.gguf", "a-Q8_0.gguf"], "has no Q4_K_M; it has Q2_K, Q8_0"),
        (None, ["model.safetensors"], "has no GGUF; it is a checkpoint: `qwen-serve serve a/b` converts it"),
        (
            "Q2_K",
            ["one-Q2_K.gguf", "two-Q2_K.gguf"],
            "several files are Q2_K: name one of one-Q2_K.gguf, two",
        ),
    ],
)
def test_what_is_not_there_or_not_clear(quant: str | None, names: list[str], said: str) -> None:
    with pytest.raises(HubError, match=said.replace("(", r"\(")):
        choose("a/b", quant, names)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """One with a model in two quants, one of them in two parts, and a tower; the caches are empty."""
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "ours"))
    files = {
        "Tiny-Q4_K_M.gguf": WEIGHTS,
        "Q8_0/Tiny-Q8_0-00001-of-00002.gguf": b"first",
        "Q8_0/Tiny-Q8_0-00002-of-00002.gguf": b"second",
        "mmproj-F16.gguf": b"tower",
        "README.md": b"a model",
    }
    with in_place_of_the_hub(monkeypatch, tmp_path, files) as handler:
        yield handler


def test_a_model_and_its_tower_are_fetched_once(hub: type[Hub]) -> None:
    model = resolve(f"hf:{REPO}:q4_k_m", None)
    assert (model.name, model.read_bytes()) == ("Tiny-Q4_K_M.gguf", WEIGHTS)
    tower = find_mmproj(model)
    assert tower is not None
    assert tower.read_bytes() == b"tower"
    asked = len(hub.asked)
    for spelt in (f"hf:{REPO}", f"https://huggingface.co/{REPO}:Q4_K_M"):
        assert resolve(spelt, None) == model
    assert resolve(f"hf.co/{REPO}", "Q4_K_M") == model
    assert len(hub.asked) == asked, "what is in the cache needs no network"
    assert not [path for _, path, _ in hub.asked if "Q8_0" in path]


def test_all_parts_of_a_split_model_are_fetched(hub: type[Hub]) -> None:
    model = resolve(f"hf:{REPO}:Q8_0", None, vision=False)
    assert model.name == "Tiny-Q8_0-00001-of-00002.gguf"
    assert [path.read_bytes() for path in sorted(model.parent.iterdir())] == [b"first", b"second"]
    assert find_model(model.parent) == model
    assert find_mmproj(model) is None


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"


def test_a_download_goes_on_where_it_was_interrupted(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the process ended, and after a network failure."""
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{digest}.incomplete").write_bytes(WEIGHTS[:100_000])
    hub.breaks_after = 50_000
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    # the client waits before it tries again
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    assert resolve(f"hf:{REPO}", None, vision=False).read_bytes() == WEIGHTS
    ranges = [part for method, _, part in hub.asked if method == "GET" and part]
    assert ranges == ["bytes=100000-", "bytes=150000-"]
    assert [path.name for path in blobs(tmp_path).iterdir()] == [digest]


def test_what_came_is_held_against_the_checksum(hub: type[Hub], tmp_path: Path) -> None:
    hub.damages = "Tiny-Q4_K_M.gguf"
    with pytest.raises(WeightsError, match=r"what came has the sha256 .* it was removed"):
        resolve(f"hf:{REPO}", None, vision=False)
    assert list(blobs(tmp_path).iterdir()) == []
    hub.damages = None
    assert resolve(f"hf:{REPO}", None, vision=False).read_bytes() == WEIGHTS


def test_a_download_larger_than_the_disk_is_not_begun(hub: type[Hub], tmp_path: Path) -> None:
    hub.claimed_bytes = 10**16
    with pytest.raises(WeightsError, match=r"20,000,000\.0 GB to download"):
        resolve(f"hf:{REPO}", None)
    assert not blobs(tmp_path).exists()


def test_what_cannot_be_fetched_is_said(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match=f"hf:{REPO}: has no Q2_K; it has Q4_K_M, Q8_0"):
        resolve(f"hf:{REPO}:Q2_K", None)
    with pytest.raises(WeightsError, match="hf:Some/Else: the hub knows no such model"):
        resolve("hf:Some/Else", None)
    with pytest.raises(WeightsError, match="Some/Else-GGUF: the hub knows no such model"):
        resolve("Some/Else-GGUF:Q8_0", None)
    with pytest.raises(WeightsError, match="--quant Q8_0: hf:a/b:Q4_K_M says which already"):
        resolve("hf:a/b:Q4_K_M", "Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="is not in the cache, and HF_HUB_OFFLINE keeps it from"):
        resolve(f"hf:{REPO}", None)


def test_what_is_in_the_cache_is_served_without_the_hub(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(f"hf:{REPO}:Q8_0", None, vision=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve(f"hf:{REPO}:Q8_0", None) == model, "its tower is not there, and cannot be asked for"
    assert resolve(f"hf:{REPO}", None) == model, "the only one"
    with pytest.raises(WeightsError, match=r"is not in the cache, and the hub .* is out of reach"):
        resolve(f"hf:{REPO}:Q4_K_M", None)


def run_models(*arguments: str) -> int:
    return models.main(arguments, prog="qwen-serve")


def test_list_and_rm(hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolve(f"hf:{REPO}:Q8_0", None)
    resolve(f"hf:{REPO}:Q4_K_M", None)
    nano = tmp_path / "ours" / "models" / "nano"
    checkpoint = tmp_path / "hub" / "models--Qwen--Qwen3.5-4B" / "snapshots" / "0"
    for path in (nano / "nano-F16.gguf", nano / "nano-Q4_K_M.gguf", checkpoint / "model.safetensors"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights")
    (nano / "nano.imatrix.gguf").touch()
    (nano / "nano-Q4_K_M.json").touch()
    (checkpoint / "config.json").write_text('{"architectures": ["Qwen3_5ForConditionalGeneration"]}')
    capsys.readouterr()
    assert run_models("list") == 0
    listed = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in listed] == [
        "NAME",
        f"hf:{REPO}:Q4_K_M",
        f"hf:{REPO}:Q8_0",
        "nano:F16",
        "nano:Q4_K_M",
        "Qwen/Qwen3.5-4B",
    ]
    assert listed[1][1:] == ["0.3", "MB"]
    assert run_models("rm", "nano:Q4_K") == 1
    assert "nano:Q4_K: no such model in the caches; did you mean nano:Q4_K_M?" in capsys.readouterr().err
    assert run_models("rm", "nano:q4_k_m", f"hf:{REPO}:Q8_0") == 0
    assert {path.name for path in nano.iterdir()} == {"nano-F16.gguf", "nano.imatrix.gguf"}
    assert len(list(blobs(tmp_path).iterdir())) == 2, "the other model, and the tower"
    foreign = next((blobs(tmp_path).parent / "snapshots").iterdir()) / "model.safetensors"
    foreign.write_bytes(b"another program's")
    assert run_models("rm", f"hf:{REPO}") == 0
    assert foreign.exists()
    foreign.unlink()
    resolve(f"hf:{REPO}:Q4_K_M", None)
    assert run_models("rm", "nano", f"hf:{REPO}", "Qwen/Qwen3.5-4B") == 0
    assert not nano.exists()
    assert list((tmp_path / "hub").glob("models--*")) == []


def test_a_model_is_not_removed_under_a_conversion(
    hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "ours" / "models" / "nano" / "nano-Q4_K_M.gguf"
    made.parent.mkdir(parents=True)
    made.touch()
    with locked(made.parent / ".convert.lock"):
        assert run_models("rm", "nano:Q4_K_M") == 1
    assert "a conversion is writing beside it" in capsys.readouterr().err
    assert made.exists()


def test_llama_servers_spelling(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr("qwen_serve.server.__main__.main", served.append)
    assert cli.serve(["-hf", f"{REPO}:Q4_K_M", "--port", "0"]) == 0
    assert cli.serve(["--hf-repo", REPO, "--hf-file", "Tiny-Q4_K_M.gguf", "--mmproj", "off"]) == 0
    assert [Path(arguments[1]).name for arguments in served] == ["Tiny-Q4_K_M.gguf"] * 2
    assert served[0][2:] == ["--port", "0"]
    assert cli.serve(["nano", "-hf", REPO]) == cli.serve(["-hff", "a.gguf"]) == 2
    assert "-hf names the model: nano is named, too" in capsys.readouterr().err


@pytest.mark.slow
def test_a_split_model_of_the_hub_is_loaded(hub: type[Hub], tmp_path: Path, nano_q4_k_m: Path) -> None:
    whole_file = hub.folder / "Tiny-Q6_K.gguf"
    shutil.copy(nano_q4_k_m, whole_file)
    with StageRecord.locked(hub.folder, "Tiny", force=False) as record:
        parts = split(Output(whole_file, "it"), whole_file.stat().st_size // 3, record)
    whole_file.unlink()
    assert len(parts) > 2
    model = resolve(f"hf:{REPO}:Q6_K", None)
    whole, found = read_header(nano_q4_k_m), read_model(model)
    assert found.tensors == whole.tensors
    settings = EngineSettings(model=model, ctx_size=512, parallel=1, threads=1, remember=False)
    engine = Engine(settings)
    try:
        engine.start()
        engine.wait_ready(60)
    finally:
        engine.close()
    with pytest.raises(ModelLoadError, match=r"is part 1 .from 0. of \d; name the first"):
        read_model(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"00003-of-0000\d\.gguf does not exist"):
        read_model(parts[0])
