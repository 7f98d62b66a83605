"""Text in, blocks of tokens out: tokenizers, corpora, packing, batches, evaluation sets."""

from cedd.data.batches import BatchSampler, Prefetcher, batches_in_order
from cedd.data.corpora import Corpus, FileCorpus, HubCorpus, Piece, TextCorpus, open_corpus
from cedd.data.detokenizers import DETOKENIZERS, Detokenizer
from cedd.data.evaluation_sets import (
    EVALUATION_SETS,
    EvaluationData,
    EvaluationSet,
    find_evaluation_set,
    load_evaluation_set,
    open_evaluation_set,
)
from cedd.data.packing import PackedDataset, PackingPolicy, open_packed, pack
from cedd.data.tokenizers import (
    MASK_CHARACTER,
    BPETokenizer,
    ByteTokenizer,
    CharAsGPT2,
    CharTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
    make_tokenizer,
)
from cedd.data.training_data import TrainingData, prepare_training_data

__all__ = [
    "DETOKENIZERS",
    "EVALUATION_SETS",
    "MASK_CHARACTER",
    "BPETokenizer",
    "BatchSampler",
    "ByteTokenizer",
    "CharAsGPT2",
    "CharTokenizer",
    "Corpus",
    "Detokenizer",
    "EvaluationData",
    "EvaluationSet",
    "FileCorpus",
    "GPT2Tokenizer",
    "HubCorpus",
    "PackedDataset",
    "PackingPolicy",
    "Piece",
    "Prefetcher",
    "TextCorpus",
    "Tokenizer",
    "TrainingData",
    "batches_in_order",
    "find_evaluation_set",
    "load_evaluation_set",
    "load_gpt2",
    "load_tokenizer",
    "make_tokenizer",
    "open_corpus",
    "open_evaluation_set",
    "open_packed",
    "pack",
    "prepare_training_data",
]
