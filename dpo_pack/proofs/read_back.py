"""Reads an exported model as its users do, and compares it with what was trained. Imports no dpo_pack.

A run starts this file as a program, with a JSON object on stdin (`reader_job` in run/export.py). The last
line on stdout is a JSON object: `failure` is null or a sentence that names a file; `tensors` is how many the
files hold; `error` is by token, and `unquantised` is that of a base that training quantises and this process
does not.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig

_Job = dict[str, Any]


def main() -> None:
    job: _Job = json.load(sys.stdin)
    directory, tensors, error, unquantised = Path(job["directory"]), 0, None, None
    with contextlib.redirect_stdout(sys.stderr):
        try:
            types = {}  # of tensors, by file and name
            for file in sorted(directory.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    names = list(opened.keys())
                    types[file.name] = {name: opened.get_slice(name).get_dtype() for name in names}
            tensors = sum(map(len, types.values()))
            failure = _wrong_file(directory, types, job)
            if failure is None:
                model = _read(directory, job)
                failure = _wrong_tensor(model, directory, types, job)
            if failure is None and job["sequences"]:
                failure, error = _wrong_logps(model, job)
                if job["quantization"] is not None and failure is None:
                    del model  # there may be no room for two
                    _, unquantised = _wrong_logps(_read(directory, {**job, "quantization": None}), job)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as raised:  # whatever the libraries say of these files
            failure = f"{directory} cannot be read: {type(raised).__name__}: {' '.join(str(raised).split())}"
    print(json.dumps({"failure": failure, "tensors": tensors, "error": error, "unquantised": unquantised}))


def _wrong_file(directory: Path, types: dict[str, dict[str, str]], job: _Job) -> str | None:
    for file in directory.glob("*.safetensors.index.json"):
        for name, part in json.loads(file.read_text())["weight_map"].items():
            if name not in types.get(part, {}):
                return f"{directory / part} lacks {name}, which {file.name} promises"
    for part, by_name in types.items():
        for name, kind in by_name.items():
            if kind in ("F64", "F32", "F16", "BF16") and kind not in job["types"]:
                return f"{directory / part} has {name} in the type {kind}, not {' or '.join(job['types'])}"
    config = directory / "config.json"
    values = json.loads(config.read_text()) if config.is_file() else {}
    said = {part.get("tie_word_embeddings") for part in (values, values.get("text_config") or {})} - {None}
    if said and job["is_tied"] not in said or said == {True, False} and not job["is_tied"]:
        flag = str(not job["is_tied"]).lower()
        return f"{config} says tie_word_embeddings: {flag}, and the weights are otherwise"
    return None


def _read(directory: Path, job: _Job) -> Any:
    options = {"trust_remote_code": job["trust_remote_code"]}
    auto: Any = getattr(transformers, job["auto_class"])
    if job["base"] is None:
        model, info = auto.from_pretrained(directory, dtype="auto", output_loading_info=True, **options)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                raise ValueError(f"{kind.replace('_', ' ')}, the first: {min(map(str, info[kind]))}")
        return model
    from peft import PeftModel

    options |= {"revision": job["revision"]}
    dtype = getattr(torch, job["parameters"])
    if job["sequences"]:
        if job["quantization"] is not None:
            settings = transformers.BitsAndBytesConfig.from_dict(job["quantization"])
            options |= {"quantization_config": settings, "device_map": {"": job["device"]}}
        base = auto.from_pretrained(job["base"], dtype=dtype, **options)
        if getattr(base, "is_quantized", False):  # training computes with weights that are restored
            base = _restored(base, dtype)
    else:  # the adapter alone is compared, so the base's weights are not read
        config = AutoConfig.from_pretrained(job["base"], **options)
        with torch.device("meta"):
            del options["revision"]
            base = auto.from_config(config, dtype=dtype, **options).to_empty(device="cpu")
    return PeftModel.from_pretrained(base, str(directory)).get_base_model()


def _restored(base: Any, dtype: torch.dtype) -> Any:
    states = {name: p.quant_state for name, p in base.named_parameters() if hasattr(p, "quant_state")}
    shapes = {name: state.shape for name, state in states.items()}
    for state in states.values():  # on a CPU bitsandbytes takes other blocks' scales for some shapes
        state.shape = torch.Size((1, state.shape.numel()))
    base = base.dequantize(dtype)
    for name, shape in shapes.items():
        parameter = base.get_parameter(name)
        parameter.data = parameter.data.view(shape)
    return base


def _wrong_tensor(model: Any, directory: Path, types: dict[str, dict[str, str]], job: _Job) -> str | None:
    found = model.state_dict()
    for name, digest in job["digests"].items():
        plain = name.replace(".default.", ".").removesuffix(".default")  # as peft names it in files
        names = {name, plain, f"base_model.model.{plain}"}
        holds = (part for part, by_name in types.items() if names & by_name.keys())
        where = directory / next(holds, next(iter(types)) if len(types) == 1 else "")
        if name not in found:
            return f"{where} lacks {name}"
        tensor = found[name].detach().cpu()
        sha256 = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if sha256.hexdigest() != digest:
            return f"{where}: {name} is not the trained tensor ({str(tensor.dtype).removeprefix('torch.')})"
    return None


@torch.no_grad()
def _wrong_logps(model: Any, job: _Job) -> tuple[str | None, float]:
    device, dtype = torch.device(job["device"]), job["autocast"] and getattr(torch, job["autocast"])
    if job["base"] is None:
        model = model.to(getattr(torch, job["parameters"]))
    model, errors, processor = model.to(device).eval(), [], None
    if any(pictures for _, _, pictures in job["sequences"]):
        options = {"trust_remote_code": job["trust_remote_code"]}
        processor = transformers.AutoProcessor.from_pretrained(job["directory"], **options)
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
    files = "config.json" if processor is None else "config.json and the files of its processor"
    failure = (
        f"{job['directory']}: each tensor is right, but log-probs differ by {error:.1e} nats a token in "
    )
    return f"{failure}the mean ({job['bound']:.1e} are allowed); see its {files}", error


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
