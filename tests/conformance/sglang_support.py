"""SGLang servers for tests: settings, tiny models that SGLang serves on a CPU, and its figures."""

from typing import Any

import pytest

from async_rl.inference.sglang.engine import SglangConfig, SglangReplica
from async_rl.inference.sglang.server import interpreter
from message_queue.errors import EngineError
from tests.helpers import numerics
from tests.helpers.tiny_models import COMMON, glm4_moe_config, mixtral_config, qwen3_moe_config

FIGURES = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
SMALL_POOL = 1200  # K/V slots: many long requests do not fit at once and some are retracted


def config(**changes: Any) -> SglangConfig:
    """A small CPU replica; prompts longer than 96 tokens are prefilled in chunks."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "threads": numerics.THREADS,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 96,
        "kv_cache_tokens": SMALL_POOL,
        "load_timeout_s": 60,
        "start_timeout_s": 240,
        "extra_args": {"decode_log_interval": 1, "schedule_conservativeness": 0.1},
    }
    return SglangConfig(**{**fields, **changes})


def require_sglang() -> None:
    """Skip the calling test if SGLang's virtualenv is absent."""
    try:
        interpreter(config())
    except EngineError as error:
        pytest.skip(str(error))


def qwen3_moe(**changes: Any) -> Any:
    """Every layer has experts: SGLang knows no dense ones in this family."""
    return qwen3_moe_config(mlp_only_layers=[], **changes)


def mixtral(**changes: Any) -> Any:
    """8 experts, top-2, softmax over the chosen."""
    return mixtral_config(intermediate_size=COMMON["intermediate_size"], **changes)


def glm4_moe(**changes: Any) -> Any:
    """Without bias and head norms."""
    return glm4_moe_config(attention_bias=False, use_qk_norm=False, **changes)


async def loads(replica: SglangReplica) -> dict[str, Any]:
    """Figures of its requests, over all its schedulers; they are current if decode_log_interval is 1."""
    schedulers = (await replica.backend.server.get("/v1/loads?include=core"))["loads"]
    return {name: sum(each[name] for each in schedulers) for name in FIGURES}
