"""Support for machines without a GPU: the parts of megatron-core, vLLM and SGLang that need one otherwise.

`garbage` keeps Python's garbage collections short, on all machines.
"""

FORCED_EXPERTS = "async_rl_forced_experts"  # key of the forced rows in vLLM's SamplingParams.extra_args
