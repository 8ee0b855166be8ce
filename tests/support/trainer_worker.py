"""A Trainer with a LoRA model, alone or as a worker of a run. Arguments: model folder, output folder, batch."""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def samples() -> list[dict[str, list[int]]]:
    """Returns 24 sequences of 3 to 8 tokens."""
    rng = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 15, (3 + index * 5 % 6,), generator=rng).tolist()} for index in range(24)]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full((len(batch), longest), -100)
    for place, row in enumerate(batch):
        ids[place, : len(row["input_ids"])] = labels[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


def lora(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model.enable_input_require_grads()
    return get_peft_model(model, config)


def arguments(folder: Path, batch: int, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.05,
        "save_strategy": "steps",
        "save_steps": 2,
        # Then layers have backward passes of their own, inside of the model's.
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "report_to": "none",
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(**{**options, **changes})


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def main(model_folder: str, output: str, batch: str) -> None:
    from worker_agent.integrations import join
    from worker_agent.integrations.huggingface import AyniCallback

    model, folder = lora(model_folder), Path(output)
    run = join(model)
    data = run.shard(samples())
    trainer = Trainer(
        model, arguments(folder, int(batch)), train_dataset=data, data_collator=collate, callbacks=[AyniCallback(run)]
    )
    trainer.train()
    save_file(trained(model), folder / "trained.safetensors", {"rank": str(run.rank)})


if __name__ == "__main__":
    main(*sys.argv[1:])
