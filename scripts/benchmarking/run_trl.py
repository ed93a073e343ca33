"""One run of TRL's DPOTrainer on the same token ids, in the same steps, with the same optimizer settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarking.contenders import (
    BETA,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    Contender,
    Measurement,
    Setting,
)
from benchmarking.workloads import Workload, digest_of

LENGTH_COLUMN = "length"


def run_trl(contender: Contender, setting: Setting, scratch: Path, spawned_at: float | None) -> Measurement:
    """Measure it in this process; `spawned_at` is when the process was started (Unix time).

    Counted are the reference pass of the constructor and the time from the first micro-batch on.
    """
    clock = Clock(setting, microbatches_a_step=setting.pairs_per_step // contender.microbatch_pairs)
    trainer = build_trainer(contender, setting, scratch, clock)
    if contender.reference_only:
        return Measurement(
            contender=contender.name,
            pairs=len(trainer.train_dataset),
            reference_seconds=clock.reference_seconds,
            cpu_seconds=clock.cpu_seconds,
        )
    trainer.training_step = clock.around_microbatches(trainer.training_step)
    trainer.train()
    clock.finish()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    startup_seconds = None
    if spawned_at is not None:
        startup_seconds = clock.first_step_at - spawned_at - clock.reference_seconds
    return Measurement(
        contender=contender.name,
        digest=digest_of(
            (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in trainer.train_dataset
        ),
        pairs=len(trainer.train_dataset),
        step_seconds=clock.step_seconds(),
        step_tokens=clock.step_tokens,
        reference_seconds=clock.reference_seconds,
        startup_seconds=startup_seconds,
        cpu_seconds=clock.cpu_seconds,
        computed_tokens=clock.computed_tokens,
        losses=[line["loss"] for line in logged],
        grad_norms=[line["grad_norm"] for line in logged],
        chosen_logps=[line["logps/chosen"] for line in logged],
        rejected_logps=[line["logps/rejected"] for line in logged],
    )


def build_trainer(contender: Contender, setting: Setting, scratch: Path, clock: Clock) -> Any:
    """A DPOTrainer; with a precomputed reference its constructor computes it, which the clock counts.

    It would tokenise text in its constructor; it is handed ids, so nobody's tokenisation differs.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOTrainer

    with (
        patch.object(DPOTrainer, "_prepare_dataset", lambda self, rows, *_: rows),
        patch.object(DPOTrainer, "_precompute_ref_logps", clock.around_reference(DPOTrainer)),
    ):
        return DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                setting.model,
                dtype=getattr(torch, setting.parameters),
                attn_implementation=contender.attention,
            ),
            args=trl_config(contender, setting, scratch),
            train_dataset=read_dataset(setting),
            processing_class=AutoTokenizer.from_pretrained(setting.model),
            peft_config=lora_config() if setting.lora else None,
        )


class Clock:
    """When TRL's steps began, how long its reference pass took, and the tokens of its padded batches."""

    def __init__(self, setting: Setting, *, microbatches_a_step: int) -> None:
        self.device = setting.device
        self.microbatches_a_step = microbatches_a_step
        self.reference_seconds = 0.0
        self.cpu_seconds = 0.0
        self.computed_tokens = 0
        self.first_step_at = 0.0
        self.step_tokens: list[int] = []
        self._num_microbatches = 0
        self._marks: list[float] = []

    def around_reference(self, trainer_class: Any) -> Any:
        precompute = trainer_class._precompute_ref_logps

        def timed(trainer: Any, dataset: Any, name: str, batch_size: int) -> Any:
            # A first batch loads kernels and libraries; in dpo-pack the proofs do this.
            precompute(trainer, dataset.select(range(batch_size)), name, batch_size)
            begun, cpu_begun = self._now(), time.process_time()
            result = precompute(trainer, dataset, name, batch_size)
            self.reference_seconds += self._now() - begun
            self.cpu_seconds += time.process_time() - cpu_begun
            return result

        return timed

    def around_microbatches(self, training_step: Any) -> Any:
        def timed(model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            if self._num_microbatches % self.microbatches_a_step == 0:
                if not self.first_step_at:
                    self.first_step_at = time.time()
                    self.cpu_seconds -= time.process_time()
                self._marks.append(self._now())
                self.step_tokens.append(0)
            self._num_microbatches += 1
            self.computed_tokens += inputs["input_ids"].numel()
            self.step_tokens[-1] += int(inputs["attention_mask"].sum())
            return training_step(model, inputs, *arguments, **options)

        return timed

    def finish(self) -> None:
        """The last step is over."""
        self._marks.append(self._now())
        self.cpu_seconds += time.process_time()

    def step_seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]

    def _now(self) -> float:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def read_dataset(setting: Setting) -> Any:
    """The workload's first pairs as a `datasets.Dataset` of token ids, with the length to group by."""
    from datasets import Dataset

    workload = Workload(
        name="", directory=Path(setting.workload), num_pairs=0, max_length=0, digest="", origin=""
    )
    rows: list[dict[str, Any]] = []
    for row in workload.rows(setting.num_pairs):
        longer = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        rows.append({**row, LENGTH_COLUMN: len(row["prompt_ids"]) + longer})
    return Dataset.from_list(rows)


def trl_config(contender: Contender, setting: Setting, scratch: Path) -> Any:
    """DPOConfig: what decides the steps is ours, what decides speed is the contender's."""
    from trl import DPOConfig

    on_cuda = setting.device == "cuda"
    return DPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=contender.microbatch_pairs,
        gradient_accumulation_steps=setting.pairs_per_step // contender.microbatch_pairs,
        precompute_ref_log_probs=contender.precompute,
        precompute_ref_batch_size=contender.reference_batch or contender.microbatch_pairs,
        train_sampling_strategy="group_by_length" if contender.grouped else "sequential",
        length_column_name=LENGTH_COLUMN,
        remove_unused_columns=False,  # it would remove the lengths
        gradient_checkpointing=contender.gradient_checkpointing,
        use_liger_kernel=contender.liger,
        torch_compile=contender.compiled,
        bf16=on_cuda or setting.autocast,
        use_cpu=not on_cuda,
        dataloader_num_workers=2 if on_cuda else 0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=BETA,
        max_length=setting.max_length,
        num_train_epochs=1,
        logging_steps=1,  # as often as dpo-pack
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def lora_config() -> Any:
    """The same adapters as ours: on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
