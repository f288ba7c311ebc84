"""All configuration: the `args:` of serve_config.yaml as one frozen tree. Unknown fields are refused by name."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
BLOCK_SIZE = 16  # tokens of one KV block


SENDABLE_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")

ApiKey = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    # Inputs may be keys, and Serve shows errors in its log and status.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


class ModelArgs(Section):
    id: str = "smollm2-135m"
    """A bundled name, a folder in Hugging Face format, a GGUF file, or a Hugging Face id."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    max_total_tokens: int = Field(default=4096, ge=2)
    """The most tokens one request may have, prompt and output; cut to what the model was made for and the KV cache holds."""
    trust_remote_code: bool = False
    """Whether code that comes with a checkpoint may run."""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """native: loray's own, tensor-parallel; transformers: its AutoModelForCausalLM on one rank; auto: native where there is one."""
    quantization: Literal["fp8", "bitsandbytes-8bit"] | None = None
    """On a GPU. fp8: the linears in float8 (e4m3), natively, in bfloat16 otherwise; bitsandbytes-8bit: through transformers, needs the
    extra `bnb`."""
    chat_template: str | None = None
    """A Jinja chat template in place of the model's own: the template itself, or the path of a file that holds it."""
    pooling: Literal["mean", "last"] = "mean"
    """How /embed and /v1/embeddings make one vector of a text's final hidden states."""


class KVCacheArgs(Section):
    memory_fraction: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU's memory for weights, adapters and KV blocks together."""
    cpu_bytes: ByteSize = Field(default=ByteSize(GIB), gt=0)
    """Bytes for KV blocks on each rank when serving on a CPU."""
    dtype: Literal["auto", "fp8"] = "auto"
    """auto: the model's dtype. fp8: float8 (e4m3) with scales for each layer, on a GPU: twice the blocks, and slightly other logits."""


class SchedulerArgs(Section):
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens one step may compute, decodes and prefill chunks together."""
    max_running: int = Field(default=256, ge=1)
    """Sequences one step may hold."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests that may wait; beyond it a request is answered 429, one of an adapter with none that waits only beyond twice as many."""


class AdapterArgs(Section):
    default_source: Literal["local", "hub"] = "local"
    """Where an adapter id without a scheme is looked up when the request does not say."""
    local_roots: list[Path] = [Path("adapters")]
    """Folders that hold PEFT folders. A relative one counts from the folder of serve_config.yaml."""
    gpu_bytes: ByteSize | Literal["auto"] = "auto"
    """Bytes of the rank-page pool on each rank; auto: a tenth of what is free on the GPU after the weights, 1 GiB on a CPU."""
    host_bytes: ByteSize = Field(default=ByteSize(4 * GIB), gt=0)
    """Bytes of each rank's host memory for adapters that wait for a place in the pool."""
    disk_bytes: ByteSize = Field(default=ByteSize(20 * GIB), gt=0)
    """Bytes of downloaded adapters kept on disk."""
    preload: list[str] = []
    """Adapters loaded before the first request."""
    allowed_urls: list[str] = []
    """URLs that adapters may be read from begin with one of these, such as s3://bucket/ or https://example.com/adapters/."""
    storage_options: dict[str, dict[str, Any]] = {}
    """Options for fsspec by scheme, such as {s3: {endpoint_url: http://minio:9000}}. Credentials come from the usual environment."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests of one adapter that may wait; beyond it a request is answered 429."""
    weights: dict[str, Annotated[float, Field(ge=0.001, le=1000)]] = {}
    """Share of the service for an adapter, where not 1; "" is the base model."""


class ApiKeyArgs(Section):
    inference: ApiKey | dict[str, ApiKey] | None = None
    """If set, every request but the health checks needs `Authorization: Bearer <key>`. Several keys have names: {team-a: key, …}."""
    admin: ApiKey | None = None
    """Needed for /admin, as `Authorization: Bearer <key>`; without it there is no /admin."""

    @property
    def named(self) -> dict[str, str]:
        """The inference keys by name; a single one is called default."""
        if isinstance(self.inference, dict):
            return self.inference
        return {} if self.inference is None else {"default": self.inference}

    @model_validator(mode="after")
    def _check_keys(self) -> "ApiKeyArgs":
        if self.inference == {}:
            raise ValueError("inference: no keys would lock everybody out; leave it out to need none")
        if len(set(self.named.values())) < len(self.named):
            raise ValueError("inference: two names have the same key")
        if self.admin in self.named.values():
            raise ValueError("admin: is an inference key as well, so that whoever may generate would be an admin")
        for name, key in {**{f"inference ({name})": key for name, key in self.named.items()}, "admin": self.admin}.items():
            if key is not None and not SENDABLE_KEY.fullmatch(key):
                raise ValueError(f"{name}: a key is printable ASCII without a space at either end, or clients could not send it")
        return self


class LimitArgs(Section):
    max_body_bytes: ByteSize = Field(default=ByteSize(4 * MIB), gt=0)
    """Bytes one request's body may have; beyond it the answer is 413."""
    max_concurrent_requests: int = Field(default=1024, ge=1)
    """Unfinished requests one ingress replica may hold; beyond it the answer is 429, but for admins. Health checks and metrics don't
    count."""
    body_timeout_s: Seconds = 60.0
    """A request whose body is not whole by then is answered 408, so that nobody keeps a place by sending nothing."""
    max_best_of: int = Field(default=2, ge=1)
    """The most sequences that the native API's best_of may try."""
    max_choices: int = Field(default=16, ge=1)
    """The most choices that the OpenAI API's n and best_of may ask for."""
    request_timeout_s: Seconds | None = None
    """A generation that runs longer, waiting included, ends with an error; null: never."""
    keep_alive_s: Seconds = 15.0
    """A stream that has been silent for so long sends a comment, so that no proxy cuts it."""


class GrammarArgs(Section):
    max_text_bytes: ByteSize = Field(default=ByteSize(256 * KIB), gt=0)
    """Bytes that a JSON schema, regular expression or grammar may have."""
    compile_timeout_s: Seconds = 10.0
    """A grammar that takes longer to compile is refused."""
    max_compile_bytes: ByteSize = Field(default=ByteSize(2 * GIB), gt=0)
    """Memory that compiling may take beside the ingress replica's own."""
    max_compiled_bytes: ByteSize = Field(default=ByteSize(64 * MIB), gt=0)
    """Bytes of memory that a compiled grammar may have; every rank holds it."""
    cache_bytes: ByteSize = Field(default=ByteSize(64 * MIB), gt=0)
    """Bytes of grammars that an ingress replica keeps."""


class CorsArgs(Section):
    allow_origins: list[str] = []
    """Origins that browsers may send requests from, such as https://example.com; "*" is any. Empty: none, and no CORS headers."""
    allow_methods: list[str] = ["GET", "POST"]
    allow_headers: list[str] = ["*"]
    expose_headers: list[str] = ["*"]
    """Headers of the answer that a page may read."""
    allow_credentials: bool = False
    max_age_s: int = Field(default=600, ge=0)
    """How long a browser may remember the answer."""


class TracingArgs(Section):
    otlp_endpoint: str | None = Field(default=None, pattern="^https?://")
    """Where spans are sent, such as http://collector:4318/v1/traces; needs the extra `otel`. null: none are made."""
    service_name: str = "loray"
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced, of those whose caller did not decide it in `traceparent`."""


class ReplicaArgs(Section):
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: int = Field(default=128, ge=1)
    """Ray Serve adds replicas above this many unfinished requests each."""

    @model_validator(mode="after")
    def _check_range(self) -> "ReplicaArgs":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas})")
        return self


class IngressArgs(ReplicaArgs):
    """One is a Python process, which writes some 7,000 tokens a second: those of 32 streams of a model with eight billion parameters."""

    max_replicas: int = Field(default=4, ge=1)
    target_ongoing_requests: int = Field(default=32, ge=1)


class ServerArgs(Section):
    model: ModelArgs = ModelArgs()
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where the cluster has GPUs."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks, one GPU each, that share one copy of the model."""
    kv_cache: KVCacheArgs = KVCacheArgs()
    scheduler: SchedulerArgs = SchedulerArgs()
    adapters: AdapterArgs = AdapterArgs()
    api_keys: ApiKeyArgs = ApiKeyArgs()
    limits: LimitArgs = LimitArgs()
    grammars: GrammarArgs = GrammarArgs()
    cors: CorsArgs = CorsArgs()
    tracing: TracingArgs = TracingArgs()
    ingress: IngressArgs = IngressArgs()
    driver: ReplicaArgs = ReplicaArgs()
