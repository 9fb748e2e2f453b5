"""A Lightning Trainer with a callback of flopwise: python examples/lightning_module.py"""

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopwise.integrations.lightning import FlopwiseCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
trainer = lightning.Trainer(
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[FlopwiseCallback(steps=10, stop=True)],
)
trainer.fit(Classifier(), DataLoader(data, batch_size=64))
