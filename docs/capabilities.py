"""Writes docs/capabilities.md from the tests: `python docs/capabilities.py` from the root of the repository.

Features of the engines are counted from the collected tests of tests/conformance. Families and layouts are those of the
parametrisations of tests/e2e and tests/parallel; refusals are read from the configs of the engines.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEAD = """\
# Capabilities

Written by `docs/capabilities.py` from the tests. "Refused" means before any process starts, with the way out. All tests
of engines run on the CPU. On GPUs, the trainer alone was tried (`tests/gpu`,
[one GPU](benchmarks.md#one-gpu-in-bfloat16)); whole runs, and engines on GPUs, were not run.

"""
ENGINES = ("vllm", "sglang")
TRAINER_FILES = {  # feature -> file
    "logprobs, gradients and routing of each family": "tests/e2e/test_trainer_families.py",
    "every loss and advantage": "tests/e2e/test_trainer_objectives.py",
    "several optimizer steps per batch": "tests/e2e/test_trainer_mini_batches.py",
    "router replay": "tests/e2e/test_trainer_replay.py",
    "shared prefixes": "tests/e2e/test_shared_prefixes.py",
    "old logprobs at every staleness": "tests/e2e/test_old_policy.py",
    "critic and GAE": "tests/e2e/test_critic.py",
    "distillation from teachers": "tests/e2e/test_trainer_distillation.py",
    "LoRA": "tests/e2e/test_trainer_lora.py",
    "top-p, top-k and min-p": "tests/e2e/test_trainer_support.py",
    "checkpoints": "tests/e2e/test_trainer_checkpoint.py",
    "restart in another layout": "tests/parallel/test_resharding.py",
    "Adam on the CPU": "tests/e2e/test_optimizer_offload.py",
    "Transformer Engine's spec, over stand-ins": "tests/e2e/test_trainer_layer_spec.py",
}


def page() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    items = collected(["tests/conformance", *TRAINER_FILES.values()])
    return HEAD + "\n".join([*_features(items), *_trainer(items), *_families(), *_layouts(), *_parity()])


def collected(paths: Sequence[str]) -> list[Any]:
    """Tests of files and folders, without running them."""
    import pytest

    class Collector:
        def __init__(self) -> None:
            self.items: list[Any] = []

        def pytest_collection_finish(self, session: Any) -> None:
            self.items = list(session.items)

    collector, said = Collector(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q", *(str(ROOT / path) for path in paths)], plugins=[collector])
    if code != 0:
        raise RuntimeError(said.getvalue())
    return collector.items


def _features(items: Sequence[Any]) -> Iterator[str]:
    yield "## Engines\n\n| tests/conformance | vLLM | SGLang |\n|---|---|---|"
    counts: dict[Any, Counter[str]] = {}
    for item in items:
        if "conformance" in item.path.parts:
            counts.setdefault(item.module, Counter()).update(_engines(item))
    for module, number in sorted(counts.items(), key=lambda pair: pair[0].__name__):
        if number:
            title = (inspect.getdoc(module) or "").partition("\n\n")[0].split(": ")[0].replace("\n", " ").rstrip(".")
            name = module.__name__.rpartition(".")[2]
            cells = " | ".join("tested" if number[engine] else "not run" for engine in ENGINES)
            yield f"| {title} (`{name}`) | {cells} |"
    yield ""


def _engines(item: Any) -> set[str]:
    """Engines that a test starts."""
    values = {str(value).partition("-")[0] for value in getattr(getattr(item, "callspec", None), "params", {}).values()}
    named = {engine for engine in ENGINES if engine in values}
    if not values & {"fake", *ENGINES}:
        fixtures = {"engine": "vllm", "sglang_server": "sglang"}
        named |= {engine for fixture, engine in fixtures.items() if fixture in item.fixturenames}
    return named


def _trainer(items: Sequence[Any]) -> Iterator[str]:
    yield "## Trainer\n\n| feature | tested by |\n|---|---|"
    files = {item.path for item in items}
    yield from (f"| {feature} | `{file}` |" for feature, file in TRAINER_FILES.items() if ROOT / file in files)
    yield ""


def _families() -> Iterator[str]:
    from async_rl.inference.sglang.config import CPU_BROKEN, CPU_FAMILIES
    from async_rl.trainer.model.families import FAMILIES
    from tests.e2e import test_engine_families

    tested = {*test_engine_families.FAMILIES, *(f"vllm-{family}" for family in test_engine_families.DENSE)}
    # The first two: tests/conformance; llama: test_a_dense_model_of_sglang_is_updated.
    tested |= {"vllm-qwen3_moe", "sglang-qwen3_moe", "sglang-llama"}
    yield "## Families\n\n| `model_type` | trainer | vLLM | SGLang |\n|---|---|---|---|"
    for family in FAMILIES:
        on_vllm, on_sglang = ("tested" if f"{engine}-{family}" in tested else "accepted, not run" for engine in ENGINES)
        if family not in CPU_FAMILIES:
            on_sglang = f"refused on the CPU: {CPU_BROKEN.get(family, 'not tested there')}"
        yield f"| {family} | tested | {on_vllm} | {on_sglang} |"
    yield ""


def _layouts() -> Iterator[str]:
    from tests.conformance.test_scenarios_publishes import SERVERS
    from tests.e2e.test_engine_families import LAYOUTS

    tested = {*LAYOUTS, *SERVERS} - set(ENGINES)
    yield "## Layouts of a replica\n\n| layout | vLLM | SGLang |\n|---|---|---|"
    yield "| one rank | tested | tested |"
    for kind in sorted({name.partition("-")[2] for name in tested}):
        cells = ("tested" if f"{engine}-{kind}" in tested else "not run" for engine in ENGINES)
        yield f"| {kind} | {' | '.join(cells)} |"
    yield "| tp2-dp2, on the CPU | refused: vLLM cannot gather the expert ids of a group | not run |"
    yield "| tp2 over two nodes (`tests/e2e/test_nodes.py`) | tested | tested |\n"


def _parity() -> Iterator[str]:
    from tests.parallel.parity_cells import FAMILIES, LAYOUTS, all_cells

    cells = Counter(cell.layout for cell in all_cells())
    yield "## Layouts of the trainer\n"
    yield f"`make parity` compares each with one rank, for {' and '.join(FAMILIES)}, with `trainer.router_replay` of"
    yield "none, R2 and R3, every recomputation, packed and padded ([results](parity.md)).\n"
    yield "| ranks | layouts |\n|---|---|"
    for ranks in sorted({layout.ranks for layout in LAYOUTS.values()}):
        names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks and cells[name]]
        yield f"| {ranks} | {', '.join(names)} |"
    yield "\ndp is data, tp tensor, ep expert, etp expert_tensor, cp context, pp pipeline, vpp virtual_pipeline,"
    yield "distopt the distributed optimizer."


def main() -> int:
    """Write the page."""
    (ROOT / "docs" / "capabilities.md").write_text(page().rstrip("\n") + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
