"""Trains the network on scikit-learn's handwritten digits (no download, a few seconds), and writes mnist.pt."""

import torch
from model import DigitNet
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import nll_loss

EPOCHS = 20
BATCH = 64


def main():
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, heldout = (torch.tensor(part / 16, dtype=torch.float32).view(-1, 1, 8, 8) for part in split[:2])
    train_labels, answers = map(torch.tensor, split[2:])
    torch.manual_seed(0)
    net = DigitNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(train_images)).split(BATCH):
            optimizer.zero_grad()
            nll_loss(net(train_images[rows]), train_labels[rows]).backward()
            optimizer.step()
    net.eval()
    with torch.inference_mode():
        right = (net(heldout).argmax(1) == answers).float().mean().item()
    print(f"{right:.1%} of {len(answers)} held-out digits are recognised")
    torch.save(net.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
