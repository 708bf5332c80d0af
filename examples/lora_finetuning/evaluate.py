"""The loss of a model under plain Lightning, in one process and without adapters.

python evaluate.py results/lora.pt
"""

import argparse

from lightning.pytorch import Trainer
from train import CausalLM, LibraryText

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--package", default="encodings")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    given = parser.parse_args()
    module = CausalLM(given.model, given.hidden_size, given.num_layers)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    metrics = trainer.validate(module, LibraryText(given.package), verbose=False)
    print(f"{given.model}: val_loss {metrics[0]['val_loss']:.6f}")
