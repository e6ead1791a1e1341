"""Interface of an inference engine, as agent loops use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

from annotated_types import Ge, Gt, Le, Lt

from agent_loop.bounds import bounded
from message_queue.tokens import Int32Array, RoutedExperts, TokenOutput

MIN_TEMPERATURE = 0.01  # vLLM raises lower ones to it


@bounded("sampling")
class SamplingConfig:
    """Sampling settings. Every engine applies them in this order:

        temperature   logits / temperature; 0 is greedy, and the steps below do not apply
        min_p         keeps tokens with at least min_p times the probability of the most likely token
        top_k         keeps the top_k most likely remaining tokens, and tokens as likely as the last one
        top_p         keeps the fewest most likely remaining tokens with at least top_p of their mass; the engine
                      chooses the order of equally likely tokens

    With probabilities 0.5, 0.2, 0.15, 0.1, 0.05 and top_k=3, top_p=0.8 the first two are kept: 0.7 of 0.85. The kept
    tokens are renormalised. A token is sampled from that distribution, which also gives its logprob. If a step can
    leave tokens out, the engine returns the kept ones (`TokenOutput.support`), and training uses the same distribution.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy, else at least `MIN_TEMPERATURE`."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Probability mass to keep, in (0, 1]; 1 is off."""
    top_k: int = -1
    """Tokens to keep; -1 is off."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Least probability to keep, relative to the most likely token, in [0, 1); 0 is off."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is {self.temperature}; must be 0 (greedy) or >= {MIN_TEMPERATURE}, the lowest "
                "that every engine applies unchanged"
            )
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"sampling.top_k is {self.top_k}; must be -1 (off) or >= 1")

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary. Greedy tokens have the whole distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One decode."""

    request_id: str
    """Unique while in flight."""
    token_ids: Int32Array
    """int32 [n], everything so far: prompt, earlier turns and, on a resume, the tokens already sampled."""
    max_new_tokens: int
    """Remaining tokens of the budget."""
    existing_rows: int = 0
    """Routing rows the caller already holds; the engine returns rows from this position on."""
    forced_experts: RoutedExperts | None = None
    """Rows from position 0 on. When the engine forwards such a position, it uses the given experts. None
    lets the engine choose. A request with forced experts shares no prefix cache with any other session, even if their
    salts are equal."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling such a token ends the decode; the token is part of the output."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling settings."""
    session: str = ""
    """Shared by the requests of one trajectory, so that a router can keep them on one replica."""
    cache_salt: str = ""
    """Requests with different salts share no prefix cache."""


class Engine(Protocol):
    """Decodes tokens. Implementations: vLLM and SGLang replicas, a router over replicas, and the fake of the tests."""

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """Decode until a stop token, the budget, or an abort.

        Returns the segments in order, at least one: one per weight version that sampled, so more than one only if new
        weights arrived in flight. All but the last end with `StopReason.ABORT` and hold tokens. An abort of the
        request is a normal result too: the last segment ends with ABORT, with all tokens, logprobs and rows so far
        (possibly none). While the engine is paused the call waits.

        Raises:
            AnswerError: the engine's answer was refused.
            ReplicaLostError: the engine is dead.
            EngineError: the engine refused the request, or cannot serve for another reason.
        """
        ...
