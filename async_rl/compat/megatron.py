"""Makes megatron-core 0.16 run without CUDA and without Transformer Engine.

The sources of megatron-core contain the names of CUDA devices, streams and random state. Patches at run time cannot
reach these. Therefore an import hook rewrites these names when a module is loaded (line numbers do not change), and
repairs the module before other modules import names from it. With CUDA nothing is rewritten; with Transformer Engine
the repairs for its absence do nothing.
"""

from __future__ import annotations

import contextlib
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
        # streams, events, profiler ranges
        (r"torch\.cuda\.(Stream|Event|current_stream|default_stream|stream|synchronize|nvtx)\b", r"_megatron_cpu.\1"),
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


# ---- replacements of torch.cuda for the rewritten sources


class Event:
    """Replaces torch.cuda.Event: CPU calls are complete when they return."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def record(self, *_args: object) -> None: ...
    def wait(self, *_args: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Stream:
    """Replaces torch.cuda.Stream: CPU calls run in order."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...


_STREAM = Stream()


def current_stream(*_args: object) -> Stream:
    """Replaces torch.cuda.current_stream."""
    return _STREAM


default_stream = current_stream


def stream(_stream: object) -> contextlib.AbstractContextManager[None]:
    """Replaces torch.cuda.stream."""
    return contextlib.nullcontext()


def synchronize(*_args: object) -> None:
    """Replaces torch.cuda.synchronize."""


class nvtx:
    """Replaces torch.cuda.nvtx."""

    @staticmethod
    def range_push(*_args: object) -> None: ...
    @staticmethod
    def range_pop(*_args: object) -> None: ...
    @staticmethod
    def range(*_args: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


# ---- repairs after a module was executed


def _use_cpu_random_state(module: Any) -> None:
    import torch

    def set_state(state: torch.Tensor, _device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    module._set_cuda_rng_state = set_state


def _keep_eager(module: Any) -> None:
    """Disable jit_fuser (torch.compile): it needs a C++ compiler and much time to start on a CPU."""
    module.disable_jit_fuser()


def _convert_cpu_split_sizes(module: Any) -> None:
    """Convert CPU tensors to arrays, as all_to_all requires; the original converts CUDA tensors only."""

    import torch

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

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

        def is_te_min_version(version: str, check_equality: bool = True) -> bool:
            return False

        module.is_te_min_version = is_te_min_version


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
    "megatron.core.jit": (_keep_eager,),
    "megatron.core.tensor_parallel.mappings": (_allow_uneven_splits,),
    "megatron.core.transformer.moe.moe_utils": (_define_general_gemm, _convert_cpu_split_sizes),
    "megatron.core.tensor_parallel.random": (_use_cpu_random_state, _default_to_no_fp8),
}
