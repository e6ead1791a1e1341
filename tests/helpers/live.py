"""What an engine's loads prove."""

from async_rl.weights.live import LiveWeights, _open


def without_equation(held: LiveWeights) -> list[str]:
    """Names of the parameters whose values are not those of published tensors."""
    return sorted({name for name, _ in _open(held._loads[-1][1], held._forms)})
