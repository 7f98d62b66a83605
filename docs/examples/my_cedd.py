"""The command line with parts of your own: `python my_cedd.py train tiny --process shuffle-first ...`."""

# region register
from dataclasses import replace

import torch
from add_dynamics import stops_early
from add_method import mine
from add_tokenizer import Words

import cedd
from cedd.cli import main
from cedd.data.tokenizers import TOKENIZER_KINDS
from cedd.process import PROCESSES


def shuffle_first(vocab_size: int, until: float = 0.5, schedule: cedd.Schedule | None = None) -> cedd.TokenProcess:
    """Tokens are shuffled until about this time, then masked."""
    made = cedd.eroulette(vocab_size, schedule=schedule, mask_share=lambda t: torch.sigmoid(20 * (t - until)))
    # Saved with a model: the name and the arguments that rebuild the process.
    return replace(made, spec={"name": "shuffle-first", "until": until})


PROCESSES["shuffle-first"] = shuffle_first
cedd.METHODS.update({method.name: method for method in (mine, stops_early)})
TOKENIZER_KINDS[Words.kind] = Words

if __name__ == "__main__":
    raise SystemExit(main())
# endregion
