"""One process and a loop of its own. Killed at any moment and started again, it goes on as if it had not been.

python plain.py --root runs/plain
"""

import argparse
import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import unbroken

NUMBERS, LENGTH, WIDTH, HEAD = 31, 16, 32, 8


class Sequences:
    """Arithmetic sequences modulo NUMBERS: (numbers [LENGTH], those that follow them [LENGTH])."""

    def __len__(self) -> int:
        return NUMBERS * NUMBERS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, stride = divmod(index, NUMBERS)
        sequence = (first + stride * torch.arange(LENGTH + 1)) % NUMBERS
        return sequence[:-1], sequence[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (linear(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.places = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.numbers(numbers) + self.places.weight[: numbers.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # [batch * LENGTH, NUMBERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="where the run keeps its checkpoints")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, metavar="STEPS", help="save every so many steps")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(7)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = unbroken.data.DataLoader(Sequences(), global_batch_size=32, seed=7)
    state = {"model": model, "optim": optimizer, "sched": scheduler}

    with unbroken.Checkpointer(args.root, state, loader=loader, every=unbroken.Every(steps=args.every)) as run:
        run.resume()  # the newest checkpoint, if there is one
        batches = loader.forever()
        while run.step_number < args.steps:
            numbers, following = next(batches)
            loss = F.cross_entropy(model(numbers.to(device)), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step()  # an optimizer step is complete; saves when one is due
            if run.step_number % 20 == 0:
                logging.info("step %d: loss %.4f", run.step_number, loss.item())
        run.save().wait()  # the last step, too


if __name__ == "__main__":
    main()
