"""Model families of the trainer tests: a checkpoint of each with random norms and biases, its batches and updates."""

from functools import partial

from async_rl.trainer.loss.losses import DecoupledPPO
from tests.conformance.reference import routers_of
from tests.helpers import tiny_models
from tests.parallel.support import expected_step, load_reference, make_batch, start_trainer

SMALL_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 40, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
YARN |= {"beta_fast": 32, "beta_slow": 1}
MODELS = {
    **{family: partial(tiny_models.tiny_config, family, num_hidden_layers=3) for family in tiny_models.FAMILIES},
    **{
        family: partial(tiny_models.tiny_config, family, num_hidden_layers=3, full_attention_interval=3)
        for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    "qwen3_5_moe_text-vision": lambda: tiny_models.with_vision(
        "qwen3_5_moe_text", num_hidden_layers=2, full_attention_interval=2
    ),
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**SMALL_LATENT),
    "deepseek_v3-yarn-whole-query": lambda: tiny_models.deepseek_v3_config(
        **{**SMALL_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    "glm4_moe-plain": lambda: tiny_models.glm4_moe_config(
        num_hidden_layers=3, attention_bias=False, use_qk_norm=False, n_group=4, topk_group=4
    ),
    "llama-tied": lambda: tiny_models.llama_config(num_hidden_layers=2, tie_word_embeddings=True),
    "qwen2_moe-normed": lambda: tiny_models.qwen2_moe_config(num_hidden_layers=2, norm_topk_prob=True, qkv_bias=False),
    "qwen3-tied-yarn": lambda: tiny_models.qwen3_dense_config(
        num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=YARN
    ),
}


class Family:
    """A checkpoint; its trainers replay R3 if it has routers."""

    def __init__(self, config, folder, *, loss=None):
        self.checkpoint = tiny_models.save_checkpoint(config, folder, seed=1, vectors=True)
        self.layers = len(routers_of(load_reference(self.checkpoint)))
        self.settings = {"router_replay": "R3" if self.layers else "none", "loss": loss or DecoupledPPO()}

    def start(self, **changes):
        return start_trainer(self.checkpoint, **(self.settings | changes))

    def batch(self, lengths=(23, 9, 31, 14), **changes):
        batch = make_batch(lengths, routed=self.layers > 0, layers=self.layers, **changes)
        batch["token_ids"].clamp_(min=1)  # transformers takes no gradient for the padding token, 0
        return batch

    def expected(self, batch, *, routed=True):
        """One update of `batch` by transformers; routed: over its rows, if the model has routers."""
        return expected_step(self.checkpoint, batch, self.settings["loss"], routed=routed and self.layers > 0)
