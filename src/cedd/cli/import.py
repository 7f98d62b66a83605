"""`cedd import`: a network that others have published, as a model folder."""

from __future__ import annotations

import json

from cedd.cli import UserError
from cedd.cli.arguments import Import
from cedd.tasks import import_model


def run(arguments: Import) -> int:
    """Write the folder, complete or not at all, and say what is in it."""
    out = arguments.out.expanduser()
    if out.exists():
        raise UserError(f"{out} is there already; name a new folder")
    if not out.resolve().parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} to")
    revision = {} if arguments.revision is None else {"revision": arguments.revision}
    model = import_model(arguments.name, arguments.tokenizer, device=arguments.device, **revision)
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
    print(json.dumps(facts) if arguments.json else said)
    return 0
