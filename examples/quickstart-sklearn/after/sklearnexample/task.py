"""The model as a list of arrays, and the data: plain scikit-learn and NumPy."""

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

PIXELS, CLASSES = 64, 10


def create_model(epochs):
    """A logistic regression that goes on from the parameters it has, all of them zero at first."""
    model = LogisticRegression(max_iter=epochs, warm_start=True)
    model.classes_ = np.arange(CLASSES)
    set_model_params(model, [np.zeros((CLASSES, PIXELS)), np.zeros(CLASSES)])
    return model


def get_model_params(model):
    """Its parameters: two float64 arrays."""
    return [model.coef_, model.intercept_]


def set_model_params(model, params):
    """Give it these parameters."""
    model.coef_, model.intercept_ = (np.array(param) for param in params)


def load_data(partition_id, num_partitions):
    """This node's share of scikit-learn's 1,797 images: images and labels to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    partitioner = IidPartitioner(num_partitions)
    partitioner.dataset = Dataset.from_dict({"position": range(len(labels))}).shuffle(seed=42)
    share = partitioner.load_partition(partition_id)["position"][:]
    return train_test_split(images[share] / 16, labels[share], test_size=0.2, random_state=42)
