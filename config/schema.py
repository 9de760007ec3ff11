"""Every setting of Chairlift, once: its name, type, default and meaning.

Standard library only, since the engine reads these classes and must run without the server's packages. The text under
each field is its documentation: `chairlift serve --help` and the table in README.md are made from it. A field's name
is its flag (`max_num_seqs` -> `--max-num-seqs`), its key in a TOML file and its environment variable
(`CHAIRLIFT_MAX_NUM_SEQS`). `config.load` reads them; nothing else does.

What a value may be beyond its type is in the field's metadata: `at_least`, `at_most`, `pattern` with `expected` (what
matches it, in words), `unit`, `secret` (never shown), `hidden` (from help and docs). `config.values` holds values
against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
KernelBackend = Literal["auto", "reference", "cpu"]
Quantization = Literal["none", "int8"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "int8"]
GenerationConfig = Literal["auto", "none"]
ReasoningParser = Literal["none", "think"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"]
LogFormat = Literal["text", "json"]
OverloadStatus = Literal["503", "429"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model: what is served, on what."""

    model: str = DEFAULT_MODEL
    """What to serve: `smollm2` (the default model), a Hugging Face id, a directory, or a `.gguf` file."""

    served_model_name: str | None = None
    """The name clients use for it. By default what `--model` says."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    dtype: DType = "auto"
    """Type of weights and activations. `auto`: bfloat16 where the device or the C kernels compute in it,
    else float32."""

    device: str = field(
        default="auto",
        metadata={"pattern": r"auto|cpu|cuda(:\d+)?", "expected": "auto, cpu, cuda or cuda:N"},
    )
    """`cpu`, `cuda` or `cuda:N`. `auto`: the first CUDA device, else the CPU."""

    max_model_len: int | None = field(default=None, metadata={"at_least": 1})
    """Longest prompt plus output, in tokens. By default what the model was made for, cut to what the KV cache holds."""

    kernels: KernelBackend = "auto"
    """Kernel back end. `auto`: the fastest one that this machine can run."""

    fuse: bool = True
    """With the `cpu` kernels: replace the model's layers by fused ones, each compared with the original first."""

    quantization: Quantization = "none"
    """Weights in fewer bits, converted at load. `int8`: of the linear layers, with the `cpu` kernels."""

    generation_config: GenerationConfig = "auto"
    """What requests sample with that do not say so. `auto`: with `temperature`, `top_p`, `top_k`, `min_p` and
    `repetition_penalty` of the model's `generation_config.json`, if it has any; `none`: with the API's own defaults."""

    num_threads: int | None = field(default=None, metadata={"at_least": 1})
    """CPU threads the engine computes with. By default the cores this process may use."""

    cache_dir: str | None = None
    """Where models unpacked from GGUF files are kept. By default `~/.cache/chairlift`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache: memory for the keys and values of running requests."""

    block_size: int = field(default=32, metadata={"at_least": 1, "at_most": 1024})
    """Tokens in one KV block."""

    kv_cache_memory: int | None = field(default=None, metadata={"at_least": 1, "unit": "bytes"})
    """Bytes for the KV cache, with a unit if you like (`4GiB`, `500MB`). By default a share of the free memory."""

    kv_cache_tokens: int | None = field(default=None, metadata={"at_least": 1})
    """Size of the KV cache in tokens instead of in bytes."""

    kv_cache_dtype: KVCacheDType = "auto"
    """Type of keys and values in the KV cache. `auto`: the model's. `int8` holds about twice as many tokens in the same
    memory as `bfloat16`, and changes outputs a little; `bfloat16` twice as many as `float32`."""

    prefix_caching: bool = True
    """Keep finished prompts' blocks, and reuse them for requests that begin alike."""

    prefix_cache_per_key: bool = False
    """Reuse them for the same API key only: how soon an answer begins then tells nobody what others have sent. \
    Without API keys it does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduler: what goes into one step."""

    max_num_seqs: int = field(default=64, metadata={"at_least": 1})
    """Most requests that run at once."""

    max_num_batched_tokens: int = field(default=512, metadata={"at_least": 1})
    """Most tokens computed in one step. Smaller: steadier streams; larger: faster prompts."""

    enable_chunked_prefill: bool = True
    """Let a long prompt take several steps, beside running streams. Off: a prompt goes in one step, whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Server: how it is reached."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 opens it to the network: set an API key then."""

    port: int = field(default=8000, metadata={"at_least": 0, "at_most": 65535})
    """Port to listen on; 0 takes a free one."""

    header_timeout: int = field(default=20, metadata={"at_least": 1})
    """Seconds within which a request's headers must have come; with HTTPS, the handshake before them too."""

    body_timeout: int = field(default=60, metadata={"at_least": 1})
    """Seconds that are spent waiting for a request's body."""

    write_timeout: int = field(default=60, metadata={"at_least": 0})
    """Seconds after which a client that takes nothing of its answer is cut off, and its request ends. One that is slow
    is not. 0 waits for ever."""

    max_connections: int | None = field(default=None, metadata={"at_least": 1})
    """Most open connections, TLS handshakes too: with one more, that which has been idle longest is closed. By default
    what the limit of open files (`ulimit -n`) allows."""

    max_queued_requests: int = field(default=512, metadata={"at_least": 0})
    """Most requests that wait, beside the `--max-num-seqs` that run; each choice is one. More are refused at once, with
    a `Retry-After` that is measured."""

    max_queued_tokens: int | None = field(default=None, metadata={"at_least": 1})
    """Most tokens in the prompts that wait. By default eight times what the KV cache holds."""

    overload_status: OverloadStatus = "503"
    """HTTP status of such a refusal: 503 as the server is at its limit, or 429 for clients that retry on that alone."""

    requests_per_minute: int | None = field(default=None, metadata={"at_least": 1})
    """Most requests that an API key may make in a minute; without keys, all clients together. More get 429 and \
    `Retry-After`. By default no limit."""

    tokens_per_minute: int | None = field(default=None, metadata={"at_least": 1})
    """Most tokens that an API key may use in a minute, prompts and output; without keys, all clients together.
    Outputs without `max_tokens` may overdraw it by as much again: nobody waits for more than two minutes. By default no
    limit."""

    max_queue_wait: int | None = field(default=None, metadata={"at_least": 1})
    """Seconds that a request may wait for its first step. It is dropped then, with 503 and `Retry-After`, before
    anything is computed for it. By default as long as it takes."""

    request_timeout: int | None = field(default=None, metadata={"at_least": 1})
    """Seconds that a whole answer may take, a client's `timeout_ms` if that is less: it ends with 504 then, or with an
    error event if its stream has begun. By default as long as it likes."""

    reasoning_parser: ReasoningParser = "none"
    """How the model writes its thoughts. `think`: in `<think>` tags; chats then have them in `reasoning_content`."""

    tool_parser: ToolParser = "auto"
    """How the model writes calls of tools. `auto`: as its chat template shows; `none`: chats cannot offer tools."""

    log_level: LogLevel = "info"
    """Least severity that is logged."""

    log_format: LogFormat = "text"
    """How lines are logged: `text` for people, `json` for programs, an object a line."""

    log_prompts: bool = False
    """Log the beginning of each prompt, as the model gets it."""

    shutdown_timeout: int = field(default=30, metadata={"at_least": 0})
    """Seconds that open requests get to finish in when the server is told to stop (SIGTERM, Ctrl-C). What is not done
    by then ends with the error `stopping`: status 503 before its first byte."""

    stall_timeout: int = field(default=120, metadata={"at_least": 1})
    """Seconds after which a step that does not end, or an event loop that does nothing, counts as hung: `/health` and
    `/ready` say 503 from then on. More than the slowest step takes."""

    stall_grace: int = field(default=30, metadata={"at_least": 0})
    """Seconds that what hangs gets to go on after all. Then the process ends with status 1; its log has the stacks of
    all threads."""

    max_stored_responses: int = field(default=1000, metadata={"at_least": 0})
    """Most finished answers of `/v1/responses` that are kept, in memory, for `previous_response_id` and `GET`. The \
    one that was not used for longest goes first. 0 keeps none."""

    stored_responses_memory: int = field(default=64 * 1024**2, metadata={"at_least": 0, "unit": "bytes"})
    """Most bytes that those take, each with the conversation before it."""

    vllm_metrics: bool = True
    """Also publish the `vllm:*` metric names that existing dashboards and autoscalers read."""

    otlp_traces_endpoint: str | None = field(
        default=None,
        metadata={
            "pattern": r"https?://[^/\s]+/\S*",
            "expected": "a URL of OTLP over HTTP with its path, such as http://localhost:4318/v1/traces",
        },
    )
    """URL that OpenTelemetry traces are sent to, by OTLP over HTTP: a span for each request that generates. By default
    what `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` say. Needs the extra `otel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access: who may reach the server, and from where."""

    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"secret": True})
    """Keys that clients must send as `Authorization: Bearer KEY`. Prefer the environment or `--api-key-file`."""

    api_key_file: str | None = None
    """File with one key a line (`#` starts a comment)."""

    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call the server by (`llm.example.com`, `.example.com` with all below it, `*`: any). \
    IP addresses and `localhost` always may. By default no others on a loopback address, and any on another."""

    cors_allow_origins: tuple[str, ...] = ()
    """Web pages that may use the server from a browser: their origins (`https://chat.example.com`), `*`: all. By \
    default only the server's own."""

    ssl_certfile: str | None = None
    """Serve HTTPS, with the certificate (and its chain) in this PEM file."""

    ssl_keyfile: str | None = None
    """PEM file with the certificate's key, if it is not in the same file."""

    ssl_keyfile_password: str | None = field(default=None, repr=False, metadata={"secret": True})
    """What that key is encrypted with. Prefer the environment."""

    ssl_ca_certs: str | None = None
    """Take only clients with a certificate that these authorities (a PEM file) have signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Faults: made on purpose, for the tests. Not shown to anybody."""

    faults: tuple[str, ...] = field(default=(), metadata={"hidden": True})
    """`PHASE:KIND[=SECONDS][@FIRST[xTIMES]][?TOKEN]`: see `engine/faults.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything: the engine's settings and the server's."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
