"""Converts the tokenizer from `tokenizer.json` and `tokenizer_config.json` to the GGUF's form."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from qwen_serve.convert.checkpoint import read_json
from qwen_serve.convert.config import SPECIAL_TOKENS, ModelConfig
from qwen_serve.convert.errors import CheckpointError

# llama.cpp's name for the pre-tokenizer <- the split pattern in tokenizer.json (src/llama-vocab.cpp has both)
PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
KNOWN_ENDS, MORE_ENDS = ("<|im_end|>", "<|endoftext|>"), ("eot", "eom")
BYTE_LEVEL_SPACE = chr(ord(" ") + 256)  # how byte-level BPE writes a space


@dataclass(frozen=True)
class Vocab:
    """The parts of the tokenizer that a GGUF holds; `tokens` and `types` are as long as the embedding."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre_tokenizer: str
    special_ids: Mapping[str, int]
    add_special: Mapping[str, bool]
    chat_template: str | list[dict[str, str]] | None

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> Vocab:
        """Reads the tokenizer of a checkpoint folder and pads it to `config.vocab_size`.

        Raises: CheckpointError: it is no byte-level BPE, llama.cpp has no name for its pre-tokenizer, or it
            has ids beyond the embedding.
        """
        if not (folder / "tokenizer.json").is_file() and (folder / "vocab.json").is_file():
            raise CheckpointError(
                f"{folder} has vocab.json and no tokenizer.json, which says how text is split: load it with "
                "AutoTokenizer of transformers 5 and save it (`save_pretrained`), or copy the base model's"
            )
        tokenizer = read_json(folder / "tokenizer.json")
        settings = _read_if_there(folder / "tokenizer_config.json")
        model = tokenizer.get("model") or {}
        if model.get("type") != "BPE":
            raise CheckpointError(f"tokenizer.json: model.type must be BPE, got {model.get('type')!r}")
        added = _added_tokens(tokenizer, settings, config.vocab_size)
        tokens, types = _tokens(model.get("vocab") or {}, added, config.vocab_size)
        special_ids = _special_ids(settings, added, config)
        special_ids |= _more_ends(folder, special_ids, tokens)
        merges = [_merge(entry) for entry in model.get("merges") or []]
        _check_unicode("model.merges", merges)
        return cls(
            tokens=tokens,
            types=types,
            merges=merges,
            pre_tokenizer=_pre_tokenizer(tokenizer.get("pre_tokenizer")),
            special_ids=special_ids,
            add_special=_add_special(
                tokenizer.get("post_processor"),
                settings,
                {kind: tokens[id_] for kind, id_ in special_ids.items()},
            ),
            chat_template=_chat_template(folder, settings),
        )


def _added_tokens(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], vocab_size: int
) -> dict[int, dict[str, Any]]:
    """Id -> {content, special}; `tokenizer.json` takes precedence over `tokenizer_config.json`.

    Tokens that were added without a row in the embedding, which no model can read, are left out.
    """
    places = [
        ("tokenizer_config.json: added_tokens_decoder", (settings.get("added_tokens_decoder") or {}).items()),
        ("tokenizer.json: added_tokens", ((None, entry) for entry in tokenizer.get("added_tokens") or [])),
    ]
    added: dict[int, dict[str, Any]] = {}
    for where, entries in places:
        for key, entry in entries:
            try:
                id_ = int(entry["id"] if key is None else key)
                added[id_] = {**entry, "content": str(entry["content"])}
            except (KeyError, TypeError, ValueError):
                raise CheckpointError(
                    f"{where}: each token must have an id and content, got {entry!r:.80}"
                    + (f" for {key!r}" if key is not None else "")
                ) from None
    for id_ in [id_ for id_ in added if id_ >= vocab_size]:
        print(
            f"tokenizer: token {added[id_]['content']!r} has id {id_}, which has no row in the embedding "
            f"(vocab_size {vocab_size}): left out",
            file=sys.stderr,
        )
        del added[id_]
    for entry in added.values():
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]:
            print(
                f"tokenizer: token {entry['content']!r} has {', '.join(flags)}, which llama.cpp does not "
                "apply: text beside it is tokenized otherwise than in transformers",
                file=sys.stderr,
            )
    return added


def _tokens(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    highest = max([*vocab.values(), *added], default=-1)
    if highest < 0:
        raise CheckpointError("tokenizer.json: model.vocab is empty")
    if highest >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json: token id {highest} has no row in the embedding "
            f"(config.json: vocab_size is {vocab_size})"
        )
    # embeddings are often padded to round shapes; the extra rows get names and are never generated
    tokens = [f"[PAD{id_}]" for id_ in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    for token, id_ in vocab.items():
        tokens[id_], types[id_] = token, int(gguf.TokenType.NORMAL)
    for id_, entry in added.items():
        content = str(entry["content"])
        control = entry.get("special", False) or (content.startswith("<|") and content.endswith("|>"))
        tokens[id_] = content
        types[id_] = int(gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED)
    _check_unique(tokens)
    _check_unicode("model.vocab", tokens)
    return tokens, types


def _check_unicode(where: str, texts: Sequence[str]) -> None:
    """Raises CheckpointError for half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"tokenizer.json: {where}: {text!r} has half of a surrogate pair, which is no text"
            ) from None


def _check_unique(tokens: Sequence[str]) -> None:
    """Raises CheckpointError if two ids have the same text, because llama.cpp aborts when it loads such a
    vocabulary."""
    id_of: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        if (first := id_of.setdefault(token, id_)) != id_:
            raise CheckpointError(
                f"tokenizer: ids {first} and {id_} are both {token!r}; "
                "do tokenizer.json and tokenizer_config.json belong together?"
            )


def _merge(entry: Any) -> str:
    """A merge as text. Older tokenizer files have "a b", newer ones ["a", "b"], so that a part may have a
    space."""
    if isinstance(entry, str) and entry.count(" ") == 1:
        return entry
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
        raise CheckpointError(f"tokenizer.json: model.merges must hold pairs of texts, got {entry!r}")
    left, right = (part.replace(" ", BYTE_LEVEL_SPACE) for part in entry)
    return f"{left} {right}"


def _pre_tokenizer(section: Any) -> str:
    pattern = next(_split_patterns(section), None)
    if pattern in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[pattern]
    known = "\n".join(f"  {name}: {regex}" for regex, name in PRE_TOKENIZERS.items())
    raise CheckpointError(
        f"tokenizer.json: llama.cpp has no pre-tokenizer that splits by\n  {pattern}\nknown are\n{known}"
    )


def _split_patterns(section: Any) -> Iterator[str]:
    if not isinstance(section, dict):
        return
    if section.get("type") == "Split":
        pattern = section.get("pattern") or {}
        yield str(pattern.get("Regex", pattern.get("String")))
    for part in section.get("pretokenizers") or []:
        yield from _split_patterns(part)


def _special_ids(
    settings: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], config: ModelConfig
) -> dict[str, int]:
    """The tokenizer's ids take precedence over config.json's, whose eos may end a document but not a turn."""
    id_of = {str(entry["content"]): id_ for id_, entry in added.items()}
    ids: dict[str, int] = {}
    for kind in SPECIAL_TOKENS:
        entry = settings.get(f"{kind}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        if content in id_of:
            ids[kind] = id_of[content]
        elif kind in config.special_token_ids:
            ids[kind] = config.special_token_ids[kind]
    return ids


def _more_ends(folder: Path, special_ids: Mapping[str, int], tokens: Sequence[str]) -> dict[str, int]:
    """Tokens beside eos that end an answer, by generation_config.json: llama.cpp has keys for two. It knows
    some by their texts. Others are named on stderr."""
    named = _read_if_there(folder / "generation_config.json").get("eos_token_id")
    ids = [id_ for id_ in (named if isinstance(named, list) else [named]) if isinstance(id_, int)]
    ends = dict.fromkeys(
        id_
        for id_ in ids
        if 0 <= id_ < len(tokens) and id_ != special_ids.get("eos") and tokens[id_] not in KNOWN_ENDS
    )
    if lost := [tokens[id_] for id_ in [*ends][len(MORE_ENDS) :]]:
        print(
            f"{folder / 'generation_config.json'}: eos_token_id also has {', '.join(lost)}; a GGUF has no "
            "room for more ends of an answer, so they do not end one",
            file=sys.stderr,
        )
    return dict(zip(MORE_ENDS, ends, strict=False))


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _add_special(
    post_processor: Any, settings: Mapping[str, Any], special: Mapping[str, str]
) -> dict[str, bool]:
    """Kind of a special token -> whether it is added to a text; `special` has the tokens' texts.
    tokenizer.json takes precedence."""
    flags: dict[str, bool] = {}
    if isinstance(post_processor, dict):
        flags = {"bos": False, "eos": False}
        for part in post_processor.get("processors", [post_processor]):
            if (kind := part.get("type")) == "TemplateProcessing":
                flags |= _framed(part, special)
            elif kind != "ByteLevel":  # ByteLevel adds nothing
                raise CheckpointError(
                    f"tokenizer.json: post_processor must be ByteLevel or TemplateProcessing, got {kind}"
                )
    for kind in SPECIAL_TOKENS:
        value = settings.get(f"add_{kind}_token")
        if isinstance(value, bool):
            flags.setdefault(kind, value)
    return flags


def _framed(template: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, bool]:
    """The tokens that a template adds to a single text. transformers 5 also saves templates that add
    nothing."""
    pieces = [next(iter(piece.items())) for piece in template.get("single") or []]
    places = [i for i, (kind, piece) in enumerate(pieces) if (kind, piece.get("id")) == ("Sequence", "A")]
    if len(places) != 1:
        raise CheckpointError("tokenizer.json: post_processor.single does not hold the text once")
    added = {
        "bos": ("before", [piece["id"] for _, piece in pieces[: places[0]]]),
        "eos": ("after", [piece["id"] for _, piece in pieces[places[0] + 1 :]]),
    }
    for kind, (where, tokens) in added.items():
        if tokens and tokens != [special.get(kind)]:
            raise CheckpointError(
                f"tokenizer.json: post_processor adds {' '.join(tokens)} {where} the text, "
                f"which is not {kind} ({special.get(kind)}); llama.cpp can add that alone"
            )
    return {kind: bool(tokens) for kind, (_, tokens) in added.items()}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The template, or several with names. A file of its own takes precedence over tokenizer_config.json, as
    in transformers; llama.cpp's converter has it the other way round."""
    named = settings.get("chat_template")
    template: str | list[dict[str, str]] | None = named
    if (file := folder / TEMPLATE).is_file():
        template = _text(file)
        if named is not None and named != template:
            print(
                f"{folder}: {TEMPLATE} and tokenizer_config.json have different chat templates; {TEMPLATE}'s "
                "is taken, as in transformers",
                file=sys.stderr,
            )
    elif named is None and (folder / OLD_TEMPLATE).is_file():
        template = read_json(folder / OLD_TEMPLATE).get("chat_template")
    others = [{"name": path.stem, "template": _text(path)} for path in sorted(folder.glob(MORE_TEMPLATES))]
    if others and isinstance(template, str):
        template = [{"name": "default", "template": template}, *others]
    if template is None or isinstance(template, str) or _are_named(template):
        return template
    raise CheckpointError(
        f"{folder}: chat_template must be a text, or a list of objects with name and template, got "
        f"{template!r:.80}"
    )


def _are_named(templates: Any) -> bool:
    return isinstance(templates, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in templates
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: is not UTF-8 ({error}); save it in UTF-8") from None
