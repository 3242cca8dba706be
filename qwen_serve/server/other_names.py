"""Flags of llama-server and vLLM, commands of Ollama and vLLM: what does the same here."""

from __future__ import annotations

_ALWAYS = "that is always so here; leave it out"
_REQUEST = "a request says that, in its body"
_ADAPTERS = "adapters are named by --lora NAME=FILE.gguf, and chosen by a request"

_FLAGS = {
    # llama-server
    "-m": "--model FILE.gguf, or `qwen-serve serve FILE.gguf`",
    "-mu --model-url": "`qwen-serve serve hf:owner/name:Q4_K_M`",
    "-dr --docker-repo": "`qwen-serve serve hf:owner/name:Q4_K_M`",
    "-hft --hf-token": "the environment variable HF_TOKEN",
    "-c": "--ctx-size N, the tokens of all sequences together",
    "-ngl --gpu-layers": "--n-gpu-layers N",
    "-np": "--parallel N",
    "-b": "--batch-size N",
    "-ub": "--ubatch-size N",
    "-t": "--threads N",
    "-tb": "--threads-batch N",
    "-fa": "--flash-attn {auto,on,off}",
    "-ctk": "--cache-type-k TYPE",
    "-ctv": "--cache-type-v TYPE",
    "-sm": "--split-mode {none,layer}",
    "-ts": "--tensor-split 3,1",
    "-mg": "--main-gpu N",
    "-a": "--alias NAME",
    "-mm": "--mmproj FILE.gguf",
    "-md --model-draft": "--draft-model FILE.gguf",
    "--draft --draft-n": "--draft-max N",
    "--spec-type": "--speculation {auto,off,ngram,mtp,draft,both}",
    "--mmap": "--use-mmap",
    "--no-mmap": "--no-use-mmap",
    "--chat-template-file": "--chat-template FILE",
    "--chat-template-kwargs --reasoning-format -rea --reasoning": "--thinking or --no-thinking",
    "--reasoning-budget": "--thinking-budget N",
    "--ssl-key-file": "--ssl-keyfile FILE",
    "--ssl-cert-file": "--ssl-certfile FILE",
    "--cache-ram -cram": "--prefix-host-mib N",
    "--ctx-checkpoints --swa-checkpoints": "--prefix-checkpoints N",
    "--cache-reuse --cache-prompt": "--prefix-cache, which is on",
    "--no-cache-prompt": "--no-prefix-cache",
    "--no-webui --no-ui": "--no-page",
    "--webui --ui": "--page, which is on",
    "--webui-mcp-proxy --ui-mcp-proxy": "--mcp-origins http://127.0.0.1:3001",
    "-to --timeout": "--body-timeout S for a client's body; --drain-timeout S at the end",
    "-v --verbose -lv --verbosity": "--log-level debug",
    "--log-disable": "--log-level error",
    "--jinja --metrics --slots --props -cb --cont-batching -kvu --kv-unified --warmup": _ALWAYS,
    "--temp --temperature --top-k --top-p --min-p --repeat-penalty": f"{_REQUEST}, or --sampling-defaults",
    "-n --predict --n-predict --grammar --json-schema -s": _REQUEST,
    "--seed": _REQUEST,
    "--embedding --embeddings --rerank --reranking --pooling": "nothing here: this server only generates",
    # vLLM
    "--max-model-len": "--ctx-size N, all tokens of --parallel N sequences",
    "--gpu-memory-utilization --kv-cache-memory-bytes": "--ctx-size N; 0, the default, takes what fits",
    "--served-model-name": "--alias NAME",
    "--max-num-seqs": "--parallel N",
    "--max-num-batched-tokens": "--batch-size N",
    "--kv-cache-dtype": "--cache-type-k TYPE and --cache-type-v TYPE",
    "--quantization -q --dtype --load-format": "`qwen-serve serve MODEL --quant Q4_K_M`",
    "--tensor-parallel-size -tp --pipeline-parallel-size -pp": "--split-mode layer and --tensor-split",
    "--data-parallel-size -dp": "`python -m qwen_serve.server.cluster`, replicas behind one address",
    "--speculative-config --num-speculative-tokens": "--speculation {auto,off,ngram,mtp,draft,both}",
    "--enable-prefix-caching": "--prefix-cache, which is on",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--swap-space --kv-offloading-size": "--prefix-host-mib N",
    "--cpu-offload-gb": "--n-gpu-layers N",
    "--lora-scaled --lora-init-without-apply --lora-modules --enable-lora": _ADAPTERS,
    "--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --fully-sharded-loras": _ADAPTERS,
    "--default-chat-template-kwargs": "--thinking or --no-thinking",
    "--generation-config --override-generation-config": "--sampling-defaults {file,card,card-coding}",
    "--uvicorn-log-level": "--log-level LEVEL",
    "--allowed-local-media-path --allowed-media-domains": "--image-urls https and --image-url-hosts",
    "--download-dir": "the environment variable HF_HOME",
    "--hf-config-path --tokenizer --tokenizer-mode --config-format": "nothing here: a GGUF has them in it",
    "--enable-chunked-prefill --enable-auto-tool-choice --tool-call-parser --reasoning-parser": _ALWAYS,
    "--enable-reasoning --trust-remote-code --enforce-eager --disable-log-requests": _ALWAYS,
}

FLAGS = {flag: answer for flags, answer in _FLAGS.items() for flag in flags.split()}
"""A flag of llama-server or vLLM -> what says that here."""

COMMANDS = {
    "run": "`qwen-serve serve MODEL` serves, `qwen-serve chat` talks to it",
    "pull": "`qwen-serve serve MODEL` downloads what it serves; `qwen-serve list` shows what is here",
    "ps": "a server has one model: `curl localhost:8080/v1/models` names it, `qwen-serve list` what is here",
    "ls": "`qwen-serve list`",
    "show": "`curl localhost:8080/props` describes the model that is served",
    "stop": "Ctrl-C or SIGTERM ends `qwen-serve serve`; `make stop` what `make start` began",
    "create": "`qwen-convert` makes a GGUF of a checkpoint, --alias names it",
    "cp": "--alias gives a model another name",
    "push": "nothing is uploaded from here",
    "complete": "`qwen-serve chat QUESTION`",
    "bench": "`qwen-bench`",
    "delete": "`qwen-serve rm NAME`",
}
"""A command of Ollama or vLLM -> what does that here."""
