"""Accelerate: prepare, accumulate, clip, gather_for_metrics, save."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    set_seed(7)
    data = TensorDataset(torch.randn(50, 8), torch.randint(0, 3, (50,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    evaluation = DataLoader(data, batch_size=4)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    for _ in range(1):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right, seen = 0, 0
        for x, y in evaluation:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right, seen = right + int((guess == y).sum()), seen + len(y)
        accelerator.print(f"{right} of {seen}")
        assert seen == 50
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
