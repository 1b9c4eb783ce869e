"""Makes a tokenizer and text without a download: what TorchTitan would take from Hugging Face's hub.

The tokenizer is trained here, by byte-pair encoding. The text is Python's own documentation, in the files, the columns
and the configurations of C4, so that TorchTitan reads it as it reads `allenai/c4`.
"""

import gzip
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
"""That of TorchTitan's debug models."""
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SHARDS, VALIDATION_EVERY = 2, 8
CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
"""


def make(folder: Path) -> None:
    """Make both in a folder that does not exist yet; of several processes that try, one succeeds."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        documents = [topics[name] for name in sorted(topics)]
        _train_tokenizer(documents, made / "tokenizer")
        _write_c4(documents, made / "c4")
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.exists():
                raise


def _train_tokenizer(documents: list[str], folder: Path) -> None:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_c4(documents: list[str], folder: Path) -> None:
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    validation = documents[::VALIDATION_EVERY]
    training = [each for number, each in enumerate(documents) if number % VALIDATION_EVERY]
    for shard in range(SHARDS):
        _write_shard(folder / "en" / f"c4-train.{shard:05}-of-{SHARDS:05}.json.gz", training[shard::SHARDS])
    _write_shard(folder / "en" / "c4-validation.00000-of-00001.json.gz", validation)


def _write_shard(path: Path, documents: list[str]) -> None:
    origin = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://docs.python.org/3/"}
    rows = [{"text": text, **origin} for text in documents]
    # Without the time of writing, so that every node has the same bytes.
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
