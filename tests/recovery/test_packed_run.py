"""From text to trained bits: a tokenizer is trained, the corpus packed by the command, and a model
trained from the files, with faults and without."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import elastix
from elastix import cli
from elastix.data import Mixture, PackedRecords, PackedText, load_tokenizer
from elastix.data.files import stdlib_corpus
from elastix.testing import assert_recovers
from models.qwen3 import SIZES, next_token_loss

SEQ_LEN, VOCAB_SIZE, NUM_STEPS = 32, 512, 50
FAULTS = ["lose 0@9", "return 0@17", "lose 0@23", "return 0@31", "lose 0@38"]
"""Always of one slice: to compile this model for one more set takes long."""
SLICES = {"num_slices": 3, "devices_per_slice": 1}


@pytest.fixture(
    scope="module", params=[60, pytest.param(None, marks=pytest.mark.soak)], ids=["some", "all"]
)
def folder(tmp_path_factory, request) -> Path:
    """The embedded corpus, its tokenizer, and what the command makes of both."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("packed")
    modules = [document.decode() for document in stdlib_corpus().documents[: request.param]]
    documents = [part for module in modules for part in module.split("\n\n")]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(documents, VOCAB_SIZE, special_tokens=["<|endoftext|>"])
    trained.save(str(folder / "tokenizer.json"))
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (folder / "corpus.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        words = ["--tokenizer", str(folder / "tokenizer.json"), "--seq-len", str(SEQ_LEN)]
        words += ["--out", str(folder / "packed"), "--shard-size", "0.4"]
        assert cli.main(["data", "pack", str(folder / "corpus.jsonl"), *words]) == 0
        yield folder


def recipe(data) -> elastix.Recipe:
    small = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    return elastix.Recipe(
        model=replace(SIZES["tiny"], vocab_size=VOCAB_SIZE, intermediate_size=48, **small),
        data=data,
        optimizer=elastix.AdamW(peak=3e-3, warmup=5),
        loss=next_token_loss,
        num_steps=NUM_STEPS,
        global_batch=8,
        num_replicas=4,
        policy=elastix.Policy(snapshot_every=5, checkpoint_every=10, probe_every=0.2, warm="off"),
    )


def test_a_model_trained_from_packed_files_recovers(folder, tmp_path):
    data = PackedRecords(str(folder / "packed"))
    assert (
        data.vocab_size == load_tokenizer(str(folder / "tokenizer.json")).vocab_size == VOCAB_SIZE
    )
    assert len(list((folder / "packed").glob("part-*"))) > 2
    summary = assert_recovers(recipe(data), FAULTS, **SLICES, run_dir=tmp_path / "run")
    assert len(summary.recoveries) == len(FAULTS)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    # Not all 8 * 32 positions are targets: documents end in between.
    targets = [row["tokens"] for row in rows]
    assert all(128 < count <= 256 for count in targets) and len(set(targets)) > 5


def test_a_mixture_of_packed_files_and_text_recovers_and_resumes(folder, tmp_path):
    tokenizer = str(folder / "tokenizer.json")
    text = PackedText((str(folder / "corpus.jsonl"),), tokenizer=tokenizer, seq_len=SEQ_LEN)
    mixture = Mixture((PackedRecords(str(folder / "packed")), text), (3, 1), shuffle=500)
    whole = replace(recipe(mixture), num_steps=24)
    summary = assert_recovers(whole, ["lose 0@7", "return 0@12"], **SLICES)
    backend = elastix.testing.SteppingBackend
    half = elastix.train(
        replace(whole, num_steps=11), backend=backend(3, 1), run_dir=tmp_path / "run"
    )
    resumed = elastix.train(whole, backend=backend(3, 1), run_dir=tmp_path / "run")
    assert half.state_sha256 != resumed.state_sha256 == summary.state_sha256
    shutil.move(folder / "packed", tmp_path / "moved")
    elsewhere = replace(mixture, parts=(PackedRecords(str(tmp_path / "moved"), prefetch=0), text))
    again = elastix.train(
        replace(whole, data=elsewhere), backend=backend(3, 1), run_dir=tmp_path / "run"
    )
    shutil.move(tmp_path / "moved", folder / "packed")
    assert again.state_sha256 == resumed.state_sha256
    changed = replace(whole, data=replace(mixture, weights=(3, 2)))
    with pytest.raises(ValueError, match="another recipe"):
        elastix.train(changed, backend=backend(3, 1), run_dir=tmp_path / "run")
    lines = (folder / "corpus.jsonl").read_text()
    try:
        (folder / "corpus.jsonl").write_text(lines + lines[: lines.index("\n") + 1])
        with pytest.raises(ValueError, match=r"another data \(parts was"):
            elastix.train(whole, backend=backend(3, 1), run_dir=tmp_path / "run")
    finally:
        (folder / "corpus.jsonl").write_text(lines)
