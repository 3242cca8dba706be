"""`qwen-serve`: the server, the terminal client, the converter and the build of llama.cpp under one name."""

import argparse
import os
import sys
from collections.abc import Sequence

from qwen_serve.server.about import llama_version, own_version

USAGE = """\
Serve Qwen3.5 models, talk to them, convert them.

  qwen-serve serve nano                                        # the tiny bundled model
  qwen-serve serve Qwen/Qwen3.5-4B --quant Q4_K_M              # downloads and converts it once
  qwen-serve serve hf:unsloth/Qwen3.5-4B-GGUF:Q4_K_M           # downloads a finished GGUF
  qwen-serve serve model.gguf --parallel 32 --ctx-size 131072
  qwen-serve chat 'What is 17+25?'

Serve and ask:
  qwen-serve serve MODEL [--quant Q4_K_M] [--variant NAME] [--SETTING VALUE ...]
  qwen-serve chat [QUESTION]      talk to a running server

Models:
  qwen-serve list                 list cached models
  qwen-serve rm NAME              remove a cached model
  qwen-serve convert [--FLAG ...] convert a checkpoint to GGUF (same as qwen-convert)

This machine:
  qwen-serve setup                build the patched llama.cpp, or use a release's wheel
  qwen-serve --version            versions of qwen-serve and llama-cpp-python

MODEL is one of
  model.gguf                      a GGUF file
  hf:owner/name:Q4_K_M            a GGUF on the Hugging Face hub (also -hf owner/name[:quant]);
                                  downloaded once into the hub's cache (HF_HOME)
  Qwen/Qwen3.5-4B, ./folder       a checkpoint, by hub id or folder; converted once to --quant
                                  (Q4_K_M) in QWEN_SERVE_CACHE (~/.cache/qwen-serve)
  nano                            the tiny bundled model

A variant, such as fast or small, is a quant and settings under one name: docs/variants.md.
Each command has --help."""


COMMANDS = ("serve", "chat", "list", "rm", "convert", "setup")


def main() -> int:
    """Runs the subcommand with the rest of the command line; returns 2 for an unknown one."""
    try:
        return _run((sys.argv[1:2] or [""])[0], sys.argv[2:])
    except ModuleNotFoundError as error:
        if (error.name or "qwen_serve").partition(".")[0] == "qwen_serve":
            raise
        what = "`qwen-serve setup` installs llama.cpp, `pip install qwen-serve` the rest"
        print(f"error: {error.name} is not installed: {what}", file=sys.stderr)
        return 1


def _run(command: str, arguments: Sequence[str]) -> int:
    match command:
        case "chat":
            from qwen_serve.server import client

            return client.main(arguments, prog="qwen-serve chat")
        case "serve":
            return serve(arguments)
        case "convert":
            # replaces this process, so that signals reach the converter itself, which cleans up
            os.execv(sys.executable, [sys.executable, "-m", "qwen_serve.convert", *arguments])
        case "setup":
            from qwen_serve.server import setup_llama

            return setup_llama.main(arguments, prog="qwen-serve setup")
        case "list" | "rm":
            from qwen_serve.server import models

            return models.main([command, *arguments], prog="qwen-serve")
        case "--version":
            print(f"qwen-serve {own_version()}, llama-cpp-python {llama_version()}")
        case "--help" | "-h":
            print(USAGE)
        case _:
            print(_not_a_command(command) if command else USAGE, file=sys.stderr)
            return 2
    return 0


def _not_a_command(word: str) -> str:
    from qwen_serve.server.names import nearest
    from qwen_serve.server.other_names import COMMANDS as ELSEWHERE

    if word in ELSEWHERE:
        return f"error: {word} is not a command here: {ELSEWHERE[word]}"
    near = nearest(word, COMMANDS)
    hint = f"did you mean {near}?" if near else "`qwen-serve --help` lists them"
    return f"error: {word} is not a command; {hint}"


def serve(arguments: Sequence[str]) -> int:
    """Runs `serve [MODEL] [--quant NAME] [--variant NAME] ...`, where MODEL comes first and becomes --model;
    returns the exit status."""
    from qwen_serve.server.settings import ENV_PREFIX
    from qwen_serve.server.settings_sources import (
        SettingsError,
        load_settings,
        load_variant,
        named_variant,
        settings_help,
    )
    from qwen_serve.server.weights import WeightsError, resolve

    count = 1 if arguments and not arguments[0].startswith("-") else 0
    named, rest = arguments[:count], arguments[count:]
    parser = argparse.ArgumentParser(prog="qwen-serve serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--quant")
    parser.add_argument("--variant")
    # llama-server's
    parser.add_argument("-hf", "-hfr", "--hf-repo", dest="repo")
    parser.add_argument("-hff", "--hf-file", dest="file")
    options, settings = parser.parse_known_args(rest)
    if options.variant is not None:
        settings = ["--variant", options.variant, *settings]
    if {"--help", "-h"} & set(settings):
        print(f"{USAGE}\n\nOptions of serve:\n\n{settings_help()}", end="")
        return 0
    if (options.repo or options.file) and (named or not options.repo):
        what = f"{named[0]} is named, too" if named else "--hf-file is a file of --hf-repo"
        print(f"error: -hf names the model: {what}", file=sys.stderr)
        return 2
    if named or options.repo:
        try:
            chosen = options.variant or named_variant()
            variant = load_variant(chosen) if chosen else None
            # before a download and a conversion; any file replaces the model
            load_settings(["--model", __file__, *settings])
            chosen_tower = f"{ENV_PREFIX}MMPROJ" in os.environ or any(
                word.partition("=")[0] == "--mmproj" for word in settings
            )
            name = named[0] if named else f"hf:{options.repo.removeprefix('hf:')}"
            model = resolve(name, options.file or options.quant, variant, vision=not chosen_tower)
            settings = ["--model", str(model), *settings]
        except SettingsError as error:
            print(error, file=sys.stderr)
            return 2
        except WeightsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    elif options.quant is not None:
        print("error: --quant needs a checkpoint: qwen-serve serve MODEL --quant ...", file=sys.stderr)
        return 2

    from qwen_serve.server.__main__ import main as run

    run(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
