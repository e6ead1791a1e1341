"""The Megatron trainer. Importing it prepares megatron-core for machines without CUDA or Transformer Engine."""

from async_rl.train import megatron_cpu

megatron_cpu.install()
