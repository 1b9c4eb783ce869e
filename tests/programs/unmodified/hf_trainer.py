"""The Trainer of transformers with a tiny model and its own checkpoints, as run_clm.py."""

import os
import sys

import torch
from killed import killed_once, tell
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Dies(TrainerCallback):
    def __init__(self) -> None:
        self.first = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        killed_once(args.process_index, state.global_step)


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    rows = [{"input_ids": torch.arange(8) % (3 + row), "labels": torch.arange(8) % (3 + row)} for row in range(8)]
    dies = Dies()
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[dies])
    trainer.train(resume_from_checkpoint=last)
    tell(args.process_index, dies.first, sum(each.double().sum().item() for each in model.parameters()))


if __name__ == "__main__":
    main()
