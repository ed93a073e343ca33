"""Reads an exported model as its users do, and compares it with what was trained. Imports no dpo_pack.

A run starts this file as a program, with a JSON object on stdin (`prepare_verification` in run/export.py).
The last line on stdout is a JSON object: `failure` is null or a sentence, `tensors` is how many the files
hold, and `error` is that of the log-probs, in nats a token.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

gc.disable()  # a sixth of the time of these imports
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import AutoConfig, PreTrainedModel  # noqa: E402, F401

gc.freeze()
gc.enable()


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    directory, tensors, error = Path(job["directory"]), 0, None
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for file in directory.glob("*.safetensors"):
                with safe_open(file, framework="pt") as opened:
                    tensors += len(list(opened.keys()))
            model = _read(directory, job)
            failure = _wrong_flag(directory / "config.json", job) or _wrong_tensor(model, job["digests"])
            if failure is None and job["sequences"]:
                failure, error = _wrong_logps(model, job)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as raised:  # whatever the libraries say of these files
            failure = f"cannot be read: {type(raised).__name__}: {' '.join(str(raised).split())}"
    failure = failure and f"{directory}: {failure}"
    print(json.dumps({"failure": failure, "tensors": tensors, "error": error}))


def _read(directory: Path, job: dict[str, Any]) -> Any:
    options = {"trust_remote_code": job["trust_remote_code"]}
    auto: Any = getattr(transformers, job["auto_class"])
    if job["base"] is None:
        model, info = auto.from_pretrained(directory, dtype="auto", output_loading_info=True, **options)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                raise ValueError(f"{kind.replace('_', ' ')}, the first: {min(map(str, info[kind]))}")
        return model
    from peft import PeftModel

    dtype = getattr(torch, job["parameters"])
    if job["sequences"]:
        base = auto.from_pretrained(job["base"], dtype=dtype, revision=job["revision"], **options)
    else:  # the adapter alone is compared, so the base's weights are not read
        config = AutoConfig.from_pretrained(job["base"], revision=job["revision"], **options)
        with torch.device("meta"):
            base = auto.from_config(config, dtype=dtype, **options).to_empty(device="cpu")
    return PeftModel.from_pretrained(base, str(directory)).get_base_model()


def _wrong_flag(config: Path, job: dict[str, Any]) -> str | None:
    """Where the files hold a head and embeddings, transformers does not tie them, and others do."""
    values = json.loads(config.read_text()) if config.is_file() else {}
    parts = (values, values.get("text_config") or {})
    flags = {part.get("tie_word_embeddings") for part in parts} - {None}
    if flags and job["is_tied"] not in flags or flags == {True, False} and not job["is_tied"]:
        flag = str(not job["is_tied"]).lower()
        return f"config.json says tie_word_embeddings: {flag}, and the weights are otherwise"
    return None


def _wrong_tensor(model: Any, digests: dict[str, str]) -> str | None:
    found = model.state_dict()
    for name, digest in digests.items():
        if name not in found:
            return f"it lacks {name}"
        tensor = found[name].detach().cpu()
        sha256 = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if sha256.hexdigest() != digest:
            return f"{name} is not the trained tensor ({str(tensor.dtype).removeprefix('torch.')})"
    return None


@torch.no_grad()
def _wrong_logps(model: Any, job: dict[str, Any]) -> tuple[str | None, float]:
    device, dtype = torch.device(job["device"]), job["autocast"] and getattr(torch, job["autocast"])
    if job["base"] is None:
        model = model.to(getattr(torch, job["parameters"]))
    model, errors, processor = model.to(device).eval(), [], None
    if any(pictures for _, _, pictures in job["sequences"]):
        options = {"trust_remote_code": job["trust_remote_code"]}
        processor = transformers.AutoProcessor.from_pretrained(job["directory"], **options)
        if job["image_sizes"] is not None:  # the one setting that differs from the training's
            trained, written = job["image_sizes"]
            found = dict(processor.image_processor.size)
            if found != written:
                return f"its processor has size {found}, not {written}", 0.0
            processor.image_processor.size = trained
    for (ids, number, pictures), logps in zip(job["sequences"], job["logps"], strict=True):
        tokens = torch.tensor([ids], device=device)
        images = _image_inputs(model, processor, pictures, tokens) if pictures else {}
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            logits = model(input_ids=tokens, use_cache=False, **images).logits[0, -number - 1 : -1]
        of_targets = logits.float().log_softmax(dim=-1).gather(1, tokens[0, -number:, None])
        errors.append(abs(float(of_targets.double().sum()) - logps) / number)
    kept = sorted(errors)[: len(errors) - job["routes"]]  # rounding can send one to another expert
    error = sum(kept) / len(kept)
    if error <= job["bound"]:
        return None, error
    return (
        f"each tensor is right, but log-probs differ by {error:.1e} nats a token in the mean "
        f"({job['bound']:.1e} are allowed); see its config.json{' and its processor' if processor else ''}"
    ), error


def _image_inputs(model: Any, processor: Any, pictures: list[str], tokens: torch.Tensor) -> dict[str, Any]:
    """Returns what the model gets of a prompt's images, which are PNG files as data URLs."""
    from PIL import Image

    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in pictures]
    made = processor(images=[images], text=[processor.image_token * len(images)], return_tensors="pt")
    of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    read = inspect.signature(model.forward).parameters.keys()
    inputs = {name: made[name].to(tokens.device) for name in read & made.keys() - of_text}
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    if "mm_token_type_ids" in read:
        inputs["mm_token_type_ids"] = (tokens == model.config.image_token_id).int()
    return inputs


if __name__ == "__main__":
    main()
