"""The Megatron trainer. Importing any part of it first prepares megatron-core for machines without CUDA or TE."""

from async_rl.train import megatron_cpu

megatron_cpu.install()
