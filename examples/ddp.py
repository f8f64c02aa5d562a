"""DistributedDataParallel. Killed at any moment, one rank or all, and started again, it goes on as if it had not been.

torchrun --standalone --nproc-per-node 2 --max-restarts 9 ddp.py --root runs/ddp
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

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

    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    torch.manual_seed(7)
    # With three ranks and more, add find_unused_parameters=True if a restart must not change the last bit of a sum.
    model = DistributedDataParallel(Transformer().to(device))
    torch.manual_seed(7000 + rank)  # for dropout: each rank's own random numbers
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = unbroken.data.DataLoader(Sequences(), global_batch_size=32, seed=7)  # over all ranks
    state = {"model": model, "optim": optimizer, "sched": scheduler}

    with unbroken.Checkpointer(args.root, state, loader=loader, every=unbroken.Every(steps=args.every)) as run:
        for numbers, following in run.batches(until=args.steps):  # resumes by itself, saves when due
            loss = F.cross_entropy(model(numbers.to(device)), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if (run.step_number + 1) % 20 == 0:
                logging.info("step %d: loss %.4f", run.step_number + 1, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
