"""Makes megatron-core 0.16 run without CUDA and without Transformer Engine.

The sources of megatron-core contain the names of CUDA devices, streams and random state. Patches at run time cannot
reach these. Therefore an import hook rewrites these names when a module is loaded (line numbers do not change), and
repairs the module before other modules import names from it. With CUDA nothing is rewritten; with Transformer Engine
the repairs for its absence do nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PACKAGE = "megatron.core"
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # devices
        (r"""device\s*=\s*(['"])cuda\1""", 'device="cpu"'),
        (r"""torch\.device\((['"])cuda\1\)""", 'torch.device("cpu")'),
        (r"""init_data\((['"])cuda\1\)""", 'init_data("cpu")'),
        (r"torch\.cuda\.current_device\(\)", "torch.get_default_device()"),
        (r"\.cuda\([^()]*(?:\(\))?\)", ".cpu()"),
        (r"pin_memory\s*=\s*True", "pin_memory=False"),
        # type names that the optimizers compare with
        (r"""(['"])torch\.cuda\.(Half|BFloat16|Float)Tensor\1""", r"'torch.\2Tensor'"),
        # streams and events
        (r"torch\.cuda\.(Event|stream|synchronize)\b", r"torch.cpu.\1"),
        (r"torch\.cuda\.Stream\b", "_megatron_cpu.Stream"),
        (r"torch\.cuda\.(current|default)_stream\b", "_megatron_cpu.Stream"),
        (r"torch\.cuda\.empty_cache\(\)", "None"),
        # random state
        (r"torch\.cuda\.random\.get_rng_state\(device=device\)", "torch.get_rng_state()"),
        (r"torch\.cuda\.get_rng_state\(\)", "torch.get_rng_state()"),
        (r"torch\.cuda\.manual_seed\(", "torch.manual_seed("),
    )
)


def install() -> None:
    """Install the import hook, once per process.

    Raises:
        RuntimeError: megatron-core is already imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError("megatron.core was imported before async_rl.trainer; import async_rl.trainer first")
    sys.meta_path.insert(0, _Finder())
    # megatron-core calls its own deprecated functions in every linear layer.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE) or ".fsdp" in fullname:
            return None
        import torch  # a process that only reads the configuration does without it

        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, rewrite=not torch.cuda.is_available())
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, *, rewrite: bool) -> None:
        super().__init__(fullname, path)
        self._rewrite = rewrite

    def get_code(self, fullname: str) -> CodeType | None:
        if not self._rewrite:
            return super().get_code(fullname)
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        rewritten = rewrite_source(source)
        if rewritten == source:
            return super().get_code(fullname)  # the cached bytecode is valid
        return compile(rewritten, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nearly every module warns about missing optional accelerators
            super().exec_module(module)
        for repair in (_REPAIRS if self._rewrite else _REPAIRS_WITHOUT_TE).get(module.__name__, ()):
            repair(module)


def rewrite_source(source: str) -> str:
    """Replace CUDA names in a source file; line numbers do not change.

    `x.cuda()` -> `x.cpu()`, `device="cuda"` -> `device="cpu"`.
    """
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    if "_megatron_cpu." in source:
        source = re.sub(r"(?m)^import torch$", f"import torch; import {__name__} as _megatron_cpu", source, count=1)
    return source


class Stream:
    """Replaces streams, and functions that return one: CPU calls run in order. `torch.cpu.Stream` has no events."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...

    def record_event(self) -> torch.cpu.Event:
        import torch

        return torch.cpu.Event()


# ---- repairs after a module was executed


def _use_cpu_random_state(module: Any) -> None:
    import torch

    module._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


def _convert_cpu_split_sizes(module: Any) -> None:
    """Convert CPU tensors to arrays, as all_to_all requires; the original converts CUDA tensors only."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _allow_uneven_splits(module: Any) -> None:
    """Pad to the largest part and cut the result, because gloo supports equal parts only.

    Parts of 3 and 1 rows are gathered as 3 + 3 rows and cut to 3 + 1.
    """
    import torch

    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
        out = part.new_zeros((rows, *part.shape[1:]))
        out[: len(part)] = part
        return out

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1 or len(set(output_split_sizes)) == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        parts = gather(padded(input_, max(output_split_sizes)), group).chunk(group.size())
        return torch.cat([p[:rows] for p, rows in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        rows = max(input_split_sizes)
        parts = torch.cat([padded(p, rows) for p in input_.split(list(input_split_sizes))])
        return reduce_scatter(parts, group)[: input_split_sizes[group.rank()]]

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_uneven, reduce_scatter_uneven


def _define_general_gemm(module: Any) -> None:
    """Define a name that the router uses but does not import without TE (moe_utils.py, router_gating_linear)."""
    if not module.HAVE_TE:
        module.te_general_gemm = None


def _order_no_te_before_any(module: Any) -> None:
    """Let is_te_min_version return False without TE; offloading of the optimizer calls it, and it fails on None."""
    if module.get_te_version() is None:
        module.is_te_min_version = lambda _version, check_equality=True: False


def _know_te_is_absent(module: Any) -> None:
    """Correct HAVE_TE: multi_latent_attention.py mistakes its own placeholder for TE."""
    if not importlib.util.find_spec("transformer_engine"):
        module.HAVE_TE = False


def _default_to_no_fp8(module: Any) -> None:
    """Change the default of `fp8` from False to None, because random.py tests `fp8 is not None`."""
    if not module.HAVE_TE:
        module.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


_Repair = Callable[[Any], None]
_REPAIRS_WITHOUT_TE: dict[str, tuple[_Repair, ...]] = {
    "megatron.core.utils": (_order_no_te_before_any,),
    "megatron.core.transformer.moe.moe_utils": (_define_general_gemm,),
    "megatron.core.transformer.multi_latent_attention": (_know_te_is_absent,),
    "megatron.core.tensor_parallel.random": (_default_to_no_fp8,),
}
_REPAIRS: dict[str, tuple[_Repair, ...]] = {
    **_REPAIRS_WITHOUT_TE,
    # torch.compile needs a C++ compiler and much time to start on a CPU.
    "megatron.core.jit": (lambda module: module.disable_jit_fuser(),),
    "megatron.core.tensor_parallel.mappings": (_allow_uneven_splits,),
    "megatron.core.transformer.moe.moe_utils": (_define_general_gemm, _convert_cpu_split_sizes),
    "megatron.core.tensor_parallel.random": (_use_cpu_random_state, _default_to_no_fp8),
}
