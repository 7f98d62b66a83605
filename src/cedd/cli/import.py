"""`cedd import`: convert a published network to a model folder."""

from __future__ import annotations

import json
import os
from typing import Any

from cedd.cli import UserError
from cedd.cli.arguments import Import
from cedd.names import printable
from cedd.tasks import import_model


def run(arguments: Import) -> int:
    """Write the folder, complete or not at all, and print a summary."""
    out = arguments.out.expanduser()
    if out.exists():
        raise UserError(f"{out} already exists; choose another folder with --out")
    above = next(folder for folder in out.resolve().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"cannot create {out}: {above} is not a folder that can be written")
    revision: dict[str, Any] = {} if arguments.revision is None else {"revision": arguments.revision}
    model = import_model(
        arguments.name, arguments.tokenizer, device=arguments.device, mask_id=arguments.mask_id, **revision
    )
    model.reader(model.length)  # refuses a network whose mask is not known
    model.save_pretrained(out, weights=arguments.weights, extra={"title": out.name})
    origin = model.folder.config["imported"]
    facts = {
        "out": str(out),
        **origin,
        "method": model.method.name,
        "process": model.process.config()["name"],
        "tokenizer": model.tokenizer.name,
        "vocab_size": model.process.vocab_size,
        "length": model.length,
        "parameters": model.model.num_parameters(),
    }
    said = (
        f"{out}: {origin['family']}, {model.name}, {facts['parameters'] / 1e6:.1f} M parameters, "
        f"{facts['vocab_size']:,} tokens ({facts['tokenizer']}), reads {model.length} at once"
    )
    print(json.dumps(facts) if arguments.json else printable(said))
    return 0
