"""Generate with a tiny model while the n-th file operation of its bank fails.

`python -m tests.fault.generating FOLDER STEP`, started under `shim.c`, prints as JSON what each generation came to. No
process is forked: MLX does not bear it.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from prefixbank.blas import load_blas

load_blas()  # before anything imports mlx

from mlx_lm import generate  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402

from prefixbank.bank import PrefixBank  # noqa: E402
from prefixbank.errors import BankWarning, PrefixBankError  # noqa: E402
from tests.fault.faults import FAULTS  # noqa: E402
from tests.fault.trap import Shim, Trap  # noqa: E402
from tests.model.tiny import FROM_DISK, build_model, build_tokenizer, random_ids  # noqa: E402


def main(folder: Path, step: int) -> None:
    """Fail every `step`-th operation of a hit and of a miss that is stored, in each way, until there are no more."""
    warnings.simplefilter("ignore", BankWarning)
    model, tokenizer = build_model(), TokenizerWrapper(build_tokenizer())
    prompt = random_ids(60)
    prompts = {"hit": prompt, "miss": random_ids(60, seed=2)}
    cold = {name: generate(model, tokenizer, ids, max_tokens=3) for name, ids in prompts.items()}
    template, root = folder / "template", folder / "bank"
    with PrefixBank.open(template, chunk_tokens=16, durability="fast") as bank:
        bank.attach(model, tokenizer).warm(prompt)
    shim = Shim()
    shim.watch(root)
    for fault_name, fault in FAULTS.items():
        for name, token_ids in prompts.items():
            nth = n_seen = 1
            while nth <= n_seen:
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(template, root)
                with PrefixBank.open(root, **FROM_DISK) as bank:
                    llm = bank.attach(model, tokenizer)
                    llm.match(token_ids)
                    shim.arm(Trap(fault.mode, nth, fault.kinds, fault.errno, fault.stays))
                    text = llm.generate(token_ids, max_tokens=3).text
                    with suppress(PrefixBankError):
                        bank.flush()
                    n_seen, hit = shim.n_seen, shim.hit
                    shim.watch(root)
                    n_kept = len(bank.chunks())
                    again = llm.generate(token_ids, max_tokens=3).text
                print(
                    json.dumps(
                        {
                            "at": [fault_name, name, nth, hit],
                            "hit": bool(hit),
                            "right": text == again == cold[name],
                            "n_kept": n_kept,
                        }
                    ),
                    flush=True,
                )
                nth += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
