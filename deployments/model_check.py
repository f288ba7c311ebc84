"""Refuses a model that can't be served as asked, before anything is started or stopped."""

from loray.deployments.config import BLOCK_SIZE, ServerArgs
from loray.deployments.configured_template import check_configured
from loray.models.architectures import Implementation, UnsupportedModel, architecture_names, choose
from loray.models.checkpoint import check_tokenizer, least_kv_bytes, max_tensor_parallel, read_config, resolve_model
from loray.models.converted import is_converted


def check_model(args: ServerArgs, *, verify: bool = False) -> Implementation:
    """How it will be served. Raises CheckpointError or ValueError, one line each."""
    folder = resolve_model(args.model.id, args.model.revision, verify=verify)
    config = read_config(folder)
    if not is_converted(folder):  # those are checked where they are made
        check_tokenizer(folder)
    if args.model.chat_template:
        check_configured(args.model.chat_template)
    wanted = args.model.implementation
    if args.model.quantization == "bitsandbytes-8bit":
        if wanted == "native" or args.device == "cpu":
            raise ValueError(f"model.quantization: {args.model.quantization} needs a GPU, and implementation auto or transformers")
        wanted = "transformers"
    implementation = choose(config, wanted, args.model.trust_remote_code)
    if args.model.quantization == "fp8":
        _check_float8(args, implementation)
    if args.kv_cache.dtype == "fp8" and (implementation != "native" or args.device == "cpu"):
        raise ValueError("kv_cache.dtype: fp8 needs a GPU and a model that loray runs natively")
    ranks = args.tensor_parallel_size
    if implementation == "transformers" and ranks > 1:
        names = ", ".join(architecture_names(config))
        raise UnsupportedModel(f"tensor_parallel_size: {names} is served through transformers, on one rank only")
    if implementation == "native" and ranks > (heads := max_tensor_parallel(config)):
        raise ValueError(f"tensor_parallel_size: {ranks} is more than this model allows: it has {heads} attention heads")
    if (
        implementation == "native"
        and args.device == "cpu"
        and args.kv_cache.cpu_bytes < (least := least_kv_bytes(config, BLOCK_SIZE, ranks))
    ):
        raise ValueError(
            f"kv_cache.cpu_bytes: {args.kv_cache.cpu_bytes} bytes are no room for {BLOCK_SIZE} tokens, which take at least {least}"
        )
    return implementation


def _check_float8(args: ServerArgs, implementation: Implementation) -> None:
    if args.device == "cpu":
        raise ValueError("model.quantization: fp8 needs a GPU, and device is cpu")
    if implementation != "native":
        raise ValueError("model.quantization: fp8 needs a model that loray runs natively, and model.implementation auto or native")
    if args.model.dtype not in ("auto", "bfloat16"):
        raise ValueError(f"model.quantization: fp8 needs model.dtype auto or bfloat16, not {args.model.dtype}")
