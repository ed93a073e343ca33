"""Tokenising a stream of rows, in this process or in several; the result is the same."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.tokenization import TokenizationSettings, TokenizedBatch, Tokenizer, tokenize_batch
from dpo_pack.errors import DataError

_BATCH_ROWS = 512
_BATCHES_PER_WORKER = 2  # under way, so that no worker waits for the reader


def tokenize_rows(
    rows: Iterator[NumberedRow],
    settings: TokenizationSettings,
    tokenizer: Tokenizer,
    *,
    num_workers: int,
    max_pairs: int | None,
) -> Generator[TokenizedBatch, None, None]:
    """Batches in row order, until the rows end or `max_pairs` pairs are kept.

    No row is read that cannot be needed: a batch has at most as many rows as pairs are missing.
    """
    wanted = sys.maxsize if max_pairs is None else max_pairs
    if num_workers < 2:
        return _tokenize_here(rows, settings, tokenizer, wanted)
    return _tokenize_in_workers(rows, settings, tokenizer, wanted, num_workers)


def _tokenize_here(
    rows: Iterator[NumberedRow], settings: TokenizationSettings, tokenizer: Tokenizer, wanted: int
) -> Generator[TokenizedBatch, None, None]:
    while batch := list(islice(rows, min(_BATCH_ROWS, wanted))):
        tokenized = tokenize_batch(batch, settings, tokenizer)
        wanted -= len(tokenized.pairs.records)
        yield tokenized


def _tokenize_in_workers(
    rows: Iterator[NumberedRow],
    settings: TokenizationSettings,
    tokenizer: Tokenizer,
    wanted: int,
    num_workers: int,
) -> Generator[TokenizedBatch, None, None]:
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy the tokenizer's threads' locks
        initializer=_start_worker,
        initargs=(settings, tokenizer),
    )
    under_way: deque[tuple[int, Future[TokenizedBatch]]] = deque()
    try:
        while True:
            while len(under_way) < num_workers * _BATCHES_PER_WORKER:
                batch = list(islice(rows, min(_BATCH_ROWS, wanted)))
                if not batch:
                    break
                wanted -= len(batch)  # as if all were kept; corrected below
                under_way.append((len(batch), pool.submit(_tokenize_in_worker, batch)))
            if not under_way:
                return
            num_rows, future = under_way.popleft()
            tokenized = future.result()
            wanted += num_rows - len(tokenized.pairs.records)
            yield tokenized
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenised died, most likely for want of memory; set data.num_workers: 0"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[TokenizationSettings, Tokenizer] | None = None


def _start_worker(settings: TokenizationSettings, tokenizer: Tokenizer) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = settings, tokenizer


def _tokenize_in_worker(batch: list[NumberedRow]) -> TokenizedBatch:
    assert _worker is not None
    settings, tokenizer = _worker
    return tokenize_batch(batch, settings, tokenizer)
