"""Cells of the parity table: layouts, replay modes, recomputations, packings and families."""

from dataclasses import dataclass, field, replace

from async_rl.trainer.model.model import ParallelConfig, TrainerConfig
from tests.helpers import numerics, tiny_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    ranks: int = 1
    """The ranks that `parallel` does not use are data parallel."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed_optimizer: bool = False


def _layout(ranks: int, *, distributed_optimizer: bool = False, **parallel: int) -> Layout:
    return Layout(ranks=ranks, parallel=ParallelConfig(**parallel), distributed_optimizer=distributed_optimizer)


LAYOUTS = {
    "single": Layout(),
    "dp2": _layout(2),
    "dp2-distopt": _layout(2, distributed_optimizer=True),
    "tp2": _layout(2, tensor=2),
    "tp2-etp1": _layout(2, tensor=2, expert_tensor=1),
    "tp2-ep2-etp1": _layout(2, tensor=2, expert=2, expert_tensor=1),
    "etp2": _layout(2, expert_tensor=2),
    "ep2": _layout(2, expert=2),
    "cp2": _layout(2, context=2),
    "cp2-ep2": _layout(2, context=2, expert=2),
    "pp2": _layout(2, pipeline=2),
    "pp2-vpp2": _layout(2, pipeline=2, virtual_pipeline=2),
    "tp2-dp2-distopt": _layout(4, tensor=2, distributed_optimizer=True),
    "pp3": _layout(3, pipeline=3),  # 4 layers: (1, 2, 1)
    "tp4": _layout(4, tensor=4),  # Qwen3-MoE has 2 key-value heads, each on two ranks
    "tp2-pp2": _layout(4, tensor=2, pipeline=2),
    "tp2-pp2-vpp2": _layout(4, tensor=2, pipeline=2, virtual_pipeline=2),
    "tp2-cp2": _layout(4, tensor=2, context=2),
    "tp2-ep2": _layout(4, tensor=2, expert=2),
    "tp2-dp2-ep2-etp1": _layout(4, tensor=2, expert=2, expert_tensor=1),
    "ep2-etp2": _layout(4, expert=2, expert_tensor=2),
    "ep4": _layout(4, expert=4),
    "ep2-dp2-distopt": _layout(4, expert=2, distributed_optimizer=True),
    "cp2-ep2-dp2": _layout(4, context=2, expert=2),
    "cp2-pp2": _layout(4, context=2, pipeline=2),
    "pp2-ep2": _layout(4, pipeline=2, expert=2),
    "pp2-vpp2-ep2": _layout(4, pipeline=2, virtual_pipeline=2, expert=2),
    "pp4": _layout(4, pipeline=4),
}
REPLAYS = ("none", "R2", "R3")
RECOMPUTES = ("none", "selective", "full")
PACKINGS = ("packed", "padded")
# An odd rank of the latents, so that splitting them over ranks would fail.
LATENT = {"q_lora_rank": 47, "kv_lora_rank": 41, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}
FAMILIES = {
    "qwen3_moe": lambda: tiny_models.qwen3_moe_config(rope_theta=1000.0),
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**LATENT, num_hidden_layers=4),
}
# These are in single cells (test_parity.py), not in every layout of the table.
MODELS = {
    **FAMILIES,
    "gpt_oss": tiny_models.gpt_oss_config,
    "qwen3_next": lambda: tiny_models.qwen3_next_config(full_attention_interval=2, mlp_only_layers=[0]),
    "qwen3_5": lambda: tiny_models.with_vision(
        "qwen3_5_moe_text",
        num_hidden_layers=3,
        full_attention_interval=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    family: str
    layout: str
    replay: str
    recompute: str = "none"
    packing: str = "packed"
    dtype: str = "float32"
    fault: str = ""
    """A replay that is broken on purpose (tests/parallel/broken_replay.py); empty for none."""
    layers: str = "local"
    """local, transformer_engine, or fused: the spec of the latter over modules like its own (fused_layers.py)."""
    trees: str = ""
    """Shape of a batch with shared prefixes (`support.TREES`); empty for sequences that share nothing."""
    shares: bool = True
    """Whether prefixes are computed once; False in the reference."""
    critic: str = ""
    """Trunk of the value model whose update is compared; empty for the update of the policy."""
    support: bool = False
    """Whether the tokens were sampled from parts of the vocabulary."""

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == "float32" else self.dtype
        layers = "" if self.layers == "local" else self.layers
        support = "support" if self.support else ""
        always = (self.family, self.layout, self.replay, self.recompute, self.packing)
        critic = self.critic and f"{self.critic} critic"
        return "/".join(part for part in (*always, dtype, layers, support, critic, self.trees, self.fault) if part)

    @property
    def reference(self) -> str:
        """Name of the file with the result of one rank, in float32."""
        parts = (self.family, self.replay, "support" * self.support, self.critic, self.trees)
        return "-".join(filter(None, parts)) + ".pt"

    @property
    def on_one_rank(self) -> "Cell":
        return replace(self, layout="single")

    def config(self) -> TrainerConfig:
        layout = LAYOUTS[self.layout]
        return TrainerConfig(
            ranks=layout.ranks,
            parallel=layout.parallel,
            distributed_optimizer=layout.distributed_optimizer,
            router_replay=self.replay,  # pyright: ignore[reportArgumentType]
            recompute=self.recompute,  # pyright: ignore[reportArgumentType]
            packing=self.packing == "packed",
            prefix_sharing="auto" if self.shares else "off",
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            layer_spec="transformer_engine" if self.layers == "transformer_engine" else "local",
            # Several micro-batches on every rank, of sequences of different lengths.
            micro_batch_tokens=64 if self.trees else 32,
            timeout_s=60,
            threads=numerics.THREADS,
        )


def all_cells() -> list[Cell]:
    """The whole table, layouts of equal size together."""
    return [
        Cell(family=family, layout=layout, replay=replay, recompute=recompute, packing=packing)
        for layout in LAYOUTS
        for family in FAMILIES
        for replay in REPLAYS
        for recompute in RECOMPUTES
        for packing in PACKINGS
    ]


def ranks_of(cell: Cell) -> int:
    """How many ranks a cell runs on."""
    return LAYOUTS[cell.layout].ranks
