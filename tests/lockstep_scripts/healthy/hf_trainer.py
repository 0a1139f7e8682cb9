"""Hugging Face Trainer: train, evaluate and save a small Llama in bf16."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        ids = torch.arange(16) * (index + 1) % 64
        return {"input_ids": ids, "labels": ids}


def main():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        max_steps=3,
        bf16=True,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        dataloader_num_workers=1,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens(40), eval_dataset=Tokens(18)
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model("final")


if __name__ == "__main__":
    main()
