"""What the trainer exports of a family loads in vLLM, and both then agree about tokens and routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict

from async_rl.inference.vllm.engine import VllmConfig, VllmReplica, engine_environment, start_vllm
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.transport import read_update
from message_queue.tokens import TokenOutput
from tests.conformance.conftest import generate, prompt, publish, request
from tests.conformance.reference import reference
from tests.helpers import numerics, tiny_models
from tests.parallel.support import assert_near, load_reference, make_batch, start_trainer

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

CONFIG = VllmConfig(
    device="cpu",
    threads=numerics.THREADS,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    kv_cache_bytes=16 << 20,
)
CONFIGS = {
    # Latent attention of vLLM on the CPU has kernels for these sizes of the latents only, which are the defaults.
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(num_hidden_layers=2),
    "glm4_moe": lambda: tiny_models.glm4_moe_config(num_hidden_layers=2),
}


def batch_of(tokens: Any, segment: TokenOutput) -> TensorDict:
    """The prompt and the sampled tokens as one sequence, with the rows that the engine routed by."""
    assert segment.routed_experts is not None
    ids = torch.from_numpy(np.concatenate([tokens, segment.token_ids]).astype(np.int64))
    rows = torch.from_numpy(segment.routed_experts.experts.astype(np.int16))
    return TensorDict(
        {
            "token_ids": ids[None],
            "loss_mask": (torch.arange(len(ids)) >= len(tokens))[None],
            "lengths": torch.tensor([len(ids)]),
            "routed_experts": torch.cat([rows, torch.full_like(rows[:1], -1)])[None],
        },
        batch_size=[1],
    )


async def assert_agrees(replica: VllmReplica, trainer: Any, model: Any, *, name: str) -> None:
    """The trainer gives the engine's tokens the engine's logprobs, over its routing and over its own alike.

    model: the same weights in transformers.
    """
    tokens = prompt(40)
    segment = await generate(replica, request(name, tokens))
    batch = batch_of(tokens, segment)
    live = batch.clone()
    live["routed_experts"][:] = -1
    sampled = torch.from_numpy(segment.logprobs)
    bound = 2 * reference(model, np.concatenate([tokens, segment.token_ids])).logprob_bound
    for rows in (batch, live):
        assert_near(trainer.logprobs(rows)[batch["loss_mask"]], sampled, bound=bound)


@pytest.mark.parametrize("family", CONFIGS)
async def test_exported_checkpoints_and_updates_of_a_family_agree_with_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    from async_rl.trainer.model.convert import export_weights

    checkpoint = tiny_models.save_checkpoint(CONFIGS[family](), tmp_path / "model", seed=2, vectors=True)
    trainer = start_trainer(checkpoint, optimizer=OptimizerConfig(lr=5e-3))
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(
        dict(export_weights(trainer.model.chunks, shape=trainer.model.shape)),
        exported / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await start_vllm(CONFIG, name="replica-0", checkpoint=exported)
    try:
        await assert_agrees(replica, trainer, load_reference(exported), name="exported")
        trainer.train(make_batch(layers=len(trainer.model.replay.layers)))
        update = trainer.export(tmp_path / "updates", version=1)
        assert update is not None
        await publish(replica, update)
        save_file(dict(read_update(update.path)), exported / "model.safetensors", metadata={"format": "pt"})
        await assert_agrees(replica, trainer, load_reference(exported), name="updated")
    finally:
        await replica.close()
        trainer.close()
