"""`python -m recipes.first_model.convert SOURCE FOLDER`: a GGUF file becomes a Hugging Face checkpoint folder.

transformers reads the file with the packages `gguf` and `accelerate`. The weights are dequantized and stored in
float32, so that they are exactly those of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_accelerate_available, is_gguf_available
from transformers.utils.quantization_config import GgufConfig

from async_rl.files.atomic_dir import make_folder, partial_folder, publish_folder, recover_folder

SPLIT_DIGITS = ("smollm",)
"""Values of `tokenizer.ggml.pre` whose tokenizers take each digit apart; transformers reads no value of this field."""


def convert(file: Path, folder: Path) -> None:
    """Write config, float32 weights, tokenizer with chat template and generation config of a GGUF file into `folder`.

    Raises:
        ValueError: a package is missing, or the file cannot be read, or it has no chat template.
    """
    lacking = {"gguf": is_gguf_available(), "accelerate": is_accelerate_available()}
    if names := [name for name, available in lacking.items() if not available]:
        raise ValueError(f"{' and '.join(names)} cannot be imported; pip install {' '.join(names)}")
    source: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        plain: Any = GgufConfig(dequantize=True)
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=plain)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as GGUF ({error!r}); copy it again") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{file} has no chat template; take the file of an instruct model")
    if _pre_tokenizer(file) in SPLIT_DIGITS:
        rules: Any = [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    make_folder(folder.parent)
    recover_folder(folder)
    for part in (model, tokenizer):
        part.save_pretrained(partial_folder(folder))
    publish_folder(folder)


def gguf_file(source: Path) -> Path:
    """The file itself, or the only GGUF file of a folder.

    Raises:
        ValueError: there is none, or the folder has several.
    """
    if source.is_file():
        return source
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"{source} has {len(found)} GGUF files; give the path of one")
    return found[0]


def _pre_tokenizer(file: Path) -> str:
    """Name of the rules that split text before it is encoded."""
    gguf: Any = import_module("gguf")
    field = gguf.GGUFReader(str(file)).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.first_model.convert", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="GGUF file, or a folder with one")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder to write")
    arguments = parser.parse_args(argv)
    try:
        convert(gguf_file(arguments.source), arguments.folder)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{arguments.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
