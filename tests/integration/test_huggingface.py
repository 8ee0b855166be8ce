"""transformers' Trainer on workers of a run, and the stock LoRA script with its marked lines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from tests.support.coordinator import CoordinatorProcess, coordinator
from tests.support.joined_runs import OWN, example, outputs, programs, settings
from tests.support.tiny_models import write_llama
from tests.support.trainer_worker import arguments, collate, lora, samples, trained
from worker_agent.integrations.huggingface import AyniCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]

SENTENCES = ["the old cat sings", "a red stone sleeps loud", "the river runs", "the new dog sings soft", "a cat runs"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path / "run", {**OWN, "start_workers": 2}) as server:
        yield server


def environments(server: CoordinatorProcess) -> list[dict[str, str]]:
    return [{**settings(server, f"w{index}"), "HF_HUB_OFFLINE": "1"} for index in range(2)]


def test_two_trainers_are_one_with_all_samples_weighted_by_tokens_and_clipped_after(
    two: CoordinatorProcess, llama: Path, tmp_path: Path
):
    folders = [tmp_path / f"worker-{index}" for index in range(2)]
    commands = [["tests/support/trainer_worker.py", str(llama), str(folder), "2"] for folder in folders]
    with programs(commands, environments(two)) as started:
        outputs(started)
    one, other = (load_file(folder / "trained.safetensors") for folder in folders)
    alone, first = lora(str(llama)), trained(lora(str(llama)))
    # Each step of one process has the samples of both: 2 micro-batches of 2 on either side are 2 of 4.
    options = arguments(tmp_path / "alone", 4, save_strategy="no")
    Trainer(alone, options, train_dataset=samples(), data_collator=collate).train()
    expected = trained(alone)
    assert max(float((expected[name] - first[name]).abs().max()) for name in expected) > 1e-3
    for name, value in one.items():
        assert value.equal(other[name])
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5)
    # Rank 0 wrote the checkpoint, where PEFT looks for an adapter.
    for folder in folders:
        with safe_open(folder / "trained.safetensors", "pt") as file:
            is_first = file.metadata()["rank"] == "0"
        assert (folder / "checkpoint-2" / "adapter_model.safetensors").exists() == is_first


def test_loss_scaling_is_refused(tmp_path: Path):
    options = arguments(tmp_path, 2)
    options.fp16 = True
    with pytest.raises(ValueError, match="use bf16=True"):
        AyniCallback(None).on_train_begin(options, None, None)  # type: ignore[arg-type]


def test_the_stock_lora_script_runs_on_two_workers(two: CoordinatorProcess, llama: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES * 8))
    folders = [tmp_path / f"out-{index}" for index in range(2)]
    commands = [[example("huggingface/train_lora.py"), str(llama), str(text), str(folder)] for folder in folders]
    with programs(commands, environments(two)) as started:
        outputs(started)
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert one
    assert all(one[name].equal(other[name]) for name in one)
    assert any(value.any() for name, value in one.items() if "lora_B" in name)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), folders[0])
    assert adapted.active_adapters == ["default"]
