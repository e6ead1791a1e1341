"""The Megatron trainer. Importing it prepares megatron-core for machines without CUDA or Transformer Engine."""

from async_rl.compat import megatron

megatron.install()
