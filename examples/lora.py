"""Fine-tune with LoRA by `transformers.Trainer`, over many islands: the base stays where it is, adapters alone travel.

python examples/lora.py RUN --base gpt2 --text notes.txt --learner eu-1 [--bits 4] [--save adapters]
isthmus syncer RUN
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

import isthmus
from isthmus.integrations.transformers import IsthmusCallback


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--base", required=True, help="a model of a hub, or a folder")
    parser.add_argument("--text", required=True, help="what this learner trains on")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantise the base")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="folder for the adapters of the global model, when this learner has ended")
    a = parser.parse_args()
    how = {4: BitsAndBytesConfig(load_in_4bit=True), 8: BitsAndBytesConfig(load_in_8bit=True)}.get(a.bits)
    tokenizer = AutoTokenizer.from_pretrained(a.base)
    ids = torch.tensor(tokenizer(Path(a.text).read_text()).input_ids)
    lines = [{"input_ids": line, "labels": line} for line in ids[: len(ids) // 32 * 32].view(-1, 32)]
    base = AutoModelForCausalLM.from_pretrained(a.base, quantization_config=how)
    torch.manual_seed(0)  # adapters begin with the same values everywhere
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=a.steps, per_device_train_batch_size=8, learning_rate=5e-3,
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    callback = IsthmusCallback(
        a.run, bus=a.bus, learner=a.learner, create=isthmus.Rules.suited, checkpoint_s=2.0, save=a.save
    )
    callback.into(Trainer(model=model, args=settings, train_dataset=lines)).train()


if __name__ == "__main__":
    main()
