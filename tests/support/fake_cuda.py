"""A GPU that is not there: fake CUDA tensors go forward and backward, and inductor generates kernels.

A fake tensor has no values: whoever asks for one, as a wait for the device does, gets an error. Backward
passes need `fake_driver.c`, which scripts/test_cuda_build.sh loads before torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from dpo_pack.model.layout import Row, packed_row
from dpo_pack.packing.lengths import Group

CUDA = torch.device("cuda")


def has_fake_driver() -> bool:
    """Whether the CUDA runtime of this process is `fake_driver.c`'s."""
    try:
        return ctypes.CDLL(None).cudaStreamQuery is not None and hasattr(ctypes.CDLL(None), "cuInit")
    except AttributeError:
        return False


def _properties(capability: tuple[int, int]) -> SimpleNamespace:
    shared = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}.get(capability, 101376)
    return SimpleNamespace(
        name="a GPU", major=capability[0], minor=capability[1], total_memory=80 * 2**30,
        multi_processor_count=132, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        warp_size=32, gcnArchName="", shared_memory_per_block=49152, shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024, L2_cache_size=50 * 2**20, max_threads_per_block=1024,
        uuid="x", is_integrated=False,
    )  # fmt: skip


@contextmanager
def fake_cuda(
    *, backward: bool = False, capability: tuple[int, int] = (9, 0)
) -> Iterator[pytest.MonkeyPatch]:
    """Context in which CUDA tensors are fake. `backward`: autograd works as well (see above)."""
    properties = _properties(capability)
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device=CUDA, device_type=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
            "get_device_capability": capability, "get_device_name": properties.name, "synchronize": None,
            "is_initialized": False, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": None, "_lazy_init": None, "current_stream": stream, "_exchange_device": 0,
            "_maybe_exchange_device": 0, "set_device": None, "is_bf16_supported": True,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, functools.partial(_answer, value))
        patch.setattr(Tensor, "pin_memory", lambda self: self)  # fake tensors have none
        # Without a device torch.autocast switches itself off.
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True))
        for name in ("init_gpu_context", "init_cuda_context"):
            if hasattr(fake_tensor, name):
                patch.setattr(fake_tensor, name, lambda *_, **__: None)
        with FakeTensorMode(), torch.autograd.set_multithreading_enabled(not backward):
            yield patch


@contextmanager
def inductor_without_a_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[list[str]]:
    """Context in which torch.compile generates code for a device of this capability, and in its place runs
    the graph that it compiled on fake tensors. Yields the list of what it has generated."""
    import torch._dynamo.device_interface as interface
    import triton
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    properties = _properties(capability)
    shared = properties.shared_memory_per_block_optin
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    utils = {"max_shared_mem": shared, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        set_current_device=lambda *_: None,
        get_current_stream=lambda *_: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: utils),
    )
    compiled: list[str] = []

    def to_module(graph: Any) -> Any:
        source = graph.codegen()
        source = source[0] if isinstance(source, tuple) else source
        compiled.append(getattr(source, "value", source))

        def call(arguments: Any) -> Any:
            modes = [a.fake_mode for a in arguments if isinstance(a, FakeTensor)]
            # The operations of the graph are no launches, so modes that count do not see them.
            with _disable_current_modes(), modes[0] if modes else nullcontext():
                return graph.orig_gm(*arguments)

        return SimpleNamespace(call=call, __file__="", key="")

    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(
            joint_graph_constant_folding=False, fx_graph_cache=False, compile_threads=1,
            use_static_triton_launcher=False,
        ),
        functorch_config.patch(enable_autograd_cache=False),
    ):  # fmt: skip
        for owner in (interface.CudaInterface, interface.CudaInterface.Worker):
            patch.setattr(owner, "get_device_properties", staticmethod(lambda device=None: properties))
            patch.setattr(owner, "current_device", staticmethod(lambda: 0))
        patch.setattr(interface.CudaInterface, "is_available", staticmethod(lambda: True))
        patch.setattr(interface.CudaInterface, "get_raw_stream", staticmethod(lambda device: 0))
        patch.setattr(GraphLowering, "compile_to_module", to_module)
        for name, empty in {"cache_key": "", "cache_path": "", "cache_linemap": []}.items():
            patch.setattr(GraphLowering, name, empty, raising=False)
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None)
        torch._dynamo.reset()
        yield compiled
        torch._dynamo.reset()


def _answer(value: Any, *arguments: Any, **options: Any) -> Any:
    return value


def row_of(num_tokens: int, *, vocabulary: int = 1000) -> Row:
    """A packed row with exactly so many tokens: pairs of 700, of which 400 are scored, and a last one."""
    random = np.random.default_rng(0)

    def ids(length: int, first: int) -> np.ndarray:
        drawn: np.ndarray = random.integers(3, vocabulary, length)
        drawn[0] = first  # no two completions begin alike
        return drawn

    groups, left = [], num_tokens
    while left > 0:
        size = 700 if left >= 1400 else left
        half = min(200, size // 4)
        groups.append(Group(context=ids(size - 2 * half, 7), completions=(ids(half, 5), ids(half, 6))))
        left -= size
    row = packed_row(groups, CUDA, share_prompt=True)
    assert row.num_tokens == num_tokens
    return row
