"""Trains a small network on scikit-learn's handwritten digits; killed and started again, it goes on as if it had not.

torchrun --standalone --nproc-per-node 2 --max-restarts 9 train.py runs/digits
"""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from ledger import Ledger
from model import Digits, Net, augment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unbroken


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="where the run keeps its checkpoints")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="save every so many steps")
    parser.add_argument("--batch", type=int, default=64, help="samples of an optimizer step, over all ranks")
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each rank")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ledger", metavar="DIR", help="write down what was trained (for the demonstration's audit)")
    return parser.parse_args()


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; for every other batch, drawn at random, of pairs of images mixed with one another."""
    if random.random() < 0.5:
        return nn.functional.cross_entropy(model(images), labels)
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(images))
    out = model(share * images + (1 - share) * images[other])
    mixed = nn.functional.cross_entropy(out, labels[other])
    return share * nn.functional.cross_entropy(out, labels) + (1 - share) * mixed


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    seed_everything(args.seed)  # the same first weights on every rank
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps)
    seed_everything(args.seed * 1000 + rank)  # and from here on each rank's own random numbers

    loader = unbroken.data.DataLoader(
        Digits(), global_batch_size=args.batch, seed=args.seed, transform=augment, num_workers=args.workers
    )
    state = {"model": net, "optim": optimizer, "sched": scheduler}
    ledger = Ledger(args.ledger, rank)

    with unbroken.Checkpointer(
        args.root, state, loader=loader, every=unbroken.Every(steps=args.every), keep=unbroken.Keep(last=3)
    ) as run:
        for images, labels, numbers in run.batches(until=args.steps):
            loss = loss_of(model, images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ledger.record(run, numbers.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
