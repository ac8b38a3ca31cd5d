"""Own the options that say which model, and loading it; used by the verbs that need one."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prefixbank.bank import PrefixBank
    from prefixbank.model import BankedModel

__all__ = [
    "AdapterOption",
    "KVBitsOption",
    "KVGroupSizeOption",
    "ModelOption",
    "PrecisionOption",
    "PrefillStepSizeOption",
    "SaltOption",
    "load_model",
]

ModelOption = Annotated[
    str, typer.Option("--model", metavar="PATH_OR_ID", help="The model: a folder, or a Hugging Face hub id.")
]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", metavar="PATH", help="The folder of a LoRA adapter for the model.")
]
SaltOption = Annotated[
    str, typer.Option("--salt", metavar="TEXT", help="Keep apart from what is stored with another salt.")
]
KVBitsOption = Annotated[
    int | None, typer.Option("--kv-bits", metavar="N", help="Quantise the KV cache to this many bits.")
]
KVGroupSizeOption = Annotated[
    int | None, typer.Option("--kv-group-size", metavar="N", help="How many values share a scale with --kv-bits (64).")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="auto|model|float32",
        help="The weights as they are (model), as float32, or what runs well here (auto).",
    ),
]
PrefillStepSizeOption = Annotated[
    int | None, typer.Option("--prefill-step-size", metavar="N", help="How many tokens a step computes (2048).")
]


def load_model(
    bank: PrefixBank,
    model: str,
    *,
    adapter: str | None,
    salt: str,
    kv_bits: int | None,
    kv_group_size: int | None,
    precision: str,
    prefill_step_size: int | None = None,
) -> BankedModel:
    """Load the model of a command line and attach it to the bank; what others print goes to stderr. Imports MLX."""
    from prefixbank.blas import load_blas

    load_blas()  # before mlx
    given = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "prefill_step_size": prefill_step_size}
    options = {option: value for option, value in given.items() if value is not None}
    with redirect_stdout(sys.stderr):
        return bank.load_model(model, adapter_path=adapter, salt=salt, precision=precision, **options)
