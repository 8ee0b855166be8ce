"""The tasks in tree, on tiny models of the real classes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from ayni import order
from ayni.buckets import FLAT
from ayni.run_config import BatchConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun
from tests.support.tiny_models import WORDS, files_below, write_bert, write_llama, write_sentences
from worker_agent.tasks.tokenizers import train_bpe
from worker_agent.training.events import TrainResult
from worker_agent.training.load import load_task
from worker_agent.training.loop import train
from worker_agent.training.task import Task

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
"""PEFT, called by these tests directly, asks for an attribute that transformers has renamed."""

TEXT = "the old cat sings\na red stone sleeps loud\nthe river runs\n" * 12
CLASSIFY: dict[str, object] = {"max_tokens": 12, "lora_rank": 2, "lora_dropout": 0.1}
LLAMA: dict[str, object] = {"context": 16, "width": 16, "inner_width": 24, "num_blocks": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def classify_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify")
    write_bert(folder / "model")
    write_sentences(folder / "train.jsonl", 40)
    write_sentences(folder / "test.jsonl", 9, first=40)
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text(TEXT)
    (folder / "heldout.txt").write_text("the new dog sings soft\n" * 4)
    return folder


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_llama(folder / "model")
    (folder / "train.txt").write_text(TEXT)
    return folder


@pytest.fixture(params=["classification", "from scratch", "from scratch, tied", "lora"])
def kind(
    request: pytest.FixtureRequest, classify_folder: Path, text_folder: Path, lora_folder: Path
) -> tuple[TaskConfig, Path]:
    """One configuration of each task."""
    return {
        "classification": (TaskConfig(name="lora_classification", options=CLASSIFY), classify_folder),
        "from scratch": (TaskConfig(name="causal_lm", options=LLAMA | {"evaluation": ["heldout.txt"]}), text_folder),
        "from scratch, tied": (TaskConfig(name="causal_lm", options=LLAMA | {"tied_embeddings": True}), text_folder),
        "lora": (TaskConfig(name="causal_lm_lora", options={"context": 8, "lora_rank": 2}), lora_folder),
    }[request.param]


def load(config: TaskConfig, folder: Path, seed: int = 5, **options: object) -> Any:
    return load_task(replace(config, options=config.options | options), files_below(folder), seed, "cpu")


def run(
    config: TaskConfig, folder: Path, shares: list[int], steps: int = 2
) -> tuple[LocalRun, list[Task], list[TrainResult]]:
    tasks = [load(config, folder) for _ in shares]
    run_config = RunConfig(
        seed=5,
        num_steps=steps,
        task=config,
        batch=BatchConfig(samples=9, microbatches=6, evaluation_samples=4),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    local = LocalRun(run_config, tasks[0].num_evaluation_samples, shares)
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    return local, tasks, [result for result in results if isinstance(result, TrainResult)]


def test_runs_are_byte_identical_for_one_and_three_workers(kind: tuple[TaskConfig, Path]) -> None:
    one, _, alone = run(*kind, [6])
    three, _, together = run(*kind, [1, 3, 2])
    assert one.gradient_hashes == three.gradient_hashes
    assert {result.parameters_sha256 for result in together} == {alone[0].parameters_sha256}
    assert one.evaluations[-1].global_loss == three.evaluations[-1].global_loss


def test_the_mean_gradient_is_that_of_torch_on_the_whole_batch(kind: tuple[TaskConfig, Path]) -> None:
    """Without dropout, micro-batches of unequal weight must add up to one plain batch."""
    config, folder = kind
    local = LocalRun(RunConfig(seed=5, num_steps=1, task=config, batch=BatchConfig(samples=9, microbatches=6)), 0, [6])
    task = load(config, folder)
    for module in task.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    reference = load(config, folder)
    reference.model.eval()
    sums = reference.loss(reference.batch(order.samples_at(5, 0, 9, task.num_samples).tolist(), "train"))
    (sums.loss_sum / sums.weight).backward()
    train(local.session(0), task, local.config)
    named = dict(reference.trainable())
    for spec in reference.buckets:
        expected = torch.cat([named[name].grad.reshape(-1) for name in spec.names]).numpy()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(local.means[0][spec.bucket], expected, rtol=1e-4, atol=1e-5 * scale)
    assert local.commits[0].total_weight == sums.weight


def test_fingerprints_are_equal_for_equal_tasks_and_initial_weights_come_from_the_seed(
    kind: tuple[TaskConfig, Path],
) -> None:
    first, second, other = load(*kind), load(*kind), load(*kind, seed=6)
    assert first.fingerprint() == second.fingerprint() == other.fingerprint()
    assert first.dataset_fingerprint() == second.dataset_fingerprint()
    assert len(first.dataset_fingerprint()) == 64
    values = [torch.cat([p.detach().reshape(-1) for _, p in task.trainable()]) for task in (first, second, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert len(first.summary().encode()) <= 256
    assert len(first.dataset_summary().encode()) <= 256


def test_only_lora_and_the_head_are_trained_as_one_flat_vector(classify_folder: Path) -> None:
    task = load(TaskConfig(name="lora_classification", options=CLASSIFY), classify_folder)
    names = [name for name, _ in task.trainable()]
    assert len(names) == 2 * 2 * 2 + 2
    assert all("lora_" in name for name in names[:-2])
    assert names[-2:] == ["head.weight", "head.bias"]
    (spec,) = task.buckets
    assert spec.bucket == FLAT
    assert spec.num_elements == 2 * 2 * 2 * 2 * 16 + 3 * 16 + 3


def test_a_padded_batch_gives_the_sum_of_its_samples(classify_folder: Path) -> None:
    task = load(TaskConfig(name="lora_classification", options=CLASSIFY), classify_folder)
    task.model.eval()
    with torch.no_grad():
        together = task.loss(task.batch(range(7), "train"))
        alone = [task.loss(task.batch([index], "train")) for index in range(7)]
    assert float(together.loss_sum) == pytest.approx(sum(float(one.loss_sum) for one in alone), rel=1e-5)
    assert together.num_correct == sum(one.num_correct for one in alone)
    assert together.weight == 7


def test_the_adapter_loads_with_peft_and_gives_the_same_answers(classify_folder: Path, tmp_path: Path) -> None:
    _, (task,), _ = run(TaskConfig(name="lora_classification", options=CLASSIFY), classify_folder, [6])
    task.model.eval()
    task.save(tmp_path)
    tokens, mask, _ = task.batch(range(5), "evaluation")
    encoder = PeftModel.from_pretrained(AutoModel.from_pretrained(classify_folder / "model"), str(tmp_path / "adapter"))
    states = encoder.eval()(input_ids=tokens, attention_mask=mask).last_hidden_state
    mean = F.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
    head = load_file(tmp_path / "head.safetensors")
    saved = json.loads((tmp_path / "classifier.json").read_text())
    logits = mean * saved["options"]["head_scale"] @ head["weight"].T + head["bias"]
    assert torch.allclose(logits, task.model(tokens, mask), atol=1e-5)
    assert saved["classes"] == ["about-cat", "about-dog", "about-stone"]
    before = load(TaskConfig(name="lora_classification", options=CLASSIFY), classify_folder)
    assert not torch.allclose(before.model.eval()(tokens, mask), logits, atol=1e-3)
    assert "/" not in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_blocks_and_other_components_travel_apart_in_backward_order(text_folder: Path) -> None:
    task = load(TaskConfig(name="causal_lm", options=LLAMA), text_folder)
    assert [str(spec.bucket) for spec in task.buckets] == ["lm_head", "final_norm", "block 1", "block 0", "embedding"]
    assert task.buckets[2].component_sizes == (256, 256, 256, 256, 384, 384, 384, 16, 16)
    tied = load(TaskConfig(name="causal_lm", options=LLAMA | {"tied_embeddings": True}), text_folder)
    assert [str(spec.bucket) for spec in tied.buckets] == ["final_norm", "block 1", "block 0", "embedding"]


def test_lora_blocks_have_empty_components_and_nothing_outside(lora_folder: Path) -> None:
    task = load(TaskConfig(name="causal_lm_lora", options={"context": 8, "lora_rank": 2}), lora_folder)
    assert [str(spec.bucket) for spec in task.buckets] == ["block 1", "block 0"]
    assert task.buckets[0].component_sizes == (64, 0, 64, 0, 0, 0, 0, 0, 0)


def test_bits_per_byte_start_at_eight_and_weights_count_tokens(text_folder: Path) -> None:
    task = load(TaskConfig(name="causal_lm", options=LLAMA), text_folder)
    sums = task.loss(task.batch([task.num_samples - 1], "train"))
    assert 0 < sums.weight == sums.num_predictions < 16
    bits = task.derived_metrics(float(sums.loss_sum.detach()) / sums.weight, "train")["bits_per_byte"]
    assert bits == pytest.approx(8, abs=0.3)
    assert task.derived_metrics(math.log(2), "evaluation")["bits_per_byte"] == pytest.approx(1)


def test_a_saved_language_model_loads_with_transformers(text_folder: Path, tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        folder.mkdir()
        config = TaskConfig(name="causal_lm", options=LLAMA | {"tied_embeddings": tied})
        _, (task,), _ = run(config, text_folder, [6], steps=1)
        task.save(folder)
        assert (folder / "model.safetensors").is_file()
        loaded = LlamaForCausalLM.from_pretrained(folder)
        inputs, _, _ = task.batch([0, 1], "train")
        assert torch.equal(loaded(input_ids=inputs).logits, task.model.eval()(input_ids=inputs).logits)


def test_a_saved_adapter_of_a_language_model_loads_with_peft(lora_folder: Path, tmp_path: Path) -> None:
    _, (task,), _ = run(TaskConfig(name="causal_lm_lora", options={"context": 8, "lora_rank": 2}), lora_folder, [6])
    task.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(lora_folder / "model")
    inputs, _, _ = task.batch([0, 1], "train")
    plain = base(input_ids=inputs).logits.detach().clone()
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    logits = loaded(input_ids=inputs).logits
    assert torch.allclose(logits, task.model.eval()(input_ids=inputs).logits, atol=1e-6)
    assert not torch.allclose(logits, plain, atol=1e-4)


def test_a_trained_tokenizer_is_the_same_each_time_and_gives_texts_back() -> None:
    texts = [TEXT, "na\u00efve \u2603\n\n  spaces"]
    first, second = train_bpe(texts, 300), train_bpe(texts, 300)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300
    for text in texts:
        assert first.decode(first.encode(text).ids) == text


def test_bpe_comes_from_the_run_or_is_trained_and_is_saved(text_folder: Path, tmp_path: Path) -> None:
    config = TaskConfig(name="causal_lm", options=LLAMA | {"tokenizer": "bpe", "vocabulary": 280})
    task = load(config, text_folder)
    assert task.model.config.vocab_size == 280
    assert task.derived_metrics(1.0, "train")["bits_per_byte"] < 1 / math.log(2) / 1.5
    task.save(tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shipped = files_below(text_folder) | {"tokenizer.json": tmp_path / "tokenizer.json"}
    again = load_task(replace(config, options=config.options | {"vocabulary": 999}), shipped, 5, "cpu")
    assert again.dataset_fingerprint() == task.dataset_fingerprint()
    assert saved.get_vocab_size() == 280


def test_the_end_of_a_text_is_held_out_when_no_file_is(text_folder: Path) -> None:
    task = load(TaskConfig(name="causal_lm", options=LLAMA | {"held_out_fraction": 0.25}), text_folder)
    assert task.num_evaluation_samples == -(-(len(TEXT) // 4 - 1) // 16)
    none = load(TaskConfig(name="causal_lm", options=LLAMA | {"held_out_fraction": 0.0}), text_folder)
    assert none.num_evaluation_samples == 0


def test_other_data_or_weights_have_other_fingerprints(classify_folder: Path, tmp_path: Path) -> None:
    config = TaskConfig(name="lora_classification", options=CLASSIFY)
    expected = load(config, classify_folder)
    changed = tmp_path / "changed"
    changed.mkdir()
    write_bert(changed / "model")
    write_sentences(changed / "train.jsonl", 40, first=1)
    write_sentences(changed / "test.jsonl", 9, first=40)
    other = load(config, changed)
    assert other.fingerprint() == expected.fingerprint()
    assert other.dataset_fingerprint() != expected.dataset_fingerprint()
    model = AutoModel.from_pretrained(changed / "model")
    model.embeddings.word_embeddings.weight.data[0, 0] += 1.0
    model.save_pretrained(changed / "model")
    assert load(config, changed).fingerprint() != expected.fingerprint()
    assert load(config, classify_folder, lora_alpha=4.0).fingerprint() != expected.fingerprint()


def test_a_model_that_does_not_fit_the_task_is_refused(
    lora_folder: Path, classify_folder: Path, tmp_path: Path
) -> None:
    files = files_below(classify_folder) | {
        name: path for name, path in files_below(lora_folder).items() if name.startswith("model/")
    }
    with pytest.raises(
        ValueError, match=r"does not fit: LoRA wants modules named query, value; its linear modules are "
    ):
        load_task(TaskConfig(name="lora_classification"), files, 5, "cpu")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((classify_folder / "model" / "tokenizer.json").read_bytes())
    broken = files | {"model/config.json": tmp_path / "config.json"}
    with pytest.raises(ValueError, match=r"folder 'model' of the run is no model that AutoModel can load"):
        load_task(TaskConfig(name="lora_classification"), broken, 5, "cpu")
    write_bert(tmp_path / "thin")
    weights = load_file(tmp_path / "thin" / "model.safetensors")
    del weights["encoder.layer.0.attention.self.query.weight"]
    save_file(weights, tmp_path / "thin" / "model.safetensors", {"format": "pt"})
    thin = files | {f"model/{name}": path for name, path in files_below(tmp_path / "thin").items()}
    with pytest.raises(ValueError, match=r"does not fit BertModel: 1 weights are missing \(encoder.layer.0.attention"):
        load_task(TaskConfig(name="lora_classification"), thin, 5, "cpu")
    without = {name: path for name, path in files.items() if name != "model/tokenizer.json"}
    with pytest.raises(ValueError, match=r"folder 'model' of the run has no tokenizer.json"):
        load_task(TaskConfig(name="lora_classification"), without, 5, "cpu")
    with pytest.raises(ValueError, match=r"width \(18\) must be an even multiple of num_heads \(4\)"):
        load_task(TaskConfig(name="causal_lm", options={"width": 18}), files, 5, "cpu")


def test_words_of_the_tiny_models_are_known() -> None:
    """Guards the fixtures: unknown words would make every test above easier."""
    assert set(TEXT.split()) <= set(WORDS)
