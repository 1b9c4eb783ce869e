"""Train a small Llama with the Trainer of `transformers`, over as many ranks as torchrun starts."""

import os
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from holdfast.train.integrations.transformers import HoldfastCallback

STEPS, SAMPLES, LENGTH = int(os.environ.get("STEPS", "60")), int(os.environ.get("SAMPLES", "5000")), 64

text = "".join(topics[name] for name in sorted(topics)).encode()  # Python's own documentation; every byte is a token
samples = [list(text[start : start + LENGTH]) for start in range(0, LENGTH * SAMPLES, LENGTH)]
dataset = Dataset.from_dict({"input_ids": samples, "labels": samples})

set_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention_dropout=0.1,
)
on_gpu, many = torch.cuda.is_available(), "RANK" in os.environ
args = TrainingArguments(
    output_dir=os.environ.get("HOLDFAST_CHECKPOINT_PATH", "checkpoints"),
    max_steps=STEPS,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    logging_steps=5,
    save_steps=20,
    save_total_limit=3,
    disable_tqdm=True,
    report_to="none",
    use_cpu=not on_gpu,
    ddp_backend="gloo" if many and not on_gpu else None,
)
holdfast = HoldfastCallback()
trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=dataset, callbacks=[holdfast])
trainer.train(resume_from_checkpoint=holdfast.resume_path)
trainer.save_model(os.environ.get("MODEL", "model"))
