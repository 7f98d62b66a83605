"""`cedd train`: train any method on any process."""

from __future__ import annotations

import json
import os

from cedd.cli import UserError
from cedd.cli.arguments import Train
from cedd.cli.console import PlainConsole
from cedd.methods import get_method
from cedd.storage import finite


def run(arguments: Train) -> int:
    """Train, with messages on standard error; the first rank prints the result as JSON if asked."""
    config = arguments.config
    if str(config.out).startswith("("):
        raise UserError("name the run's folder: --out FOLDER")
    get_method(config.method)
    from cedd.tasks.train import train
    from cedd.training.distributed import FirstRankFailed
    from cedd.training.loop import switch_threads_often

    switch_threads_often()
    try:
        result = train(config, console=PlainConsole(stderr=True)).training_result
    except FirstRankFailed:  # which has said why, once
        return 1
    assert result is not None
    if arguments.json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"out": str(config.out), **finite(vars(result))}))
    return result.exit_code
