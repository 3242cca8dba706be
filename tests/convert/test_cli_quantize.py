"""llama-quantize's flags: types, a matrix that is there; one that was interrupted; the table at the end."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.convert import imatrix as imatrix_module
from qwen_serve.convert.chunks import decode_chunks
from qwen_serve.convert.cli import main, parser
from qwen_serve.convert.cli_quantize import OTHERS, with_flags
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.imatrix import Entry, Imatrix, ImatrixError, Resume, check_fits, collect_imatrix
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.search.target import parse_size
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header, read_model
from qwen_serve.llamacpp.quantize import quantized_types
from tests.checkpoints import write_checkpoint

import numpy as np  # isort: skip

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


def types(gguf: Path, *flags: str) -> dict[str, str]:
    """Of the matrices that Q4_K_M with these flags would have."""
    recipe = with_flags({"Q4_K_M": load_recipe("Q4_K_M")}, parser().parse_args(flags))["Q4_K_M"]
    found = quantized_types(
        gguf, file_type=recipe.file_type, overrides=recipe.overrides, mixture=recipe.mixture
    )
    return {name: kind.name for name, kind in found.items() if kind.name not in ("F32", "F16")}


def test_types_by_flag(nano_f16: Path) -> None:
    stock = types(nano_f16)
    assert stock["token_embd.weight"] == "Q6_K"
    assert stock["blk.0.ssm_out.weight"] == "Q6_K", "an override of the recipe"
    chosen = types(nano_f16, "--tensor-type", "SSM_out=q8_0", "--tensor-type", "ssm=Q5_K")
    assert chosen["blk.0.ssm_out.weight"] == "Q8_0"
    assert {name for name in stock if stock[name] != chosen[name]} == {
        name
        for name in stock
        if "ssm_" in name and stock[name] != {True: "Q8_0"}.get("ssm_out" in name, "Q5_K")
    }
    embedding = types(nano_f16, "--token-embedding-type", "Q8_0", "--tensor-type", "token_embd=Q2_K")
    assert embedding["token_embd.weight"] == "Q8_0"
    assert types(nano_f16, "--output-tensor-type", "Q5_K")["token_embd.weight"] == "Q5_K", (
        "tied: it is the head"
    )


def test_pure_is_one_type_but_where_it_is_said(nano_f16: Path) -> None:
    assert set(types(nano_f16, "--pure").values()) == {"Q4_K"}
    kept = types(nano_f16, "--pure", "--tensor-type", "ffn_down=Q6_K")
    assert {kind for name, kind in kept.items() if "ffn_down" in name} == {"Q6_K"}
    assert {kind for name, kind in kept.items() if "ffn_down" not in name} == {"Q4_K"}


def test_a_recipe_with_other_types_is_another(nano_f16: Path) -> None:
    recipes = {"Q4_K_M": load_recipe("Q4_K_M")}
    given: tuple[list[str], ...] = (
        ["--pure"],
        ["--output-tensor-type", "Q8_0"],
        ["--token-embedding-type", "Q8_0"],
        [],
    )
    made = {with_flags(recipes, parser().parse_args(flags))["Q4_K_M"].fingerprint for flags in given}
    assert len(made) == 4
    assert load_recipe("Q4_K_M").fingerprint in made


@pytest.mark.parametrize("flag", OTHERS)
def test_flags_of_llama_cpps_tools_name_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([flag, "x"])
    assert f"{flag} is a flag of llama.cpp's tools; here: {OTHERS[flag]}" in capsys.readouterr().err


def test_what_is_wrong_with_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for flags, said in (
        (["--tensor-type", "ffn_down"], "want NAME=TYPE, such as ffn_down=Q6_K; got 'ffn_down'"),
        (["--tensor-type", "ffn=Q9"], "want one of F32, F16"),
        (["--tensor-type", "(=Q8_0"], "is not a regular expression"),
        (["--output-tensor-type", "Q4_K_M"], "want one of F32, F16"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(flags)
        assert said in capsys.readouterr().err
    with pytest.raises(ConvertError, match="--pure want a --quant that is quantized"):
        with_flags({}, parser().parse_args(["--pure"]))
    assert main(["--imatrix", "a.gguf", "--no-imatrix"]) == 1
    assert "--imatrix FILE and --no-imatrix contradict each other" in capsys.readouterr().err
    write_checkpoint(tmp_path / "tiny")
    assert main(["--src", str(tmp_path / "tiny"), "--imatrix", "nowhere.gguf", "--out", str(tmp_path)]) == 1
    assert "nowhere.gguf: not a GGUF imatrix file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_matrix_that_is_there_is_taken_and_a_table_ends_the_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 40)
    flags = ["--src", str(checkpoint), "--no-kld", "--no-vision", "--threads", "1", "--out"]
    assert main([*flags, str(tmp_path / "one"), "--quant", "F16,Q2_K", "--calibration", str(text)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (start,) = (number for number, words in enumerate(printed) if words[:2] == ["file", "size"])
    assert [words[0] for words in printed[start + 1 : start + 3]] == [
        "Random-1B-F16.gguf",
        "Random-1B-Q2_K.gguf",
    ]
    assert not [words for words in printed if words[:1] == ["tensors"]], "no list unless asked for"
    given = tmp_path / "one" / "Random-1B.imatrix.gguf"
    again = [*flags, str(tmp_path / "two"), "--quant", "Q2_K", "--imatrix", str(given), "--show-tensors"]
    assert main(again) == 0
    assert "  tensors " in capsys.readouterr().out
    made = [(tmp_path / out / "Random-1B-Q2_K.gguf").read_bytes() for out in ("one", "two")]
    assert made[0] == made[1]
    assert not list((tmp_path / "two").glob("*.txt"))


def test_a_matrix_of_another_model_is_refused(nano_f16: Path, tmp_path: Path) -> None:
    def save(entries: dict[str, Any]) -> Path:
        Imatrix(entries, ("t",), 1, 512).save(tmp_path / "i.gguf")
        return tmp_path / "i.gguf"

    def entry(width: int) -> Entry:
        return Entry(np.ones((1, width), np.float32), np.ones(1, np.float32))

    with pytest.raises(ImatrixError, match=r"names no tensor of .*: it is another model's"):
        check_fits(save({"blk.900.ffn_up.weight": entry(8)}), model=nano_f16)
    with pytest.raises(ImatrixError, match=r"blk.0.ffn_up.weight has 8 columns, and \d+ in"):
        check_fits(save({"blk.0.ffn_up.weight": entry(8)}), model=nano_f16)
    with pytest.raises(ImatrixError, match="numbers the layers of the whole model; a recipe prunes some"):
        check_fits(save({"blk.0.ffn_up.weight": entry(8)}), [(0, 1)])


def test_an_interrupted_matrix_goes_on_and_is_the_same(
    nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} squared is {n * n}." for n in range(170)))
    decoded = [0]

    def stop(*arguments: Any, **options: Any) -> None:
        decoded[0] += 1
        if decoded[0] == 3:
            raise KeyboardInterrupt
        decode_chunks(*arguments, **options)

    monkeypatch.setattr(imatrix_module, "CHUNKS_PER_BATCH", 1)
    collect_imatrix(nano_f16, tmp_path / "whole.gguf", text=text, runtime=RUNTIME)
    monkeypatch.setattr(imatrix_module, "SAVE_INTERVAL_S", -1)
    monkeypatch.setattr(imatrix_module, "decode_chunks", stop)
    resume = Resume(tmp_path / "unfinished.npz", "this model and text")

    def collect(resume: Resume) -> None:
        collect_imatrix(nano_f16, tmp_path / "i.gguf", text=text, runtime=RUNTIME, resume=resume)

    with pytest.raises(KeyboardInterrupt):
        collect(resume)
    assert resume.path.exists()
    assert not (tmp_path / "i.gguf").exists()
    collect(resume)
    chunks = Imatrix.load(tmp_path / "i.gguf").chunk_count
    assert decoded[0] - 3 == chunks - 2, "two were done"
    assert (tmp_path / "i.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not resume.path.exists()


def test_a_file_in_parts_is_whole_again(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--src",
        str(checkpoint),
        "--no-vision",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
        "--quant",
        "F16",
    ]
    assert main([*flags, "--split-max-size", "100kB"]) == 0
    whole = read_header(tmp_path / "Random-1B-F16.gguf")
    parts = sorted(tmp_path.glob("Random-1B-F16-*-of-*.gguf"))
    assert len(parts) > 3
    together = read_model(parts[0])
    assert together.tensors == whole.tensors
    assert together.metadata.items() >= whole.metadata.items()
    for part in parts:
        for name, tensor in read_header(part).tensors.items():
            data, n_bytes = part.read_bytes()[tensor.offset :], tensor.n_bytes
            at = whole.tensors[name].offset
            assert data[:n_bytes] == whole.path.read_bytes()[at : at + n_bytes]
    times = [part.stat().st_mtime_ns for part in parts]
    assert main([*flags, "--split-max-size", "100kB"]) == 0
    assert [part.stat().st_mtime_ns for part in parts] == times
    capsys.readouterr()
    assert main([*flags, "--split-max-size", "10kB"]) == 1
    assert "token_embd.weight alone has 41 kB; tensors stay whole" in capsys.readouterr().err


def test_a_dry_run_tells_the_sizes_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--src", str(checkpoint), "--no-vision", "--no-imatrix", "--no-kld", "--threads", "1"]
    flags += ["--out", str(out), "--quant", "F16,Q2_K,Q8_0", "--pure"]
    assert main([*flags, "--dry-run"]) == 0
    planned = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert not out.exists()
    assert main(flags) == 0
    made = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Random-1B-")]
    assert [words[0] for words in planned] == ["quant", "F16", "Q2_K", "Q8_0", "nothing"]
    # kB to three figures, and bits
    assert [words[1:] for words in planned[1:4]] == [words[1:] for words in made]
    assert main(["--dry-run", "--quant", "auto", "--target-bpw", "5"]) == 1
    assert "not known before it has searched" in capsys.readouterr().err


def test_a_dry_run_of_a_gguf_and_of_less_than_all(
    checkpoint: Path, nano_f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--src", str(nano_f16), "--dry-run", "--out", str(tmp_path)]) == 0
    assert "Q4_K_M" in capsys.readouterr().out
    for flags in ([], ["--keep-vocab", "257"]):
        assert main(["--src", str(checkpoint), "--quant", "F16", "--dry-run", *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("F16")]
    whole, fewer = (parse_size("".join(words[1:3])) for words in lines)
    assert fewer < whole
    assert not list(tmp_path.glob("*.gguf*"))
