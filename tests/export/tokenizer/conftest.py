"""Fixtures of the tokenizer tests."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from sentencepiece_families import SENTENCEPIECE
from small_bundles import TOKENIZERS
from small_files import write


@pytest.fixture(scope="module")
def train() -> ModuleType:
    """The script that trained the committed tokenizers."""
    spec = importlib.util.spec_from_file_location("train", TOKENIZERS / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sentencepiece_source(train: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint's directory with a model of a family, trained with SentencePiece's own normalization."""

    @cache
    def make(name: str) -> Path:
        directory: Path = tmp_path_factory.mktemp(name) / "source"
        directory.mkdir()
        [file] = {*getattr(transformers, name).vocab_files_names.values()} - {"tokenizer.json"}
        train.train_sentencepiece(directory / Path(file).stem, **SENTENCEPIECE[name])
        write(directory / "config.json", {"model_type": "attnlens"})
        write(directory / "tokenizer_config.json", {"tokenizer_class": name})
        if name == "DebertaV2Tokenizer":
            write(directory / "added_tokens.json", {"[MASK]": 298})
        return directory

    return make
