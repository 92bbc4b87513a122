"""What it costs to resume: the first batch at step 10^6 against the first at step 10.

Each kind of data is opened from nothing, as a process that resumes does it, and from a stream that
is open already, as after a loss. Nothing here is a test; the figures go to standard output.

    python bench/data.py --megabytes 20
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastix.data import Mixture, PackedRecords, PackedText, Text
from elastix.data.files import stdlib_corpus
from elastix.data.pack_command import data_main

NEAR, FAR = 10, 10**6
GLOBAL_BATCH, SEQ_LEN, REPEATS = 16, 512, 15


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a line for each kind of data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=20, help="of text (default: 20)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        corpus = write_corpus(Path(folder, "corpus.txt"), given.megabytes * 10**6)
        print(
            f"Python {platform.python_version()}, {given.megabytes} MB of text, batches of "
            f"{GLOBAL_BATCH} x {SEQ_LEN} tokens; milliseconds, the median of {REPEATS}"
        )
        steps = "".join(f"{head:>9}" for head in (f"step {NEAR}", "10^6", "ratio"))
        print(f"{'':<16}{'never':>9}{'opened anew':>27}{'open already':>27}")
        print(f"{'data':<16}{'opened':>9}{steps}{steps}")
        for name, config in kinds(corpus, Path(folder)).items():
            print(line(name, config), flush=True)
    return 0


def write_corpus(path: Path, size: int) -> str:
    """Python's standard library, again and again, each time a little different."""
    documents, written, number = stdlib_corpus().documents, 0, 0
    with path.open("wb") as file:
        while written < size:
            head = f"# {number}\n".encode()
            written += file.write(head + documents[number % len(documents)] + b"\n\f\n")
            number += 1
    return str(path)


def kinds(corpus: str, folder: Path) -> dict[str, Any]:
    """What is measured, by name."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        out = ["--out", str(folder / "packed"), "--seq-len", str(SEQ_LEN), "--tokenizer", "bytes"]
        data_main(["pack", corpus, "--separator", "\f", "--shard-size", "4", *out])
    packed = PackedText((corpus,), separator="\f", seq_len=SEQ_LEN)
    records = PackedRecords(str(folder / "packed"))
    return {
        "Text": Text((corpus,), seq_len=SEQ_LEN),
        "PackedText": packed,
        "  window of 1000": replace(packed, shuffle=1000),
        "PackedRecords": records,
        "Mixture": Mixture((packed, records), (0.7, 0.3)),
    }


def line(name: str, config: Any) -> str:
    """The times of one kind of data, and the ratios that are wanted to be at most 2."""
    start = perf_counter()
    stream = config.build(GLOBAL_BATCH, 0)
    next(stream.batches(0))
    cold = perf_counter() - start
    text = f"{name:<16}{1e3 * cold:>9.1f}"
    for read in (
        lambda n: next(config.build(GLOBAL_BATCH, 0).batches(n)),
        lambda n: next(stream.batches(n)),
    ):
        near, far = seconds(read)
        text += f"{1e3 * near:>9.2f}{1e3 * far:>9.2f}{far / near:>9.2f}"
    return text


def seconds(read: Callable[[int], object]) -> tuple[float, float]:
    """The medians at both steps, measured in turns, so that a busy moment meets both."""
    times: dict[int, list[float]] = {NEAR: [], FAR: []}
    for k in range(REPEATS):
        for number in (NEAR + k, FAR + k):  # never the batch that was read just now
            start = perf_counter()
            read(number)
            times[NEAR if number < FAR else FAR].append(perf_counter() - start)
    return median(times[NEAR]), median(times[FAR])


if __name__ == "__main__":
    sys.exit(main())
