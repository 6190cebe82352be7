"""SentencePiece models in the formats of checkpoint families."""

from typing import Any

# Pieces in the order of each family's SentencePiece file.
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "XLMRobertaTokenizer": {},
    "CamembertTokenizer": {},
    "AlbertTokenizer": {
        "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]",
    },
    "DebertaV2Tokenizer": {
        "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
        "eos_piece": "[SEP]", "unk_piece": "[UNK]",
    },
    "T5Tokenizer": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}  # fmt: skip
