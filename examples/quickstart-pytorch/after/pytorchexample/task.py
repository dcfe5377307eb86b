"""The model, the data, and training and testing: plain PyTorch."""

from functools import cache

import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 297


class Net(nn.Module):
    """A small CNN for 8x8 images of ten digits."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        """Logits of a batch of images."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


@cache
def load_images():
    """Scikit-learn's 1,797 images, scaled to [0, 1], and their labels, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order]


def load_data(partition_id, num_partitions, batch_size):
    """This node's share of the images: one loader to train with, one to evaluate with."""
    images, labels = load_images()
    partitioner = IidPartitioner(num_partitions)
    partitioner.dataset = Dataset.from_dict({"position": range(TEST_IMAGES, len(labels))})
    share = partitioner.load_partition(partition_id).train_test_split(test_size=0.2, seed=42)
    train, test = (
        TensorDataset(images[at], labels[at]) for at in (share["train"]["position"], share["test"]["position"])
    )
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def load_test_data():
    """The images that no node has, for the server."""
    images, labels = load_images()
    return DataLoader(TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES]), batch_size=128)


def train(net, trainloader, epochs, lr):
    """Train in place; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


@torch.no_grad()
def test(net, testloader):
    """Loss and accuracy."""
    net.eval()
    loss, correct = 0.0, 0
    for images, labels in testloader:
        logits = net(images)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
