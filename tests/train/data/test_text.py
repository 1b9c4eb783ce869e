from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from holdfast.errors import HoldfastError
from holdfast.train import Data, Text
from holdfast.train.data import text_files
from holdfast.train.data.prefetcher import Prefetcher
from holdfast.train.data.sharding import ShardPlan
from holdfast.train.data.token_cache import load_or_build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "holdfast" / "text"


def windows(tokens: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in tokens]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty windows of four bytes, each different, in two files."""
    (tmp_path / "text" / "a").mkdir(parents=True)
    (tmp_path / "text" / "a" / "first.txt").write_bytes(b"".join(b"%03d." % n for n in range(10))[:-2])
    (tmp_path / "text" / "second.txt").write_bytes(b"".join(b"%03d." % n for n in range(10, 20)))
    return tmp_path / "text"


def test_documentation_is_english_bytes_of_the_shape_asked_for():
    tokens = Text(length=65).tokens(range(4))
    assert tokens.shape == (4, 65)
    assert tokens.dtype == torch.int64
    assert b" the " in b"".join(windows(Text(length=65).tokens(range(64))))


def test_sample_is_the_same_in_another_process_life():
    samples = range(2800, 2804)
    assert torch.equal(Text(length=65).tokens(samples), Text(length=65).tokens(samples))
    assert not torch.equal(Text(length=65).tokens(samples), Text(length=65, seed=1).tokens(samples))


def test_epoch_sees_every_window_once(folder: Path):
    text = Text([folder], length=4)
    seen = [window for first in range(0, 20, 2) for window in windows(text.tokens(range(first, first + 2)))]
    assert len(seen) == len(set(seen)) == 20
    assert sorted(windows(text.tokens(range(20, 40)))) == sorted(seen) != seen


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json"])
def test_empty_file_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(HoldfastError) as refused:
        Text([tmp_path / name], length=4)
    (finding,) = refused.value.findings
    assert (finding.code, finding.what) == ("text-too-short", "the text has 0 tokens, fewer than one sample")


PLAN = ShardPlan(global_batch=1, micro_batch_size=1, rank=0, world_size=1)
FIRST, SECOND = PLAN.step(0)[0], PLAN.step(1)[0]


def test_file_that_changed_and_another_tokenizer_are_told_apart_at_a_resume(tmp_path: Path):
    file, tokenizer = tmp_path / "x.txt", words(tmp_path / "tokenizer")
    file.write_text("one two three one two three")
    begun = Prefetcher(lambda finding: None)
    begun.load(FIRST, Data(Text([file], length=2), batch_size=1), PLAN, 0)

    def resume(**given: Any) -> tuple[str, str]:
        supply = Prefetcher(lambda finding: None)
        supply.load_state_dict(begun.state_dict())
        with pytest.raises(HoldfastError) as refused:
            supply.load(SECOND, Data(Text([file], length=2, **given), batch_size=1), PLAN, 1)
        (finding,) = refused.value.findings
        assert (finding.code, "Data(..., start_sample=1)" in finding.remedy) == ("data-changed", True)
        was, now = finding.evidence[0].split(", is ")
        return was, now

    was, now = resume(tokenizer=tokenizer)
    assert "tokens of bytes" in was
    assert f"tokens of {type(tokenizer).__name__}" in now
    file.write_text("one two three one two three four")
    was, now = resume()
    assert "tokens of bytes" in now
    assert was.split(",")[0].split()[-1] != now.split(",")[0].split()[-1]


def test_text_shorter_than_a_sample_is_refused(folder: Path):
    with pytest.raises(HoldfastError) as refused:
        Text([folder / "second.txt"], length=41)
    assert refused.value.findings[0].code == "text-too-short"


def everything(text: Text) -> bytes:
    return b"".join(windows(torch.stack([text[item] for item in range(len(text))])))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "x.txt": lambda path, rows: path.write_text("\n\n".join(row["text"] for row in rows)),
    "x.txt.gz": lambda path, rows: path.write_bytes(gzip.compress("\n\n".join(row["text"] for row in rows).encode())),
    "x.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "c4-train.00000-of-00001.json.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "x.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "x.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "x.jsonl.zst": lambda path, rows: path.write_bytes(b"".join(zstandard.compress(lines([row])) for row in rows)),
    "x.parquet": parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_the_same_in_files_of_all_kinds(tmp_path: Path, name: str):
    rows = [{"number": number, "text": f"document {number} ø"} for number in range(5)]
    WRITERS[name](tmp_path / name, rows)
    assert everything(Text([tmp_path / name], length=1)).decode() == "\n\n".join(row["text"] for row in rows)


def test_large_file_is_read_in_pieces_and_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.train.data.text_files.CHUNK_BYTES", 7)
    told = "".join(f"line {number}\n" for number in range(20))
    (tmp_path / "x").write_text(told)
    assert everything(Text([tmp_path / "x"], length=1)).decode() == told


def words(tokenizer_folder: Path) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({"<end>": 0, "?": 1, "one": 2, "two": 3, "three": 300_000}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="?")
    tokenizer.save_pretrained(tokenizer_folder)
    return tokenizer


def test_tokens_of_a_tokenizer_or_of_one_by_its_name_are_its_own_with_an_end_between_documents(tmp_path: Path):
    tokenizer = words(tmp_path / "tokenizer")
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "one two"}, {"text": "three four"}]))
    for given in (tokenizer, str(tmp_path / "tokenizer")):
        text = Text([tmp_path / "x.jsonl"], length=5, tokenizer=given)
        assert text[0].tolist() == [2, 3, 0, 300_000, 1]


def test_tokens_are_kept_and_made_again_when_a_file_or_the_tokenizer_changed_or_the_cache_was_cut(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    read = text_files._text
    monkeypatch.setattr(text_files, "_text", lambda path, column: asked.append(path) or read(path, column))
    file = tmp_path / "x.txt"
    file.write_text("one two three")
    first = Text([file], length=2)
    assert (Text([file], length=3).fingerprint != first.fingerprint, len(asked)) == (True, 1)
    Text([file], length=2, tokenizer=words(tmp_path / "tokenizer"))
    assert len(asked) == 2
    for kept in cache.glob("*.tokens"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert (Text([file], length=2).fingerprint, len(asked)) == (first.fingerprint, 3)
    file.write_text("one two three four")
    assert (Text([file], length=2).fingerprint != first.fingerprint, len(asked)) == (True, 4)


def zeroed(file: Path) -> None:
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(8) + content[middle + 8 :])


def a_bit_flipped_in_the_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [zeroed, a_bit_flipped_in_the_last_byte, a_fifo])
@pytest.mark.parametrize("suffix", ["tokens", "json"])
@pytest.mark.timeout(60)
def test_damaged_cache_is_made_anew_with_a_finding_before_anything_is_trained_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys, damage: Callable[[Path], None], suffix: str
):
    monkeypatch.setattr("holdfast.train.data.token_cache.BLOCK_BYTES", 100)
    told = "".join(f"line {number}\n" for number in range(200))
    (tmp_path / "x.txt").write_text(told)
    whole = Text([tmp_path / "x.txt"], length=1)
    assert whole.findings == ()
    (file,) = cache.glob(f"*.{suffix}")
    damage(file)

    noted: list[str] = []
    text = Text([tmp_path / "x.txt"], length=1)
    assert everything(text).decode() == told
    assert text.fingerprint == whole.fingerprint
    Prefetcher(lambda finding: noted.append(finding.code)).load(FIRST, Data(text, batch_size=1), PLAN, 0)
    assert noted == ["data-cache-corrupt"]
    assert file.name in capsys.readouterr().err
    assert Text([tmp_path / "x.txt"], length=1).findings == ()


def test_every_block_of_tokens_has_a_checksum_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.train.data.token_cache.BLOCK_BYTES", 64)

    def parts() -> Iterator[Any]:
        bounds = ((0, 0), (0, 5), (5, 100), (100, 101))
        return (np.arange(*each, dtype=np.uint32) for each in bounds)

    for _ in range(2):
        tokens, _, noticed = load_or_build(tmp_path, "key", np.uint32, parts())
        assert (tokens.tolist(), noticed) == ([*range(101)], ())
    (file,) = tmp_path.glob("*.tokens")
    for place in (*range(0, 404, 9), 403):
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
        tokens, _, noticed = load_or_build(tmp_path, "key", np.uint32, parts())
        assert tokens.tolist() == [*range(101)]
        assert f"byte {place // 64 * 64:,} has" in noticed[0].evidence[0]


def test_ranks_that_come_together_make_the_tokens_once(tmp_path: Path):
    began = threading.Barrier(3)
    made: list[int] = []

    def parts() -> Iterator[Any]:
        made.append(1)
        yield np.arange(100, dtype=np.uint8)

    def rank(_: int) -> tuple[int, str]:
        began.wait(60)
        tokens, digest, _ = load_or_build(tmp_path, "key", np.uint8, parts())
        return len(tokens), digest

    with ThreadPoolExecutor(3) as ranks:
        fetched = list(ranks.map(rank, range(3)))
    assert len(set(fetched)) == len(made) == 1
    assert fetched[0][0] == 100


@pytest.mark.parametrize(
    ("name", "written", "where"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": ', "x.jsonl:2"),
        ("x.json", b'{"text": "a"}\n{"text": "\xff"}\n', "x.json:2"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "x.jsonl:2"),
        ("x.json", b'[{"text": "a"}, {"text": 5}]', "x.json, row 2"),
        ("x.json", b'[{"text": "a"}', "x.json"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "x.jsonl.gz"),
        ("x.jsonl.zst", b"no zstd at all", "x.jsonl.zst"),
        ("x.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 99)[:-2], "x.jsonl.zst"),
        ("x.parquet", b"no parquet", "x.parquet"),
        ("x.txt", None, "x.txt"),
    ],
)
def test_file_that_cannot_be_read_is_named_and_nothing_of_it_is_kept(
    tmp_path: Path, cache: Path, name: str, written: bytes | None, where: str
):
    if written is not None:
        (tmp_path / name).write_bytes(written)
    with pytest.raises(HoldfastError) as refused:
        Text([tmp_path / name], length=1)
    (finding,) = refused.value.findings
    assert (finding.code, finding.where) == ("data-unreadable", str(tmp_path / where))
    assert finding.evidence
    assert finding.remedy
    assert list(cache.glob("*.tokens")) == []


def test_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(HoldfastError) as refused:
        Text([tmp_path / "x.txt"], length=1, cache=tmp_path / "x.txt" / "in")
    assert refused.value.findings[0].code == "data-cache-unwritable"
