"""Tokenises a stream of rows in this process or in several processes; the result is the same."""

import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice

from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.tokenization import TokenizationSettings, TokenizedBatch, tokenize_batch
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.system.errors import DataError

_BATCH_ROWS = 512
_BATCH_BYTES = 1 << 24
_BATCHES_PER_WORKER = 2  # submitted ahead, so that no worker waits for the reader

_Result = Callable[[], TokenizedBatch]


def tokenize_rows(
    rows: Iterator[NumberedRow],
    settings: TokenizationSettings,
    tokenizer: Tokenizer,
    *,
    num_workers: int,
    max_pairs: int | None,
) -> Generator[TokenizedBatch, None, None]:
    """Yields batches in row order, until the rows end or `max_pairs` pairs are kept.

    To read no rows in vain, a batch never has more rows than pairs are still missing.
    """
    wanted = sys.maxsize if max_pairs is None else max_pairs
    most_under_way = num_workers * _BATCHES_PER_WORKER if num_workers > 1 else 1
    under_way: deque[tuple[int, _Result]] = deque()
    with _workers(settings, tokenizer, num_workers) as submit:
        while True:
            while len(under_way) < most_under_way:
                batch = _take(rows, min(_BATCH_ROWS, wanted))
                if not batch:
                    break
                wanted -= len(batch)  # assumes that all rows are kept; corrected below
                under_way.append((len(batch), submit(batch)))
            if not under_way:
                return
            num_rows, result = under_way.popleft()
            tokenized = result()
            wanted += num_rows - len(tokenized.pairs.records)
            yield tokenized


def _take(rows: Iterator[NumberedRow], most: int) -> list[NumberedRow]:
    """Returns the next rows: at most `most`, and no more after _BATCH_BYTES bytes."""
    taken, num_bytes = [], 0
    for row in islice(rows, most):
        taken.append(row)
        num_bytes += len(pickle.dumps(row))  # pickle measures any type, in a microsecond a row
        if num_bytes > _BATCH_BYTES:
            break
    return taken


@contextmanager
def _workers(
    settings: TokenizationSettings, tokenizer: Tokenizer, num_workers: int
) -> Iterator[Callable[[list[NumberedRow]], _Result]]:
    """Yields a function that starts to tokenise a batch and returns a function that waits for the result."""
    if num_workers < 2:
        yield lambda batch: partial(tokenize_batch, batch, settings, tokenizer)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy locks of the tokenizer's threads
        initializer=_start_worker,
        initargs=(settings, tokenizer),
    )
    try:
        yield lambda batch: pool.submit(_tokenize_in_worker, batch).result
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenised was killed, probably because memory ran out; set data.num_workers: 0"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[TokenizationSettings, Tokenizer] | None = None


def _start_worker(settings: TokenizationSettings, tokenizer: Tokenizer) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too, but the parent stops them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    _worker = settings, tokenizer


def _tokenize_in_worker(batch: list[NumberedRow]) -> TokenizedBatch:
    assert _worker is not None
    settings, tokenizer = _worker
    return tokenize_batch(batch, settings, tokenizer)
