"""Measurements in processes of their own: what a job asks for, and what it has found.

    python -m benchmarking.process JOB.json

The parent writes the job and reads results from the standard output, a line as soon as each is there.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarking.contenders import Contender, Measurement, Setting

SCRIPTS = Path(__file__).resolve().parents[1]
OUT_OF_MEMORY = "out of memory"
COMPILED_LIMIT_SECONDS = 600.0  # a library may compile again for each new length
RESULT_MARK = "@result "


class ProcessDied(Exception):
    """A process was ended by a signal: the kernel's, a library's or ours. The message says by which."""


class TimeIsUp(SystemExit):
    """No time is left for another measurement. What was measured is kept."""

    def __init__(self) -> None:
        super().__init__("--minutes: time is up; the same command goes on from here")


def seconds_until(stop_at: float) -> float:
    """Seconds until this time (time.monotonic()). Raises TimeIsUp if it is over."""
    if (seconds := stop_at - time.monotonic()) < 0:
        raise TimeIsUp
    return seconds


def measure(
    contenders: Sequence[Contender],
    setting: Setting,
    *,
    stop_at: float = float("inf"),
    compiled_seconds: float = COMPILED_LIMIT_SECONDS,
) -> Generator[Measurement]:
    """Each contender measured, one after another. Raises TimeIsUp at `stop_at`.

    Neighbours have a process in common, unless one of them is compiled or wants other variables at its start.
    After a failure that is not about memory the others get a new process, because a CUDA error spoils all
    that comes after it. If a process dies, its contender is tried once more in a new process, unless it was
    the first one there.
    """
    for _, batch in itertools.groupby(
        contenders, key=lambda one: one.name if one.compiled or one.malloc else ""
    ):
        together = list(batch)
        while together:
            limit = seconds_until(stop_at)
            if together[0].compiled:
                limit = min(limit, compiled_seconds)
            job: dict[str, Any] = {"kind": "measure", "setting": asdict(setting)}
            job["contenders"] = [asdict(contender) for contender in together]
            begun, num_measured, failure = time.monotonic(), 0, "its process left no result"
            try:
                for line in _run(job, setting.device, together[0].environment, limit_seconds=limit):
                    num_measured += 1
                    yield Measurement(**line)
            except ProcessDied as death:
                seconds_until(stop_at)
                is_late = time.monotonic() - begun >= limit
                failure = f"ended after {limit:.0f} seconds" if is_late else str(death)
            if num_measured == 0:
                num_measured = 1
                yield Measurement(contender=together[0].name, failure=failure)
            together = together[num_measured:]


def measure_peak(device: str, dtype: str) -> dict[str, float]:
    """What this machine reaches, in a new process: see peak.py."""
    return next(_run({"kind": "peak", "device": device, "dtype": dtype}, device))


def profile(contender: Contender, setting: Setting, *, stop_at: float = float("inf")) -> dict[str, Any]:
    """A few steps by operator, see profiling.py; empty where the profiler failed."""
    job = {"kind": "profile", "contenders": [asdict(contender)], "setting": asdict(setting)}
    limit = seconds_until(stop_at)
    try:
        return next(_run(job, setting.device, contender.environment, limit_seconds=limit))
    except ProcessDied:
        seconds_until(stop_at)
        return {}


def save_model(name: str, target: Path, *, parameters: str, device: str) -> None:
    """A random model on disk, made in a new process: its memory is nobody else's."""
    job = {"kind": "model", "name": name, "target": str(target), "parameters": parameters, "device": device}
    for _ in _run(job, device):
        pass


def visible_devices(device: str) -> str:
    """CUDA_VISIBLE_DEVICES: none for the CPU, else one. On several TRL's trainer would take other steps."""
    return "" if device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _run(
    job: dict[str, Any],
    device: str,
    variables: dict[str, str] | None = None,
    *,
    limit_seconds: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """Results as the process left them. Raises ProcessDied; after an error exits with its last lines.

    The process is ended after `limit_seconds`, and if the caller wants no more of its results.
    """
    environment = {
        **os.environ,
        **(variables or {}),
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": visible_devices(device),
        # For every contender: with it, rows and batches of many lengths waste less memory.
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    }
    with tempfile.TemporaryDirectory(prefix="dpo-pack-measurement-") as scratch:
        environment["HF_DATASETS_CACHE"] = f"{scratch}/datasets"
        path, errors = Path(scratch, "job.json"), Path(scratch, "errors.txt")
        path.write_text(json.dumps({**job, "spawned_at": time.time()}))
        command = [sys.executable, "-P", "-m", "benchmarking.process", str(path)]
        with (
            errors.open("w") as error_file,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=error_file, text=True, env=environment
            ) as process,
        ):
            assert process.stdout is not None
            timer = threading.Timer(min(limit_seconds, threading.TIMEOUT_MAX), process.kill)
            timer.daemon = True
            timer.start()
            try:
                for line in process.stdout:  # libraries print to it, too
                    if line.startswith(RESULT_MARK):
                        yield json.loads(line.removeprefix(RESULT_MARK))
            except BaseException:
                process.kill()
                raise
            finally:
                timer.cancel()
        sys.stderr.write(errors.read_text()[-4000:] if "Traceback" in errors.read_text() else "")
        if process.returncode == -signal.SIGKILL:  # the kernel does so with what takes too much memory
            raise ProcessDied(OUT_OF_MEMORY)
        if process.returncode < 0:
            raise ProcessDied(f"its process died of {signal.Signals(-process.returncode).name}")
        if process.returncode > 0:
            sys.exit(f"a measurement failed ({job['kind']}):\n{errors.read_text()[-4000:]}")


def _do(job: dict[str, Any], scratch: Path) -> Iterator[dict[str, Any]]:
    """What this process was started for, its results one by one."""
    if job["kind"] == "peak":
        from benchmarking.peak import matrix_product_peak

        yield matrix_product_peak(job["device"], job["dtype"])
        return
    if job["kind"] == "model":
        from benchmarking.shapes import save_model as save

        save(job["name"], Path(job["target"]), parameters=job["parameters"], device=job["device"])
        return
    setting = Setting(**job["setting"])
    contenders = [Contender.from_json(fields) for fields in job["contenders"]]
    if job["kind"] == "profile":
        from benchmarking.profiling import profile_steps

        try:
            yield profile_steps(contenders[0], setting, scratch)
        except Exception:  # a page without a profile is better than none
            traceback.print_exc()
            yield {}
        return
    spawned_at = job["spawned_at"] if len(contenders) == 1 else None  # the others start in a warm process
    for number, contender in enumerate(contenders):
        directory = scratch / str(number)
        directory.mkdir()
        measurement = _measure_here(contender, setting, directory, spawned_at)
        yield asdict(measurement)
        if measurement.failure not in (None, OUT_OF_MEMORY):
            return  # after most CUDA errors nothing runs in this process


def _measure_here(
    contender: Contender, setting: Setting, scratch: Path, spawned_at: float | None
) -> Measurement:
    from benchmarking.peak import forget_peak, peak_memory_bytes
    from benchmarking.run_dpo_pack import run_dpo_pack
    from benchmarking.run_trl import run_trl
    from dpo_pack.system.errors import first_line, is_out_of_memory

    forget_peak()
    run = run_dpo_pack if contender.trainer == "dpo-pack" else run_trl
    try:
        measurement = run(contender, setting, scratch, spawned_at)
    except Exception as error:  # the others still get their page if one cannot run here
        traceback.print_exc()
        failure = OUT_OF_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {first_line(error)}"
        return Measurement(contender=contender.name, failure=failure)
    measurement.peak_memory_bytes = peak_memory_bytes(setting.device)
    return measurement


if __name__ == "__main__":
    job_path = Path(sys.argv[1])
    for result in _do(json.loads(job_path.read_text()), job_path.parent):
        print(f"{RESULT_MARK}{json.dumps(result)}", flush=True)
