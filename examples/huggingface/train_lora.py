"""A LoRA script as transformers and PEFT teach it, on workers of a run: see the lines marked `ayni`.

AYNI_COORDINATOR=HOST:PORT AYNI_TOKEN_FILE=run.token python examples/huggingface/train_lora.py MODEL TEXT OUTPUT
"""

import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from worker_agent.integrations import join  # ayni: 1
from worker_agent.integrations.huggingface import AyniCallback  # ayni: 2


def main(model_folder: str, text_file: str, output: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{model_folder}/tokenizer.json", pad_token="[UNK]")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    )
    run = join(model)  # ayni: 3

    lines = [line for line in Path(text_file).read_text().splitlines() if line]
    dataset = [tokenizer(line) for line in lines]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=run.shard(dataset),  # ayni: 4, each worker its own samples
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[AyniCallback(run)],  # ayni: 5
    )
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
